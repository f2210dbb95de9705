"""`interop.transformers`: models as users train them, against no checkpointing."""

import copy
import functools
import importlib
import itertools
import sys
from collections import Counter
from typing import Any

import pytest
import torch

from remat import RematWarning, SideEffectError, TraceError, modules, policies
from remat._calls import cache, decorated
from tests.support import (
    LiveBytes,
    OperatorCounter,
    assert_bitwise,
    assert_close,
    daily,
    swept,
)

tr: Any = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from remat.interop.transformers import disable, enable  # noqa: E402

pytestmark = [
    # Of what these packages do among themselves.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

BATCH, LENGTH, WIDTH, VOCABULARY = 2, 10, 16, 40
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": 2,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
}
GROUPED = SIZES | {
    "num_key_value_heads": 1,
    "attention_dropout": 0.1,
    "use_cache": False,
}


def llama(**changes):
    return tr.LlamaForCausalLM(tr.LlamaConfig(**(GROUPED | changes)))


def mixtral(experts="batched_mm", **changes):
    model = tr.MixtralForCausalLM(
        tr.MixtralConfig(**GROUPED, num_local_experts=4, **changes)
    )
    model.set_experts_implementation(experts)
    return model


def gpt2():
    return tr.GPT2LMHeadModel(
        tr.GPT2Config(
            n_embd=WIDTH, n_layer=2, n_head=2, vocab_size=VOCABULARY, n_positions=16, use_cache=False
        )
    )  # fmt: skip


