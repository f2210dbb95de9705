"""`interop.torch`: the wrappers of torch.distributed, in place."""

import functools
from typing import Any, cast

import pytest
import torch
import torch.utils.checkpoint as peer
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as peer_wrapper
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from remat import RematWarning, modules
from remat.interop.torch import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint,
    checkpoint_wrapper,
    offload_wrapper,
)
from remat.policies import everything_saveable, nothing_saveable
from remat.storage import Offload
from tests.support import assert_bitwise, seeded

pytestmark = pytest.mark.contract


def relus() -> Any:
    """Six layers, as torch's tests have them."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(10, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU()),
        *(nn.Linear(4, 3), nn.ReLU()),
    )


def with_gradients(model, call):
    """Output, the input's gradient and the parameters'."""
    x = seeded(2, 10, dtype=torch.float32).requires_grad_()
    out = call(x)
    out.sum().backward()
    return out.detach(), x.grad, [each.grad for each in model.parameters()]


def regions_in(model: nn.Module) -> list[str]:
    """The names of the modules that have one."""
    return [name for name, each in model.named_modules() if "forward" in vars(each)]


def is_linear(module):
    return isinstance(module, nn.Linear)


def test_apply_activation_checkpointing():
    """test_checkpoint_wrapper.py: test_apply_activation_checkpointing, without its change of names."""
    plain, model = relus(), relus()
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, preserve_rng_state=False), check_fn=is_linear
    )  # fmt: skip

    assert regions_in(model) == ["0", "2", "4"]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert_bitwise(with_gradients(model, model), with_gradients(plain, plain))
    assert model[0].forward.settings.rng == "keys"


def test_apply_activation_checkpointing_leaves_the_model_out():
    """All submodules by default, the model itself never."""
    model = relus()
    apply_activation_checkpointing(model)

    assert "forward" not in vars(model)
    assert all("forward" in vars(each) for each in model)


def test_apply_activation_checkpointing_with_a_function_of_ones_own():
    """What it returns is put in the module's place, wherever that is."""
    model = relus()
    model.append(model[0])
    apply_activation_checkpointing(
        model, lambda module: nn.Sequential(module), is_linear
    )

    assert type(model[0]) is nn.Sequential
    assert model[6] is model[0]


def test_checkpoint_wrapper():
    """The module itself comes back; `modules.remove` takes the region out."""
    module = nn.Linear(2, 2)
    for impl in (*CheckpointImpl, *peer_wrapper.CheckpointImpl):
        found = checkpoint_wrapper(module, checkpoint_impl=impl, engine="rerun")
        assert found is module
    modules.remove(module)
    assert "forward" not in vars(module)
    ours, theirs = CheckpointImpl.__members__, peer_wrapper.CheckpointImpl.__members__
    assert [*ours] == [*theirs]


class Keywords(nn.Module):
    """Takes tensors by position, by keyword, and some that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)

    def forward(self, a, b, c=None, d=None, **_):
        return tuple(self.linear(each) for each in (a, b, c, d))


@pytest.mark.filterwarnings('ignore:.*has no effect on a value that is on "cpu"')
@pytest.mark.parametrize(
    "wrap",
    [
        *(functools.partial(checkpoint_wrapper, checkpoint_impl=impl) for impl in CheckpointImpl),
        offload_wrapper,
    ],
)  # fmt: skip
def test_wrapped_modules_take_keywords(wrap):
    """test_checkpoint_wrapper.py: test_checkpoint_wrapper_kwarg_support."""
    x = torch.ones(4, 3, requires_grad=True)
    plain, model = Keywords(), wrap(Keywords())

    found = model(x, x, c=x, d=x, e=x, f=x)

    assert_bitwise(found, plain(x, x, x, x))
    assert all(each.requires_grad for each in found)
    assert_bitwise(torch.autograd.grad(found[2].sum(), x), torch.autograd.grad(plain(x, x, x, x)[2].sum(), x))  # fmt: skip


def test_states_have_the_names_of_the_plain_module():
    """test_checkpoint_wrapper.py: test_load_activation_checkpointed_module, test_fqn."""
    plain: Any = nn.Linear(3, 3)
    model: Any = checkpoint_wrapper(nn.Linear(3, 3))
    assert [*model.state_dict()] == [name for name, _ in model.named_parameters()]

    for source, target in ((model, plain), (plain, model)):
        with torch.no_grad():
            source.weight.add_(0.5)
        target.load_state_dict(source.state_dict())
        assert_bitwise([*target.parameters()], [*source.parameters()])


def test_attributes_of_a_wrapped_module():
    """test_checkpoint_wrapper.py: test_forward_missing_attributes: the module is itself."""
    module: Any = nn.Sequential(nn.Linear(1, 1))
    wrapped: Any = checkpoint_wrapper(module)
    wrapped.own = "bar"

    assert (wrapped[0], wrapped.own) == (module[0], "bar")


class Block(nn.Module):
    """Parts of unlike sizes, for policies that count parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 10))
        self.norm = nn.LayerNorm(10)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def blocks() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.ModuleDict({"inner": Block()})["inner"], Block())


