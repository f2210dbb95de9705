"""Plans: which values of a function a budget saves, decided before anything runs."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, cast, final

import torch

from remat._calls.decorated import undecided
from remat._calls.residuals import residuals_of
from remat._errors import PolicyError, refusal, require_choice, require_type, show_type
from remat._graph.operators import made_by
from remat._partition import budgets
from remat._partition.decide import fingerprint
from remat._partition.peak import Peaks
from remat.planners import Option, Problem, Solution, Step, solve_cut, solve_milp
from remat.policies import AbstractPolicy, Budget, Planned
from remat.policies._budget import Size, as_budget
from remat.policies._sizes import show_size
from remat.storage import AbstractStorage, Chain, links_of
from remat.storage._contract import own_classes

_P = ParamSpec("_P")
_VERSION = 3
#: A budget, in bytes, into which everything fits. Not the fraction 1.0: a draw's recorded
#: state may be more than all that is saved without remat.
ANY_BYTES = 2**62
_SOLVERS: dict[str, budgets.Solver] = {"cut": solve_cut, "milp": solve_milp}


@final
@dataclasses.dataclass(frozen=True, slots=True)
class PlanRow:
    """One value that a plan decides about."""

    place: int  # its place among the values of the forward
    name: str  # what `checkpoint_name` called it, or ""
    op: str  # the operator that made it, "aten.mm"
    shape: tuple[int, ...]
    dtype: str  # "float32"
    source: str  # the user's "file.py:line" that made it
    size_bytes: int  # of its elements
    cost: int  # of the operator that makes it, in the unit of the plan's costs
    storage: AbstractStorage | None  # how it is saved; None if it is recomputed
    held_bytes: int  # what it holds while it waits, 0 if it is recomputed

    @property
    def decision(self) -> str:
        """What happens to the value: the repr of its storage, or "recompute"."""
        return "recompute" if self.storage is None else repr(self.storage)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class FrontierPoint:
    """The outcome of one budget."""

    budget_bytes: int
    saved_bytes: int  # what would be held
    recompute_cost: int  # of recomputation, in the unit of the plan's costs
    lower_bound: int  # no choice within the budget costs less


@final
@dataclasses.dataclass(frozen=True, slots=True)
class PlanDifference:
    """Where two plans for one program differ."""

    # the rows of both plans for each value that they treat differently
    changes: tuple[tuple[PlanRow, PlanRow], ...]
    saved_bytes: int  # how many bytes more the second plan holds
    recompute_cost: int  # how much more recomputation costs in it

    def __str__(self) -> str:
        """One line a value, and the totals."""
        lines = [
            f"{_row_label(one)} at {one.source}: {one.decision} -> {other.decision}"
            for one, other in self.changes
        ]
        totals = (
            f"{self.saved_bytes:+d} bytes held, {self.recompute_cost:+d} recompute cost"
        )
        return "\n".join([*lines, totals])


@final
@dataclasses.dataclass(frozen=True)
class Plan:
    """What is saved of a function within a budget; `plan` makes it.

    Laws: `saved_bytes <= budget_bytes`; `lower_bound <= recompute_cost`;
    `Plan.from_json(p.to_json()) == p`. A region with `policy` holds exactly `saved_bytes`.

    Attributes:
        rows: the values that the plan decides about, in the order of the forward.
        budget_bytes: the most that may be held, per call of the region.
        saved_bytes: what a call holds from its forward to its backward because of the
            plan: saved values, states of generators and copies of what a call changes.
            Arguments are not counted.
        argument_bytes: what a call holds beside that: its tensors, captured ones included,
            which its caller mostly holds too.
        peaks: the most that the forward, and the backward, have made and not yet freed at
            one time, arguments aside; see `Peaks`.
        recompute_flops: FLOPs of the operators that the backward runs again, by torch's
            formulas; operators without one count as 0.
        recompute_cost: what these operators cost, and storing what is saved: FLOPs plus
            bytes moved, or nanoseconds for `costs="measured"`.
        lower_bound: no choice within the budget has a lower `recompute_cost`.
        costs: "flops" or "measured".
        solver: "cut" or "milp".
        fingerprint: of the forward that was planned.
        problem: the problem that the solver solved.

    Example:
        >>> import torch
        >>> from remat import plan, remat
        >>> def f(x, w):
        ...     return torch.tanh(torch.tanh(x @ w) @ w).sum()
        >>> found = plan(f, budget=0.5)(torch.ones(4, 8), torch.ones(8, 8))
        >>> found.saved_bytes, found.recompute_flops, found.gap
        (128, 512, 0.0)
        >>> region = remat(f, policy=found.policy)
    """

    rows: tuple[PlanRow, ...]
    budget_bytes: int
    saved_bytes: int
    argument_bytes: int
    peaks: Peaks
    recompute_flops: int
    recompute_cost: int
    lower_bound: int
    costs: str
    solver: str
    fingerprint: str
    problem: Problem = dataclasses.field(repr=False)

    @property
    def predicted_peak_bytes(self) -> int:
        """The most that forward and backward have made and not yet freed at one time.

        Gradients and outputs are counted, arguments are not.
        """
        return self.peaks.of_step

    @property
    def gap(self) -> float:
        """The fraction of `recompute_cost` by which the best plan could be cheaper."""
        cost = self.recompute_cost
        return (cost - self.lower_bound) / cost if cost else 0.0

    @property
    def policy(self) -> AbstractPolicy:
        """The plan as a policy, for `@remat`; it refuses another program."""
        saved = [(row.place, row.storage) for row in self.rows]
        return Planned(
            self.fingerprint,
            tuple((place, each) for place, each in saved if each is not None),
            self.budget_bytes,
        )

    def frontier(self) -> tuple[FrontierPoint, ...]:
        """The outcomes of other budgets, from the least to what is saved without remat.

        Laws: costs fall, and bytes grow, from point to point.
        """
        found: dict[int, FrontierPoint] = {}
        for size in self.problem.budgets:
            each = solve_cut(self.problem, size)
            point = FrontierPoint(size, each.saved_bytes, each.cost, each.lower_bound)
            found.setdefault(each.cost, point)
        return tuple(found.values())

    def diff(self, other: Plan) -> PlanDifference:
        """The differences to another plan for the same program.

        Raises:
            PolicyError: the other plan is for another program.
        """
        require_type("Plan.diff(other)", other, Plan, wanted="another plan")
        if other.fingerprint != self.fingerprint:
            raise PolicyError.of(
                where="Plan.diff(other)",
                what=f"the programs differ: {self.fingerprint} and "
                f"{other.fingerprint}.",
                why="Plans decide about the values of one program.",
                do="Compare plans of one function, made with arguments of the "
                "same shapes.",
            )
        theirs = {row.place: row for row in other.rows}
        changes = tuple(
            (row, theirs[row.place])
            for row in self.rows
            if row.place in theirs and row.storage != theirs[row.place].storage
        )
        return PlanDifference(
            changes,
            other.saved_bytes - self.saved_bytes,
            other.recompute_cost - self.recompute_cost,
        )

    def to_json(self) -> str:
        """The plan as text, for `from_json`.

        Raises:
            PolicyError: a storage cannot be written as text: it has a mesh or a key, or
                is not a class of this package.
        """
        text = {"version": _VERSION, **_fields_of(self)}
        return json.dumps(text, default=_as_plain)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            ValueError: the text is not a plan, or has another version of this format.
        """
        try:
            found: dict[str, Any] = json.loads(text)
            require_choice("version", found.pop("version"), (_VERSION,), of="a plan")
            found["rows"] = tuple(map(_plan_row_of, found["rows"]))
            found["problem"] = _to_problem(found["problem"])
            found["peaks"] = Peaks(**found["peaks"])
            return cls(**found)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise refusal(
                ValueError,
                where="Plan.from_json(text)",
                what=f"the text is not a plan of version {_VERSION}.",
                why=f"It cannot be read: {type(error).__name__}: {error}.",
                do="Pass what `Plan.to_json` returned, or plan again.",
            ) from error

    def __str__(self) -> str:
        """A table: one line for all values that are alike, and the totals."""
        rows = [("count", "value", "bytes", "held", "decision", "source")]
        groups = Counter(
            (_row_label(row), row.size_bytes, row.held_bytes, row.decision, row.source)
            for row in self.rows
        )
        rows += [
            (str(count), what, show_size(size), show_size(held), decision, source)
            for (what, size, held, decision, source), count in groups.items()
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines += [
            f"saved {show_size(self.saved_bytes)} of {show_size(self.budget_bytes)}, held "
            f"{show_size(self.saved_bytes + self.argument_bytes)} with the arguments, "
            f"predicted peak {show_size(self.predicted_peak_bytes)} "
            "without them",
            f"recompute {self.recompute_flops:.3g} FLOPs, cost {self.recompute_cost:.4g} "
            f"{_UNITS[self.costs]}, the best at most {self.gap:.2%} less",
        ]
        return "\n".join(lines)


_UNITS = {"flops": "FLOPs and bytes moved", "measured": "ns"}


def _row_label(row: PlanRow) -> str:
    name = f'"{row.name}" ' if row.name else ""
    return f"{name}{row.op} {show_type(row.dtype, row.shape)}"


def _plan_row_of(text: dict[str, Any]) -> PlanRow:
    shape, storage = tuple(text["shape"]), _to_storage(text["storage"])
    fields: dict[str, Any] = {**text, "shape": shape, "storage": storage}
    return PlanRow(**fields)


def plan(
    fun: Callable[_P, Any],
    *,
    budget: Size | AbstractPolicy | None = None,
    peak: Size | None = None,
    solver: str = "cut",
    costs: str = "flops",
) -> Callable[_P, Plan]:
    """Decides what a call of a function saves within a budget, without running it.

    Each value is either saved, or recomputed together with the values that it depends
    on, so that the bytes held stay within the budget and as little as possible is
    recomputed. The function is only traced, so the arguments may be fake tensors or on
    the meta device: no weights are needed. It is differentiated as in
    `saved_residuals`.

    Laws: as those of `Plan`; a larger budget never costs more.

    Args:
        fun: the function, or a region, whose options other than the policy are kept.
        budget: the most that is held: as `policies.budget` takes it, or such a policy, with
            its `allow`.
        peak: the most that lives at once, as `policies.budget` takes it.
        solver: "cut", which sweeps minimum cuts over the price of a byte and takes
            about a second for a thousand values; or "milp", an integer program, which
            is exact if it ends within a minute.
        costs: "flops", FLOPs plus bytes moved of each operator; or "measured", the time
            that each takes on tensors of these sizes here, in nanoseconds. Peaks then have in
            them what kernels hold inside, which torch's profiler tells.

    Returns:
        A callable that takes the call's arguments and returns the plan.

    Raises:
        BudgetError: by the callable, if more bytes are held even when nothing is saved,
            or if nothing fits into free memory; the message names the smallest budget
            that works.
        PolicyError: `budget` is neither a size nor a budget; or `costs="measured"` and the
            arguments have no data, a profiler runs, or an operator does not run on zeros.
        ValueError: `solver` or `costs` has a value that it cannot have.

    Example:
        >>> import torch
        >>> from remat import plan
        >>> def f(x, w):
        ...     return torch.tanh(torch.tanh(x @ w) @ w).sum()
        >>> w = torch.empty(4096, 4096, device="meta")
        >>> plan(f, budget="100MiB")(w, w).saved_bytes
        67108864

    References:
        Jain et al., "Checkmate", 2020, https://arxiv.org/abs/1910.02653; Beaumont et al.,
        "Optimal checkpointing for heterogeneous chains", 2019,
        https://arxiv.org/abs/1911.13214; torch's `activation_memory_budget` chooses for
        compiled functions, by a knapsack that leaves the closure out.
    """
    require_choice("solver", solver, tuple(_SOLVERS), of="plan")
    policy = as_budget(budget, peak, "plan(budget=...)", costs)

    region = undecided(fun)

    def planned(*args: _P.args, **kwargs: _P.kwargs) -> Plan:
        return Planner(region, args, kwargs, policy, solver).plan(policy)

    return planned


@final
class Planner:
    """Plans of one call within any budget, from one trace and one model of it.

    Attributes:
        fingerprint: of the call's forward.
        wanted: for each operand whether it has a gradient: of equal forwards, that of a model's
            first block or of a frozen one may have none, and so another backward.
        devices: the kind of device of each operand: storages and times differ with it, and
            fingerprints do not.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        policy: Budget,
        solver: str = "cut",
    ) -> None:
        entry, site, captured = undecided(fun).entry_of(args, kwargs)
        operands = entry.region.operands
        held = residuals_of(entry, (*site.tensors, *captured))
        self._argument_bytes = sum(each.size_bytes for each in held if each.path)
        self._analysis = entry.region.stages(site.roots).analysis
        self._policy, self._solver = policy, solver
        self.fingerprint = fingerprint(self._analysis)
        self.wanted = tuple(meta.requires_grad for meta in operands)
        self.devices = tuple(meta.device.type for meta in operands)

    @functools.cached_property
    def _model(self) -> budgets.Model:
        return budgets.model_for(self._analysis, self._policy)

    def plan(self, budget: Budget) -> Plan:
        """What the call saves within a budget, which allows what the planner's own does."""
        return self._planned(self._model, budget)

    def without_remat(self) -> Plan:
        """What the call saves where all may be, whatever the planner's own budget allows."""
        model = budgets.model_without_remat(self._analysis, self._policy)
        return self._planned(model, Budget(ANY_BYTES))

    def _planned(self, model: budgets.Model, budget: Budget) -> Plan:
        size, solution = budgets.solve(model, budget, _SOLVERS[self._solver])
        return Plan(
            rows=tuple(_rows(model, solution)),
            budget_bytes=size,
            saved_bytes=solution.saved_bytes,
            argument_bytes=self._argument_bytes,
            peaks=model.peaks(solution.choice),
            recompute_flops=model.recompute_flops(solution.choice),
            recompute_cost=solution.cost,
            lower_bound=solution.lower_bound,
            costs=self._policy.costs,
            solver=self._solver,
            fingerprint=self.fingerprint,
            problem=model.problem,
        )

    def within(self, size: int) -> Plan:
        """What the call saves within so many bytes."""
        return self.plan(dataclasses.replace(self._policy, size=size, peak=None))


def _rows(model: budgets.Model, solution: Solution) -> Iterator[PlanRow]:
    analysis = model.analysis
    graph = analysis.joint.graph
    for number, item in enumerate(model.items):
        member = analysis.members[item.number]
        view, option = analysis.views[item.number], solution.choice[number]
        maker = graph.values[member]
        is_output = maker.op is operator.getitem
        held = 0 if option is None else model.problem.items[number][option].size_bytes
        yield PlanRow(
            place=analysis.ranks[item.number],
            name=", ".join(view.names),
            op=made_by(maker, graph.values),
            shape=view.shape,
            dtype=_name_of_dtype(view.dtype),
            source=view.source,
            size_bytes=view.size_bytes,
            cost=model.costs(graph, maker.args[0].index if is_output else member),
            storage=None if option is None else item.storages[option],
            held_bytes=held,
        )


_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def _as_plain(part: Any) -> Any:
    """A part of a plan as what JSON knows, parts of this part aside.

    Raises:
        PolicyError: it has a storage that holds what text cannot: a mesh, a key, a class of
            the user's.
    """
    if isinstance(part, (Step, Option)):
        return dataclasses.astuple(part)
    fields = _fields_of(part)
    if "storage" in fields:
        fields["storage"] = _from_storage(fields["storage"])
    return fields


def _fields_of(part: Any) -> dict[str, Any]:
    """The fields of a dataclass that goes into JSON."""
    return {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}


def _from_storage(storage: AbstractStorage | None) -> Any:
    if storage is None:
        return None
    links = links_of(storage)
    if links != (storage,):
        return [*map(_from_storage, links)]
    kind = type(storage).__name__
    fields = _fields_of(storage) if own_classes().get(kind) is type(storage) else None
    if fields is None or not all(isinstance(each, _PLAIN) for each in fields.values()):
        raise PolicyError.of(
            where="Plan.to_json()",
            what=f"the storage {storage!r} cannot be written as text.",
            why="Only storages of this package can, if they have no device mesh and "
            "no key.",
            do="Plan again where the plan is needed, or allow other storages.",
        )
    for name, each in fields.items():
        if isinstance(each, torch.dtype):
            fields[name] = {"dtype": _name_of_dtype(each)}
    return {"kind": kind, **fields}


def _to_storage(text: Any) -> AbstractStorage | None:
    """The storage of what a plan wrote as JSON."""
    if text is None:
        return None
    if isinstance(text, list):
        made = map(_to_storage, cast("list[Any]", text))
        return Chain(tuple(each for each in made if each is not None))
    fields: dict[str, Any] = dict(text)
    kind: Any = own_classes()[fields.pop("kind")]
    for name, each in fields.items():
        if isinstance(each, dict):
            fields[name] = getattr(torch, str(cast("Any", each)["dtype"]))
    return kind(**fields)


def _name_of_dtype(dtype: torch.dtype) -> str:
    """A dtype as people and JSON write it: "float32"."""
    return str(dtype).removeprefix("torch.")


def _to_problem(text: Any) -> Problem:
    """The problem of what a plan wrote as JSON."""
    steps = [Step(cost, tuple(uses), item) for cost, uses, item in text["steps"]]
    items = [tuple(Option(*each) for each in options) for options in text["items"]]
    fixed_bytes, base_cost = text["fixed_bytes"], text["base_cost"]
    wanted = tuple(text["wanted"])
    return Problem(tuple(steps), wanted, tuple(items), fixed_bytes, base_cost)
