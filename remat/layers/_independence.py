"""Whether a function may run tile by tile along an axis, read off its trace.

The axis is followed from the arguments through each step of the forward graph, by what
`_axis_rules` knows of the operators. Nothing runs.
"""

from __future__ import annotations

import dataclasses
import operator
import re
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, final

import torch

from remat._calls.decorated import undecided
from remat._calls.entry import Entry
from remat._errors import MutationError, TileError, refusal
from remat._graph import operators
from remat._graph.meta import TensorMeta
from remat._graph.values import Graph, Ref, Value
from remat._torch import schemas, tracer
from remat.layers._axis import Alike, Along, Key, Mixed, MixesError, State, Total
from remat.layers._axis_rules import (
    Operand,
    Step,
    pointwise,
    require_no_size,
    rule_of,
)
from remat.layers._tile_call import Call
from remat.layers._tile_pattern import Pattern
from remat.layers._two_lengths import (
    different_dims,
    label,
    require_same_steps,
    sized_dims,
)

#: The traces that were found to be independent, each with the patterns and reductions.
_known: weakref.WeakKeyDictionary[object, set[object]] = weakref.WeakKeyDictionary()


def require_independent(
    region: Any, pattern: Pattern, reduce: str, call: Call, size: int
) -> None:
    """Refuses a function whose trace mixes places of the axis, once for each trace.

    It is judged by traces of two lengths, of a tile and of the whole: what differs between them
    comes of the length.
    """
    if size >= call.length:
        return  # one tile, which is the whole
    # A tile of one place would not show what is broadcast along it.
    last, size = call.sizes(size)[-1], max(size, 2)
    whole = call.length if call.length > size else 2 * size
    tile = _traced(region, call, size)
    known, judged = _known.setdefault(tile.entry.region, set()), (size, whole, last)
    if (pattern.text, reduce, judged) in known:
        return
    _require_no_writes(region, tile.entry)
    _require_results(region, tile, outputs_of(tile), pattern, reduce)
    # Its policy may be one for a tile alone: a budget, a plan.
    larger = _traced(undecided(region), call, whole)
    require_same_steps(tile.entry, larger.entry)
    if last > 1:
        require_same_steps(tile.entry, _traced(region, call, last).entry)
    sized = sized_dims(tile.entry, larger.entry)
    traces = [dataclasses.replace(each, sized=sized) for each in (tile, larger)]
    one, other = map(outputs_of, traces)
    for trace, returned in zip(traces, (one, other), strict=True):
        told = [
            dataclasses.replace(each, sized=different_dims(a.meta, b.meta))
            for each, a, b in zip(returned, one, other, strict=True)
        ]
        _require_results(region, trace, told, pattern, reduce)
    known.add((pattern.text, reduce, judged))


@final
@dataclasses.dataclass(frozen=True)
class _Trace:
    """A trace of a tile of some length, and what its arguments have of the axis.

    `sized` has for each value the dimensions that are as long as the tile is; none are known
    from one trace alone.
    """

    entry: Entry
    states: list[State]
    length: int
    sized: Mapping[int, frozenset[int]] = dataclasses.field(
        default_factory=dict[int, frozenset[int]]
    )


def _traced(region: Any, call: Call, length: int) -> _Trace:
    (args, kwargs), states = call.stand_in(length, is_part=True)
    return _Trace(region.entry_of(args, kwargs)[0], states, length)


def _require_results(
    region: Any,
    trace: _Trace,
    returned: Sequence[Operand],
    pattern: Pattern,
    reduce: str,
) -> None:
    """Refuses a trace whose results are not those that the pattern names."""
    with tracer.unrecorded():  # a trace around this one is not to hold them
        made = [torch.empty(each.meta.shape, device="meta") for each in returned]
    parts = pattern.of_results(trace.entry.output.around(made))
    for part, tensor, each in zip(parts, made, returned, strict=True):
        dim = part.dim(tensor, "a result")
        _require_result(region, each, dim, Total(reduce), trace.length)