AUTO_WRAP = {
    "classes": ModuleWrapPolicy({Block, nn.Linear}),
    "blocks": functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={Block}
    ),
    "sizes": functools.partial(size_based_auto_wrap_policy, min_num_params=430),
    "large": functools.partial(size_based_auto_wrap_policy, min_num_params=860),
    "predicate": functools.partial(
        lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Tanh)
    ),
    "custom": CustomPolicy(lambda module: isinstance(module, Block | nn.Sequential)),
}


@pytest.mark.parametrize("policy", AUTO_WRAP.values(), ids=AUTO_WRAP)
def test_policies_of_fsdp_pick_what_they_pick_in_torch(policy):
    """By the same protocol; numbers are those of the plain model."""
    plain, model, theirs = blocks(), blocks(), blocks()
    apply_activation_checkpointing(model, auto_wrap_policy=policy)
    peer_wrapper.apply_activation_checkpointing(theirs, auto_wrap_policy=policy)

    wrapped = [
        name.replace("_checkpoint_wrapped_module.", "")
        for name, each in theirs.named_modules()
        if isinstance(each, peer_wrapper.CheckpointWrapper)
    ]
    assert regions_in(model) == wrapped != []
    assert_bitwise(with_gradients(model, model), with_gradients(plain, plain))


def test_a_policy_of_fsdp_may_name_options():
    """They go to the wrapper, with those that it has already."""
    model = blocks()
    policy = CustomPolicy(
        lambda module: isinstance(module, Block) and {"preserve_rng_state": False}
    )
    wrapper = functools.partial(checkpoint_wrapper, engine="rerun")
    apply_activation_checkpointing(model, wrapper, auto_wrap_policy=policy)

    settings = model[1].forward.settings
    assert (settings.rng, settings.engine) == ("keys", "rerun")


@pytest.mark.filterwarnings('ignore:.*has no effect on a value that is on "cpu"')
def test_offload_wrapper():
    """What is saved, and inputs, wait in host memory; a region recomputes as before.

    test_checkpoint_wrapper.py: test_checkpoint_wrapper_cpu_offload, as far as a CPU shows it.
    """
    plain, model = relus(), relus()
    checkpoint_wrapper(model[4], preserve_rng_state=False)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=offload_wrapper)

    first, fifth = model[0].forward.settings, model[4].forward.settings
    assert first.policy == everything_saveable.stored(Offload())
    assert fifth.policy == nothing_saveable
    assert first.inputs.others == fifth.inputs.others == Offload()
    assert (first.rng, fifth.rng) == ("preserve", "keys")
    assert_bitwise(with_gradients(model, model), with_gradients(plain, plain))


def test_offload_wrapper_of_a_module_that_runs_again():
    """It keeps inputs as they are."""
    model = checkpoint_wrapper(relus(), engine="rerun")
    with pytest.raises(
        ValueError, match=r"saved_inputs=\.\.\.\): has no effect with this engine"
    ):
        offload_wrapper(model)


def test_checkpoint_fn_may_be_ours():
    """It is what is called in any case."""
    model = checkpoint_wrapper(relus(), checkpoint_fn=checkpoint, use_reentrant=False)

    assert "forward" in vars(model)


@pytest.mark.parametrize(
    ("wrap", "text"),
    [
        (lambda: checkpoint_wrapper(relus(), offload_to_cpu=False), r"\(offload_to_cpu=...\): is no option .* are use_reentrant, .* Use one of these"),
        (lambda: checkpoint_wrapper(cast(Any, torch.sin)), "got <built-in .* remat\\(function\\)"),
    ],
)  # fmt: skip
def test_wrong_calls(wrap: Any, text: str):
    """Each says what it takes."""
    with pytest.raises(TypeError, match=text):
        wrap()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda model: apply_activation_checkpointing(model, peer_wrapper.checkpoint_wrapper), "torch's own wrapper"),
        (lambda model: checkpoint_wrapper(model, checkpoint_fn=peer.checkpoint), "not be a region of this package"),
    ],
)  # fmt: skip
def test_wrappers_that_cannot_be_kept(call, text):
    """Each raises and says why."""
    with pytest.raises(NotImplementedError, match=text):
        call(relus())


def test_apply_activation_checkpointing_to_nothing():
    """A `check_fn` that accepts nothing says so."""
    with pytest.warns(RematWarning, match="matches no module"):
        apply_activation_checkpointing(relus(), check_fn=lambda module: False)
