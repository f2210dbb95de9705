"""What may be handed to torch.compile, and which sizes and backends it may have then."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

from remat import MutationError, modules, remat
from tests.support import assert_bitwise, seeded

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # Dynamo's own, of what is between two graphs.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


class Block(nn.Module):
    """A module of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh().sin()


class Decorated(Block):
    """One whose forward is a region."""

    @remat
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh().sin()


class Called:
    """An object that is called."""

    def __call__(self, x: Tensor) -> Tensor:
        return x.tanh().sin()


def assigned() -> nn.Module:
    """A module whose forward was decorated by hand."""
    block: Any = Block()
    block.forward = remat(block.forward)
    return block


def hooked() -> nn.Module:
    """A module with a region, and with a hook around it."""
    block = modules.apply(Block(), Block)
    block.register_forward_hook(lambda _, args, out: out * args[0])
    return block


ROOTS: dict[str, Callable[[], Any]] = {
    "a whole model": lambda: modules.apply(Block(), Block),
    "its copy": lambda: copy.deepcopy(modules.apply(Block(), Block)),
    "a class of torch's": lambda: modules.apply(nn.Linear(4, 4).double(), ""),
    "a model and its parts": lambda: modules.apply(
        nn.Sequential(Block(), Block()), "**"
    ),
    "a model with a hook": hooked,
    "a forward assigned": assigned,
    "a module": lambda: remat(Block()),
    "a decorated forward": Decorated,
    "a bound method": lambda: Decorated().forward,
    "a function": lambda: remat(torch.tanh),
    "an object": lambda: remat(Called()),
}


@pytest.mark.parametrize("make", ROOTS.values(), ids=ROOTS)
def test_a_region_is_what_is_compiled(make: Callable[[], Any]) -> None:
    """Nothing of the user's is around it: a graph holds it, and no part runs outside."""
    torch._dynamo.reset()
    region, x = make(), seeded(3, 4).requires_grad_()
    counter = CompileCounterWithBackend("aot_eager")

    out = torch.compile(region, backend=counter, fullgraph=True)(x)
    found = torch.autograd.grad(out.sum(), x)

    targets = {str(node.target) for each in counter.graphs for node in each.graph.nodes}
    assert "dynamo_bypassing_wrapper" in targets
    assert_bitwise(found, torch.autograd.grad(region(x).sum(), x))


@remat
def sized(x: Tensor) -> Tensor:
    """A region that reads its sizes."""
    rows = torch.arange(x.shape[0], dtype=x.dtype)
    return (x.sin() * x.shape[0] + rows[:, None]).reshape(-1, 2).exp().sin()


def of_sizes(x: Tensor) -> Tensor:
    """What is compiled, with steps around the region."""
    return (sized(x.cos()) * 2).sum()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_each_size_has_its_numbers(backend: str, dynamic: bool | None) -> None:
    """Where the backend runs one graph for all sizes, too."""
    torch._dynamo.reset()
    run: Any = torch.compile(of_sizes, backend=backend, fullgraph=True, dynamic=dynamic)

    for size in (4, 6, 8, 6):
        x = seeded(size, 4).requires_grad_()
        found, expected = (torch.autograd.grad(each(x), x) for each in (run, of_sizes))
        assert_bitwise(found, expected)


@remat
def counted(x: Tensor) -> Tensor:
    """A region that multiplies by a size."""
    return (x.sin() * x.shape[0]).sin()


def of_open_sizes(x: Tensor) -> Tensor:
    """What is compiled for rows whose number is to stay open."""
    return (counted(x.cos()) * 2).sum()


OPEN: dict[str, tuple[Callable[[Tensor, int], None], str]] = {
    "mark_dynamic": (
        torch._dynamo.mark_dynamic,
        r"depends on dimension 0 of L\['x'\], marked as dynamic",
    ),
    "mark_unbacked": (
        torch._dynamo.decorators.mark_unbacked,
        "depends on u0, a number that only values tell",
    ),
}
each_open = pytest.mark.parametrize(("mark", "why"), OPEN.values(), ids=OPEN)


@each_open
def test_what_has_to_stay_open_is_refused_in_one_graph(mark: Any, why: str) -> None:
    """The error names the region, and what it depends on; without the mark all is well."""
    torch._dynamo.reset()
    run: Any = torch.compile(of_open_sizes, backend="aot_eager", fullgraph=True)
    x, y = seeded(4, 4), seeded(4, 4).requires_grad_()
    mark(x.requires_grad_(), 0)

    with pytest.raises(Unsupported, match=rf"region counted \(test_compiled_.*{why}"):
        run(x)

    assert_bitwise(run(y), of_open_sizes(y))


@each_open
def test_what_has_to_stay_open_runs_between_graphs(mark: Any, why: str) -> None:
    """The region runs as it does outside, for any size."""
    torch._dynamo.reset()
    run: Any = torch.compile(of_open_sizes, backend="aot_eager")

    for size in (4, 6, 8):
        x = seeded(size, 4).requires_grad_()
        mark(x, 0)
        found, expected = (
            torch.autograd.grad(each(x), x) for each in (run, of_open_sizes)
        )
        assert_bitwise(found, expected)


def test_a_mark_on_what_no_region_reads_stays() -> None:
    """One graph for all of its sizes."""
    torch._dynamo.reset()
    counter, y = CompileCounterWithBackend("aot_eager"), seeded(4, 4)

    def fun(x: Tensor) -> Tensor:
        return of_sizes(y) + x.sin().sum() * x.shape[0]

    run = torch.compile(fun, backend=counter, fullgraph=True)
    for size in (3, 5, 6):
        x = seeded(size, 4)
        torch._dynamo.mark_dynamic(x, 0)
        assert_bitwise(run(x), fun(x))

    assert counter.frame_count == 1


def scaled(x: Tensor, by: str) -> Tensor:
    """What a region may not do, for some arguments."""
    return x.mul_(2.0) if by == "in place" else x.sin().mul_(2.0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_call_that_fails_spoils_no_other(backend: str) -> None:
    """The region stays apart in that frame alone; a backend that only runs raises as it is."""
    region, x = remat(scaled), seeded(3, 4).requires_grad_()

    def run(by: str) -> Tensor:
        torch._dynamo.reset()
        fun = torch.compile(
            lambda x: region(x.cos(), by), backend=backend, fullgraph=True
        )
        return fun(x)

    kind: type[Exception] = Unsupported if backend == "aot_eager" else MutationError
    with pytest.raises(kind, match="changed in place"):
        run("in place")

    assert_bitwise(run("outside"), region(x.cos(), "outside"))
