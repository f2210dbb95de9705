"""Trackers of named generator states, as Megatron's and TransformerEngine's.

"Any registered tracker (an object with `get_states`/`set_states`) is captured by value at
the region's entry, recomputation draws the same numbers even where dead work is cut out,
and generators end as without remat: dropout at the start, in the middle, at the end,
skipped by dead-code elimination, saved for one draw and recomputed for the next, in nested
regions, with an exception half-way."
"""

from collections.abc import Generator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import (
    ImplicitRandomnessError,
    RematError,
    SideEffectError,
    checkpoint_name,
    policies,
    random,
    remat,
)
from tests.random.trackers import (
    DEVICE,
    GraphSafe,
    InPlace,
    Tracker,
    generator_state,
    new_generator,
)
from tests.support import (
    assert_bitwise,
    assert_close,
    in_turn,
    pairwise,
    seeded,
)

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore::remat.RematWarning"),
]


tracker: Tracker = Tracker()


@pytest.fixture(params=[Tracker], autouse=True)
def registered(request: Any) -> Generator[None]:
    """A tracker of some kind, registered; "dp" is seeded like the generator itself."""
    global tracker
    tracker = request.param()
    with random.register_tracker(tracker):
        yield


def drop(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def forked(x: Tensor, name: str = "tp") -> Tensor:
    with tracker.fork(name):
        return drop(x)


def at_start(x: Tensor) -> Tensor:
    return torch.sin(torch.sin(forked(x)))


def in_the_middle(x: Tensor) -> Tensor:
    return torch.sin(forked(torch.sin(x)) * 2)


def at_end(x: Tensor) -> Tensor:
    return forked(torch.sin(torch.sin(x)))


def around(x: Tensor) -> Tensor:
    """A generator's draw before, within each of two names, and after."""
    x = checkpoint_name(drop(torch.sin(x)), "first")
    x = checkpoint_name(forked(torch.sin(x)), "second")
    x = drop(torch.sin(forked(torch.sin(x), "dp")))
    with tracker.fork():
        x = torch.sin(drop(torch.sin(drop(torch.sin(x)))))
    return torch.sin(drop(x))


def dead_draw(x: Tensor) -> Tensor:
    """The first fork is needed by no gradient: its recomputation is left out."""
    y = forked(torch.sin(x)).detach() + 1
    return torch.sin(forked(torch.sin(x))) + y


def unused_draw(x: Tensor) -> Tensor:
    """The first fork is needed by nothing at all, and yet moves its state."""
    with tracker.fork():
        torch.rand(7)
    return torch.sin(forked(torch.sin(x)))


def within(x: Tensor) -> Tensor:
    """One name inside another."""
    with tracker.fork("dp"):
        x = drop(torch.sin(x))
        with tracker.fork("tp"):
            x = drop(torch.sin(x))
        return torch.sin(drop(torch.sin(x)))


def nested(x: Tensor) -> Tensor:
    """An inner region that forks; one inside a fork; one that is both."""
    x = drop(remat(in_the_middle, rng="preserve")(torch.sin(x)))
    with tracker.fork():
        x = remat(lambda x: drop(torch.sin(x)).sin(), rng="preserve")(x)
    with tracker.fork("pp"):
        return remat(around, rng="preserve")(x)


def unnested(x: Tensor) -> Tensor:
    """The same without regions."""
    x = drop(in_the_middle(torch.sin(x)))
    with tracker.fork():
        x = drop(torch.sin(x)).sin()
    with tracker.fork("pp"):
        return around(x)


class Block(nn.Module):
    """A module that finds its tracker in an attribute, as a layer of Megatron does."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = tracker

    def forward(self, x: Tensor) -> Tensor:
        with self.tracker.fork():
            return torch.sin(drop(torch.sin(x)))


FUNS = [at_start, in_the_middle, at_end, around, dead_draw, unused_draw, within, nested]
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "first": {"policy": policies.save_only_these_names("first")},
    "second": {"policy": policies.save_only_these_names("second")},
    "everything": {"policy": policies.everything_saveable},
    "rerun": {"engine": "rerun"},
}
KINDS = [Tracker, InPlace, GraphSafe]
# torch.func refuses a write into a tensor that the function captures.
FUNCTIONAL = [Tracker, GraphSafe]
ENGINES = ["trace", "rerun"]
each_kind = pytest.mark.parametrize("registered", KINDS, indirect=True)
functional = pytest.mark.parametrize("registered", FUNCTIONAL, indirect=True)
each_engine = pytest.mark.parametrize("engine", ENGINES)


def states() -> list[Tensor]:
    """Where all generators stand."""
    held = tracker.get_states().values()
    values = [
        each.clone() if isinstance(each, Tensor) else each.get_state() for each in held
    ]
    return [generator_state(), *values]


def settle() -> None:
    """From one seed, anew."""
    torch.manual_seed(7)
    tracker.set_states({})
    tracker.add("tp", 11)
    tracker.add("dp", 7)
    tracker.add("pp", 11)


def trained(fun: Any) -> list[Tensor]:
    """Two calls, then their backwards, twice: values, gradients, all states."""
    settle()
    x = seeded(5, 8).requires_grad_()
    one, two = fun(x), fun(x)
    found = [one.detach(), two.detach(), *states()]
    torch.rand(5)
    forked(x)
    for y in (one, two):
        found += torch.autograd.grad(y, x, torch.cos(y.detach()), retain_graph=True)
        found += torch.autograd.grad(y.sum(), x)
    return [*found, *states(), forked(x).detach()]


@pytest.mark.parametrize(("options", "fun"), in_turn(OPTIONS, FUNS))
def test_the_same_numbers_are_drawn(fun: Any, options: str) -> None:
    """Values, gradients and all states are bitwise plain's, however often."""
    region = remat(fun, rng="preserve", **OPTIONS[options])
    expected = trained(unnested if fun is nested else fun)

    assert_bitwise(trained(region), expected)
    assert_bitwise(trained(region), expected)


@pytest.mark.parametrize(
    ("registered", "engine", "fun"),
    pairwise(KINDS, ENGINES, [around, dead_draw, within, nested]),
    indirect=["registered"],
)
def test_each_kind_of_tracker(fun: Any, engine: Any) -> None:
    """States by value, by reference, and in generators."""
    region = remat(fun, rng="preserve", engine=engine)

    assert_bitwise(trained(region), trained(unnested if fun is nested else fun))


@each_kind
@each_engine
def test_in_a_module(engine: Any) -> None:
    """A tracker in an attribute; one trace serves whatever state it is in."""
    block = Block()
    region: Any = remat(block, engine=engine)
    region.cache_clear()

    assert_bitwise(trained(region), trained(block))
    assert region.cache_info().misses == (engine == "trace")


@pytest.mark.parametrize(
    ("registered", "engine", "fun"),
    in_turn(FUNCTIONAL, ENGINES, [around, dead_draw, within, nested]),
    indirect=["registered"],
)
def test_under_func_grad(fun: Any, engine: Any) -> None:
    """`torch.func.grad`, and a Hessian-vector product by two reverse modes."""

    def derived(fun: Any) -> Any:
        settle()
        loss, gradient = torch.func.grad_and_value(lambda x: fun(x).sum())(seeded(3, 4))
        return loss, gradient, states()

    def second(fun: Any) -> Any:
        settle()
        inner = torch.func.grad(lambda x: fun(x).sum())
        return torch.func.grad(lambda x: inner(x).sin().sum())(seeded(3, 4)), states()

    region = remat(fun, rng="preserve", engine=engine)
    plain = unnested if fun is nested else fun
    assert_close(derived(region), derived(plain))
    assert_close(second(region), second(plain))


@functional
@each_engine
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_under_vmap(randomness: Any, engine: Any) -> None:
    """vmap(grad): the masks of value and gradient agree, and are alike or not."""
    settle()
    region = remat(forked, rng="preserve", engine=engine)
    before = states()

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        y, pull, *_ = torch.func.vjp(region, x)
        return y, pull(torch.ones_like(y))[0]

    x = seeded(1, 64).expand(4, 64)
    y, gradient = torch.func.vmap(run, randomness=randomness)(x)

    assert_close(gradient * x, y)
    assert (gradient == gradient[0]).all() == (randomness == "same")
    moved = [not torch.equal(a, b) for a, b in zip(states(), before, strict=True)]
    assert moved == [False, True, False, False]


@each_kind
@each_engine
@pytest.mark.parametrize("place", ["within a fork", "after a fork", "in the backward"])
def test_an_exception_half_way(place: str, engine: Any) -> None:
    """Whatever raises, all states are where plain code would have left them."""
    is_on = False

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if is_on and place != "in the backward":
                raise ZeroDivisionError
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            if is_on:
                raise ZeroDivisionError
            return gradients[0]

    def fun(x: Tensor) -> Tensor:
        with tracker.fork():
            x = drop(torch.sin(x))
            if place != "after a fork":
                x = Failing.apply(x)
        return Failing.apply(torch.sin(x)) if place == "after a fork" else torch.sin(x)

    def run(fun: Any) -> list[Tensor]:
        settle()
        with pytest.raises(ZeroDivisionError):
            fun(seeded(4, 4).requires_grad_()).sum().backward()
        return states()

    is_on = True
    found = run(remat(fun, rng="preserve", engine=engine))
    # A trace runs forward and backward at once, and moves no state before it raises.
    settle()
    unmoved = states()
    assert_bitwise(found, unmoved if engine == "trace" else run(fun))


def test_an_operator_that_raises_in_a_program() -> None:
    """A draw that fails while the program runs leaves all states in place."""
    settle()
    before = states()

    def fun(x: Tensor, p: Tensor) -> Tensor:
        with tracker.fork():
            return torch.sin(x * torch.bernoulli(p))

    region = remat(fun, rng="preserve")
    x = seeded(4).requires_grad_()
    region(x, torch.full((4,), 0.5).double())
    settle()

    with pytest.raises(RuntimeError, match="p_in >= 0"):
        region(x, torch.full((4,), 2.0).double())
    assert_bitwise(states(), before)


@each_kind
def test_states_are_taken_by_value() -> None:
    """What happens to the tracker between forward and backward does not matter."""
    for engine in ("trace", "rerun"):
        region = remat(around, rng="preserve", engine=engine)
        gradients: list[Tensor] = []
        for is_disturbed in (False, True):
            settle()
            x = seeded(4, 4).requires_grad_()
            y = region(x).sum()
            if is_disturbed:
                for held in tracker.get_states().values():
                    state = new_generator(99).get_state()
                    held.copy_(state) if isinstance(held, Tensor) else held.set_state(
                        state
                    )
            gradients += torch.autograd.grad(y, x)
        assert_bitwise(gradients[0], gradients[1])


def test_a_tracker_that_is_not_registered() -> None:
    """A fork that a trace cannot place is refused, with both ways out."""
    settle()
    stranger = Tracker()
    stranger.add("tp", 3)
    before = states()

    def fun(x: Tensor) -> Tensor:
        with torch.random.fork_rng([] if DEVICE.type == "cpu" else [DEVICE]):
            torch.manual_seed(3)
            return torch.sin(drop(x))

    with pytest.raises(ImplicitRandomnessError) as error:
        remat(fun, rng="preserve")(seeded(3).requires_grad_())

    assert "test_trackers.py:" in str(error.value)
    assert "random.register_tracker(tracker)" in str(error.value)
    assert 'engine="rerun"' in str(error.value)
    assert_bitwise(states(), before)
    assert_bitwise(trained(remat(fun, rng="preserve", engine="rerun")), trained(fun))


def seeds(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return torch.sin(x)


def adds(x: Tensor) -> Tensor:
    tracker.add("new", 5)
    return torch.sin(x)


def reseeds(x: Tensor) -> Tensor:
    tracker.add("tp", 5)
    return torch.sin(x)


def assert_refused_and_undone(fun: Any, error: type[RematError]) -> None:
    """A trace raises and leaves all states alone; `engine="rerun"` takes the function."""
    settle()
    region: Any = remat(fun, rng="preserve")
    before = states()

    with pytest.raises(error, match='engine="rerun"'):
        region(seeded(3).requires_grad_())

    assert_bitwise(states(), before)
    assert_bitwise(trained(remat(fun, rng="preserve", engine="rerun")), trained(fun))


@pytest.mark.parametrize("fun", [seeds, adds, reseeds])
def test_a_function_that_sets_states(fun: Any) -> None:
    """Seeding is a side effect, which a trace would run once: refused, and undone."""
    assert_refused_and_undone(fun, SideEffectError)


def again(x: Tensor) -> Tensor:
    """A fork within a fork of the same name, which starts where the outer one did."""
    with tracker.fork():
        x = drop(torch.sin(x))
        with tracker.fork():
            x = drop(torch.sin(x))
        return torch.sin(drop(torch.sin(x)))


def again_without_a_later_draw(x: Tensor) -> Tensor:
    with tracker.fork():
        return torch.sin(forked(torch.sin(x)))


def again_by_regions(x: Tensor) -> Tensor:
    with tracker.fork():
        x = drop(torch.sin(x))
        return torch.sin(remat(in_the_middle, rng="preserve")(x))


def rewound(x: Tensor) -> Tensor:
    states = tracker.get_states()
    kept = {name: each.clone() for name, each in states.items()}
    x = forked(torch.sin(x))
    tracker.set_states(kept)
    return torch.sin(forked(x))


@pytest.mark.parametrize(
    ("fun", "error"),
    [
        (again, ImplicitRandomnessError),
        (again_without_a_later_draw, SideEffectError),
        (again_by_regions, ImplicitRandomnessError),
        (rewound, SideEffectError),
    ],
)
def test_a_state_that_was_left_behind(fun: Any, error: type[RematError]) -> None:
    """A fork that does not go on where the last one ended is refused, not guessed."""
    assert_refused_and_undone(fun, error)


def test_registering_anew_traces_anew() -> None:
    """A trace names its registration: another one has another."""
    mine = Tracker()
    mine.add("tp", 5)

    def fun(x: Tensor) -> Tensor:
        with mine.fork():
            return torch.sin(drop(x))

    region = remat(fun, rng="preserve")
    region.cache_clear()
    x = seeded(3).requires_grad_()
    for misses in (1, 2):
        with random.register_tracker(mine):
            region(x)
            region(x)
        assert region.cache_info().misses == misses
    with pytest.raises(ImplicitRandomnessError):
        region(x)


@each_kind
@each_engine
def test_equal_modules_with_trackers_of_their_own(engine: Any) -> None:
    """Each draws from its own tracker, also where it finds the other one's trace."""
    other = type(tracker)()
    blocks = [Block(), Block()]
    blocks[1].tracker = other
    regions: list[Any] = [remat(block, engine=engine) for block in blocks]
    regions[0].cache_clear()

    def both(layers: Any) -> list[Tensor]:
        settle()
        other.set_states({})
        other.add("tp", 13)
        x = seeded(5, 8).requires_grad_()
        found = [layer(x) for layer in (*layers, *layers)]
        gradients = torch.autograd.grad(torch.stack(found).cos().sum(), x)
        return [*found, *gradients, *states()]

    with random.register_tracker(other):
        assert_bitwise(both(regions), both(blocks))


def test_keys_refuse_a_fork() -> None:
    """Under `rng="keys"` a draw is refused wherever its numbers come from."""
    settle()
    before = states()

    with pytest.raises(ImplicitRandomnessError, match='rng="preserve"'):
        remat(forked)(seeded(3).requires_grad_())

    assert_bitwise(states(), before)


def test_a_handle_ends_once() -> None:
    """`remove` twice is no error, and then it may be registered again."""
    mine = Tracker()
    handle = random.register_tracker(mine)
    handle.remove()
    handle.remove()

    with (
        random.register_tracker(mine),
        pytest.raises(ValueError, match=r"registered already.*remove\(\)"),
    ):
        random.register_tracker(mine)


def test_what_is_no_tracker() -> None:
    """An object without the methods, and states that are none."""
    strange: Any = Tracker()
    strange.states_["tp"] = 3

    with pytest.raises(TypeError, match=r"this list has no get_states"):
        random.register_tracker([])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"'tp' of this Tracker is a int: it must be"):
        random.register_tracker(strange)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_between_graphs_of_torch_compile() -> None:
    """A region that draws from a tracker runs as it does outside."""
    torch._dynamo.reset()
    region, x = remat(at_start, rng="preserve"), seeded(3, 4).requires_grad_()
    found: list[Any] = []

    def fun(x: Tensor) -> Tensor:
        return region(x.exp()).sum()

    for run in (fun, torch.compile(fun, backend="aot_eager")):
        tracker.add("tp", 5)
        found.append([*torch.autograd.grad(run(x), x), tracker.states_["tp"]])

    assert_bitwise(*found)
