"""`interop.transformers.enable(tiled_loss=, tiled_mlp=)`: the same step, in less at a time."""

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from remat import SavedTensorModifiedError, SideEffectError, modules
from tests.support import LiveBytes, assert_close, swept

tr: Any = pytest.importorskip("transformers")

from remat.interop.transformers import disable, enable  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning"
)

VOCABULARY, LENGTH = 1024, 64
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "use_cache": False,
}
#: Gemma's logits go through a softcap before its loss, which reads them whole.
KINDS = {
    "Llama": {**SIZES, "num_key_value_heads": 2},
    "Gemma2": {**SIZES, "num_key_value_heads": 2, "head_dim": 8},
    "Mixtral": {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4},
    "GPT2": {
        "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False,
    },
}  # fmt: skip
HEADS = {
    "Llama": "LlamaForCausalLM",
    "Gemma2": "Gemma2ForCausalLM",
    "Mixtral": "MixtralForCausalLM",
    "GPT2": "GPT2LMHeadModel",
}
IDS = torch.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % VOCABULARY


def made(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(tr, f"{kind}Config")(**KINDS[kind] | changes)
    return getattr(tr, HEADS[kind])(config).train()


def step(model: Any, **given: Any) -> tuple[Any, list[Any]]:
    output = model(input_ids=IDS, labels=IDS, **given)
    return output, [*torch.autograd.grad(output.loss, [*model.parameters()])]


def peak(model: Any) -> int:
    step(model)
    with LiveBytes() as memory:
        step(model)
        return memory.peak


@pytest.mark.parametrize("kind", ["Llama", *swept(["GPT2", "Gemma2"])])
def test_losses_and_gradients_are_the_models_own(kind: str):
    plain, model = made(kind), enable(made(kind), tiled_loss=4, tiled_mlp=4)
    for given in ({}, {"num_items_in_batch": 100}):
        (expected, gradients), (output, found) = (
            step(plain, **given),
            step(model, **given),
        )

        assert_close(output.loss, expected.loss)
        assert_close(found, gradients)
        assert_close(output.logits + 0, expected.logits)


def test_logits_of_one_tile_and_hidden_values_of_one_tile_exist():
    logits = IDS.numel() * VOCABULARY * 4
    layers = peak(enable(made("Llama")))
    loss = peak(enable(made("Llama"), tiled_loss=16))
    both = peak(enable(made("Llama"), tiled_loss=16, tiled_mlp=8))

    assert layers - loss >= 1.5 * logits
    assert both < loss


@pytest.mark.sweep  # plans of other models take more each day
def test_a_plan_may_take_more_tiles():
    """In one tile, the logits take most of the limit."""
    model = enable(made("Llama", vocab_size=4096), tiled_loss=1)
    model.gradient_checkpointing_disable()
    step = modules.Step(lambda output: output.loss)
    found = modules.plan(model, peak="2.5MiB", step=step)(input_ids=IDS, labels=IDS)

    (row,) = found.tiles
    assert row.name == "tiled_loss"
    assert model.lm_head.forward.tiles == row.tiles > 1
    assert found.predicted_peak_bytes <= 2.5 * 2**20


def test_what_reads_the_logits_gets_them():
    plain, model = made("Llama"), enable(made("Llama"), tiled_loss=4)
    expected, output = plain(input_ids=IDS), model(input_ids=IDS)
    late = output.logits

    assert isinstance(late, torch.Tensor)
    assert late.shape == expected.logits.shape
    assert late.dtype == torch.float32
    assert late.requires_grad
    for read in (
        lambda logits: logits.argmax(-1),
        lambda logits: logits[..., :3].sum(),
        lambda logits: logits[:, -1].softmax(-1),
        lambda logits: logits.view(-1),
        lambda logits: F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), IDS[:, 1:].reshape(-1)),
        lambda logits: F.cross_entropy(logits.flatten(0, 1), logits.flatten(0, 1).softmax(-1)),
        lambda logits: logits.to(torch.float64).sum(),
        lambda logits: torch.stack([logits, logits]).mean(),
        lambda logits: logits[:, None].contiguous(memory_format=torch.channels_last),
    ):  # fmt: skip
        assert_close(read(late), read(expected.logits))


