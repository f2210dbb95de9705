"""`fit`: policies and tiles for a training step, whose peak stays within a limit."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

from remat._calls.decorated import DecoratedFunction, undecided
from remat._errors import CapturedTensorError, refusal, require_callable
from remat._generators.python_and_numpy import drawing_from, states
from remat._graph.meta import TensorMeta
from remat._partition.costs import known_workspace
from remat._plans.plan import Plan, Planner
from remat._plans.recording import (
    Optimizer,
    Recorder,
    Recording,
    optimizer_on,
    record,
    require_no_transform,
    without_data,
)
from remat._plans.shares import Search, Shares, limit_of, show_gap
from remat._plans.tiles import TilesRow, with_tiles
from remat._plans.timeline import Timeline, loads_of, over_the_limit, timeline
from remat._switches.blocks import Instead, standing_in
from remat._torch import fakes, modes, tracer, trees
from remat._torch.isolation import isolated
from remat._torch.modules import called_with
from remat._tracing.side_effects import undone
from remat._user_lines import user_line, warn
from remat.policies import AbstractPolicy, Budget, budget
from remat.policies._budget import Size, as_budget
from remat.policies._sizes import show_size
from remat.storage._contract import held_in

_Region = DecoratedFunction[..., Any]
_Call = tuple[_Region, Planner]
"""A region, and what plans one call of it."""

_Attempt = tuple[Search, tuple[Recording, list[_Region], list[_Region], Shares]]
"""A search, and what was recorded, the regions of the calls, twice, and their budgets."""

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
        is_lasting: whether the next call of the step calls this region again, and not one
            that it makes anew.
    """

    name: str
    policy: AbstractPolicy
    plans: tuple[Plan, ...]
    region: Any = dataclasses.field(repr=False)
    is_lasting: bool = True

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
    """Policies and tiles for a step, and the peak that they come to.

    Attributes:
        rows: the regions, in the order of their first calls.
        timeline: what lives in the step.
        beside: the points beside this one, which recompute less and more.
        tiles: the functions that are to run in more tiles than they do.
        gap: the fraction of what is recomputed, in the unit of `costs`, by which the best of
            the budgets that the regions may have in these tiles could be cheaper.
    """

    rows: tuple[FitRow, ...]
    timeline: Timeline
    beside: str = ""
    tiles: tuple[TilesRow, ...] = ()
    gap: float = 1.0

    @property
    def predicted_peak_bytes(self) -> int:
        """The most that lives at once in the step."""
        return self.timeline.peak.size_bytes

    def apply(self) -> None:
        """Gives the regions their policies and functions their tiles, in place.

        Each region is traced again for its own. One that the step makes anew at each call
        cannot be reached: a warning says so.
        """
        for row in self.rows:
            row.region.decide_by(row.policy)
        lost = dict.fromkeys(row.name for row in self.rows if not row.is_lasting)
        if lost:
            warn(
                where=f"fit: apply() of {', '.join(f'`{name}`' for name in lost)}",
                what="has no effect.",
                why="When the step ran again it called another region there, as where it "
                "makes one anew at each call.",
                do="Decorate with `remat` outside of the step, or pass the policies of the "
                "rows where the regions are made.",
            )
        for row in self.tiles:
            row.apply()

    def __str__(self) -> str:
        """A line for each region and each number of tiles, the peak, and what is beside."""
        rows = map(str, (*self.rows, *self.tiles))
        parts = [*rows, str(self.timeline), show_gap(self.gap), self.beside]
        return "\n".join(filter(None, parts))


