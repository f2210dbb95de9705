"""What tiles take: `python -m tests.benchmarks tiles`.

Cross-entropy over a large vocabulary beside plain torch, its own chunks, torch.compile and, if it
is installed, cut_cross_entropy; the peak of an MLP against the number of tiles; and a GPT on a long
sequence, whose blocks are regions and whose MLPs and loss run tile by tile.
"""

import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from remat import remat
from remat.layers import tiled, tiled_cross_entropy
from tests.benchmarks import timing, work
from tests.benchmarks.memory import allocated
from tests.benchmarks.tables import heading

Steps = Mapping[str, Callable[[], Any]]
MIB = 2**20
PLAIN = "plain torch"
ROUNDS = 2


def main(threads: int) -> None:
    """Measures and prints all three."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    print(heading())
    print(
        table("Cross-entropy: 4,096 tokens of width 512, 131,072 classes", vocabulary())
    )
    print(working_set())
    print(table("A GPT of 12 layers of width 64, 16,384 tokens", long_gpt(), rounds=1))


def vocabulary(
    tokens: int = 4096, width: int = 512, classes: int = 2**17, compiles: bool = True
) -> Steps:
    """The loss of a vocabulary and its gradients, by each contender."""
    x = torch.randn(tokens, width, requires_grad=True)
    head = (torch.randn(classes, width) / width**0.5).requires_grad_()
    targets = torch.randint(classes, (tokens,))

    def loss(x: Tensor, head: Tensor) -> Tensor:
        return F.cross_entropy(x @ head.T, targets)

    contenders: dict[str, Callable[[Tensor, Tensor], Any]] = {
        PLAIN: loss,
        "F.linear_cross_entropy": functools.partial(
            F.linear_cross_entropy,
            target=targets,
            options=torch.nn.LinearCrossEntropyOptions(),
        ),
    }
    if compiles:
        contenders["torch.compile"] = torch.compile(loss)
        # Of Apple's package, what runs on a CPU; its kernels, as Liger's, need a GPU.
        if importlib.util.find_spec("cut_cross_entropy"):
            contenders["cut_cross_entropy, torch_compile"] = functools.partial(
                importlib.import_module("cut_cross_entropy").linear_cross_entropy,
                targets=targets,
                impl="torch_compile",
            )
    contenders["remat, 16 tiles"] = functools.partial(
        tiled_cross_entropy, targets=targets, tiles=16
    )
    return {
        name: functools.partial(_gradients, each, x, head)
        for name, each in contenders.items()
    }


def working_set(tokens: int = 4096, width: int = 64, hidden: int = 2048) -> str:
    """The peak of an MLP against the number of tiles."""
    given = [torch.randn(1, tokens, width), torch.randn(width, hidden) / 8]
    args = [each.requires_grad_() for each in (*given, torch.randn(hidden, width) / 45)]

    def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.gelu(x @ up) @ down

    def peak(f: Callable[..., Tensor]) -> int:
        _summed(f, args)
        return allocated(lambda: _summed(f, args)).peak

    lines = [
        f"\nAn MLP of width {width}, hidden {hidden}, {tokens:,} tokens\n",
        "| tiles | peak MiB | times tiles, less the constant |",
        "|--:|--:|--:|",
    ]
    found = {
        tiles: peak(tiled(mlp, "b (tile s) d, ... -> b (tile s) d", tiles=tiles))
        for tiles in (1, 2, 4, 8, 16, 32, 64)
    }
    constant = 2 * found[64] - found[32]
    lines += [f"| plain torch | {peak(mlp) / MIB:.2f} | |"]
    lines += [
        f"| {tiles} | {size / MIB:.2f} | {(size - constant) * tiles / MIB:.1f} |"
        for tiles, size in found.items()
    ]
    return "\n".join([*lines, f"\nThe constant is {constant / MIB:.2f} MiB.\n"])


def long_gpt(
    layers: int = 12, tokens: int = 16384, width: int = 64, classes: int = 16384
) -> Steps:
    """A step of a GPT, plainly and with regions whose MLPs and loss are tiles."""
    params = [work.block_parameters(width) for _ in range(layers)]
    head = (torch.randn(classes, width) / 8).requires_grad_()
    x, targets = torch.randn(1, tokens, width), torch.randint(classes, (1, tokens))
    mlp = tiled(_mlp, "b (tile s) d, ... -> b (tile s) d", tiles=32)
    leaves = [head, *(each for layer in params for each in layer.values())]
    for each in leaves:
        each.requires_grad_()

    def step(unit: work.Unit, loss: Callable[[Tensor], Tensor]) -> Any:
        h = x
        for layer in params:
            h = unit(layer, h)
        return torch.autograd.grad(loss(h), leaves)

    def plain_loss(h: Tensor) -> Tensor:
        return F.cross_entropy((h @ head.T).flatten(0, 1), targets.flatten())

    def tiled_loss(h: Tensor) -> Tensor:
        return tiled_cross_entropy(h, head, targets, tiles=64)

    region = remat(functools.partial(_block, mlp=mlp))
    return {
        PLAIN: lambda: step(work.block, plain_loss),
        "remat, blocks": lambda: step(remat(work.block), plain_loss),
        "remat, blocks and tiles": lambda: step(region, tiled_loss),
    }


def _block(p: work.Params, x: Tensor, mlp: Callable[..., Tensor]) -> Tensor:
    """`work.block`, whose MLP is given."""
    return mlp(work.attention(p, x), p["norm2"], p["bias2"], p["up"], p["down"])


def _mlp(x: Tensor, norm: Tensor, bias: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x + F.gelu(F.layer_norm(x, x.shape[-1:], norm, bias) @ up) @ down


def _gradients(loss: Callable[..., Tensor], *args: Tensor) -> Any:
    return torch.autograd.grad(loss(*args), args)


def _summed(f: Callable[..., Tensor], args: list[Tensor]) -> Any:
    return torch.autograd.grad(f(*args).sum(), args)


def table(title: str, steps: Steps, rounds: int = ROUNDS) -> str:
    """Times over plain torch's, and peaks, of steps that agree."""
    right = steps[PLAIN]()
    peaks: dict[str, int] = {}
    for name, step in steps.items():
        torch.testing.assert_close(step(), right, rtol=1e-3, atol=1e-5)
        peaks[name] = allocated(step).peak
    times = timing.interleaved(steps, rounds, lead=0, clock=timing.clock())
    if rounds == 1:
        ratios = {name: each[-1] / times[PLAIN][-1] for name, each in times.items()}
        spreads = dict.fromkeys(times, "")
    else:
        paired = timing.paired(times, times[PLAIN])
        ratios = {name: each.median for name, each in paired.items()}
        spreads = {
            name: f"{each.low:.3f} to {each.high:.3f}" for name, each in paired.items()
        }
    lines = [f"\n{title}\n", "| | s | over plain | quartiles | peak MiB | of plain's |"]
    lines.append("|---|--:|--:|---|--:|--:|")
    for name, each in times.items():
        share = peaks[name] / peaks[PLAIN]
        lines.append(
            f"| {name} | {sorted(each)[len(each) // 2]:.2f} | {ratios[name]:.3f} | "
            f"{spreads[name]} | {peaks[name] / MIB:.1f} | {share:.3f} |"
        )
    return "\n".join(lines)
