"""What a region holds dies with what needs it (laws 2 and 11, and issue 2).

"After `del` of the outputs, saved bytes are gone without a garbage collection; 1,000
steps hold memory flat." And a cache of traces holds nothing of its users.
"""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import TraceError, checkpoint_name, policies, remat
from tests.support import LiveBytes, assert_bitwise, daily, seeded, tensors_in

# Forward mode itself compiles decompositions with torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")
WEIGHT: Any = None
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "names": {"policy": policies.save_only_these_names("h")},
    "everything": {"policy": policies.everything_saveable},
    "rerun": {"engine": "rerun"},
    "preserve": {"rng": "preserve"},
    "verify": {"verify": True, "policy": policies.save_only_these_names("h")},
}


@pytest.fixture(autouse=True)
def _without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def block(x: Tensor, w: Tensor) -> Tensor:
    """A named and an unnamed intermediate."""
    return torch.sin(checkpoint_name(torch.sin(x @ w), "h") @ w)


def leaves() -> list[Tensor]:
    """An input of 32 KiB and a weight of 2 KiB."""
    return [seeded(256, 16).requires_grad_(), seeded(16, 16, seed=1).requires_grad_()]


def step_backward(region: Any, args: list[Tensor]) -> None:
    torch.autograd.grad(region(region(*args), args[1]).sum(), args)


def step_twice(region: Any, args: list[Tensor]) -> None:
    (grad,) = torch.autograd.grad(region(*args).sum(), args[0], create_graph=True)
    torch.autograd.grad(grad.square().sum(), args)


def step_func_grad(region: Any, args: list[Tensor]) -> None:
    torch.func.grad(lambda x, w: region(x, w).sum())(*[a.detach() for a in args])


def step_forward(region: Any, args: list[Tensor]) -> None:
    region(*args)


def step_vmap(region: Any, args: list[Tensor]) -> None:
    x, w = (a.detach() for a in args)
    gradient = torch.func.grad(lambda x: region(x, w).sum())
    torch.func.vmap(gradient)(x.reshape(4, -1, 16))


def step_jvp(region: Any, args: list[Tensor]) -> None:
    x, w = (a.detach() for a in args)
    gradient = torch.func.grad(lambda x: region(x, w).sum())
    torch.func.jvp(gradient, (x,), (x,))


STEPS: list[Callable[[Any, list[Tensor]], None]] = [
    step_backward,
    step_twice,
    step_func_grad,
    step_forward,
    step_vmap,
    step_jvp,
]


@pytest.mark.contract
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("options", daily(OPTIONS, ["nothing", "rerun"]))
def test_saved_bytes_die_with_the_outputs(step: Any, options: dict[str, Any]) -> None:
    """After a step of any kind nothing is alive, without a garbage collection."""
    region, args = remat(block, **options), leaves()
    step(region, args)

    with LiveBytes() as memory:
        step(region, args)
        step(region, args)
        assert memory.live == 0


@pytest.mark.contract
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_deleting_an_output_frees_what_it_held(options: dict[str, Any]) -> None:
    """Between forward and backward bytes are held; `del` of the output frees them."""
    region, args = remat(lambda x, w: block(block(x, w), w), **options), leaves()
    step_backward(region, args)

    with LiveBytes() as memory:
        y = region(*args)
        assert memory.live >= y.untyped_storage().nbytes()
        del y
        assert memory.live == 0


def test_the_backward_frees_as_plain_does() -> None:
    """After a backward without retain_graph an output that is kept holds only itself."""
    region, args = remat(block, policy=policies.everything_saveable), leaves()
    step_backward(region, args)

    with LiveBytes() as memory:
        y = region(*args)
        assert memory.live > y.untyped_storage().nbytes()
        torch.autograd.grad(y.sum(), args)
        assert memory.live == y.untyped_storage().nbytes()


def tanhs(x: Tensor) -> Tensor:
    """16 values of the size of x, each of which the backward reads once."""
    for _ in range(16):
        x = torch.tanh(x)
    return x


def test_a_saved_value_is_let_go_after_its_last_use() -> None:
    """Inside one region's backward too, so that the peak is at most plain autograd's."""
    peaks: list[int] = []
    for fun in (tanhs, remat(tanhs, policy=policies.everything_saveable)):
        x = seeded(64, 64).requires_grad_()
        fun(x).sum().backward()  # traces
        with LiveBytes() as live:
            fun(x).sum().backward()
        peaks.append(live.peak)

    assert peaks[1] <= peaks[0]


def test_a_kept_graph_keeps_its_saved_values() -> None:
    """Only the backward that frees the graph lets go; one after it raises, as always."""
    x = seeded(4, 4).requires_grad_()
    out = remat(tanhs, policy=policies.everything_saveable)(x).sum()

    first = torch.autograd.grad(out, x, retain_graph=True)
    again = torch.autograd.grad(out, x)

    assert torch.equal(first[0], again[0])
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(out, x)


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("is_captured", [False, True], ids=["argument", "closure"])
def test_a_loss_that_is_kept_holds_no_batch(engine: Any, is_captured: bool) -> None:
    """As for plain autograd: what a freed graph knew of its call is freed with it."""
    w = seeded(16, 16).requires_grad_()

    def loss_of(batch: Tensor) -> Tensor:
        given = () if is_captured else (batch,)
        fun = remat(lambda x=batch: torch.sin(x @ w).sum(), engine=engine)
        return fun(*given)

    losses: list[Tensor] = []
    live: list[int] = []
    for _ in range(3):  # the first one traces
        with LiveBytes() as memory:
            losses.append(loss_of(w.new_ones(64, 16)))
            losses[-1].backward()
            live.append(memory.live - losses[-1].nbytes)

    assert live[1:] == [0, 0]


