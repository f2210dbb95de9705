"""What budgets recompute beside their peers, at equal measured bytes.

One stack of transformer blocks, run by each contender; counted are the bytes that live
between forward and backward, and the FLOPs of the backward beyond those without remat.
Then the stack is planned for exactly the bytes that the contender held, and counted too.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from remat import plan, remat
from remat.reporting import LiveBytes
from tests.benchmarks.contenders import selective
from tests.benchmarks.work import Params, Work, block, blocks, summed

BLOCKS, BATCH, SEQUENCE, WIDTH = 8, 4, 64, 64
_aten = torch.ops.aten
_CPU = _aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward


def _attention_flops(*args: Any, **kwargs: Any) -> int:
    return flop_registry[_aten._scaled_dot_product_flash_attention](*args, **kwargs)


vars(_attention_flops)["_get_raw"] = True  # it takes tensors, not shapes


def count(f: Callable[[], Tensor], stack: Work) -> tuple[int, int]:
    """Bytes between forward and backward, the outputs left out, and backward FLOPs."""
    leaves = [tensor for own in stack.params for tensor in own.values()]
    torch.autograd.grad(f(), leaves)
    with LiveBytes() as live:
        output = f()
        held = live.current_bytes - output.untyped_storage().nbytes()
    # torch 2.13 has no formula for the CPU's attention; its backward is alike for all.
    mapping = {_CPU: _attention_flops, _CPU_BACKWARD: lambda *_, **__: 0}
    with FlopCounterMode(display=False, custom_mapping=mapping) as flops:
        torch.autograd.grad(output, leaves)
    return held, flops.get_total_flops()


def contenders(stack: Work) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Every k-th block, matmuls saved, and torch's own budgets."""
    for k in (1, 2, 4):
        name = "checkpoint, every block" if k == 1 else f"checkpoint, every {k} blocks"
        yield name, lambda k=k: _in_groups(stack, k)
    yield "selective, matmuls", lambda: stack.forward(selective(block))
    for part in (0.25, 0.5, 0.75):
        yield f"torch `dp_knapsack`, {part}", _knapsack(stack, part)


def _in_groups(stack: Work, k: int) -> Tensor:
    def group(params: list[Params], x: Tensor) -> Tensor:
        for own in params:
            x = block(own, x)
        return x

    x = stack.x
    for start in range(0, len(stack.params), k):
        x = checkpoint(group, stack.params[start : start + k], x, use_reentrant=False)
    return x.sum()


def _knapsack(stack: Work, part: float) -> Callable[[], Tensor]:
    names = list(stack.params[0])
    flat = [tensor for own in stack.params for tensor in own.values()]

    def loss(x: Tensor, *tensors: Tensor) -> Tensor:
        width = len(names)
        for start in range(0, len(tensors), width):
            own = dict(zip(names, tensors[start : start + width], strict=True))
            x = block(own, x)
        return x.sum()

    compiled: Any = aot_function(
        loss,
        fw_compiler=_as_it_is,
        bw_compiler=_as_it_is,
        partition_fn=min_cut_rematerialization_partition,
    )

    def run() -> Tensor:
        with config.patch(
            activation_memory_budget=part,
            activation_memory_budget_solver="dp",
            activation_memory_budget_runtime_estimator="flops",
        ):
            return compiled(stack.x, *flat)

    return run


def _as_it_is(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
    return make_boxed_func(gm.forward)


def main(threads: int) -> None:
    """Prints the table."""
    torch.set_num_threads(threads)
    stack = blocks(BLOCKS, BATCH, SEQUENCE, WIDTH)

    def plain(params: list[Params]) -> Tensor:
        return summed(block, params, stack.x)

    held, base = count(lambda: plain(stack.params), stack)
    print(f"torch {torch.__version__}; no remat holds {held / 2**20:.2f} MiB\n")
    print(
        "| contender | held, MiB | MFLOPs again | planned: held, MiB | MFLOPs again |"
    )
    print("|---|---|---|---|---|")
    for name, run in contenders(stack):
        held, flops = count(run, stack)
        found = plan(plain, budget=held)(stack.params)
        region = remat(plain, policy=found.policy)
        own_held, own_flops = count(lambda region=region: region(stack.params), stack)
        cells = [held / 2**20, (flops - base) / 1e6, own_held / 2**20]
        cells.append((own_flops - base) / 1e6)
        print(f"| {name} | {' | '.join(f'{each:.2f}' for each in cells)} |", flush=True)
