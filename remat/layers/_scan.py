"""`scan`: one function repeated, as a stack of equal layers.

It has the meaning of `jax.lax.scan`, which is compiled to a loop. Here the loop runs in
Python over one trace of the function, and each step is a region.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsIndex, TypeVar, cast, final

import torch
from torch import Tensor

from remat._api import remat
from remat._calls.decorated import DecoratedFunction, is_of_module
from remat._calls.options import PolicyLike
from remat._errors import CarryError, require_callable, require_type
from remat._graph.meta import TensorMeta
from remat._switches.numerics import Numerics
from remat._torch import dynamo, guards, trees
from remat._tracing.thread import is_lifting
from remat._user_lines import warn
from remat.layers import _run_stack, _unrolled
from remat.layers._links import laid_densely, link_of, relaid, resolved, stand_ins
from remat.layers._stack import Stack, slices_of, stacked_rows
from remat.policies import everything_saveable
from remat.schedules import AbstractSchedule
from remat.schedules._contract import require_schedule

_Carry = TypeVar("_Carry")
_X = TypeVar("_X")
_Y = TypeVar("_Y")


@dynamo.traced_as(_unrolled.scan)
def scan(
    f: Callable[[_Carry, _X], tuple[_Carry, _Y]],
    init: _Carry,
    xs: _X = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int = 1,
    *,
    policy: PolicyLike = None,
    schedule: AbstractSchedule | None = None,
) -> tuple[_Carry, _Y]:
    """Runs `f` once per slice of `xs`, passing on a carry; the backward recomputes.

    It is this loop, with one trace of `f` for all steps::

        carry, ys = init, []
        for x in xs:
            carry, y = f(carry, x)
            ys.append(y)
        return carry, torch.stack(ys)

    Laws: numbers and gradients are those of the loop, under every transform, also for
    captured tensors. Without a schedule each step is a region under `policy`, and one
    carry per step is held. A schedule says which carries are kept and which steps run
    again; under `.backward()` the gradients are the same to the bit. Second derivatives
    and forward mode of a scheduled scan hold one carry per step.

    Args:
        f: (carry, x) -> (carry, y), each a pytree of tensors; None is an empty one, and
            Python numbers become tensors. A module will do. Under a schedule it may change
            no buffers, and draws from keys alone.
        init: the first carry. Structure, shapes and dtypes stay from step to step; but a
            Python number takes on the dtype that the first step gives it, as in JAX.
        xs: a pytree of tensors of shape (length, ...), sliced along dimension 0, also
            keys of `random.split`; or None if `f` needs no slices.
        length: the number of steps; required if `xs` has no tensor, otherwise checked.
        reverse: whether to go from the last slice to the first; `ys` keeps its order.
        unroll: for compatibility with JAX; more than 1 warns that it has no effect.
        policy: what a step saves for its backward; None means
            `policies.nothing_saveable` without a schedule; with one, recorded steps
            save everything.
        schedule: which carries are kept; None means all.

    Returns:
        The last carry, and the `y` of all steps stacked along a new dimension 0.

    Raises:
        CarryError: the carry changes, `f` returns no pair, a leaf is not a tensor, or the
            lengths do not agree.
        ScheduleError: `schedule` is not a schedule.

    Example:
        >>> import torch
        >>> from remat import scan, schedules
        >>> w = torch.ones(2, 2, requires_grad=True)
        >>> def step(h, x):
        ...     h = torch.tanh(h @ w + x)
        ...     return h, h.sum()
        >>> h, sums = scan(step, torch.zeros(2), torch.ones(9, 2), schedule=schedules.Revolve(3))
        >>> h.shape, sums.shape
        (torch.Size([2]), torch.Size([9]))
        >>> sums.sum().backward()
        >>> w.grad.shape
        torch.Size([2, 2])

    References:
        `jax.lax.scan`.
    """
    if unroll != 1:
        warn(
            where="scan",
            what=f"unroll={unroll!r} has no effect.",
            why="In JAX it unrolls a compiled loop; here the steps run one by one anyway.",
            do="Leave it out.",
        )
    require_schedule(schedule, "scan")
    require_callable("scan(f, ...)", f)
    if length is not None:
        require_type("scan(length=...)", length, SupportsIndex, wanted="an int")
    call = _Scan.of(f, init, xs, length, reverse)
    while True:
        try:
            return call.run(f, policy, schedule)
        except _CarryDtypeChanged as error:
            call = call.promoted(error)


class _Scan(NamedTuple):
    """A call of `scan`: its arguments, checked, and as leaves."""

    step: Callable[[Any, Any], Any]
    #: The leaves of the first carry, dense in memory.
    carry: list[Tensor]
    carry_tree: trees.Frame
    #: The leaves of `xs`.
    scanned: list[Tensor]
    xs_tree: trees.Frame
    length: int
    is_reversed: bool
    #: The Python numbers that leaves of the first carry were, by their places; a bool has a
    #: dtype of its own.
    numbers: dict[int, complex]

    @classmethod
    def of(cls, f: Any, init: Any, xs: Any, length: int | None, reverse: bool) -> _Scan:
        carry, carry_tree = trees.Frame.of(_as_tensors(init, "init"))
        given = enumerate(leaf for leaf in trees.flatten(init)[0] if leaf is not None)
        numbers: dict[int, complex] = {
            place: leaf
            for place, leaf in given
            if isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)
        }
        lengths = set[int]() if length is None else {operator.index(length)}
        scanned, xs_tree = trees.Frame.of(xs)
        return cls(
            stepping(f),
            [laid_densely(each) for each in carry],
            carry_tree,
            [resolved(each) for each in scanned],
            xs_tree,
            _length_of(scanned, xs, lengths),
            reverse,
            numbers,
        )

    def run(self, f: Any, policy: PolicyLike, schedule: AbstractSchedule | None) -> Any:
        if self.length == 0:
            return self.without_steps()
        if not _run_stack.wants_gradient((f,), [*self.carry, *self.scanned]):
            return _run_stack.run_as_it_is(lambda: self.loop(self.step), (f,))
        if schedule is None:
            rng = "preserve" if is_of_module(f) else "keys"
            return self.by_regions(remat(self.step, policy=policy, rng=rng))
        policy = everything_saveable if policy is None else policy
        return self.by_schedule(remat(self.step, policy=policy, rng="keys"), schedule)

    def promoted(self, error: _CarryDtypeChanged) -> _Scan:
        """The call with the number that changed its dtype, in its new dtype."""
        place, carry, numbers = error.place, [*self.carry], {**self.numbers}
        number, dtype = numbers.pop(place, None), carry[place].dtype
        if number is not None:
            dtype = torch.result_type(torch.empty(1, dtype=error.dtype), number)
        if number is None or dtype == carry[place].dtype:
            raise CarryError(str(error)) from None
        carry[place] = torch.tensor(number, dtype=dtype)
        return self._replace(carry=carry, numbers=numbers)

    def without_steps(self) -> tuple[Any, Any]:
        carry = self.carry_tree.around(self.carry)
        zeros = [each.new_zeros(each.shape[1:]) for each in self.scanned]
        with torch.no_grad():
            _, y = self.step(carry, self.xs_tree.around(zeros))
        rows = trees.map_tensors(lambda each: each.new_zeros((0, *each.shape)), y)
        return carry, rows

    def loop(self, step: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
        carry = self.carry_tree.around(self.carry)
        rows: list[list[Tensor]] = []
        tree = trees.Frame.of(None)[1]
        for parts in slices_of(self.scanned, self.length, self.is_reversed):
            carry, y = step(carry, self.xs_tree.around(parts))
            row, tree = trees.Frame.of(y)
            rows.append(row)
        return carry, tree.around(stacked_rows(rows, self.is_reversed))

    def by_regions(self, region: DecoratedFunction[..., Any]) -> tuple[Any, Any]:
        if is_lifting():
            # A trace that is repeated for a derivative may find a captured tensor rebound to
            # one without a gradient; a call looks at what stands for it.
            return self.loop(region)
        entry, site, captured = region.entry_of(self._stand_ins(), {})
        roots, numerics = site.roots, Numerics.current()
        strides = [meta.stride for meta in self.metas()[: len(self.carry)]]
        run = entry.call_quietly if guards.is_quiet() else entry.call

        def step(carry: Any, x: Any) -> Any:
            laid = map(relaid, trees.tensor_leaves(carry), strides)
            tensors = [*laid, *trees.tensor_leaves(x), *captured]
            return run(roots, tensors, numerics)

        return self.loop(step)

    def by_schedule(
        self, region: DecoratedFunction[..., Any], schedule: AbstractSchedule
    ) -> tuple[Any, Any]:
        captured: dict[Tensor, int] = {}
        count = len(self.carry)
        link, entry = link_of(region, self._stand_ins(), count, captured)
        tensors = [*self.carry, *self.scanned, *captured]
        returned = link.returned()
        given = [True] * count
        for _ in given:  # until each step leaves it as it is
            given = _run_stack.given_after(link, given)[:count]
        stages = (_run_stack.stage_of(link, link.state, given),) * self.length
        counts = count, len(self.scanned), len(returned) - count
        stack = Stack([link] * self.length, *counts, is_reversed=self.is_reversed)
        found = _run_stack.run_scheduled(stack, schedule, stages, tensors)
        return entry.result(found, link.roots)

    def metas(self) -> list[TensorMeta]:
        """Of the carry and of a slice; from the second step on the carry has gradients."""
        carry = [meta.differentiated for meta in map(TensorMeta.of_operand, self.carry)]
        slices = [
            dataclasses.replace(meta, shape=meta.shape[1:], stride=meta.stride[1:])
            for meta in map(TensorMeta.of_operand, self.scanned)
        ]
        return [meta.of_result() for meta in (*carry, *slices)]

    def _stand_ins(self) -> tuple[Any, Any]:
        leaves, count = stand_ins(self.metas()), len(self.carry)
        carry = self.carry_tree.around(leaves[:count])
        return carry, self.xs_tree.around(leaves[count:])


def stepping(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`f` with its results checked; equal functions share a trace."""
    step = functools.partial(_scan_step, f)
    if hasattr(f, "__qualname__"):
        functools.update_wrapper(step, f, updated=())
    return step


