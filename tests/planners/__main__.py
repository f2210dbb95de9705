"""`python -m tests.planners`: the promises of the planners at full size, as a table."""

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from remat import plan
from remat.planners import solve_cut, solve_milp
from remat.reporting._demo.gpt import GPTShape, block, initial_parameters, make_loss
from tests.planners.problems import budgets, least_costs, random_chain, random_problem

Rows = Iterator[tuple[str, str]]


def brute_force() -> Rows:
    """300 random graphs of up to 12 values, nine budgets each, against all choices."""
    exact = near = total = bounds = 0
    integer = 0
    for seed in range(300):
        problem = random_problem(seed)
        limits = budgets(problem)
        for limit, least in zip(limits, least_costs(problem, limits), strict=True):
            swept = solve_cut(problem, limit, enumerate_up_to=0)
            total += 1
            exact += swept.cost == least
            near += swept.cost <= 1.05 * least
            bounds += swept.lower_bound <= least
            found = solve_milp(problem, limit)
            integer += found.cost == least == found.lower_bound
    yield "cases (graph and budget)", str(total)
    yield "`milp` equals brute force, gap 0", f"{integer / total:.1%}"
    yield "sweep within 5 % of brute force", f"{near / total:.1%}"
    yield "sweep equals brute force", f"{exact / total:.1%}"
    yield "certified bound holds", f"{bounds / total:.1%}"


def limits() -> Rows:
    """1,000 random problems of up to 24 values: the budget, and more of it."""
    over = dearer = total = 0
    for seed in range(1000):
        problem = random_problem(seed, 24) if seed % 4 else random_chain(seed, 4)
        costs = []
        for limit in budgets(problem, (0.1, 0.3, 0.5, 0.7, 0.9)):
            found = solve_cut(problem, limit, enumerate_up_to=0)
            over += problem.outcome(found.choice).saved_bytes > limit
            costs.append(found.cost)
            total += 1
        dearer += costs != sorted(costs, reverse=True)
    yield "random problems, budgets", f"1000, {total}"
    yield "budgets exceeded", str(over)
    yield "problems in which more budget cost more", str(dearer)


def gpt() -> Rows:
    """The demo's GPT with 24 blocks of width 512, one function, on fake tensors."""
    shape = GPTShape(layers=24, width=512, heads=8, time=512, batch=4)
    with FakeTensorMode():
        # On a fake generator's device nothing is drawn, and nothing allocated.
        parameters = initial_parameters(shape, torch.Generator())
        batch = torch.zeros(shape.batch, shape.time + 1, dtype=torch.int64)
        key = torch.zeros(2, dtype=torch.uint64)
    yield from _planned(make_loss(shape, block), (parameters, batch, key))


def _planned(f: Callable[..., Tensor], args: tuple[Any, ...]) -> Rows:
    started = time.monotonic()
    first = plan(f, budget=0.5)(*args)
    yield "values to decide about", str(len(first.rows))
    yield "trace and plan, s", f"{time.monotonic() - started:.1f}"
    whole = first.problem.outcome(first.problem.everything).saved_bytes
    for part in (0.25, 0.5, 0.75):
        started = time.monotonic()
        found = solve_cut(first.problem, int(part * whole))
        elapsed = time.monotonic() - started
        yield f"gap at {part:.0%} of {whole / 2**30:.1f} GiB", f"{found.gap:.2%}"
        yield f"solver at {part:.0%}, s", f"{elapsed:.2f}"


def llama() -> Rows:
    """A Llama of 7B parameters, 32 layers, sequence 8192, on the meta device."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):
        layer = {
            "norm1": torch.empty(4096),
            "qkv": torch.empty(4096, 3 * 4096),
            "out": torch.empty(4096, 4096),
            "norm2": torch.empty(4096),
            "gate": torch.empty(4096, 11008),
            "up": torch.empty(4096, 11008),
            "down": torch.empty(11008, 4096),
        }
        layers = [{k: torch.empty_like(v) for k, v in layer.items()} for _ in range(32)]
        x = torch.empty(1, 8192, 4096)
        turn = torch.empty(8192, 128), torch.empty(8192, 128)
    for own in layers:
        for weight in own.values():
            weight.requires_grad_()
    started = time.monotonic()
    yield from _planned(llama_stack, (layers, x, *turn))
    yield "all of it, s", f"{time.monotonic() - started:.1f}"
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield "peak memory of the process, MiB", f"{after / 1024:.0f}"
    yield "of that before the first tensor, MiB", f"{before / 1024:.0f}"


def llama_stack(layers: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pre-norm layers with rotary positions and a gated perceptron; x is (b, t, 4096)."""
    for own in layers:
        h = F.rms_norm(x, (4096,), own["norm1"]) @ own["qkv"]
        q, k, v = h.unflatten(-1, (3, 32, 128)).permute(2, 0, 3, 1, 4)
        q, k = (each * cos + each.roll(64, -1) * sin for each in (q, k))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + a.transpose(1, 2).flatten(2) @ own["out"]
        h = F.rms_norm(x, (4096,), own["norm2"])
        x = x + (F.silu(h @ own["gate"]) * (h @ own["up"])) @ own["down"]
    return x.square().sum()


PARTS = {"brute": brute_force, "limits": limits, "gpt": gpt, "llama": llama}


def main() -> None:
    """Runs the parts that are named, or all, and prints a table for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.planners")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    for name in parser.parse_args().parts or PARTS:
        print(f"{PARTS[name].__doc__}\n\n| | |\n|---|---|")
        for what, figure in PARTS[name]():
            print(f"| {what} | {figure} |", flush=True)
        print()


if __name__ == "__main__":
    main()
