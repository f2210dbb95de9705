"""`chain`: functions that differ, one after the other, as a stack."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast, final

from torch import Tensor

from remat._api import remat
from remat._calls.decorated import DecoratedFunction, RematModule, is_of_module
from remat._errors import MutationError, ScheduleError, refusal, require_type, shown
from remat._graph.meta import TensorMeta
from remat._torch import dynamo, trees
from remat.layers import _run_stack, _unrolled
from remat.layers._links import Link, laid_densely, link_of, stand_ins
from remat.layers._stack import Stack
from remat.policies import everything_saveable
from remat.schedules import AbstractSchedule, Stage
from remat.schedules._contract import require_schedule

AnyStage = DecoratedFunction[..., Any] | RematModule
_Around = Callable[[list[Tensor]], Any]
_S = TypeVar("_S")
_R = TypeVar("_R")


def chain(
    fs: Iterable[Callable[[Any], Any]], schedule: AbstractSchedule | None = None
) -> Chain:
    """Functions that run one after the other, and recompute in the backward.

    `chain([f, g, h])(x)` is `h(g(f(x)))`. Laws: numbers and gradients are those of that
    call under every transform, captured tensors and module parameters included. Without
    a schedule each function is a region, and the states between them are held. A
    schedule says which states and records are held. A function that is a region already
    stays one: its policy says what its record keeps.

    Args:
        fs: functions or modules, each from a pytree to a pytree. Under a schedule they
            draw from keys alone, and no two of them change one buffer.
        schedule: what is kept, and what is recomputed; None keeps every state.

    Returns:
        A function of a pytree; `.stages(x)` describes its stages to a schedule.

    Raises:
        ScheduleError: there is no function, or `schedule` is not a schedule.
        TypeError: an element cannot be called.

    Example:
        >>> import torch
        >>> from remat import chain, schedules
        >>> layers = [torch.nn.Linear(4, 8), torch.tanh, torch.nn.Linear(8, 2)]
        >>> model = chain(layers, schedule=schedules.Every(2))
        >>> model(torch.ones(3, 4)).square().sum().backward()
        >>> layers[0].weight.grad.shape
        torch.Size([8, 4])

    References:
        `torch.utils.checkpoint.checkpoint_sequential`; Beaumont et al., "Optimal
        checkpointing for heterogeneous chains", 2019, https://arxiv.org/abs/1911.13214.
    """
    require_type("chain(fs)", fs, Iterable, wanted="the layers: chain([f, g])")
    return Chain(tuple(fs), schedule)


@final
@dataclass(frozen=True)
class Chain:
    """What `chain` returns.

    Attributes:
        fs: the functions.
        schedule: how they are run.
    """

    fs: tuple[Callable[[Any], Any], ...]
    schedule: AbstractSchedule | None = None

    def __post_init__(self) -> None:
        require_schedule(self.schedule, "chain")
        others = [
            f"{shown(f)}, which cannot be called" for f in self.fs if not callable(f)
        ]
        if self.fs and not others:
            return
        raise refusal(
            TypeError if others else ScheduleError,
            where="chain",
            what=f"got {(*others, 'no function')[0]}.",
            why="A chain runs functions or modules, at least one.",
            do="Pass the layers: chain([f, g]).",
        )

    @dynamo.traced_as(_unrolled.chain)
    def __call__(self, x: Any) -> Any:
        leaves = trees.tensor_leaves(x)
        if not _run_stack.wants_gradient(self.fs, leaves):
            return _run_stack.run_as_it_is(
                lambda: functools.reduce(lambda state, f: f(state), self.fs, x), self.fs
            )
        if self.schedule is None:
            state = self._stages[0].region(x)
            for stage in self._stages[1:]:
                state = stage.owning(lambda region, given: region(given), state)
            return state
        stack, stages, tensors, around = _trace_chain(self._stages, x)
        return around(_run_stack.run_scheduled(stack, self.schedule, stages, tensors))

    @functools.cached_property
    def _stages(self) -> tuple[_ChainStage, ...]:
        """The functions as regions, which are kept from call to call."""
        policy = None if self.schedule is None else everything_saveable
        return tuple(_ChainStage(f, policy) for f in self.fs)

    def __reduce__(self) -> Any:
        return Chain, (self.fs, self.schedule)

    def stages(self, x: Any) -> tuple[Stage, ...]:
        """Describes each function to a schedule, for an argument like this one.

        This only traces the functions.

        Example:
            >>> import torch
            >>> from remat import chain
            >>> for stage in chain([torch.sin, torch.tanh]).stages(torch.ones(4)):
            ...     print(stage)
            Stage(cost=128, state_bytes=16, output_bytes=16, record_bytes=0)
            Stage(cost=128, state_bytes=16, output_bytes=16, record_bytes=0)
        """
        stages = [_ChainStage(f, everything_saveable) for f in self.fs]
        return _trace_chain(stages, x)[1]


#: The functions that were seen to change their argument, by identity.
_writers: weakref.WeakValueDictionary[int, Callable[[Any], Any]] = (
    weakref.WeakValueDictionary()
)


@final
class _ChainStage:
    """A function of a chain as a region; `policy` is for one that is not a region yet."""

    def __init__(self, f: Callable[[Any], Any], policy: Any) -> None:
        self._f = f
        self._policy = policy

    @functools.cached_property
    def region(self) -> AnyStage:
        f = self._f
        return cast("AnyStage", f) if _unrolled.is_region(f) else self._region_of(f)

    @functools.cached_property
    def on_copies(self) -> AnyStage:
        return self._region_of(functools.partial(_call_chained_on_copies, self._f))

    def _region_of(self, function: Callable[[Any], Any]) -> AnyStage:
        keeps_draws = self._policy is None and is_of_module(self._f)
        rng = "preserve" if keeps_draws else "keys"
        return remat(function, policy=self._policy, rng=rng)

    def owning(self, run: Callable[[AnyStage, _S], _R], state: _S) -> _R:
        """Runs a later stage, on a copy of the state if it changes that in place.

        The state is the chain's own, so that plain code allows the change.
        """
        f = self._f
        if _writers.get(id(f)) is not f:
            try:
                return run(self.region, state)
            except MutationError:
                if _unrolled.is_region(f):
                    raise
        returned = run(self.on_copies, state)
        with contextlib.suppress(TypeError):  # f has no weak references
            _writers[id(f)] = f
        return returned


def _call_chained_on_copies(f: Callable[[Any], Any], state: Any) -> Any:
    return f(trees.map_tensors(Tensor.clone, state))


def _trace_chain(
    stages: Sequence[_ChainStage], x: Any
) -> tuple[Stack, tuple[Stage, ...], list[Tensor], _Around]:
    """The functions of a chain as a stack, described to a schedule; what it takes and gives."""
    leaves, frame = trees.Frame.of(x)
    first = [*map(laid_densely, leaves)]
    metas = [*map(TensorMeta.of_operand, first)]
    captured: dict[Tensor, int] = {}
    links: list[Link] = []
    described: list[Stage] = []
    given = [True] * len(first)

    def add(region: AnyStage, around: _Around) -> _Around:
        nonlocal metas, given
        args = (around(stand_ins(metas)),)
        link, entry = link_of(region, args, len(metas), captured)
        returned = link.returned()
        metas = [meta.of_result() for meta in returned]
        links.append(link)
        given = _run_stack.given_after(link, given)
        described.append(_run_stack.stage_of(link, metas, given))
        return functools.partial(entry.result, roots=link.roots)

    around = add(stages[0].region, frame.around)
    for stage in stages[1:]:
        around = stage.owning(add, around)
    return Stack(links, len(first)), tuple(described), [*first, *captured], around
