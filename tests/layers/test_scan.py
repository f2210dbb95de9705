"""What `scan` takes, gives and refuses; how often it traces."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from remat import (
    CarryError,
    ImplicitRandomnessError,
    MutationError,
    RematWarning,
    SavedTensorModifiedError,
    ScheduleError,
    chain,
    policies,
    random,
    remat,
    scan,
    storage,
)
from remat.schedules import AbstractSchedule, Every, Revolve, Sqrt
from tests.layers.stacks import (
    LENGTH,
    SCHEDULES,
    WIDTH,
    arguments,
    loop,
    tanh_cell,
    weight,
)
from tests.support import assert_bitwise, assert_close, seeded

pytestmark = [
    pytest.mark.contract,
    # Tests count runs by an iterator.
    pytest.mark.filterwarnings(r"ignore:.*\(count\) is read:remat.RematWarning"),
]

with_and_without = pytest.mark.parametrize(
    "schedule", [None, Every(2), Revolve(2)], ids=repr
)


@with_and_without
def test_numbers_and_none(schedule: AbstractSchedule | None):
    """Python numbers become tensors, None stays where it is, in either mode."""
    w = weight().requires_grad_()

    def step(carry: Any, x: Any) -> Any:
        n, h, nothing = carry
        return (n + 1, torch.tanh(h @ w), nothing), {"n": n, "none": None, "one": 1}

    init = (0, torch.ones(WIDTH, dtype=torch.float64), None)
    (n, h, nothing), ys = scan(step, init, length=3, schedule=schedule)
    assert (int(n), nothing, ys["none"]) == (3, None, None)
    assert ys["n"].tolist() == [0, 1, 2]
    assert ys["one"].tolist() == [1, 1, 1]
    assert h.requires_grad


@with_and_without
def test_no_steps(schedule: AbstractSchedule | None):
    """The first carry comes back, and empty outputs of the right shape."""
    w, c, _ = arguments()
    c.requires_grad_()

    carry, ys = scan(tanh_cell(w), c, torch.zeros(0, WIDTH).double(), schedule=schedule)
    assert torch.equal(carry, c)
    assert ys.shape == (0, WIDTH)
    carry.sum().backward()


def test_without_gradients_it_is_the_loop():
    """Nothing is traced where nothing is wanted, or gradients are off."""
    w, c, xs = arguments()
    calls = itertools.count()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        next(calls)
        return torch.tanh(h @ w + x), None

    scan(step, c, xs)
    with torch.no_grad():
        scan(step, c.requires_grad_(), xs, schedule=Sqrt())
        for schedule in (None, Sqrt()):
            stages = [lambda h: step(h, xs[0])[0]] * LENGTH
            assert_bitwise(chain(stages, schedule)(c), Chained(stages)(c))
    assert next(calls) == 6 * LENGTH


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_one_trace_serves_all_steps(schedule: AbstractSchedule | None):
    """At every length, for a new function of the same code too.

    The first backward may trace again for the layouts of its cotangents, once for each.
    """
    calls = itertools.count()

    def made(w: Tensor) -> Any:
        def step(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            next(calls)
            return torch.tanh(h @ w + x), None

        return step

    counts: list[int] = []
    for length in (5, 9, 20):
        w, xs = weight().requires_grad_(), torch.zeros(length, WIDTH).double()
        first = torch.zeros(WIDTH).double().expand(2, WIDTH)
        scan(made(w), first, xs, schedule=schedule)[0].sum().backward()
        counts.append(next(calls))
    assert counts[0] <= 3
    assert counts == [counts[0] + k for k in range(3)]


@with_and_without
def test_a_region_inside_is_traced_at_most_once(schedule: AbstractSchedule | None):
    """The cache of a decorated step tells it; the trace of the scan may hold the step."""
    w, c, xs = arguments()
    step = remat(tanh_cell(w.requires_grad_()))
    step.cache_clear()

    scan(step, c, xs, schedule=schedule)[0].sum().backward()
    assert step.cache_info().misses <= 1


@with_and_without
def test_a_module_is_a_step(schedule: AbstractSchedule | None):
    """Its parameters get their gradients."""
    torch.manual_seed(0)

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(WIDTH, WIDTH)

        def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.cell(x, h)
            return h, h

    cell, xs = Cell(), torch.ones(5, 2, WIDTH)
    h = torch.zeros(2, WIDTH)
    scan(cell, h, xs, schedule=schedule)[1].sum().backward()
    found = [p.grad for p in cell.parameters()]
    cell.zero_grad()
    for x in xs:
        h, _ = cell(h, x)
        h.sum().backward(retain_graph=True)
    assert_close(found, [p.grad for p in cell.parameters()])


@with_and_without
def test_keys_go_through_xs(schedule: AbstractSchedule | None):
    """A step that runs again drops what it dropped."""
    w, c, xs = arguments()
    keys = random.split(random.key(0), LENGTH)

    def drop(h: Tensor, each: Any) -> tuple[Tensor, None]:
        x, key = each
        return random.dropout(key, torch.tanh(h @ w + x), 0.5), None

    def loss(c: Tensor) -> Tensor:
        return scan(drop, c, (xs, keys), schedule=schedule)[0].sum()

    def plain(c: Tensor) -> Tensor:
        for each in zip(xs, keys, strict=True):
            c, _ = drop(c, each)
        return c.sum()

    assert_close(torch.func.grad(loss)(c), torch.func.grad(plain)(c))


@pytest.mark.parametrize(
    "policy",
    [
        policies.everything_saveable,
        policies.nothing_saveable,
        policies.everything_saveable.stored(storage.Sparse()),
    ],
    ids=repr,
)
@with_and_without
def test_policies_decide_what_a_step_keeps(policy: Any, schedule: Any):
    """The numbers are those of any other policy."""
    w, c, xs = arguments()
    w.requires_grad_()

    def gradient(**options: Any) -> Any:
        return torch.autograd.grad(scan(tanh_cell(w), c, xs, **options)[0].sum(), w)

    assert_bitwise(gradient(policy=policy, schedule=schedule), gradient())


WRONG: dict[str, tuple[Any, Any, Any, str]] = {
    "no pair": (lambda c, x: c, torch.zeros(3), torch.zeros(2, 3), "returned a (Fake)?Tensor"),
    "structure": (lambda c, x: ({"a": c}, x), torch.zeros(3), torch.zeros(2, 3), "is a dict"),
    "keys": (lambda c, x: ({"b": c["a"]}, x), {"a": torch.zeros(3)}, torch.zeros(2, 3), "different structure"),
    "None": (lambda c, x: (None, x), torch.zeros(3), torch.zeros(2, 3), "None where"),
    "shape": (lambda c, x: (c[:2], x), torch.zeros(3), torch.zeros(2, 3), r"`carry` as float32\[2\]"),
    "dtype": (lambda c, x: ({"a": c["a"].double()}, x), {"a": torch.zeros(3)}, torch.zeros(2, 3), "`a` as float64"),
    "output": (lambda c, x: (c, "y"), torch.zeros(3), torch.zeros(2, 3), "is a str"),
    "no length": (lambda c, x: (c, x), torch.zeros(3), None, "number of steps is not clear"),
    "lengths": (lambda c, x: (c, x), torch.zeros(3), (torch.zeros(2), torch.zeros(3)), r"not clear: \[2, 3\]"),
    "number": (lambda c, x: (c, x), torch.zeros(3), 3, r"(?s)`xs`: is of type int.*torch\.as_tensor"),
    "iterator": (lambda c, x: (c, x), torch.zeros(3), iter([torch.zeros(3)]), r"(?s)list_iterator.*torch\.stack"),
    "0-d": (lambda c, x: (c, x), torch.zeros(3), {"a": torch.tensor(1.0)}, "`xs.a`: is 0-d"),
}  # fmt: skip


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_refusals(name: str, wanted: bool):
    """Each says what is wrong, traced or not."""
    f, init, xs, text = WRONG[name]
    if wanted:
        init = tree_map(lambda t: t.requires_grad_(), init)

    with pytest.raises(CarryError, match=text):
        scan(f, init, xs)


@pytest.mark.parametrize("wanted", [False, True])
@with_and_without
def test_a_number_takes_on_a_dtype(schedule: AbstractSchedule | None, wanted: bool):
    """Of the first step, as JAX's weak types do; tensors and truth values keep theirs."""
    x = torch.arange(5, dtype=torch.float64).requires_grad_(wanted)

    def step(c: Any, x: Tensor) -> Any:
        count, total = c
        return (count + 1, total * 0.5 + x), count * x

    start: Any = (0, 0)
    (count, total), ys = scan(step, start, x, schedule=schedule)

    expected = torch.tensor([0.5**4, 0.5**3, 0.5**2, 0.5, 1], dtype=torch.float64)
    assert (count.dtype, count.item()) == (torch.int64, 5)
    assert total.dtype == torch.float64
    assert torch.equal(total, expected @ x)
    assert torch.equal(ys, torch.arange(5) * x)
    if wanted:
        assert torch.equal(torch.autograd.grad(total, x)[0], expected)
    ones = torch.func.grad(lambda x: scan(step, start, x, schedule=schedule)[0][1])
    assert torch.equal(ones(x.detach()), expected)
    for kept in (True, torch.tensor(0)):
        with pytest.raises(CarryError, match=r"float64\[\] on \S+, and before as"):
            scan(lambda c, x: (c + x, None), kept, x, schedule=schedule)