def t5():
    return tr.T5ForConditionalGeneration(
        tr.T5Config(
            d_model=WIDTH,
            d_kv=8,
            d_ff=2 * WIDTH,
            num_layers=2,
            num_decoder_layers=1,
            num_heads=2,
            vocab_size=VOCABULARY,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def vit():
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    dropouts = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return tr.ViTForImageClassification(
        tr.ViTConfig(**sizes, **dropouts, image_size=8, patch_size=4)
    )


def whisper():
    layers = {f"{half}_layers": 2 for half in ("encoder", "decoder")}
    heads = {f"{half}_attention_heads": 2 for half in ("encoder", "decoder")}
    widths = {f"{half}_ffn_dim": 2 * WIDTH for half in ("encoder", "decoder")}
    tokens = {
        f"{name}_token_id": i
        for i, name in enumerate(("decoder_start", "pad", "bos", "eos"))
    }
    config = tr.WhisperConfig(
        **layers, **heads, **widths, **tokens, d_model=WIDTH, vocab_size=VOCABULARY, num_mel_bins=4,
        max_source_positions=8, max_target_positions=16, dropout=0.1, use_cache=False,
    )  # fmt: skip
    return tr.WhisperForConditionalGeneration(config)


MODELS = {
    "llama": llama,
    "qwen2": lambda: tr.Qwen2ForCausalLM(tr.Qwen2Config(**GROUPED)),
    "gpt2": gpt2,
    "bert": lambda: tr.BertForMaskedLM(tr.BertConfig(**SIZES)),
    "t5": t5,
    "vit": vit,
    "mixtral": mixtral,
    "whisper": whisper,
}
#: Traces of the layers; an encoder-decoder has two sorts, and T5's first layer makes the bias.
NUM_TRACES = {"t5": 3, "whisper": 2}
#: Encoder states and biases are read by several layers: sums in another order.
ROUNDED = {"t5", "whisper"}


def a_model(build) -> Any:
    """A model with the same weights at every call, in train mode."""
    torch.manual_seed(0)
    return build().train()


def a_batch(model, seed=0):
    """Drawn on the CPU, whatever the device of the tests."""
    with torch.device("cpu"):
        drawn = _drawn_batch(model, seed)
    return {name: each.to(torch.get_default_device()) for name, each in drawn.items()}


def _drawn_batch(model, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCABULARY, (BATCH, LENGTH), generator=generator)
    if model.main_input_name == "pixel_values":
        return {
            "pixel_values": torch.randn(BATCH, 3, 8, 8, generator=generator),
            "labels": torch.tensor([0, 1]),
        }
    if model.main_input_name == "input_features":
        return {
            "input_features": torch.randn(BATCH, 4, 16, generator=generator),
            "labels": ids,
        }
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def gradients(model, *, seed=0, **changes):
    """Loss and gradients of one step with dropout."""
    torch.manual_seed(seed)
    model.zero_grad()
    out = model(**a_batch(model, seed), **changes)
    out.loss.backward()
    return out.loss.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.fixture
def traces(monkeypatch):
    """Counts the traces that are made, where none is kept from before."""
    made, compile_call = [], cache.compile_call
    monkeypatch.setattr(decorated, "_caches", {})
    monkeypatch.setattr(
        cache, "compile_call", lambda *args: made.append(1) or compile_call(*args)
    )
    return made


@pytest.mark.contract
@pytest.mark.parametrize(
    "name", [*(name for name in MODELS if name not in ROUNDED), *swept(sorted(ROUNDED))]
)
def test_models(name, traces):
    """Losses and gradients of two steps are those of no checkpointing, wholly by tracing."""
    plain, model = a_model(MODELS[name]), enable(a_model(MODELS[name]))
    assert_equal = assert_close if name in ROUNDED else assert_bitwise

    for seed in range(2):
        expected, found = gradients(plain, seed=seed), gradients(model, seed=seed)
        assert_bitwise(found[0], expected[0])
        assert found[1].keys() == expected[1].keys()
        given = [n for n, each in expected[1].items() if each is not None]
        assert given == [n for n, each in found[1].items() if each is not None]
        assert_equal([found[1][n] for n in given], [expected[1][n] for n in given])

    assert len(traces) == NUM_TRACES.get(name, 1)


@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
def test_experts_chosen_by_value(experts):
    """A Python loop over the experts that were hit cannot be traced; it runs again."""
    build = functools.partial(mixtral, experts)
    if experts == "eager":
        with pytest.raises(TraceError, match=r'nonzero.*engine="rerun"'):
            gradients(enable(a_model(build)))

    assert_bitwise(
        gradients(enable(a_model(build), engine="rerun")), gradients(a_model(build))
    )


@pytest.mark.contract
def test_a_model_whose_layers_cannot_be_traced_runs_by_choice():
    """With engine="auto" they run again, and one warning names the line."""
    build = functools.partial(mixtral, "eager")
    decorated._caches.clear()

    with pytest.warns(RematWarning, match=r"from now on.*nonzero") as told:
        found = gradients(enable(a_model(build), engine="auto"))

    assert_bitwise(found, gradients(a_model(build)))
    assert len([each for each in told if each.category is RematWarning]) == 1


COLLECTED = {
    "router_logits": (mixtral, {"output_router_logits": True}),
    "attentions": (llama, {"output_attentions": True}),
    "hidden_states": (llama, {"output_hidden_states": True}),
    "some_hidden_states": (llama, {"output_hidden_states": [0, -1]}),
}


@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("case", daily(COLLECTED, ["some_hidden_states"]))
def test_what_hooks_collect_inside(case, engine):
    """It is returned, in the order of the layers, and has its gradient."""
    build, asked = case
    plain, model = a_model(build), enable(a_model(build), engine=engine)
    found = []
    for each in (plain, model):
        each.set_attn_implementation("eager")
        torch.manual_seed(0)
        out = each(**a_batch(each), use_cache=False, **asked)
        (name,) = (key.removeprefix("output_") for key in asked)
        collected = [value for value in out[name] if value is not None]
        weighted = sum((k + 1) * value.sum() for k, value in enumerate(collected))
        (out.loss + weighted).backward()
        found.append([out.loss, *collected, *(p.grad for p in each.parameters())])

    assert_close(found[1], found[0])
    assert len(collected) > 1


def held_and_recomputed(model):
    """Bytes that wait for the backward, and operators that it runs."""
    gradients(model)
    batch = a_batch(model)
    torch.manual_seed(0)
    with LiveBytes() as memory:
        loss = model(**batch).loss
        held = memory.live
    with OperatorCounter() as backward:
        loss.backward()
    return held, backward.counts


#: Calls of attention, and the bytes of log-sum-exps that a fused kernel gives: there is none
#: for dropout on a CPU.
ATTENDED = {
    "bert": (MODELS["bert"], 2, 0),
    "gpt2": (gpt2, 2, 0),
    "t5": (t5, 4, 0),
    "llama": (llama, 2, 0),
    "llama_fused": (functools.partial(llama, attention_dropout=0.0), 2, 4 * 2 * BATCH * LENGTH * 2),
}  # fmt: skip


@pytest.mark.parametrize("case", daily(ATTENDED, ["llama"]))
def test_of_attention_the_output_alone_is_saved(case):
    """Whatever the call decomposes to: beside the layers' inputs one tensor each is held."""
    build, calls, sums = case
    policy = policies.save_attention_outputs

    found = held_and_recomputed(enable(a_model(build), policy))[0]
    found -= held_and_recomputed(enable(a_model(build)))[0]

    assert found == calls * 4 * BATCH * LENGTH * WIDTH + sums


def test_attention_that_is_written_out_is_not_known_as_attention():
    """Then the policy has no effect, which it says."""
    model = enable(a_model(llama), policies.save_attention_outputs)
    model.set_attn_implementation("eager")

    with pytest.warns(
        RematWarning, match=r"(?s)LlamaDecoderLayer.forward \(.*permits no value.*sdpa"
    ):
        gradients(model)


#: Either attention, of which one with a mask that hides places; the rest is for the sweep.
PLANNED = [("gpt2", "padded", "sdpa")]
UNMASKED = ("vit", "whisper")
MASKED = [
    case
    for case in itertools.product(MODELS, ["none", "ones", "padded"], ["sdpa", "eager"])
    if case[1] == "none" or case[0] not in UNMASKED
]


@pytest.mark.parametrize(
    "case",
    [*PLANNED, *swept(case for case in MASKED if case not in PLANNED)],
    ids=" ".join,
)
def test_a_plan_is_of_the_program_that_runs(case):
    """With and without masks, which these models make only where they are needed."""
    name, mask, attention = case
    plain, model = a_model(MODELS[name]), a_model(MODELS[name])
    batch = a_batch(model)
    if mask == "none":
        batch.pop("attention_mask", None)
    elif mask == "padded":
        batch["attention_mask"][0, -2:] = 0
    for each in (plain, model):
        each.set_attn_implementation(attention)

    found = modules.plan(model, budget=0.75)(**batch)

    assert found.saved_bytes <= found.budget_bytes
    losses = []
    for each in (plain, model):
        torch.manual_seed(0)
        losses.append(each(**batch).loss)
        losses[-1].backward()
    assert_bitwise(losses[1], losses[0])
    assert_equal = assert_close if name in ROUNDED else assert_bitwise
    assert_equal(*([p.grad for p in each.parameters()] for each in (plain, model)))


def test_held_bytes():
    """A further layer holds its input, and nothing else."""
    deep = functools.partial(llama, num_hidden_layers=5)
    shallow = functools.partial(llama, num_hidden_layers=2)
    hidden = 4 * BATCH * LENGTH * WIDTH
    states = 2 * 5056  # of the generator, before and after the layer's dropout

    found = held_and_recomputed(enable(a_model(deep)))[0]
    found -= held_and_recomputed(enable(a_model(shallow)))[0]
    plain = (
        held_and_recomputed(a_model(deep))[0] - held_and_recomputed(a_model(shallow))[0]
    )

    assert found <= 3 * (hidden + states)
    assert found >= 3 * hidden
    assert plain > 3 * 10 * hidden


@pytest.mark.sweep  # Dynamo takes long; other graphs hold regions each time
def test_a_graph_of_torch_compile_holds_the_layers():
    """The whole model is one, with the numbers that it has outside."""
    torch.compiler.reset()
    model = enable(a_model(functools.partial(llama, attention_dropout=0.0)))
    outside = gradients(model)

    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)

    assert_close(gradients(model), outside)


def test_policies():
    """What a policy saves is not recomputed."""
    every_other = enable(
        a_model(functools.partial(llama, num_hidden_layers=4)), every=2
    )
    saving = enable(a_model(llama), policies.save_matmul_outputs)
    nothing = enable(a_model(llama))

    counts = [
        held_and_recomputed(m)[1]["aten.mm"] for m in (a_model(llama), saving, nothing)
    ]

    # Seven linear maps in each of two layers; the last one's output is read by nothing.
    assert counts[1] == counts[0]
    assert counts[2] == counts[0] + 2 * 6
    flags = [layer.gradient_checkpointing for layer in every_other.model.layers]
    assert flags == [True, False, True, False]


def test_adapters():
    """LoRA by peft: frozen layers, adapters that learn, and inputs that need no gradient."""
    peft: Any = pytest.importorskip("peft")

    def adapted():
        config = peft.LoraConfig(
            r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]
        )
        return peft.get_peft_model(llama(), config)

    plain, model = a_model(adapted), enable(a_model(adapted))
    for each in (plain, model):
        with torch.no_grad():
            for name, parameter in each.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.1)
    expected, found = gradients(plain), gradients(model)

    assert_bitwise(found, expected)
    assert sum(each is not None for each in found[1].values()) == 2 * 2 * 2


