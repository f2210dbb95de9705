"""`modules.plan`: one budget for the blocks of a model."""

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import (
    BudgetError,
    RematWarning,
    TraceError,
    modules,
    plan,
    policies,
    remat,
    saved_residuals,
    scan,
)
from remat._partition import budgets
from remat._partition.decide import fingerprint
from remat.interop.torch import checkpoint
from remat.layers import chain, tiled
from remat.planners import Share, share
from tests.random.trackers import generator_state
from tests.support import LiveBytes, assert_bitwise, seeded, swept


class Block(nn.Module):
    """A residual MLP of some width."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden).double()
        self.down = nn.Linear(hidden, width).double()
        self.norm = nn.BatchNorm1d(width).double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))).square())


class Model(nn.Module):
    """Blocks of two kinds between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8).double()
        self.layers = nn.ModuleList(Block(8, h) for h in (16, 16, 64, 16))
        self.last = nn.Linear(8, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def made() -> tuple[Model, Tensor]:
    """A model with fixed numbers, and its input."""
    torch.manual_seed(0)
    return Model(), seeded(5, 3)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Those of all parameters, and the buffers after the step."""
    model.zero_grad()
    model(x).square().sum().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [*found, *model.buffers()]


@pytest.mark.parametrize("budget", [0.3, 4000, *swept([0.7, 1.0, "6KiB"])])
def test_the_budget_holds_and_the_numbers_stay(budget: Any) -> None:
    """Blocks hold what the plan says, together no more than the budget."""
    model, x = made()
    plain = gradients(copy.deepcopy(model), x)

    found = modules.plan(model, budget=budget)(x)

    assert [row.name for row in found.rows] == [f"layers.{k}" for k in range(4)]
    assert found.saved_bytes <= found.budget_bytes
    for row, layer in zip(found.rows, model.layers, strict=True):
        held = saved_residuals(layer.forward, seeded(5, 8))
        made_inside = [each for each in held if each.op != "input"]
        assert sum(each.size_bytes for each in made_inside) == row.plan.saved_bytes
    assert all(map(torch.equal, gradients(model, x), plain))


def test_planning_changes_nothing_else() -> None:
    """No statistics, no generator, no hooks, no keys of the state dict."""
    model, x = made()
    before = copy.deepcopy(model.state_dict())
    generator = generator_state()

    modules.plan(model, budget=0.5)(x)

    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(generator, generator_state())
    assert not any(layer._forward_pre_hooks for layer in model.layers)
    modules.remove(model)
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_more_bytes_never_cost_more() -> None:
    """Along budgets the recomputation falls, to nothing that has to run again."""
    model, x = made()

    costs = [
        sum(row.plan.recompute_cost for row in modules.plan(model, budget=size)(x).rows)
        for size in (0.1, 0.25, 0.5, 0.75, 1.0)
    ]

    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]


def test_a_plan_names_what_it_chose() -> None:
    """A line for each block, and the totals."""
    model, x = made()

    text = str(modules.plan(model, budget=1.0, where="layers.*")(x))

    assert text.count("layers.") == 4
    assert "aten.tanh" in text
    assert [line.split()[0] for line in text.splitlines()[-2:]] == ["all:", "held:"]


def test_a_peak_bounds_what_blocks_hold_and_make() -> None:
    """With their inputs, which a budget leaves out; the plan prints both."""
    model, x = made()
    all_, some = (modules.plan(model, budget=size)(x) for size in (1.0, 0.2))
    between = (all_.predicted_peak_bytes + some.predicted_peak_bytes) // 2

    found = modules.plan(model, peak=between)(x)
    both = modules.plan(model, budget=some.budget_bytes, peak="1 GiB")(x)
    auto = modules.plan(model, budget="auto")(x)

    assert some.saved_bytes <= found.saved_bytes < all_.saved_bytes
    assert found.predicted_peak_bytes <= between
    assert both.saved_bytes <= some.budget_bytes
    assert auto.saved_bytes == all_.saved_bytes
    assert found.held_bytes == found.saved_bytes + 4 * 5 * 8 * 8
    assert "with the inputs of blocks, predicted peak" in str(found)


@pytest.mark.parametrize("budget", [0.1, 0.5, 1.0])
def test_what_blocks_hold_and_make_is_predicted(budget: float) -> None:
    """Held to the byte; the peak from what is measured, the loss aside, to a tenth above."""
    model, x = made()
    blocks = nn.Sequential(*model.layers)
    found = modules.plan(blocks, budget=budget)(seeded(5, 8))
    blocks(seeded(5, 8)).square().sum().backward()
    blocks.zero_grad()
    x = seeded(5, 8)

    with LiveBytes() as memory:
        out = blocks(x)
        held = memory.live
        out.square().sum().backward()

    assert held == found.held_bytes
    loss = 3 * out.untyped_storage().nbytes()
    assert memory.peak - loss <= found.predicted_peak_bytes <= 1.1 * memory.peak


class Gate(nn.Module):
    """A block of two inputs, without parameters."""

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return x.sin() * z.cos()


class Fed(nn.Module):
    """Gates, each with two inputs made of what a linear gives."""

    def __init__(self, feed: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.feed = feed
        self.linears = nn.ModuleList(nn.Linear(8, 16).double() for _ in range(3))
        self.layers = nn.ModuleList(Gate() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for linear, layer in zip(self.linears, self.layers, strict=True):
            x = layer(*self.feed(linear(x)))[:, :8].clone()
        return x


FEEDS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "slices": lambda h: (h[:, :8], h[:, :1]),
    "a view": lambda h: (h, h.view_as(h)),
    "a detached one": lambda h: (h, h.detach()),
    "an expanded row": lambda h: (h, h[:1].expand(5, -1)),
}


@pytest.mark.parametrize("feed", FEEDS.values(), ids=FEEDS)
def test_inputs_hold_all_of_their_memory_once(feed: Any) -> None:
    """Measured; also without data, and by what a plan and a region say of each."""
    model, x = Fed(feed), seeded(5, 8)
    found = modules.plan(model, budget=0.5, where="layers.*")(x)
    of_fakes = modules.plan(model.to("meta"), budget=0.5, where="layers.*")(
        x.to("meta")
    )
    model = Fed(feed)
    modules.plan(model, budget=0.5, where="layers.*")(x)
    model(x)

    with LiveBytes() as memory:
        out = model(x)
        held = memory.live

    memory_bytes = 5 * 16 * 8
    # The inputs of linears are outputs of blocks, the first aside.
    assert held == found.held_bytes + 3 * out.nbytes
    assert [row.input_bytes for row in found.rows] == [memory_bytes] * 3
    assert of_fakes.held_bytes == found.held_bytes
    given = feed(seeded(5, 16))
    assert plan(Gate(), budget=0.5)(*given).argument_bytes == memory_bytes
    assert sum(each.size_bytes for each in saved_residuals(remat(Gate()), *given)) == (
        memory_bytes
    )


def test_a_peak_that_blocks_cannot_keep() -> None:
    """The error names the least peak that was found, and with that it works."""
    model, x = made()
    with pytest.raises(
        BudgetError, match=r"Pass peak=(\d+), or name smaller"
    ) as caught:
        modules.plan(model, peak=100)(x)

    least = int(str(caught.value).partition("Pass peak=")[2].partition(",")[0])
    assert modules.plan(model, peak=least)(x).predicted_peak_bytes == least


@pytest.mark.parametrize(
    "bounds",
    [{"peak": 1}, {"peak": "1GiB", "step": modules.Step(lambda out: out.detach())}],
    ids=["nothing fits", "no gradient"],
)
def test_a_model_that_is_not_planned_keeps_its_regions(bounds: Any) -> None:
    model, x = made()
    modules.apply(model, "layers.*")
    before = [vars(each).get("forward") for each in model.modules()]
    with pytest.raises((BudgetError, TraceError)):
        modules.plan(model, **bounds)(x)

    assert [vars(each).get("forward") for each in model.modules()] == before


def test_parts_are_of_what_is_without_remat() -> None:
    """Of bytes and of peaks, whatever blocks may save; tiles do not lower the whole."""
    model, x = made()
    whole = modules.plan(model, budget=1.0)(x)
    few = policies.by_op("aten.addmm")

    part = modules.plan(model, peak=0.9)(x)
    saved = modules.plan(model, budget=policies.budget(0.5, allow=few))(x)

    limit = int(0.9 * whole.predicted_peak_bytes)
    assert part == modules.plan(model, peak=limit)(x)
    assert part.predicted_peak_bytes <= limit
    assert saved.budget_bytes == whole.saved_bytes // 2


def test_a_budget_says_what_blocks_may_save() -> None:
    """By its `allow`."""
    model, x = made()
    plain = gradients(copy.deepcopy(model), x)

    budget = policies.budget(4000, allow=policies.by_op("aten.addmm"))
    found = modules.plan(model, budget=budget, peak="1MiB")(x)

    rows = [row for each in found.rows for row in each.plan.rows]
    assert {row.op for row in rows if row.storage is not None} == {"aten.addmm"}
    assert all(map(torch.equal, gradients(model, x), plain))


def test_equal_blocks_are_planned_once(monkeypatch: Any) -> None:
    """Whatever is asked of them: models and frontiers take most of the time."""
    model, x = made()
    asked: list[str] = []
    model_of = budgets.model_of

    def counted(analysis: Any, *args: Any) -> Any:
        asked.append(fingerprint(analysis))
        return model_of(analysis, *args)

    monkeypatch.setattr(budgets, "model_of", counted)
    with pytest.raises(BudgetError):
        modules.plan(model, peak=100)(x)

    assert len(asked) == len({*asked}) == 2


class Masked(nn.Module):
    """Passes a mask on only if it says something, and draws numbers around its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = nn.functional.dropout(self.inner.first(x), 0.5)
        for layer in self.inner.layers:
            x = layer(x) if bool(mask.all()) else layer(x * mask[:, None])
        return self.inner.last(x)


def test_the_plan_is_of_the_program_that_runs() -> None:
    """What is around the blocks decides by numbers, as at run time; nothing stays changed."""
    torch.manual_seed(0)
    model, x, mask = Masked(), seeded(5, 3), torch.ones(5, dtype=torch.bool)
    generator = generator_state()

    modules.plan(model, budget=0.5)(x, mask)

    assert torch.equal(generator, generator_state())
    model(x, mask).sum().backward()


class InPlace(Model):
    """Writes into what its blocks return, as ResNets do."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            y = layer(x)
            y += x
            x = nn.functional.relu(y, inplace=True)
        return self.last(x)


@pytest.mark.parametrize(
    "bounds",
    [
        {"budget": 0.5},
        {"peak": 1.0},
        {"peak": 1.0, "step": modules.Step(torch.sum, torch.optim.SGD)},
    ],
    ids=["budget", "peak", "step"],
)
def test_what_a_block_returns_may_be_changed_in_place(bounds: Any) -> None:
    torch.manual_seed(0)
    model, x = InPlace(), seeded(5, 3)
    plain = copy.deepcopy(model)

    modules.plan(model, where=Block, **bounds)(x)

    torch.testing.assert_close(gradients(model, x), gradients(plain, x))


class Around(nn.Module):
    """Calls a block in some way."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call, self.block = call, Half()

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.block, x)