def test_length_is_checked_against_xs():
    """An equal length is fine."""
    step = tanh_cell(weight())
    xs = torch.zeros(4, WIDTH).double()

    scan(step, xs[0], xs, length=4)
    with pytest.raises(CarryError, match=r"\[4, 5\]"):
        scan(step, xs[0], xs, length=5)


def test_unroll_warns():
    """It has no effect, and says so."""
    with pytest.warns(RematWarning, match="unroll=2 has no effect"):
        scan(lambda c, x: (c, x), torch.zeros(2), torch.zeros(3), unroll=2)


def test_a_changed_output_is_noticed():
    """The last record reads what the user has got."""
    w, c, xs = arguments()
    h, _ = scan(tanh_cell(w.requires_grad_()), c, xs, schedule=Revolve(2))

    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(SavedTensorModifiedError, match="changed in place"):
        h.sum().backward()


def test_generators_are_refused_under_a_schedule():
    """A step that runs again could not draw the same."""
    layer = nn.Dropout(0.5)
    x = torch.ones(3, requires_grad=True)

    for stage in (layer, remat(layer)):
        with pytest.raises(
            ImplicitRandomnessError,
            match=r"(?s)draws from a generator.*groups of layers",
        ):
            chain([stage, torch.sin], Every(1))(x)