def fit(
    step: Callable[..., Tensor],
    *,
    peak: Size,
    optimizer: Optimizer = 0,
    allow: object = None,
    costs: str = "flops",
) -> Callable[..., Fit]:
    """Chooses policies and tiles for a training step, so that its peak keeps to a limit.

    The step is called on tensors without data, with stand-ins for the regions that it calls,
    and differentiated by autograd; each byte that lives is counted. Then a budget for each
    region is chosen, so that what is recomputed costs as little as was found within the
    limit. Functions of `layers.tiled` get more tiles where these let it fit, or clearly less
    be recomputed. Nothing of the step is computed, and arguments on the meta device will do.

    Laws: `predicted_peak_bytes` is at most the limit. Nothing changes before `Fit.apply`.

    Args:
        step: from parameters, or modules that have them, and a batch to the loss, a number.
            Its regions and tiled functions were decorated outside of it, or put into the
            modules by `modules.apply`.
        peak: the most bytes that may live at once in the step: parameters, their gradients,
            the optimizer's state and step, the batch, what regions hold and make, and what
            runs around them. As `policies.budget` takes it.
        optimizer: what its state takes and its step makes, as `modules.Step` takes it.
        allow: what regions may save, and how, as `policies.budget` takes it.
        costs: what as little as possible is recomputed of, as `policies.budget` takes it: with
            "measured", operators run, alone and on zeros.

    Returns:
        A callable that takes the step's arguments, and returns what was chosen. What is
        differentiated are the tensors that require grad, those of modules included; where
        there are none, every floating one of the first argument and of modules.

    Raises:
        BudgetError: nothing that was tried fits; the message says by how much, and which
            single change would help most.
        TraceError: the step needs numbers around its regions, calls them under
            torch.func, or takes a gradient of them with `create_graph=True`.
        CapturedTensorError: it reads a tensor that requires grad and is neither an argument
            nor a parameter of a module among them.
        ValueError: it calls no region, or one with `engine="rerun"` or `verify=True`; it
            gives no loss of one number; or there is nothing to differentiate.

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
    require_callable("fit(step)", step)
    bound = as_budget(budget(allow=allow, peak=peak), None, _WHERE, costs)

    def fitted(*args: Any, **kwargs: Any) -> Fit:
        assert bound.peak is not None, "fit takes a peak"
        peak, whole = bound.peak, _Step(step, (args, kwargs))
        # Parameters first: a batch may wait on another device than that of the step.
        given = [*whole.parameters(), *trees.tensor_leaves((args, kwargs))]

        def attempt(is_rough: bool, limit: int | None) -> _Attempt:
            recording, calls, again = _recorded(whole, args, kwargs, optimizer, bound)
            regions, planners = map(list, zip(*calls, strict=True))
            shares = Shares(planners, list(map(id, regions)), is_rough=is_rough)
            loads = loads_of(recording)
            there = recording.parameters + recording.others
            if limit is None:
                limit = limit_of(peak, shares, loads, given, there)
            search = shares.within(limit, loads)
            return search, (recording, regions, again, shares)

        (search, rest), tiles = with_tiles(attempt)
        recording, regions, again, shares = rest
        names = [f"{_name(each)} #{place}" for place, each in enumerate(regions)]
        found = timeline(recording, names, search.found)
        if not search.fits:
            raise over_the_limit(_WHERE, search.limit, found)
        rows = [
            FitRow(
                _name(regions[places[0]]),
                dataclasses.replace(
                    bound, size=search.found[places[0]].budget_bytes, peak=None
                ),
                tuple(search.found[place] for place in places),
                regions[places[0]],
                regions[places[0]] in again,
            )
            for places in shares.units
        ]
        return Fit(tuple(rows), found, search.neighbors, tiles, search.gap)

    return fitted


def _recorded(
    whole: _Step,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    optimizer: Optimizer,
    bound: Budget,
) -> tuple[Recording, list[_Call], list[_Region]]:
    """What a step does, its calls of regions, in order, and the regions of a second run."""
    own = [*_parameters_of(whole, args, kwargs)], [*whole.buffers()]
    with without_data((args, kwargs, *own), "fit(step)") as faked:
        args, kwargs, parameters, buffers = faked
        stand_ins = zip((*own[0], *own[1]), (*parameters, *buffers), strict=True)
        instead = {id(real): each for real, each in stand_ins}
        leaves = [each for each in parameters if each.requires_grad]
        if not leaves:
            leaves = [p.requires_grad_() for p in parameters if p.is_floating_point()]

        def run(recorder: Recorder, note: Callable[..., None]) -> Tensor:
            # The next run starts alike, and no fake is left behind.
            around = undone((whole.step, args, kwargs)), drawing_from(states())
            with standing_in(_by(recorder, note)), around[0], around[1]:
                return called_with(whole, instead, args, kwargs)

        calls: list[_Call] = []
        again: list[_Region] = []

        def note_call(region: _Region, args: Any, kwargs: Any) -> None:
            with _outside():
                calls.append((region, Planner(region, args, kwargs, bound)))

        # In a run of its own: what is kept of the arguments would be counted.
        with _OfArguments():
            run(Recorder(leaves, known_workspace), note_call)
        if not leaves:
            raise _without_parameters()
        if not calls:
            raise _without_regions()
        made = optimizer_on(optimizer, instead, "fit(optimizer=...)")

        def run_again(recorder: Recorder) -> Tensor:
            return run(recorder, lambda *call: again.append(call[0]))

        others = trees.tensor_leaves((args[1:], kwargs, buffers))
        others = [each for each in others if not any(each is p for p in parameters)]
        found = record(run_again, leaves, parameters, others, made, bound.costs)
    return found, calls, again


def _by(recorder: Recorder, note: Callable[..., None]) -> Instead:
    """What stands for regions that a step calls, of which each is noted with its arguments."""

    def stand_in(region: _Region, args: Any, kwargs: Any) -> Any:
        if tracer.proxy_is_active():
            with standing_in(None):  # a part of a stack, which is traced
                return region(*args, **kwargs)
        require_no_transform()
        function = region.__wrapped__
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        _require_unverified(region)
        given = trees.map_tensors(_detached, (args, kwargs))
        captured, stored = _traced(region, *given)
        _require_given(captured)
        if not any(trees.wants_gradients((given, captured))):
            return function(*args, **kwargs)
        _require_policies(region)
        note(region, *given)
        return recorder.call(function, args, kwargs, captured, stored)

    return stand_in


@final
class _Step(nn.Module):
    """A step as a module, of which those that it is given are parts."""

    def __init__(self, step: Callable[..., Tensor], given: Any) -> None:
        super().__init__()
        self.step = step
        leaves, _ = trees.flatten(given)
        self._parts = nn.ModuleList(m for m in leaves if isinstance(m, nn.Module))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.step(*args, **kwargs)


def _parameters_of(
    whole: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    """What is counted as parameters: the first argument's, modules', and what wants gradients."""
    yield from trees.tensor_leaves(args[:1])
    yield from whole.parameters()
    later = trees.tensor_leaves((args[1:], kwargs))
    yield from (each for each in later if each.requires_grad)


@final
class _OfArguments(modes.DispatchMode):
    """Refuses what wants a gradient and was not given to the step, which counts what it is."""

    def _hear(self, op: Any, args: Any, kwargs: Any) -> Any:
        _require_given(trees.tensor_leaves((args, kwargs)))
        return modes.run_in_mode(op, args, kwargs)


@contextlib.contextmanager
def _outside() -> Generator[None]:
    """Traces a region as outside of the step: regions in it are themselves, nothing counts."""
    with isolated(), standing_in(None):
        yield


def _traced(
    region: _Region, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Tensor, ...], dict[int, int]]:
    """What a call of a region captures, and the bytes of inputs that wait in another form.

    These by their places among the tensors of the arguments and what is captured.
    """
    with _outside():
        entry, site, captured = undecided(region).entry_of(args, kwargs)
        inputs, metas = entry.region.inputs, entry.region.operands
        held = {k: held_in(storage, metas[k]) for k, storage in inputs.items()}
    operands = *site.tensors, *captured
    sizes = {
        id(operands[k]): each.size_bytes for k, each in held.items() if each.moved_bytes
    }
    own = *trees.tensor_leaves((args, kwargs)), *captured
    return captured, {
        k: sizes[id(each)] for k, each in enumerate(own) if id(each) in sizes
    }


def _require_given(tensors: Iterable[Tensor]) -> None:
    for each in tensors:
        if each.requires_grad and not fakes.is_fake(each):
            raise CapturedTensorError.of(
                where=f"fit(step), at {user_line()}",
                what=f"reads a tensor {TensorMeta.of(each)} that requires grad and is no "
                "argument.",
                why="What lives in a step is counted of its arguments: this tensor and its "
                "gradient would be left out.",
                do="Pass it in the first argument, or the module that it is a parameter of.",
            )


def _require_unverified(region: _Region) -> None:
    if region.settings.verify:
        raise refusal(
            ValueError,
            where=f"fit(step), at {user_line()}",
            what=f"calls the region `{_name(region)}`, which has verify=True.",
            why="What is compared is computed once more, and no plan has that.",
            do="Leave `verify` out of what is to be planned.",
        )


def _require_policies(region: _Region) -> None:
    if region.settings.engine == "rerun":
        raise refusal(
            ValueError,
            where=f"fit(step), at {user_line()}",
            what=f'calls the region `{_name(region)}`, which has engine="rerun".',
            why="Such a region saves nothing but its inputs, and no policy changes that.",
            do='Use engine="trace" or "auto" for what is to be planned.',
        )


def _detached(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _name(region: _Region) -> str:
    return str(getattr(region, "__qualname__", repr(region)))


def _without_parameters() -> ValueError:
    return refusal(
        ValueError,
        where="fit(step)",
        what="got nothing to differentiate.",
        why="That is what requires grad, or else the floating tensors in the first "
        "positional argument, and the parameters of modules.",
        do="Pass the parameters, or the module, first.",
    )


def _without_regions() -> ValueError:
    return refusal(
        ValueError,
        where="fit(step)",
        what="calls no region whose arguments are differentiated.",
        why="Only regions recompute, and policies are chosen for them; those inside a "
        "`scan` or a scheduled `chain` follow that one's.",
        do="Decorate the parts of the step with `remat`, outside of it.",
    )