class Squares(torch.autograd.Function):
    """A loss of somebody's own, which takes a tensor as it is."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.shape = logits.shape
        return torch.ones(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        return grad_outputs[0].expand(ctx.shape)


def test_a_gradient_that_would_be_lost_raises():
    model = enable(made("Llama"), tiled_loss=4)

    loss: Any = Squares.apply(model(input_ids=IDS).logits)
    with pytest.raises(TypeError, match=r"a gradient came back to them.*logits \+ 0"):
        loss.backward()
    assert all(each.grad is None for each in model.parameters())
    Squares.apply(model(input_ids=IDS).logits + 0).backward()  # pyright: ignore[reportAttributeAccessIssue]
    assert model.lm_head.weight.grad is not None


def overwritten(logits: torch.Tensor) -> None:
    logits[:, :, 3:7] = -50.0


HOLDING: dict[str, Callable[[Any], Any]] = {
    "__setitem__": overwritten,
    "mul_": lambda logits: logits.mul_(3),
    "masked_fill_": lambda logits: logits[:, 1:].masked_fill_(torch.tensor(True), 0),
    "relu_": torch.relu_,
    "register_hook": lambda logits: logits.register_hook(torch.neg),
    "retain_grad": lambda logits: logits.retain_grad(),
    "something is written": lambda logits: torch.add(torch.ones(()), 1, out=logits),
}


@pytest.mark.parametrize("name", HOLDING)
def test_what_would_be_lost_with_the_next_product_is_refused(name: str):
    """A change in place, or a hook. What only reads them may be changed."""
    logits: Any = enable(made("Llama"), tiled_loss=4)(input_ids=IDS).logits

    with pytest.raises(TypeError, match=rf"{name}.*`logits \+ 0`"):
        HOLDING[name](logits)
    assert_close(torch.zeros(logits.shape).add_(logits), logits + 0)


def test_logits_of_before_a_step_are_not_read_after_it():
    model = enable(made("Llama"), tiled_loss=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    output = model(input_ids=IDS, labels=IDS)
    output.loss.backward()
    kept = output.logits + 0
    optimizer.step()

    for read in (
        lambda logits: logits.argmax(-1),
        lambda logits: logits[:, 1:],
        lambda logits: F.cross_entropy(logits[0], IDS[0]),
    ):
        read(kept)
        with pytest.raises(
            SavedTensorModifiedError, match="before the optimizer's step"
        ):
            read(output.logits)


class Scaled(torch.nn.Linear):
    """A head with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 5


def test_the_loss_has_the_dtype_of_the_logits():
    plain, model = made("Llama").double(), enable(made("Llama").double(), tiled_loss=4)

    assert step(model)[0].loss.dtype == step(plain)[0].loss.dtype == torch.float32


@pytest.mark.parametrize("option", ["tiled_loss", "tiled_mlp"])
def test_what_is_no_number_of_tiles_is_refused_at_once(option: str):
    """Not in the first step; the model stays as it was."""
    model: Any = made("Llama")
    options: list[dict[str, Any]] = [{option: tiles} for tiles in (0, 1.5, "many")]

    for each in options:
        with pytest.raises(
            (TypeError, ValueError), match=rf"enable\({option}=\.\.\.\)"
        ):
            enable(model, **each)
    assert not model.is_gradient_checkpointing


@pytest.mark.parametrize("where", ["class", "instance"])
def test_a_head_with_a_forward_of_its_own_is_refused(where: str):
    model = made("Llama")
    if where == "class":
        model.lm_head.__class__ = Scaled
    else:
        model.lm_head.forward = Scaled.forward.__get__(model.lm_head)

    with pytest.raises(ValueError, match="not the product with one weight"):
        enable(model, tiled_loss=4)


def test_a_bias_that_the_head_gets_later_is_refused_where_it_would_be_lost():
    model = enable(made("Llama"), tiled_loss=4)
    model.lm_head.bias = torch.nn.Parameter(torch.ones(VOCABULARY))

    with pytest.raises(ValueError, match=r"have a bias.*enable again without"):
        model(input_ids=IDS)
    whole = disable(copy.deepcopy(model)).eval()
    assert_close(model.eval()(input_ids=IDS).logits, whole(input_ids=IDS).logits)


def test_autocast_computes_the_logits_in_its_dtype():
    plain, model = made("Llama"), enable(made("Llama"), tiled_loss=4)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        (expected, gradients), (output, found) = step(plain), step(model)

    assert output.logits.dtype == expected.logits.dtype == torch.bfloat16
    assert output.loss.dtype == expected.loss.dtype
    torch.testing.assert_close(output.loss, expected.loss, rtol=0.01, atol=0.01)
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.02)


def test_generation_and_evaluation_are_as_before():
    plain = made("Llama").eval()
    model = enable(made("Llama"), tiled_loss=4, tiled_mlp=4).eval()
    prompt = IDS[:, :4]

    assert type(model(input_ids=IDS).logits) is torch.Tensor
    assert torch.equal(
        model.generate(prompt, max_new_tokens=3, do_sample=False),
        plain.generate(prompt, max_new_tokens=3, do_sample=False),
    )