@pytest.mark.parametrize("inplace", [False, True], ids=["", "in place"])
def test_without_a_schedule_the_modules_of_a_chain_may_draw(inplace: bool):
    """As in plain code, and the same numbers; a function that draws wants a key."""
    x = seeded(3, 4).requires_grad_()
    layers = [torch.sin, nn.Dropout(0.5, inplace), torch.cos]

    def gradient(run: Any) -> Tensor:
        torch.manual_seed(0)
        return torch.autograd.grad(run(x).sum(), x)[0]

    assert_bitwise(gradient(chain(layers)), gradient(Chained(layers)))
    with pytest.raises(ImplicitRandomnessError, match="draws from a torch"):
        chain([torch.sin, lambda h: F.dropout(h, inplace=inplace)])(x)


@pytest.mark.parametrize(
    ("stage", "num_written", "num_recorded"),
    [
        (torch.sin, 1, 0),
        (lambda x: x.t().sin().t(), 1, 0),
        (lambda x: x.exp().sin(), 2, 1),
        (lambda x: x.sin().exp(), 2, 0),
        (lambda x: x.exp().sin().exp().t(), 3, 1),
    ],
    ids=["one", "views", "intermediate", "output", "both"],
)
def test_a_stage_is_described_by_what_it_writes_and_records(
    stage: Any, num_written: int, num_recorded: int
):
    """Views write nothing, and of a record the output is the next stage's state."""
    x = seeded(3, 3).requires_grad_()
    one = chain([torch.sin]).stages(x)[0]

    (found,) = chain([stage]).stages(x)

    assert found.cost == num_written * one.cost
    assert found.record_bytes == num_recorded * x.nbytes
    assert (found.state_bytes, found.output_bytes) == (x.nbytes, x.nbytes)


