"""Eight models of transformers: `python -m tests.benchmarks transformers`.

A step of training with dropout, without checkpointing, with what the models bring for it, and
with `interop.transformers.enable` in its place. The batch is doubled until a step takes as long
as a bound is stated for; a trace is timed apart. The peer is ahead of no model by more than
the spread, or the command fails.
"""

import importlib
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from remat._calls import decorated
from tests.benchmarks.bounds import Bound, Verdict, ratio_of, steady
from tests.benchmarks.contenders import PLAIN
from tests.benchmarks.memory import Bytes, allocated
from tests.benchmarks.tables import heading
from tests.benchmarks.timing import MIN_ROUNDS, Ratio, clock, interleaved

PEER = "gradient_checkpointing_enable"
OURS = "enable(model), nothing saved"
LEAST_S = 0.2


@dataclass(frozen=True)
class Size:
    """Of every model alike.

    Attributes:
        width: of the hidden states; an MLP's is four times that.
        layers: of each stack.
        length: of a sequence of tokens.
        vocabulary: how many tokens there are.
    """

    width: int = 256
    layers: int = 4
    length: int = 128
    vocabulary: int = 1024

    @property
    def heads(self) -> int:
        """Of 64 channels each, but two at least."""
        return max(2, self.width // 64)


Build = Callable[[Any, Size], Any]


def _stack(size: Size, **more: Any) -> dict[str, Any]:
    """What most configurations call their sizes."""
    return {
        "hidden_size": size.width,
        "intermediate_size": 4 * size.width,
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        **more,
    }


def _causal(size: Size, **more: Any) -> dict[str, Any]:
    return _stack(
        size,
        vocab_size=size.vocabulary,
        num_key_value_heads=size.heads // 2,
        attention_dropout=0.1,
        use_cache=False,
        **more,
    )


def _gpt2(tr: Any, size: Size) -> Any:
    config = tr.GPT2Config(
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        n_positions=size.length,
        vocab_size=size.vocabulary,
        use_cache=False,
    )
    return tr.GPT2LMHeadModel(config)


def _t5(tr: Any, size: Size) -> Any:
    config = tr.T5Config(
        d_model=size.width,
        d_kv=size.width // size.heads,
        d_ff=4 * size.width,
        num_layers=size.layers,
        num_heads=size.heads,
        vocab_size=size.vocabulary,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return tr.T5ForConditionalGeneration(config)


def _vit(tr: Any, size: Size) -> Any:
    dropouts = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    kind = {"problem_type": "single_label_classification"}  # else a call sets it
    config = tr.ViTConfig(
        **_stack(size), **dropouts, **kind, image_size=64, patch_size=8
    )
    return tr.ViTForImageClassification(config)


def _mixtral(tr: Any, size: Size) -> Any:
    # Experts are narrow: "batched_mm" copies an expert's weights for every token.
    narrow = {**_causal(size, num_local_experts=4), "intermediate_size": size.width}
    model = tr.MixtralForCausalLM(tr.MixtralConfig(**narrow))
    # torch 2.13 has no rule for the default, "grouped_mm", in float32.
    model.set_experts_implementation("batched_mm")
    return model


def _whisper(tr: Any, size: Size) -> Any:
    halves = ("encoder", "decoder")
    tokens = ("decoder_start", "pad", "bos", "eos")
    config = tr.WhisperConfig(
        **{f"{half}_layers": size.layers for half in halves},
        **{f"{half}_attention_heads": size.heads for half in halves},
        **{f"{half}_ffn_dim": 4 * size.width for half in halves},
        **{f"{name}_token_id": k for k, name in enumerate(tokens)},
        d_model=size.width,
        vocab_size=size.vocabulary,
        num_mel_bins=8,
        max_source_positions=size.length,
        max_target_positions=size.length,
        dropout=0.1,
        use_cache=False,
    )
    return tr.WhisperForConditionalGeneration(config)


MODELS: dict[str, Build] = {
    "Llama": lambda tr, size: tr.LlamaForCausalLM(tr.LlamaConfig(**_causal(size))),
    "Qwen2": lambda tr, size: tr.Qwen2ForCausalLM(tr.Qwen2Config(**_causal(size))),
    "GPT-2": _gpt2,
    "BERT": lambda tr, size: tr.BertForMaskedLM(
        tr.BertConfig(**_stack(size, vocab_size=size.vocabulary))
    ),
    "T5": _t5,
    "ViT": _vit,
    "Mixtral": _mixtral,
    "Whisper": _whisper,
}


def a_batch(model: Any, size: Size, count: int) -> dict[str, Tensor]:
    """So many examples of what a model reads, and their labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, size.vocabulary, (count, size.length), generator=generator)
    if model.main_input_name == "pixel_values":
        return {
            "pixel_values": torch.randn(count, 3, 64, 64, generator=generator),
            "labels": ids[:, 0] % 2,
        }
    if model.main_input_name == "input_features":
        frames = torch.randn(count, 8, 2 * size.length, generator=generator)
        return {"input_features": frames, "labels": ids}
    return {"input_ids": ids, "labels": ids}


def a_model(build: Build, size: Size, contender: str) -> Any:
    """A model with the same weights at every call, in train mode."""
    torch.manual_seed(0)
    model = build(importlib.import_module("transformers"), size).train()
    if contender == PEER:
        with (
            warnings.catch_warnings()
        ):  # transformers 5.23 would rather say "activation"
            warnings.filterwarnings("ignore", category=FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": False})
    elif contender == OURS:
        importlib.import_module("remat.interop.transformers").enable(model)
    return model


def forward(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss, with the same dropout at every call."""
    torch.manual_seed(0)
    return model(**batch).loss


def step(model: Any, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """The gradients."""
    model.zero_grad()
    forward(model, batch).backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


@dataclass(frozen=True)
class Line:
    """One contender on one model.

    Attributes:
        model: which.
        contender: which.
        time: over that without checkpointing.
        of_peer: over the peer's.
        held_bytes: what waits between forward and backward.
        peak_bytes: the most that a step had allocated, its gradients included.
        trace_s: of all traces together; None where nothing is traced.
    """

    model: str
    contender: str
    time: Ratio
    of_peer: Ratio
    held_bytes: int
    peak_bytes: int
    trace_s: float | None


@dataclass(frozen=True)
class Result:
    """One model, measured: at which batch, by whom, and how the bound stands."""

    batch: int
    lines: list[Line]
    verdicts: list[Verdict]


def measured(name: str, size: Size, least_s: float, rounds: int) -> Result:
    """One model under every contender, whose gradients agree."""
    models = {each: a_model(MODELS[name], size, each) for each in (PLAIN, PEER, OURS)}
    count = _batch_size(models[PLAIN], size, least_s)
    batch = a_batch(models[PLAIN], size, count)
    right = step(models[PLAIN], batch)
    traces: dict[str, float] = {}
    counted: dict[str, Bytes] = {}
    for contender, model in models.items():
        before = _traced_s()
        found = step(model, batch)
        traces[contender] = _traced_s() - before
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-5)
        model.zero_grad()
        held = allocated(lambda model=model: forward(model, batch)).left
        counted[contender] = Bytes(
            held, allocated(lambda model=model: step(model, batch)).peak
        )
    steps = {
        each: lambda model=model: step(model, batch) for each, model in models.items()
    }

    def measure(names: Collection[str], longer: int) -> dict[str, list[float]]:
        picked = {each: steps[each] for each in names}
        return interleaved(picked, rounds, longer, clock=clock())

    times, found = steady(measure, list(steps), [Bound(OURS, "time", PEER, 1.0)], {})
    lines = [
        Line(
            name,
            each,
            ratio_of(times, each, PLAIN),
            ratio_of(times, each, PEER),
            counted[each].left,
            counted[each].peak,
            traces[each] or None,
        )
        for each in models
    ]
    return Result(count, lines, found)


def _batch_size(model: Any, size: Size, least_s: float) -> int:
    """The least power of two at which a step without checkpointing takes that long."""
    seconds, count = clock(), 1
    while True:
        batch = a_batch(model, size, count)
        step(model, batch)
        started = seconds()
        step(model, batch)
        if seconds() - started >= least_s:
            return count
        count *= 2


def _traced_s() -> float:
    """What all traces that are kept have taken."""
    kept = [
        found
        for cache in decorated._caches.values()
        for found in cache.entries.values()
    ]
    return sum(entry.trace_s or 0.0 for entries in kept for entry in entries)


TABLE = (
    "| model, batch | | ms | over none | over the peer | spread | held MiB | peak MiB | trace s |\n"
    "|---|---|--:|--:|--:|--:|--:|--:|--:|"
)


def _shown(line: Line, result: Result) -> str:
    plain, peer, _ = (each.time.time_s for each in result.lines)
    cells = [
        f"{line.model}, {result.batch}",
        line.contender,
        f"{line.time.time_s * 1e3:.0f}",
        f"{line.time.time_s / plain:.3f}",
        f"{line.time.time_s / peer:.3f}",
        f"{line.of_peer.spread:.1%}",
        f"{line.held_bytes / 2**20:.2f}",
        f"{line.peak_bytes / 2**20:.2f}",
        "" if line.trace_s is None else f"{line.trace_s:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def main(
    threads: int,
    names: tuple[str, ...] = tuple(MODELS),
    size: Size = Size(),
    least_s: float = LEAST_S,
    rounds: int = MIN_ROUNDS,
) -> int:
    """Prints the table; how many models miss their bound."""
    torch.set_num_threads(threads)
    version = importlib.import_module("transformers").__version__
    print(heading())
    print(
        f"transformers {version}, {size.layers} layers of width {size.width}, "
        f"{rounds} rounds.\n"
    )
    print(TABLE, flush=True)
    verdicts: dict[str, list[Verdict]] = {}
    for name in names:
        result = measured(name, size, least_s, rounds)
        verdicts[name] = result.verdicts
        for line in result.lines:
            print(_shown(line, result), flush=True)
    print(f"\n{_conclusion(verdicts)}")
    return sum(each.fails for found in verdicts.values() for each in found)


def _conclusion(verdicts: dict[str, list[Verdict]]) -> str:
    """How each bound stands."""
    return "\n".join(
        f"- {name}: {each.standing}; {each.bound}; measured {each.ratio:.3f}, spread {each.spread:.1%}"
        for name, found in verdicts.items()
        for each in found
    )