@pytest.mark.sweep  # Dynamo takes long
# It looks at every tensor's gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_under_torch_compile_the_logits_are_whole():
    # One layer: Dynamo takes long over each, and tiles each alike.
    plain = made("Llama", num_hidden_layers=1)
    model = enable(copy.deepcopy(plain), tiled_loss=4, tiled_mlp=4)
    compiled = torch.compile(model, backend="eager")

    assert_close(compiled(input_ids=IDS, labels=IDS).loss, step(plain)[0].loss)


def test_under_torch_func_the_logits_are_whole():
    plain = made("Llama", num_hidden_layers=1)
    model = enable(copy.deepcopy(plain), tiled_loss=4, tiled_mlp=4)
    weights = dict(model.named_parameters())
    found = torch.func.grad_and_value(
        lambda w: (
            torch.func.functional_call(
                model, w, kwargs={"input_ids": IDS, "labels": IDS}
            ).loss
        )
    )(weights)[1]
    assert_close(found, step(plain)[0].loss)


def test_copies_follow_their_own_weights():
    model = enable(made("Llama"), tiled_loss=4, tiled_mlp=4)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.5)

    assert_close(step(other)[0].loss, step(disable(copy.deepcopy(other)))[0].loss)
    assert step(other)[0].loss != step(model)[0].loss


def mixtral(**options: Any) -> Any:
    model = enable(made("Mixtral"), **options)
    model.set_experts_implementation("batched_mm")
    return model


@pytest.mark.parametrize("is_training", [*swept([True]), False], ids=["train", "eval"])
def test_what_hooks_collect_inside_of_tiles_is_refused(is_training: bool):
    """Also where there is a trace in which they collect nothing; what is not inside is none of it."""
    plain, model = (
        each.train(is_training) for each in (mixtral(), mixtral(tiled_mlp=4))
    )
    refused = r"output_router_logits, which hooks collect inside of a MixtralSparse.*without `tiled_mlp`"

    with torch.set_grad_enabled(is_training):
        for _ in range(2):
            with pytest.raises(SideEffectError, match=refused):
                model(input_ids=IDS, output_router_logits=True)
            expected, found = (
                each(input_ids=IDS, output_hidden_states=True).hidden_states
                for each in (plain, model)
            )
            assert_close(found, expected)


def test_disable_takes_the_tiles_away():
    model = disable(enable(made("Llama"), tiled_loss=4, tiled_mlp=4))

    assert all("forward" not in vars(each) for each in model.modules())
    assert type(step(model)[0].logits) is torch.Tensor


def state(model: Any) -> dict[str, Any]:
    """What each module has among its attributes, but for its parts."""
    parts = ("_parameters", "_buffers", "_modules")
    return {
        name: {key: each for key, each in vars(module).items() if key not in parts}
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize(
    "refused",
    [
        {"tiled_loss": 2},
        {"tiled_loss": 2, "tiled_mlp": 2},
        {"tiled_mlp": 0},
        {"every": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_enabled", [False, True])
def test_a_model_that_is_refused_stays_as_it_was(
    refused: dict[str, int], is_enabled: bool
):
    """Whether it has regions and tiles or none."""
    model = made("Llama")
    model.lm_head.bias = torch.nn.Parameter(torch.ones(VOCABULARY))
    if is_enabled:
        enable(model, tiled_mlp=4)
    before = state(model)

    with pytest.raises(ValueError, match=r"interop\.transformers|tiled"):
        enable(model, **refused)  # pyright: ignore[reportArgumentType]
    assert state(model) == before
    assert model.is_activation_checkpointing == is_enabled


def test_enabled_again_a_model_has_the_new_tiles_alone():
    model = enable(made("Llama"), tiled_loss=4, tiled_mlp=4)
    enable(model, tiled_loss=2, tiled_mlp=2)
    assert model.lm_head.forward.tiles == 2
    assert {each.mlp.forward.tiled.tiles for each in model.model.layers} == {2}
    assert type(model.model.layers[0].mlp.forward.tiled.__wrapped__) is types.MethodType
    enable(model)

    assert all("forward" not in vars(each) for each in model.modules())


@pytest.mark.parametrize(
    ("options", "text"),
    [({"tiled_loss": 2}, "not the product with one weight"), ({"tiled_mlp": 2}, "named `mlp`")],
)  # fmt: skip
def test_models_without_such_a_part_are_refused(options: dict[str, int], text: str):
    config = tr.BertConfig(**{key: SIZES[key] for key in SIZES if key != "use_cache"})

    with pytest.raises(ValueError, match=text):
        enable(tr.BertModel(config), **options)  # pyright: ignore[reportArgumentType]