def test_buffers_change_once():
    """In a chain; a buffer that several stages change is refused."""
    torch.manual_seed(0)
    x = seeded(6, WIDTH, dtype=torch.float32).requires_grad_()
    norms = [nn.BatchNorm1d(WIDTH) for _ in range(2)]
    layers = [norms[0], torch.sin, nn.Linear(WIDTH, WIDTH)]
    twin = [norms[1], *layers[1:]]

    chain(layers, Every(2))(x).sum().backward()
    found, x.grad = x.grad, None
    Chained(twin)(x).sum().backward()
    assert_bitwise(found, x.grad)
    assert_bitwise(dict(norms[0].named_buffers()), dict(norms[1].named_buffers()))
    with pytest.raises(MutationError, match="more than one stage"):
        chain([norms[0], norms[0]], Every(1))(x)


def test_a_chain_of_nothing_is_refused():
    """There must be a function."""
    with pytest.raises(ValueError, match="got no function"):
        chain([])


@pytest.mark.parametrize("stages", [[3], [torch.sin, None]], ids=["one", "second"])
def test_what_cannot_be_called_is_no_stage(stages: Any):
    """It is named where the chain is made, and not at a call."""
    with pytest.raises(
        TypeError, match=r"chain: got (3|None), which cannot be called\."
    ):
        chain(stages)


@pytest.mark.parametrize("schedule", [3, Every, "sqrt"], ids=repr)
@pytest.mark.parametrize("wants", [False, True], ids=["without_grad", "with_grad"])
def test_what_is_no_schedule_is_refused(schedule: Any, wants: bool):
    """Whether it would be needed or not."""
    x = torch.ones(3, 2, requires_grad=wants)

    with pytest.raises(ScheduleError, match="scan: got schedule="):
        scan(lambda c, each: (c + each, None), x[0], x, schedule=schedule)
    with pytest.raises(ScheduleError, match="chain: got schedule="):
        chain([torch.sin], schedule)


def test_an_input_in_the_place_of_a_schedule_is_told_where_it_goes():
    """As `checkpoint_sequential(functions, segments, x)` takes it; no number is printed."""
    said = r"got schedule=a tensor float32\[2, 3\].*chain\(fs\)\(x\)"

    with pytest.raises(ScheduleError, match=said):
        chain([torch.sin], torch.ones(2, 3))  # pyright: ignore[reportArgumentType]


@with_and_without
def test_an_expanded_carry_is_laid_out_as_a_loop_lays_it_out(
    schedule: AbstractSchedule | None,
):
    """An expanded dimension's stride says nothing of the order in memory."""
    w = weight().requires_grad_()
    xs = seeded(LENGTH, 3, WIDTH)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x)
        return h, h * 2

    def run(by: Any) -> tuple[Tensor, Tensor]:
        start = torch.ones(WIDTH, dtype=torch.float64).expand(3, WIDTH)
        return by(step, start, xs)

    h, ys = run(lambda *given: scan(*given, schedule=schedule))
    plain, plain_ys = run(loop)

    assert h.stride() == plain.stride()
    assert_bitwise((h, ys), (plain, plain_ys))
    (found,) = torch.autograd.grad(h.sum(), w)
    assert_bitwise(found, torch.autograd.grad(plain.sum(), w)[0])


def writes(state: Any) -> Any:
    """Changes what it is given, which is a tree, and hands a part of it on."""
    state["h"].mul_(2).relu_()
    return state["h"] @ state["w"]


STAGES_THAT_WRITE: list[tuple[Any, ...]] = [
    (torch.sin, nn.ReLU(inplace=True), torch.cos),
    (torch.sin, nn.Dropout(0.0, inplace=True), nn.ReLU(inplace=True)),
    (lambda x: {"h": x.sin(), "w": torch.diag(x[0])}, writes, torch.tanh),
]