class Half(nn.Module):
    """A block of one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x)).sin()


def force_of(block: nn.Module, x: Tensor) -> Tensor:
    """Minus the gradient of an energy."""
    x = x.detach().requires_grad_()
    return -torch.autograd.grad(block(x).sum(), x, create_graph=True)[0]


INSIDE: dict[str, Any] = {
    "region": lambda f, x: remat(lambda x: f(x))(x),
    "scan": lambda f, x: scan(lambda c, _: (f(c), None), x, length=2)[0],
    "chain": lambda f, x: chain([f, f])(x),
    "tiled": lambda f, x: tiled("(tile n) d -> (tile n) d", tiles=2)(lambda x: f(x))(x),
    "drop-in": lambda f, x: checkpoint(lambda x: f(x), x, use_reentrant=False),
    "vmap": lambda f, x: torch.func.vmap(lambda x: f(x))(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "gradient": force_of,
    "cond": lambda f, x: torch.cond(x.sum() > 0, f, lambda x: x * 2.0, (x,)),
}


@pytest.mark.parametrize("call", INSIDE.values(), ids=INSIDE)
def test_a_block_that_is_called_inside_of_something(call: Any) -> None:
    """Is refused with its line; what has the call inside can be a block."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Around(call)), seeded(4, 8)
    # Dynamo reads the branches of torch.cond, and tells no names.
    named = r"modules.plan" if call is INSIDE["cond"] else r"the block `0.block`"

    with pytest.raises(
        TraceError,
        match=rf"{named}, at test_modules_plan.py:\d+: .*Name blocks that have such calls",
    ):
        modules.plan(model, budget=0.5, where=Half)(x)

    plain = gradients(model, x)
    modules.plan(model, budget=0.5, where="0")(x)
    assert_bitwise(gradients(model, x), plain)