def _require_no_writes(region: Any, entry: Entry) -> None:
    if not entry.written and not entry.changed:
        return
    raise refusal(
        MutationError,
        where=f"tiled: {name_of(region)}",
        what="changes a buffer or an argument in place.",
        why="It would change once for each tile.",
        do="Return the new value, or put the module into eval mode.",
    )


def _require_result(
    region: Any, result: Operand, dim: int | None, reduce: Total, length: int
) -> None:
    """Refuses a result that tiles do not make."""
    state = result.state
    if isinstance(state, Mixed):
        raise refusal(
            TileError,
            where=f"tiled: {state.step}",
            what=f"mixes places of the axis that is cut: {state.why}",
            why="Each tile runs by itself, and sees only its own part.",
            do="Cut along another axis, or leave the operator out of the function.",
        )
    is_alike = isinstance(state, Alike)
    others = result.sized - {dim}
    if others:
        wanted = f"as long in its dimension {min(others)} as a tile is"
    elif dim is None:
        if state is reduce or (is_alike and reduce is Total.MEAN):
            return
        wanted = f"no {reduce.value} over it"
    else:
        is_whole = is_alike and dim in state.dims and result.meta.shape[dim] == length
        if state == Along(dim) or is_whole:
            return
        wanted = f"not cut along its dimension {dim}"
    raise refusal(
        TileError,
        where=f"tiled: {name_of(region)}",
        what=f"a result is {wanted}, as its pattern says of the axis, but {_told(state)}."
        if not others
        else f"a result is {wanted}.",
        why="The results of the tiles are put together as the pattern says.",
        do="Write the pattern of what is returned; reduce over the axis by sum, or by mean "
        'with reduce="mean".',
    )


def _told(state: State) -> str:
    if isinstance(state, Along):
        return f"has it in dimension {state.dim}"
    if isinstance(state, Total):
        return f"its {state.value}"
    return "the same for all tiles"


def outputs_of(trace: _Trace) -> list[Operand]:
    """What each tensor that a traced function returns has of the axis.

    The trace has it for the tensors of the arguments; those that it captures are alike.
    """
    joint = trace.entry.stages.joint
    num_captured = joint.num_operands - len(trace.states)
    assert num_captured >= 0, "each operand is an argument or captured"
    given = [*trace.states, *[Alike()] * num_captured]
    states = follow(joint.graph, given, trace.length, trace.sized)
    found: list[Operand] = []
    for view in joint.views:
        at = view.operand if view.output is None else joint.outputs[view.output].index
        assert at is not None, "a view has a base"
        value, state = joint.graph.values[at], states[at]
        if view.path is not None:
            value, made = view.path.values[-1], follow(view.path, [state], trace.length)
            state = made[-1]
        assert isinstance(value.meta, TensorMeta), "a tensor is returned"
        found.append(Operand(state, value.meta))
    return found


def follow(
    graph: Graph,
    inputs: Sequence[State],
    length: int,
    sized: Mapping[int, frozenset[int]] = MappingProxyType({}),
) -> list[Any]:
    """What each value of a graph has of the axis, a list for several outputs of an operator.

    The backward, and inputs beyond those given, are of no interest.
    """
    states: list[Any] = [*inputs]
    states += [Alike()] * (graph.num_inputs - len(inputs))
    for value in graph.values[graph.num_inputs :]:
        if value.is_backward:
            states.append(Alike())  # nobody asks for it
        elif value.op is operator.getitem:
            made, place = states[value.args[0].index], value.args[1]
            states.append(made[place] if isinstance(made, list) else made)
        else:
            states.append(_after(value, graph, states, length, sized))
    return states


def _after(
    value: Value,
    graph: Graph,
    states: Sequence[Any],
    length: int,
    sized: Mapping[int, frozenset[int]],
) -> Any:
    used = [states[index] for index in value.uses]
    for state in used:
        if isinstance(state, Mixed):
            return state
    metas = value.meta if isinstance(value.meta, tuple) else (value.meta,)
    if operators.is_keyed(value.op) or Key() in used:
        return _keyed(value, used, metas)
    if value.op is operators.constant:
        return Alike()
    if _is_fill(value):
        return Alike(_all_dims(metas))
    try:
        step = _step_of(value, graph, states, length, sized)
        require_no_size(step)
        if all(isinstance(each.state, Alike) for each in step.operands):
            return _alike(value, step, metas)
        rule = rule_of(step)
        if rule is None:
            why = "nothing is known of what it does along an axis."
            return Mixed(label(value), why)
        state = rule(step)
    except MixesError as error:
        return Mixed(label(value), str(error))
    if len(metas) == 1:
        return state
    return [_of_output(state, each, metas[0]) for each in metas]