def _scan_step(f: Callable[[Any, Any], Any], carry: Any, x: Any) -> tuple[Any, Any]:
    result: Any = f(carry, x)
    kind = cast("type[object]", type(result))
    parts = cast("tuple[Any, ...]", result) if isinstance(result, tuple) else ()
    if len(parts) != 2:
        raise CarryError.of(
            where=f"scan over {f!r}",
            what=f"the function returned a {kind.__name__}.",
            why="A step must return a pair: the next carry, and an output to stack.",
            do="Return (carry, y); (carry, None) if there is no output.",
        )
    new, y = parts
    return _next_carry(carry, new), _as_tensors(y, "the second value that f returns")


def _next_carry(old: Any, new: Any) -> Any:
    """The new carry in the old one's structure, which it must have."""
    tensors, tree = trees.Frame.of(old)
    try:
        leaves = _tensors_like(tree, new, "the carry that f returned")
    except ValueError as error:
        raise _carry_changed(f"has a different structure ({error})") from error
    paths = [path for path, leaf in trees.leaves_with_path(old) if leaf is not None]
    for place, (one, other) in enumerate(zip(tensors, leaves, strict=True)):
        if _unrolled.carried(one) == _unrolled.carried(other):
            continue
        before, after = TensorMeta.of(one), TensorMeta.of(other)
        error = _carry_changed(
            f"has the leaf `{'.'.join(paths[place]) or 'carry'}` as {after} on "
            f"{other.device}, and before as {before} on {one.device}"
        )
        if one.dtype == other.dtype:
            raise error
        raise _CarryDtypeChanged(str(error), place, other.dtype)
    return tree.around(leaves)