class Shown(nn.Module):
    """Keeps what it computed last, in one of several ways, and may read its numbers."""

    def __init__(self, keep: Callable[[Any, Tensor], Any], *, reads: bool) -> None:
        super().__init__()
        self.linear, self.keep, self.reads = nn.Linear(16, 16).double(), keep, reads
        self.shown: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(self.linear(x))
        if self.reads and self.shown is not None:
            y = y + tensors_in(self.shown)[0].detach()
        self.shown = self.keep(self.shown, y)
        return y.cos()


def in_a_dict_that_stays(shown: Any, y: Tensor) -> dict[str, Tensor]:
    """Replaces the item of one dict."""
    shown = {} if shown is None else shown
    shown["y"] = y
    return shown


@pytest.mark.contract
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(
    "keep",
    [
        lambda _, y: y,
        lambda _, y: [{"y": (y,)}],
        in_a_dict_that_stays,
    ],
    ids=["itself", "in new containers", "in a dict that stays"],
)
def test_what_a_module_shows_of_its_last_call_holds_no_call_before(
    keep: Any, reads: bool
) -> None:
    """Neither where a step has a backward, nor where none of them has one."""
    plain = Shown(keep, reads=reads)
    region = remat(copy.deepcopy(plain), engine="rerun")
    for has_backward in (False, True):
        live: list[int] = []
        with LiveBytes() as memory:
            for step in range(5):
                losses = [
                    each(seeded(8, 16, seed=step)).sum() for each in (plain, region)
                ]
                assert torch.equal(*losses)
                if has_backward:
                    found = [
                        torch.autograd.grad(loss, [*each.parameters()])
                        for loss, each in zip(losses, (plain, region), strict=True)
                    ]
                    assert_bitwise(*found)
                    del found
                del losses
                live.append(memory.live)

        assert live[2:] == [live[2]] * 3


@pytest.mark.contract
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_many_steps_hold_memory_flat(options: dict[str, Any]) -> None:
    """50 steps of training: what is alive after each step is what was after the first."""
    region = remat(block, **options)
    w = nn.Parameter(seeded(16, 16, seed=1))
    x = seeded(8, 16)
    live = []
    with LiveBytes() as memory:
        for _ in range(50):
            (grad,) = torch.autograd.grad(region(region(x, w), w).sum(), w)
            with torch.no_grad():
                w.sub_(grad, alpha=0.01)
            del grad
            live.append(memory.live)

    assert set(live[1:]) == {live[1]}


def test_a_thousand_steps_make_no_objects() -> None:
    """Python objects do not pile up either, over 1,000 steps on a tiny block."""
    region = remat(block)
    w = nn.Parameter(seeded(4, 4, seed=1))
    x = seeded(2, 4)

    def steps(count: int) -> int:
        for _ in range(count):
            torch.autograd.grad(region(x, w).sum(), w)
        gc.collect()
        return len(gc.get_objects())

    steps(5)
    before = steps(5)
    assert abs(steps(1000) - before) < 100


class Net(nn.Module):
    """A module to die."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(seeded(16, 16, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        return block(x, self.w)

    @remat
    def decorated(self, x: Tensor) -> Tensor:
        return block(x, self.w)


def as_module(net: Net) -> Any:
    return remat(net)


def as_method(net: Net) -> Any:
    return remat(net.forward)


def as_decorated(net: Net) -> Any:
    return net.decorated


def as_lambda(net: Net) -> Any:
    return remat(lambda x: net(x))


@pytest.mark.contract
@pytest.mark.parametrize("wrap", [as_module, as_method, as_decorated, as_lambda])
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_a_module_dies_although_its_region_was_cached(wrap: Any, engine: str) -> None:
    """The cache of traces, which equal blocks share, holds no module and no weight."""
    net = Net()
    region = wrap(net) if engine == "trace" else remat(net, engine="rerun")
    torch.autograd.grad(region(seeded(2, 16)).sum(), net.w)
    dead = [weakref.ref(net), weakref.ref(net.w)]

    del net, region
    gc.collect()

    assert [reference() for reference in dead] == [None, None]


def reads_global(x: Tensor) -> Tensor:
    """A module-level region's function, which lives for ever."""
    return block(x, WEIGHT)


@pytest.mark.contract
def test_a_replaced_global_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A living region keeps no tensor that its function no longer reaches."""
    region = remat(reads_global)
    old = nn.Parameter(seeded(16, 16))
    monkeypatch.setitem(globals(), "WEIGHT", old)
    torch.autograd.grad(region(seeded(2, 16)).sum(), old)
    dead = weakref.ref(old)

    monkeypatch.undo()
    del old

    assert dead() is None


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("options", daily(OPTIONS, ["nothing", "rerun"]))
def test_arguments_die(step: Any, options: dict[str, Any]) -> None:
    """A living region keeps no argument, from the first call on."""
    region, args = remat(block, **options), leaves()
    dead = [weakref.ref(arg) for arg in args]
    step(region, args)

    del args

    assert [reference() for reference in dead] == [None, None]


def test_an_exception_keeps_nothing() -> None:
    """A call that fails half-way holds neither its arguments nor its intermediates."""
    args = leaves()

    def fails(x: Tensor, w: Tensor) -> Tensor:
        return block(x, w) * w.sum().item()

    region = remat(fails)
    dead = [weakref.ref(arg) for arg in args]
    with pytest.raises(TraceError):
        region(*args)

    del args
    gc.collect()

    assert [reference() for reference in dead] == [None, None]


def test_cache_clear_lets_go_of_traces() -> None:
    """After `cache_clear` the next call traces anew."""
    region, args = remat(block), leaves()
    step_backward(region, args)
    region.cache_clear()
    step_backward(region, args)

    assert region.cache_info().misses == 1