def trained(model, folder, **arguments):
    """Losses and weights after some steps of a Trainer that accumulates gradients."""
    data = [{k: v[0] for k, v in a_batch(model, seed).items()} for seed in range(8)]
    settings = tr.TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        **arguments,
    )
    trainer = tr.Trainer(model=model, args=settings, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
    return losses, {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize(
    "arguments", [{}, {"gradient_checkpointing": True}], ids=["", "told to"]
)
def test_trainer(tmp_path, traces, arguments):
    """A real Trainer, told to checkpoint or not, trains the same weights to the bit."""
    expected = trained(a_model(llama), tmp_path)
    model = enable(a_model(llama))

    assert_bitwise(trained(model, tmp_path, **arguments), expected)
    # Every micro-batch has one shape, and both layers are alike.
    assert len(traces) == 1


def test_the_function_stays():
    """What the model's own way of enabling asks for beside is said not to be followed."""
    model = enable(a_model(llama))
    with pytest.warns(
        RematWarning, match=r"'preserve_rng_state': False.*has no effect"
    ):
        model.gradient_checkpointing_enable({"preserve_rng_state": False})
    with pytest.warns(RematWarning, match="every_n_layers"):
        model._set_gradient_checkpointing(every_n_layers=2)
    model.gradient_checkpointing_disable()
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)


def test_a_cache_is_not_filled():
    """A key/value cache is taken out of the layers, and stays empty."""
    plain, model = a_model(llama), enable(a_model(llama))
    cache = tr.DynamicCache(config=model.config)

    found = gradients(model, use_cache=True, past_key_values=cache)

    assert cache.get_seq_length() == 0
    # The mask is made for a cache, which changes the attention's rounding.
    assert_close(found[0], gradients(plain)[0])


def test_a_cache_inside_a_region_is_refused():
    """By `modules.apply` the layer itself is called with it: it would hold a trace's tensors."""
    model = modules.apply(a_model(llama), "model.layers.*")
    with pytest.raises(SideEffectError):
        gradients(model, use_cache=True)


def test_disable_undoes_it():
    """The flags are off, and what was set is gone."""
    model, plain = a_model(llama), a_model(llama)
    before = [set(vars(each)) for each in model.modules()]
    disable(enable(model))

    after = [set(vars(each)) - {"gradient_checkpointing"} for each in model.modules()]
    assert after == [each - {"gradient_checkpointing"} for each in before]
    assert_bitwise(gradients(model), gradients(plain))


def test_copies():
    """A copy has regions of its own."""
    model = enable(a_model(llama), policies.save_attention_outputs)
    twin = copy.deepcopy(model)
    found = gradients(twin)

    assert_bitwise(found, gradients(a_model(llama)))
    assert all(each.grad is None for each in model.parameters())
    assert disable(twin) is twin
    assert model.is_gradient_checkpointing


def test_evaluation_and_generation():
    """Out of train mode nothing recomputes, and a cache is used."""
    plain, model = a_model(llama).eval(), enable(a_model(llama)).eval()
    ids = torch.ones(1, 3, dtype=torch.int64)
    arguments = {
        "max_new_tokens": 3,
        "do_sample": False,
        "use_cache": True,
        "pad_token_id": 0,
    }

    assert_bitwise(model.generate(ids, **arguments), plain.generate(ids, **arguments))


@pytest.mark.parametrize(
    ("model", "options", "error", "text"),
    [
        (torch.nn.Linear(2, 2), {}, TypeError, "not a Linear.*modules.apply"),
        (llama, {"police": 1}, TypeError, "police"),
        (llama, {"engine": "fast"}, ValueError, "engine='fast'"),
    ],
)
def test_wrong_arguments(model, options, error, text):
    """Each is refused, and leaves the model as it was."""
    model = model if isinstance(model, torch.nn.Module) else model()
    with pytest.raises(error, match=text):
        enable(model, **options)
    assert "_set_gradient_checkpointing" not in vars(model)


def test_without_support():
    """A model whose layers have no hook is sent to `modules.apply`."""
    model = llama()
    model.supports_gradient_checkpointing = False
    with pytest.raises(ValueError, match=r"does not support.*modules\.apply"):
        enable(model)


def test_without_the_package(monkeypatch):
    """The error names the extra."""
    name = "remat.interop.transformers"
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"pip install '\.\[transformers\]'"):
        importlib.import_module(name)
    assert Counter(sys.modules)[name] == 0