@pytest.mark.apart
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's, which it hides
def test_a_model_may_compile_what_calls_its_blocks() -> None:
    """Its graph ends at a block while a plan looks at that."""
    torch.manual_seed(0)
    compiled = torch.compile(lambda f, x: f(f(x)).sin(), backend="eager")
    model, x = Around(compiled), seeded(4, 8)

    found = modules.plan(model, budget=1.0, where=Half)(x)

    assert len(found.rows) == 2


class Biased(nn.Module):
    """A block that takes a bias, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16).double()

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x if bias is None else x * bias.sin()
        return torch.tanh(torch.tanh(self.up(x)).square())[:, :8]


class Biases(nn.Module):
    """Blocks, all of which take a bias where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Biased() for _ in range(2))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, bias)
        return x


class Named(nn.Module):
    """A block whose keywords are words of the planner's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3).double()

    def forward(self, x: Tensor, *, name: str, module: int, forward: float) -> Tensor:
        return torch.tanh(self.inner(x)) * len(name) * module * forward


class OfNamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Named() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, name="ab", module=2, forward=0.5)
        return x


@pytest.mark.parametrize("step", [None, modules.Step(torch.Tensor.sum)])
def test_a_block_may_have_any_keywords(step: modules.Step | None) -> None:
    model, x = OfNamed(), seeded(5, 3)
    plain = model(x)

    modules.plan(model, budget=0.5, step=step)(x)

    assert torch.equal(model(x), plain)


def test_another_call_is_planned_again() -> None:
    """Within the same bytes; a warning says, once, what the block takes that it did not."""
    torch.manual_seed(0)
    model, x = Biases(), seeded(5, 8)
    plain = copy.deepcopy(model)
    found = modules.plan(model, budget=0.5)(x)

    taken = r"takes float64\[5, 1\] in place of nothing; it is planned again"
    with pytest.warns(RematWarning, match=taken):
        again = model(x, seeded(5, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RematWarning)
        model(x, seeded(1, 1))

    again.sum().backward()
    plain(x, seeded(5, 1)).sum().backward()
    assert_bitwise(*([p.grad for p in each.parameters()] for each in (model, plain)))
    for row, layer in zip(found.rows, model.layers, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RematWarning)
            held = saved_residuals(layer.forward, x, seeded(5, 1))
        made_inside = [each.size_bytes for each in held if each.op != "input"]
        assert sum(made_inside) <= row.plan.budget_bytes


def test_a_plan_in_evaluation_serves_training() -> None:
    """Dropout holds a generator's state then, which no share of the budget had room for."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)).double()
    model = nn.Sequential(*(copy.deepcopy(block) for _ in range(2)))
    plain, x = copy.deepcopy(model), seeded(5, 8)
    modules.plan(model.eval(), where="[01]", budget=0.5)(x)

    def step(each: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        return [*torch.autograd.grad(each(x).square().sum(), [*each.parameters()])]

    with pytest.warns(RematWarning, match=r"runs other operators on the same inputs"):
        found = step(model.train())
    assert_bitwise(found, step(plain))


def test_a_model_without_data_is_planned() -> None:
    """On the meta device the model is called on fake tensors, whole."""
    with torch.device("meta"):
        model, x = Model(), torch.empty(5, 3, dtype=torch.float64)

    found = modules.plan(model, budget=0.5)(x)

    here, real = made()
    assert found.saved_bytes == modules.plan(here, budget=0.5)(real).saved_bytes


def test_a_forward_of_an_objects_own_stays() -> None:
    """It is what the plan is of, and what remains when the regions are taken out."""
    model, x = made()
    block = model.layers[0]
    own = block.forward
    block.forward = lambda x: own(x).sin().sin()

    found = modules.plan(model, budget=1.0)(x)
    modules.remove(model)

    assert "aten.sin" in {row.op for row in found.rows[0].plan.rows}
    assert torch.equal(block(seeded(5, 8)), own(seeded(5, 8)).sin().sin())


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("nope.*", "found no blocks"),
        ("layers.**", "is a part of"),
        (lambda name, _: name == "layers", "was not called"),
    ],
    ids=["none", "nested", "never_called"],
)
def test_wrong_blocks_are_refused(where: Any, why: str) -> None:
    """The text says what is wrong with them; the model is as it was."""
    model, x = made()

    with pytest.raises(ValueError, match=why):
        modules.plan(model, budget=0.5, where=where)(x)

    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("budget", [0.0, 1.5])
