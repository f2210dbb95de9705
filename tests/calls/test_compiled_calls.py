"""What may be handed to torch.compile, and which sizes and backends it may have then."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

from remat import (
    MutationError,
    disabled,
    modules,
    random,
    remat,
)
from tests.support import assert_bitwise, in_turn, seeded

pytestmark = [
    pytest.mark.apart,
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


class Decorated(nn.Module):
    """One whose forward is a region."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    @remat
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
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


@pytest.mark.parametrize(
    ("backend", "dynamic"), in_turn(["eager", "aot_eager"], [None, True])
)
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


class Counting(nn.Module):
    """A module whose output reads a buffer that it changes."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.add_(x.detach().mean(0))
        return x.sin() * self.mean


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_backward_finds_a_buffer_as_it_was(backend: str) -> None:
    """It is written once, and the recomputation starts from before."""
    torch._dynamo.reset()
    module: Any = remat(Counting())
    plain = Counting()
    run: Any = torch.compile(module, backend=backend, fullgraph=True)
    x = seeded(3, 4).requires_grad_()

    for _ in range(2):
        found, expected = (
            torch.autograd.grad(each(x).sum(), x) for each in (run, plain)
        )
        assert_bitwise([*found, module.mean], [*expected, plain.mean])


def test_disabled_is_seen_by_a_graph() -> None:
    """The plain function saves what the region would recompute, also where it came first."""
    weight = seeded(4, 4).requires_grad_()
    region = remat(lambda x: (torch.tanh(x @ weight) @ weight).exp() @ weight)
    x = seeded(64, 4)

    def num_saved() -> int:
        return len(run(x).grad_fn.saved_tensors)

    for is_first in (True, False):
        torch._dynamo.reset()
        run: Any = torch.compile(region, backend="aot_eager", fullgraph=True)
        recomputing = [num_saved()] if is_first else []
        with disabled():
            plain = num_saved()
        recomputing.append(num_saved())
        assert {each < plain for each in recomputing} == {True}


@pytest.mark.parametrize("seed", [3, -1, 1 << 63])
def test_keys_made_in_a_graph(seed: int) -> None:
    """To the bit."""
    torch._dynamo.reset()
    run = torch.compile(
        lambda x: (random.key(seed), x), backend="aot_eager", fullgraph=True
    )

    assert torch.equal(run(seeded(1))[0], random.key(seed))


def test_a_policy_sees_the_lines_of_the_user() -> None:
    """A graph has them where no frame does: a policy may decide by them."""
    torch._dynamo.reset()
    sources: list[str] = []

    def by_line(value: Any) -> bool:
        sources.append(value.source)
        return False

    region, x = remat(sized.__wrapped__, policy=by_line), seeded(4, 4).requires_grad_()
    region(x)
    outside, sources[:] = sources[:], []
    torch.compile(region, backend="aot_eager", fullgraph=True)(x)

    assert set(sources) == set(outside)


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
