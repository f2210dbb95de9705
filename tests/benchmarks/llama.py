"""Steps of large Llamas, planned and not run: `python -m tests.benchmarks llama`.

A model of 8B parameters for one device, and one of 70B for 64: each layer is cut over 8 of them
(tensor parallel), and the optimizer's state over the other 8 (ZeRO-1). One process stands for
the first device, by torch's fake process group; what the sum over devices gives, which all 8
hold, may wait in parts by `storage.Shard`. All tensors are fake ones: nothing is computed, and
the all-reduces, which are in place, are left out.
"""

import importlib
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from remat import modules, policies, storage
from remat.interop import transformers as interop
from tests.benchmarks.tables import heading

LENGTH = 32_768


@dataclass(frozen=True)
class Shape:
    """A model as one device holds it.

    Attributes:
        width: of the hidden states, which are whole on each device.
        hidden: of an MLP.
        layers: how many there are.
        heads: of queries, and of keys and values; of 128 channels each.
        words: of the vocabulary.
        stage: how many layers are one region.
        state: the optimizer's state, as a multiple of the parameters.
        peak: the limit.
    """

    width: int
    hidden: int
    layers: int
    heads: tuple[int, int]
    words: int
    stage: int
    state: float
    peak: str = "80GiB"


OF_TP, OF_DP = 8, 8
SHAPES = {
    "8B, one device": Shape(4096, 14_336, 32, (32, 8), 128_256, 1, 2.0),
    "70B, 64 devices": Shape(
        *(8192, 28_672 // OF_TP, 80, (64 // OF_TP, 8 // OF_TP), 128_256 // OF_TP),
        *(4, 2.0 / OF_DP),
    ),
}


class _Stage(nn.Module):
    """Some layers in a row."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states, **options)
        return hidden_states


def _built(shape: Shape) -> Any:
    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads[0],
        num_key_value_heads=shape.heads[1],
        head_dim=128,
        vocab_size=shape.words,
        max_position_embeddings=LENGTH,
        use_cache=False,
        dtype=torch.bfloat16,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    interop.enable(model, tiled_loss=1, tiled_mlp=1)
    model.gradient_checkpointing_disable()
    layers, count = [*model.model.layers], shape.stage
    if count > 1:
        stages = [layers[k : k + count] for k in range(0, len(layers), count)]
        model.model.layers = nn.ModuleList(map(_Stage, stages))
    return model


def planned(shape: Shape, allow: Any = None) -> modules.ModulePlan:
    """The plan of a step for the limit, on fake tensors of the CPU."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = _built(shape)
        tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    step = modules.Step(lambda found: found.loss, shape.state)
    budget = policies.budget(allow=allow, peak=shape.peak)
    plan = modules.plan(model, budget=budget, step=step)
    return plan(input_ids=tokens, labels=tokens, use_cache=False)


def _sharded(shape: Shape) -> Any:
    """May a value wait: in parts, where all devices hold it, else as it is."""
    mesh = init_device_mesh("cpu", (OF_DP, OF_TP), mesh_dim_names=("dp", "tp"))
    parts = storage.Shard(mesh["tp"], replicated="trust")

    def allow(value: policies.Value) -> Any:
        is_sum = (
            value.op is torch.ops.aten.add.Tensor and value.shape[-1] == shape.width
        )
        return (parts, storage.Keep()) if is_sum else True

    return allow


def main(threads: int) -> int:
    """Prints what lives at the peak of each step, by its parts; none fails."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    print(heading())
    version = importlib.import_module("transformers").__version__
    print(f"transformers {version}; a sequence of {LENGTH}. Predicted, not run.\n")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=OF_DP * OF_TP)
    try:
        for name, shape in SHAPES.items():
            started = time.perf_counter()
            found = planned(shape, _sharded(shape) if shape.stage > 1 else None)
            seconds = time.perf_counter() - started
            print(_shown(name, found), f"\n\nPlanned in {seconds:.0f} s.\n", flush=True)
    finally:
        dist.destroy_process_group()
    return 0


def _shown(name: str, found: modules.ModulePlan) -> str:
    assert found.timeline is not None
    moments: dict[str, Any] = {}
    for each in found.timeline.moments:
        known = moments.get(each.phase)
        if known is None or each.size_bytes > known.size_bytes:
            moments[each.phase] = each
    parts = [part for part, _ in found.timeline.peak.parts]
    lines = [
        f"| {name}, predicted GiB | {' | '.join(parts)} | all |",
        "|---" + "|--:" * (len(parts) + 1) + "|",
    ]
    for phase, each in moments.items():
        cells = [f"{size / 2**30:.1f}" for _, size in each.parts]
        lines.append(
            f"| {phase} | {' | '.join(cells)} | {each.size_bytes / 2**30:.1f} |"
        )
    plans = [row.plan for row in found.rows]
    waits = {row.decision.partition("(")[0] for each in plans for row in each.rows} - {
        "recompute"
    }
    lines += [
        f"\nSaved {found.saved_bytes / 2**30:.1f} GiB ({', '.join(sorted(waits))}), "
        f"{found.recompute_flops:.3g} FLOPs recomputed; gap {found.gap:.2%}.",
        *found.beside.splitlines(),
        *map(str, found.tiles),
    ]
    return "\n".join(lines)