@final
class _CarryDtypeChanged(CarryError):
    """A leaf of the carry, at `place`, came back in another dtype."""

    def __init__(self, text: str, place: int, dtype: torch.dtype) -> None:
        super().__init__(text)
        self.place = place
        self.dtype = dtype


def _carry_changed(how: str) -> CarryError:
    return CarryError.of(
        where="scan",
        what=f"the carry that the function returned {how}.",
        why="One trace serves all steps, so the carry keeps its structure, shapes "
        "and dtypes.",
        do="Return a carry like the one given, or give `init` the shape and dtype "
        "that the function returns.",
    )


def _length_of(scanned: Sequence[Tensor], xs: Any, stated: set[int]) -> int:
    for path, leaf in trees.leaves_with_path(xs):
        if leaf is not None and not (isinstance(leaf, Tensor) and leaf.dim() > 0):
            name = ".".join(["xs", *path])
            what = (
                "0-d" if isinstance(leaf, Tensor) else f"of type {type(leaf).__name__}"
            )
            do = (
                "Make it a tensor with one row per step, by torch.as_tensor or torch.stack; "
                "capture what all steps share."
            )
            if callable(leaf):
                do = (
                    "Run layers in a row by chain(layers)(x), or pass their parameters, "
                    "stacked as by torch.func.stack_module_state(layers)."
                )
            raise CarryError.of(
                where=f"scan: `{name}`",
                what=f"is {what}.",
                why="Each leaf of xs is sliced along its first dimension.",
                do=do,
            )
    lengths = {len(each) for each in scanned} | stated
    if len(lengths) == 1 and min(lengths) >= 0:
        return lengths.pop()
    raise CarryError.of(
        where="scan",
        what=f"the number of steps is not clear: {sorted(lengths) or 'none is given'}.",
        why="It is the first dimension of each leaf of xs, and `length`.",
        do="Give xs leaves of one length, or pass length= where xs is None.",
    )


def _tensors_like(frame: trees.Frame, tree: Any, where: str) -> list[Tensor]:
    """The tensors of a carry, numbers as tensors; ValueError if a frame has others."""
    made = [_as_tensor(leaf, where) for leaf in frame.spec.flatten_up_to(tree)]
    if tuple(each is not None for each in made) != frame.is_tensor:
        raise ValueError("None where there was a tensor, or the other way round")
    return [each for each in made if each is not None]


def _as_tensors(tree: Any, where: str) -> Any:
    leaves, spec = trees.flatten(tree)
    return trees.unflatten([_as_tensor(leaf, where) for leaf in leaves], spec)


def _as_tensor(leaf: Any, where: str) -> Tensor | None:
    if leaf is None or isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, (bool, int, float, complex)):
        return torch.tensor(leaf)
    raise CarryError.of(
        where=f"scan: a leaf of {where}",
        what=f"is a {type(leaf).__name__}, {leaf!r}.",
        why="Carries and stacked outputs must be tensors.",
        do="Make it a tensor, or let the function capture it.",
    )
