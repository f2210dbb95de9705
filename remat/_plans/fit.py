"""`fit`: policies for the regions of a training step, whose peak stays within a limit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from remat._calls.decorated import DecoratedFunction
from remat._errors import refusal
from remat._partition.budgets import peak_limit
from remat._plans.plan import Plan, plan
from remat._plans.recording import (
    Optimizer,
    Recorder,
    Recording,
    optimizer_on,
    record,
    require_no_transform,
    without_data,
)
from remat._plans.shares import ANY_BYTES, within
from remat._plans.timeline import Timeline, over_the_limit, timeline
from remat._switches.blocks import standing_in
from remat._torch import trees
from remat.planners import Share, share
from remat.policies import AbstractPolicy, Budget, budget
from remat.policies._budget import Peak, as_budget
from remat.policies._sizes import show_size

_Region = DecoratedFunction[..., Any]
_WHERE = "fit(peak=...)"


@final
@dataclasses.dataclass(frozen=True)
class FitRow:
    """What was chosen for one region.

    Attributes:
        name: its qualified name.
        policy: a budget for each of its calls.
        plans: what each call saves by it, in order.
        region: the region.
    """

    name: str
    policy: AbstractPolicy
    plans: tuple[Plan, ...]
    region: Any = dataclasses.field(repr=False)

    def __str__(self) -> str:
        saved = sum(each.saved_bytes for each in self.plans)
        flops = sum(each.recompute_flops for each in self.plans)
        return (
            f"{self.name}: {self.policy!r}, {len(self.plans)} calls save "
            f"{show_size(saved)} and recompute {flops:.3g} FLOPs"
        )


@final
@dataclasses.dataclass(frozen=True)
class Fit:
    """Policies for the regions of a step, and the peak that they come to.

    Attributes:
        rows: the regions, in the order of their first calls.
        timeline: what lives in the step.
        beside: the points beside this one, which recompute less and more.
    """

    rows: tuple[FitRow, ...]
    timeline: Timeline
    beside: str = ""

    @property
    def predicted_peak_bytes(self) -> int:
        """The most that lives at once in the step."""
        return self.timeline.peak.size_bytes

    def apply(self) -> None:
        """Gives the regions their policies, in place; each is traced again for its own."""
        for row in self.rows:
            row.region.decide_by(row.policy)

    def __str__(self) -> str:
        """A line for each region, the moments of the peak, and the points beside."""
        parts = [*map(str, self.rows), str(self.timeline), self.beside]
        return "\n".join(filter(None, parts))


def fit(
    step: Callable[..., Tensor],
    *,
    peak: Peak,
    optimizer: Optimizer = 0,
    allow: object = None,
) -> Callable[..., Fit]:
    """Chooses policies for the regions of a training step, so that its peak keeps to a limit.

    The step is called on tensors without data, with stand-ins for the regions that it calls,
    and differentiated by autograd; each byte that lives is counted. Then a budget for each
    region is chosen, so that what is recomputed costs as little as was found within the
    limit. Nothing is computed, and arguments on the meta device will do.

    Laws: `predicted_peak_bytes` is at most the limit. Nothing changes before `Fit.apply`.

    Args:
        step: from parameters and a batch to the loss, a number. Its regions are functions
            that were decorated outside of it.
        peak: the most bytes that may live at once in the step: parameters, their gradients,
            the optimizer's state and step, the batch, what regions hold and make, and what
            runs around them. As `policies.budget` takes it.
        optimizer: what its state takes and its step makes, as `modules.Step` takes it.
        allow: what regions may save, and how, as `policies.budget` takes it.

    Returns:
        A callable that takes the step's arguments, and returns what was chosen. What is
        differentiated is the first: its tensors that require grad where there are any,
        else every floating one.

    Raises:
        BudgetError: nothing that was tried fits; the message says by how much, and which
            single change would help most.
        TraceError: the step needs numbers around its regions, or calls them under
            torch.func.
        ValueError: it calls no region.

    Example:
        >>> import torch
        >>> from remat import fit, remat
        >>> block = remat(lambda w, x: torch.tanh(torch.tanh(x @ w) @ w))
        >>> def step(params, x):
        ...     for w in params:
        ...         x = block(w, x)
        ...     return x.square().sum()
        >>> params = [torch.empty(64, 64, device="meta") for _ in range(4)]
        >>> x = torch.empty(512, 64, device="meta")
        >>> found = fit(step, peak="1.25MiB", optimizer=2.0)(params, x)
        >>> found.predicted_peak_bytes <= 1.25 * 2**20
        True
        >>> found.apply()
    """
    bound = as_budget(budget(allow=allow, peak=peak), None, _WHERE)

    def fitted(*args: Any, **kwargs: Any) -> Fit:
        recording, calls = _recorded(step, args, kwargs, optimizer)
        regions = _Regions(calls, bound)
        limit = _limit(bound, recording, (args, kwargs))

        def moments(plans: Sequence[Plan]) -> Timeline:
            return timeline(recording, regions.names, plans)

        search = within(
            regions, None, limit, lambda plans: moments(plans).peak.size_bytes
        )
        found = moments(search.found.plans)
        if not search.fits:
            raise over_the_limit(_WHERE, limit, found)
        return Fit(regions.rows(search.found.plans), found, search.neighbors)

    return fitted


def _limit(bound: Budget, recording: Recording, given: Any) -> int:
    tensors = trees.tensor_leaves(given)
    device = tensors[0].device if tensors else torch.device("cpu")
    assert bound.peak is not None, "fit takes a peak"
    limit, free = peak_limit(bound.peak, device)
    # What was given is there already.
    return limit if free is None else limit + recording.parameters + recording.others


@final
@dataclasses.dataclass(frozen=True)
class _Called:
    """A region and the arguments of one call of it, without data."""

    region: _Region
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def plan(self, bound: Budget) -> Plan:
        """What the call saves within a budget."""
        return plan(self.region, budget=bound)(*self.args, **self.kwargs)


def _recorded(
    step: Callable[..., Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    optimizer: Optimizer,
) -> tuple[Recording, list[_Called]]:
    """What a step does, and the regions that it calls, in order."""
    own = trees.tensor_leaves(args[:1])
    with without_data((args, kwargs), "fit(step)") as (args, kwargs):
        parameters = trees.tensor_leaves(args[:1])
        leaves = [each for each in parameters if each.requires_grad]
        if not leaves:
            leaves = [p.requires_grad_() for p in parameters if p.is_floating_point()]
        calls: list[_Called] = []
        # Their arguments are looked at apart: what is kept here would be counted.
        with standing_in(functools.partial(_looked_at, calls, Recorder(leaves))):
            step(*args, **kwargs)
        if not calls:
            raise _without_regions()

        def run(recorder: Recorder) -> Tensor:
            places = iter(range(len(calls)))
            instead = functools.partial(_counted, recorder, places)
            with standing_in(instead):
                return step(*args, **kwargs)

        fakes = {id(real): each for real, each in zip(own, parameters, strict=True)}
        found = record(
            run,
            leaves,
            parameters,
            (args[1:], kwargs),
            optimizer_on(optimizer, fakes, "fit(optimizer=...)"),
        )
    return found, calls


def _looked_at(
    calls: list[_Called],
    recorder: Recorder,
    region: _Region,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    require_no_transform()
    own = trees.map_tensors(_alone, (args, kwargs))
    if any(each.requires_grad for each in trees.tensor_leaves(own)):
        calls.append(_Called(region, *own))
    return _counted(recorder, iter((len(calls) - 1,)), region, args, kwargs)


def _alone(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _counted(
    recorder: Recorder,
    places: Iterator[int],
    region: _Region,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    wanted = any(each.requires_grad for each in trees.tensor_leaves((args, kwargs)))
    if not wanted:
        return region.__wrapped__(*args, **kwargs)
    return recorder.call(next(places), region.__wrapped__, (args, kwargs), ())


@final
class _Regions:
    """What the calls of regions save, where all calls of a region have one budget each."""

    def __init__(self, calls: Sequence[_Called], bound: Budget) -> None:
        self._calls = calls
        self._bound = bound
        self._known: dict[Any, Plan] = {}
        self.whole = [each.plan(self._of_size(ANY_BYTES)) for each in calls]
        self._kinds = [
            (
                id(each.region),
                found.fingerprint,
                trees.wants_gradients((each.args, each.kwargs)),
            )
            for each, found in zip(calls, self.whole, strict=True)
        ]
        self._places: dict[int, list[int]] = {}
        for place, each in enumerate(calls):
            self._places.setdefault(id(each.region), []).append(place)

    @property
    def names(self) -> list[str]:
        """What messages call the calls."""
        shown = [_name(each.region) for each in self._calls]
        return [f"{name} #{place}" for place, name in enumerate(shown)]

    def rows(self, plans: Sequence[Plan]) -> tuple[FitRow, ...]:
        """What these plans are for each region."""
        rows: list[FitRow] = []
        for places in self._places.values():
            region, own = self._calls[places[0]].region, [plans[k] for k in places]
            policy = self._of_size(own[0].budget_bytes)
            rows.append(FitRow(_name(region), policy, tuple(own), region))
        return tuple(rows)

    def split(self, total: int) -> list[Plan]:
        """The plan of each call, so that the least is recomputed within so many bytes."""
        taken = share(
            [[point for _, point in points] for points in self._frontiers],
            [1] * len(self._frontiers),
            total,
            _WHERE,
        )
        plans = list(self.whole)
        each = zip(self._places.values(), self._frontiers, taken, strict=True)
        for places, points, (chosen,) in each:
            for place in places:
                plans[place] = self._plan(place, points[chosen][0])
        return plans

    @functools.cached_property
    def _frontiers(self) -> list[list[tuple[int, Share]]]:
        """For each region the sizes that its calls may have, with what they come to in all."""
        found: list[list[tuple[int, Share]]] = []
        for places in self._places.values():
            problems = {self._kinds[k]: self.whole[k].problem for k in places}
            least = max(each.fixed_bytes for each in problems.values())
            sizes = {
                b for each in problems.values() for b in each.budgets if b >= least
            }
            points: list[tuple[int, Share]] = []
            for size in sorted(sizes):
                plans = [self._plan(place, size) for place in places]
                saved = sum(each.saved_bytes for each in plans)
                cost = sum(each.recompute_cost for each in plans)
                points.append((size, Share(saved, cost)))
            found.append(points)
        return found

    def _plan(self, place: int, size: int) -> Plan:
        key = self._kinds[place], size
        if key not in self._known:
            self._known[key] = self._calls[place].plan(self._of_size(size))
        return self._known[key]

    def _of_size(self, size: int) -> Budget:
        return dataclasses.replace(self._bound, size=size, peak=None)


def _name(region: _Region) -> str:
    return str(getattr(region, "__qualname__", repr(region)))


def _without_regions() -> ValueError:
    return refusal(
        ValueError,
        where="fit(step)",
        what="calls no region whose arguments are differentiated.",
        why="Only regions recompute, and policies are chosen for them.",
        do="Decorate the parts of the step with `remat`, outside of it.",
    )