def test_a_part_is_a_part(budget: float) -> None:
    """Of what no remat holds, more than nothing and at most all."""
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        modules.plan(nn.Sequential(), budget=budget)


def test_shares_equal_brute_force() -> None:
    """Over all ways to give each of up to four programs a point, 60 random cases."""
    generator = torch.Generator().manual_seed(0)

    def number(most: int) -> int:
        return int(torch.randint(most, (), generator=generator, device="cpu"))

    for _ in range(60):
        frontiers = [
            [Share(number(30), number(50)) for _ in range(1 + number(4))]
            for _ in range(1 + number(2))
        ]
        counts = [1 + number(2) for _ in frontiers]
        programs = [kind for kind, count in enumerate(counts) for _ in range(count)]
        budget = number(90)
        every = itertools.product(*(frontiers[kind] for kind in programs))
        costs = [
            sum(point.cost for point in points)
            for points in every
            if sum(point.saved_bytes for point in points) <= budget
        ]
        if not costs:
            with pytest.raises(BudgetError, match="Give at least"):
                share(frontiers, counts, budget)
            continue
        taken = share(frontiers, counts, budget)
        points = [frontiers[k][p] for k, places in enumerate(taken) for p in places]
        assert [len(places) for places in taken] == counts
        assert sum(point.saved_bytes for point in points) <= budget
        assert sum(point.cost for point in points) == min(costs)


def test_states_larger_than_what_is_saved():
    """A generator's recorded state outweighs a small block, and fits an ample budget."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(2, 2), nn.Dropout()) for _ in range(2))
    )
    chosen = modules.plan(model, budget="1MiB")(torch.ones(3, 2))
    assert chosen.saved_bytes <= chosen.budget_bytes
    model(torch.ones(3, 2)).sum().backward()