def _step_of(
    value: Value,
    graph: Graph,
    states: Sequence[Any],
    length: int,
    sized: Mapping[int, frozenset[int]],
) -> Step:
    """A step with what its operands have of the axis."""

    def operand(ref: Ref) -> Operand:
        meta = graph.values[ref.index].meta
        if not isinstance(meta, TensorMeta):
            raise MixesError("one of its arguments is no tensor.")
        return Operand(states[ref.index], meta, sized.get(ref.index, frozenset()))

    op: Any = value.op
    if not isinstance(op, schemas.OpOverload):
        raise MixesError("it takes a function.")
    given = operators.arguments(op, value.args, dict(value.kwargs))
    by_name = {
        key: operand(each) for key, each in given.items() if isinstance(each, Ref)
    }
    every = tuple(operand(Ref(index)) for index in value.uses)
    out = value.meta[0] if isinstance(value.meta, tuple) else value.meta
    if out is None:
        raise MixesError("its result is no tensor.")
    return Step(value, given, every, by_name, out, length)


def _keyed(
    value: Value, used: Sequence[Any], metas: Sequence[TensorMeta | None]
) -> Any:
    """A draw or a key that is derived, from a key that is a tile's own or all tiles'."""
    if any(isinstance(each, (Along, Total)) for each in used):
        return Mixed(label(value), "it makes keys of values along the axis.")
    is_own = Key() in used
    if any(meta is not None and meta.dtype == torch.uint64 for meta in metas):
        made: State = Key() if is_own else Alike()
    else:
        made = Alike(_all_dims(metas)) if is_own else Alike()
    return made if len(metas) == 1 else [made] * len(metas)


def _alike(value: Value, step: Step, metas: Sequence[TensorMeta | None]) -> Any:
    """What is made of values that have nothing of the axis."""
    dims = frozenset[int]()
    ndim = len(step.out.shape)
    if rule_of(step) is pointwise:
        suits = [
            all(each.suits(dim - ndim + len(each.meta.shape)) for each in step.operands)
            for dim in range(ndim)
        ]
        dims = frozenset(dim for dim, each in enumerate(suits) if each)
    elif operators.returns_view(value.op):
        (viewed, *_) = step.operands
        if all(map(viewed.suits, range(len(viewed.meta.shape)))):
            dims = _all_dims(metas)
    return Alike(dims) if len(metas) == 1 else [Alike(dims)] * len(metas)


def _of_output(
    state: State, meta: TensorMeta | None, first: TensorMeta | None
) -> State:
    """What a further result of an operator has, after what its first one has."""
    if not isinstance(state, Along) or meta is None or first is None:
        return state
    if meta.shape[state.dim : state.dim + 1] == first.shape[state.dim : state.dim + 1]:
        return state
    return Mixed("a helper output", "its dimensions are not those of the first.")


def _all_dims(metas: Sequence[TensorMeta | None]) -> frozenset[int]:
    return frozenset(range(max((len(each.shape) for each in metas if each), default=0)))


def _is_fill(value: Value) -> bool:
    """Whether all elements are one number, or drawn each by itself."""
    name = operators.short_name(value.op).removeprefix("aten.")
    is_drawn = value.op in operators.IN_PLACE_OF and value.op is not _BY_TENSOR
    return is_drawn or _FILLS.fullmatch(name) is not None


_BY_TENSOR = torch.ops.aten.bernoulli.Tensor
_FILLS = re.compile(
    r"(new_)?(zeros|ones|full|empty|rand|randn|randint)(_like)?|scalar_tensor|fill"
)


def name_of(region: Any) -> str:
    """A tiled function in a message."""
    return getattr(region, "__qualname__", type(region).__name__)