@with_and_without
@pytest.mark.parametrize("stages", STAGES_THAT_WRITE, ids=["relu", "two", "tree"])
def test_a_later_stage_of_a_chain_may_write_to_its_state(
    stages: Any, schedule: AbstractSchedule | None
):
    """As in plain code, where nobody else has the state."""
    x = seeded(3, 3).requires_grad_()
    own = nn.Linear(3, 3).double()
    y, expected = (
        chain([own, *stages], schedule)(x),
        nn.Sequential(own, Chained(stages))(x),
    )
    wanted = (x, *own.parameters())

    assert_bitwise(y, expected)
    assert_bitwise(
        torch.autograd.grad(y.exp().sum(), wanted),
        torch.autograd.grad(expected.exp().sum(), wanted),
    )
    before = own.weight.detach().clone()
    assert_close(
        torch.func.grad(lambda x: chain([own, *stages], schedule)(x).sum())(x.detach()),
        torch.func.grad(lambda x: Chained(stages)(own(x)).sum())(x.detach()),
    )
    assert_bitwise(own.weight.detach(), before)


@with_and_without
def test_a_stage_that_writes_runs_in_its_trace_alone(schedule: AbstractSchedule | None):
    """What it does to its argument is known when the chain is called again."""
    calls = itertools.count()

    def double(x: Tensor) -> Tensor:
        next(calls)
        return x.mul_(2)

    run = chain([torch.sin, double, torch.cos], schedule)
    run(seeded(3, 3).requires_grad_()).sum().backward()
    traced = next(calls)
    run(seeded(3, 3, seed=1).requires_grad_()).sum().backward()

    assert next(calls) == traced + 1


class Chained(nn.Module):
    """Functions one after the other."""

    def __init__(self, stages: Any) -> None:
        super().__init__()
        self.stages = stages

    def forward(self, x: Any) -> Any:
        for stage in self.stages:
            x = stage(x)
        return x


@with_and_without
def test_the_first_stage_of_a_chain_may_not_write_to_what_it_is_given(
    schedule: AbstractSchedule | None,
):
    """It is the caller's, as the carry of a scan is and what it scans over."""
    x = seeded(3, 3).requires_grad_()
    w = seeded(3, 3, seed=1).requires_grad_()
    before = x.detach().clone()

    with pytest.raises(MutationError, match="is changed in place"):
        chain([nn.ReLU(inplace=True), torch.sin], schedule)(x)
    with pytest.raises(MutationError, match="is changed in place"):
        scan(lambda c, _: (c.relu_() @ w, None), x, length=2, schedule=schedule)
    with pytest.raises(MutationError, match="is changed in place"):
        scan(lambda c, x: (c + x.relu_() @ w, None), x[0], x, schedule=schedule)
    if schedule is not None:
        # Without gradient plain code may write; a stage that runs again must not.
        with pytest.raises(MutationError, match="changes its argument"):
            chain([lambda x: x.relu_() @ w, torch.sin], schedule)(x.detach())
    assert_bitwise(x.detach(), before)


@with_and_without
def test_a_step_may_write_to_what_it_makes(schedule: AbstractSchedule | None):
    """What is changed in place inside of a step is its own."""
    w, c, xs = (each.requires_grad_() for each in arguments())

    def step(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = c * x @ w
        return h.mul_(0.5).relu_(), h.add(1)

    assert_close(
        torch.autograd.grad(scan(step, c, xs, schedule=schedule)[0].sum(), (c, xs, w)),
        torch.autograd.grad(loop(step, c, xs)[0].sum(), (c, xs, w)),
    )


def test_a_captured_tensor_that_is_rebound_keeps_its_gradient_in_a_region() -> None:
    """Between forward and backward, to one that needs none."""
    w = seeded(3, 3).requires_grad_()
    held = [w]

    def steps(c: Any) -> Any:
        return scan(lambda c, _: ((c @ held[0]).tanh(), c.sum(-1)), c, length=3)

    c = seeded(2, 3, seed=1).requires_grad_()

    def loss(found: Any) -> Tensor:
        return found[0].square().sum() + found[1].sum()

    expected = torch.autograd.grad(loss(steps(c)), (c, w))
    found = loss(remat(steps)(c))
    held[0] = w.detach() * 2

    assert_close(torch.autograd.grad(found, (c, w)), expected)
