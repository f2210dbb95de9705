"""Whether a function may run tile by tile along an axis, read off its traces.

It is judged by traces of two lengths, of a tile and of the whole: what differs between them
comes of the length. The axis is followed from the arguments through each step of the forward
graph, by what `_axis_rules` knows of the operators. Nothing runs.
"""

import dataclasses
import inspect
import itertools
import operator
import re
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar, final

import torch

from remat._calls.decorated import undecided
from remat._calls.entry import Entry
from remat._errors import MutationError, RematError, TileError
from remat._graph import operators
from remat._graph.meta import TensorMeta, metas_in
from remat._graph.values import Graph, Ref, Value, prune, refs
from remat._torch import schemas, tracer
from remat.layers._axis_rules import (
    EVERY_DIM,
    Alike,
    Along,
    AxisStep,
    Key,
    Mixed,
    MixesError,
    Operand,
    State,
    Total,
    place_of,
    require_sizes,
    rule_of,
)
from remat.layers._tiles import Call, Pattern
from remat.policies._by_op import bare_name

#: The traces that were found to be independent, each with the patterns and reductions.
_judged: weakref.WeakKeyDictionary[object, set[object]] = weakref.WeakKeyDictionary()
#: Regions of this package's own, which are not traced to be judged.
_known: set[object] = set()

_T = TypeVar("_T")


def known_independent(region: _T) -> _T:
    """Has a region be taken for independent along the axis, however it is cut."""
    _known.add(region)
    return region


def require_independent(
    region: Any, pattern: Pattern, reduce: str, call: Call, size: int
) -> None:
    """Refuses a function whose trace mixes places of the axis, once for each trace."""
    is_whole = size >= call.length
    if is_whole or region in _known:
        return
    # A tile of one place would not show what is broadcast along it.
    last, size = call.sizes(size)[-1], max(size, 2)
    whole = call.length if call.length > size else 2 * size
    entry, states = _traced_tile(region, call, size)
    known, judged = (_judged.setdefault(entry.region, set()), (size, whole, last))
    if (pattern.text, reduce, judged) in known:
        return
    name = _name_of(region)
    if entry.written:
        raise MutationError.of(
            where=f"tiled: {name}",
            what="changes a buffer or an argument in place.",
            why="It would change once for each tile.",
            do="Return the new value, or put the module into eval mode.",
        )
    tile = _Forward(entry)
    # Its policy may be one for a tile alone: a budget, a plan.
    others = [_Forward(_traced(undecided(region), call, whole)[0])]
    others += [_Forward(_traced(region, call, last)[0])] if last > 1 else []
    for other in others:
        _require_same_steps(tile, other)
    results = _results_of(tile, others[0], states, (size, whole))
    with tracer.unrecorded():  # a trace around this one is not to hold them
        made = [torch.empty(each.meta.shape, device="meta") for each in results]
    parts = pattern.of_results(tile.output.around(made))
    for part, tensor, each in zip(parts, made, results, strict=True):
        dim = part.dim(tensor, "a result")
        _require_result(name, each, dim, Total(reduce), (size, whole))
    for other in others:
        _require_same_numbers(tile, other)
    if last == 1:
        one_place = _Forward(_traced(region, call, 1)[0])
        _require_like_one_place(tile, one_place, results, size)
    known.add((pattern.text, reduce, judged))


def _name_of(region: Any) -> str:
    name = getattr(region, "__qualname__", type(region).__name__)
    code = getattr(inspect.unwrap(region), "__code__", None)
    if code is None:
        return name
    return f"{name} ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})"


def _traced(region: Any, call: Call, length: int) -> tuple[Entry, list[State]]:
    (args, kwargs), states = call.stand_in(length, is_part=True)
    return region.entry_of(args, kwargs)[0], states


def _traced_tile(region: Any, call: Call, size: int) -> tuple[Entry, list[State]]:
    try:
        return _traced(region, call, size)
    except RematError:
        raise
    except RuntimeError as error:
        _traced(undecided(region), call, call.length)  # an error of the function's own
        raise TileError.of(
            where=f"tiled: {_name_of(region)}",
            what=f"fails on {size} of the {call.length} places, but not on all of them.",
            why=f"{error}".partition("\n")[0].rstrip(".") + ".",
            do="Pass a tensor that has a value for each place as a positional argument, with "
            '"(tile n)" in its pattern: a captured one, or a keyword, is the same for all tiles.',
        ) from error


@final
class _Forward:
    """A call's trace without its backward, whose cotangents stand among the operands.

    Of how many layouts there are some depends on what was traced before.
    """

    def __init__(self, entry: Entry) -> None:
        joint = entry.stages.joint
        graph = dataclasses.replace(joint.graph, outputs=joint.outputs)
        self.graph = graph = prune(graph, (), joint.num_operands)
        self.views, self.output = joint.views, entry.output
        # The steps, and those of the views of its results.
        paths = [view.path for view in joint.views if view.path]
        self.steps = [
            value
            for each in (graph, *paths)
            for value in each.values[each.num_inputs :]
        ]
        outputs = [ref.index for ref in graph.outputs if ref is not None]
        reads = [(view.output, view.operand) for view in joint.views]
        self.reads = reads, outputs, entry.labels
        # Of each tensor that is returned the value that it is, or is a view of.
        self.bases = [
            view.operand or 0 if view.output is None else outputs[view.output]
            for view in joint.views
        ]
        self.returned = [
            graph.values[base] if view.path is None else view.path.values[-1]
            for view, base in zip(joint.views, self.bases, strict=True)
        ]
        plain = (int, float, complex, str)
        self.statics = [
            each for each in entry.output.statics if isinstance(each, plain)
        ]


def _require_result(
    name: str, result: Operand, dim: int | None, reduce: Total, lengths: tuple[int, int]
) -> None:
    state = result.state
    if isinstance(state, Mixed):
        raise TileError.of(
            where=f"tiled: {state.step}",
            what=f"mixes places of the axis that is cut: {state.why}",
            why="Each tile runs by itself, and sees only its own part.",
            do="Cut along another axis, or leave the operator out of the function.",
        )
    others = () if isinstance(state, Along) else {*result.sized} - {dim}
    dims = state.dims if isinstance(state, Alike) else ()
    if others:
        wanted = f"as long in its dimension {min(others)} as a tile is"
    elif dim is None:
        if state is reduce or (result.is_alike and reduce is Total.MEAN):
            return
        wanted = f"no {reduce.value} over it"
    else:
        is_there = state == Along(dim) or dim in dims
        if is_there and result.lengths(dim) == lengths:
            return
        wanted = f"not cut along its dimension {dim}"
    told = "the same for all tiles"
    if isinstance(state, (Along, Total)):
        is_along = isinstance(state, Along)
        told = f"has it in dimension {state.dim}" if is_along else f"its {state.value}"
    raise TileError.of(
        where=f"tiled: {name}",
        what=f"a result is {wanted}, as its pattern says of the axis, but {told}."
        if not others
        else f"a result is {wanted}.",
        why="The results of the tiles are put together as the pattern says.",
        do="Write the pattern of what is returned; reduce over the axis by sum, or by mean "
        'with reduce="mean".',
    )


def _require_same_steps(tile: _Forward, other: _Forward) -> None:
    """Refuses a function whose steps, captures or results depend on the length."""
    if tile.output.is_tensor != other.output.is_tensor:
        raise _depends_on_length(
            None, "returns more or fewer values for a tile of another size."
        )
    for one, same in itertools.zip_longest(tile.steps, other.steps):
        if one is None or same is None or _step_form(one) != _step_form(same):
            what = "is a step for tiles of one size and none for those of another."
            raise _depends_on_length(one or same, what)
    if tile.reads != other.reads:
        what = "reads or returns other values for a tile of another size."
        raise _depends_on_length(None, what)


def _require_same_numbers(tile: _Forward, other: _Forward, aside: str = "") -> None:
    """Refuses a function that computes with numbers, or returns some, that are of the length."""
    for one, same in zip(tile.steps, other.steps, strict=True):
        if bare_name(one.op) == aside:
            continue
        numbers, others = _numbers_of_step(one), _numbers_of_step(same)
        names = [key for key in numbers if repr(numbers[key]) != repr(others.get(key))]
        is_constant = one.op is operators.constant
        if names and not (is_constant and one.args[0].shape != same.args[0].shape):
            shown = ", ".join(f"{numbers[key]}" for key in names)
            rest = ", ".join(f"{others.get(key)}" for key in names)
            raise _depends_on_length(
                one,
                "computes with a number that depends on the size of the tile: "
                f"{shown}, and {rest} for another size.",
            )
    if tile.statics != other.statics:
        told = f"returns {tile.statics}, and {other.statics}"
        raise _depends_on_length(None, f"{told} for a tile of another size.")


def _require_like_one_place(
    tile: _Forward, one: _Forward, results: Sequence[Operand], size: int
) -> None:
    """Refuses what a tile of one place shows, whose trace may lack steps (a copy, a view)."""
    if [*map(_step_form, tile.steps)] == [*map(_step_form, one.steps)]:
        # torch's einsum puts a dimension of one place elsewhere, where nothing depends on it.
        _require_same_numbers(tile, one, aside="permute")
    wanted = [
        [n // size if k in each.sized else n for k, n in enumerate(each.meta.shape)]
        for each in results
    ]
    found = [list(_meta_of(each).shape) for each in one.returned]
    if found != wanted:
        what = f"returns {found} for a tile of one place, which should be {wanted}."
        raise _depends_on_length(None, what)


def _depends_on_length(value: Value | None, what: str) -> TileError:
    return TileError.of(
        where=f"tiled: {'the function' if value is None else _step_label(value)}",
        what=what,
        why="A tile is smaller than the whole, so that the result would differ.",
        do='Write .mean() with reduce="mean" instead of a division by the size, or '
        "divide after the call.",
    )


def _step_label(value: Value) -> str:
    """An operator in a message, with the line that the user wrote."""
    name = value.function or operators.short_name(value.op)
    return f"{name} at {value.source}" if value.source else name


def _step_form(value: Value) -> object:
    """What a step is, whatever the length: its operator, what it reads, what it makes."""
    made = [(len(meta.shape), meta.dtype) for meta in metas_in(value.meta)]
    return value.op, value.uses, made


def _numbers_of_step(value: Value) -> dict[str, Any]:
    """What a step computes with besides tensors, but for what says how long its result is."""
    if value.op is operators.constant:
        return {"values": value.args[0].tolist()}
    op: Any = value.op
    if not isinstance(op, schemas.OpOverload):
        return {}
    given = operators.arguments(op, value.args, dict(value.kwargs))
    lengths = {*_LENGTHS, *_LENGTHS_OF.get(bare_name(value.op), ())}
    return {
        name: each
        for name, each in given.items()
        if name not in lengths and not [*refs(each)]
    }


_LENGTHS = ("size", "shape", "repeats")
_LENGTHS_OF = {
    "native_group_norm": ("N",),
    "eye": ("n", "m"),
    "arange": ("end",),
    "slice": ("end",),
    "linspace": ("steps",),
    "logspace": ("steps",),
}


def _results_of(
    tile: _Forward, whole: _Forward, given: Sequence[State], lengths: tuple[int, int]
) -> list[Operand]:
    """What each tensor that a traced function returns has of the axis.

    `given` is what the tensors of the arguments have; those that it captures are alike.
    """
    states = _follow_axis(tile.graph, whole.graph, given, lengths)
    found: list[Operand] = []
    values = zip(tile.returned, whole.returned, strict=True)
    bases = zip(tile.views, whole.views, tile.bases, values, strict=True)
    for view, same, base, pair in bases:
        state = states[base]
        if view.path is not None and same.path is not None:
            state = _follow_axis(view.path, same.path, [state], lengths)[-1]
        found.append(Operand(state, *map(_meta_of, pair)))
    return found


def _meta_of(value: Value) -> TensorMeta:
    if isinstance(value.meta, TensorMeta):
        return value.meta
    raise MixesError("one of its arguments is no tensor.")


def _follow_axis(
    graph: Graph, whole: Graph, given: Sequence[State], lengths: tuple[int, int]
) -> list[Any]:
    """What each value of a forward has of the axis, a list for several outputs of an operator."""
    states: list[Any] = [*given, *[Alike()] * (graph.num_inputs - len(given))]
    pairs = list(zip(graph.values, whole.values, strict=True))
    for value, other in pairs[graph.num_inputs :]:
        mixed = [states[k] for k in value.uses if isinstance(states[k], Mixed)]
        if mixed:
            states.append(mixed[0])
        elif value.op is operator.getitem:
            made, place = states[value.args[0].index], value.args[1]
            states.append(made[place] if isinstance(made, list) else made)
        else:
            try:
                used = {
                    k: Operand(states[k], *map(_meta_of, pairs[k])) for k in value.uses
                }
                states.append(_state_after_step(value, other, used, lengths))
            except MixesError as error:
                states.append(Mixed(_step_label(value), str(error)))
    return states


def _state_after_step(
    value: Value, other: Value, used: dict[int, Operand], lengths: tuple[int, int]
) -> Any:
    """What the results of a step have of the axis."""
    metas = [
        each.meta if isinstance(each.meta, tuple) else (each.meta,)
        for each in (value, other)
    ]
    made = [
        None if one is None or same is None else Operand(Alike(), one, same)
        for one, same in zip(*metas, strict=True)
    ]
    states = [each.state for each in used.values()]
    if operators.is_keyed(value.op) or Key() in states:
        if any(isinstance(each, (Along, Total)) for each in states):
            raise MixesError("it makes keys of values along the axis.")
        # A draw or a key that is derived, from a key that is a tile's own or all tiles'.
        is_key = any(each.meta.dtype == torch.uint64 for each in made if each)
        drawn = Key() if is_key else Alike(EVERY_DIM)
        found = [drawn if Key() in states else Alike()] * len(made)
    elif value.op is operators.constant:
        found = [Alike()]
    elif _is_fill(value) and all(isinstance(each, Alike) for each in states[1:]):
        found = [Alike(EVERY_DIM, is_zero=bare_name(value.op) in _ZEROS)]
    else:
        found = _states_by_rule(value, made, used, lengths)
    return found if isinstance(value.meta, tuple) else found[0]


def _states_by_rule(
    value: Value,
    made: Sequence[Operand | None],
    used: dict[int, Operand],
    lengths: tuple[int, int],
) -> list[State]:
    op: Any = value.op
    if not isinstance(op, schemas.OpOverload) or made[0] is None:
        raise MixesError("it takes a function, or its result is no tensor.")
    given = operators.arguments(op, value.args, dict(value.kwargs))
    by_name = {
        key: used[each.index] for key, each in given.items() if isinstance(each, Ref)
    }
    operands = tuple(used[index] for index in value.uses)
    step = AxisStep(value, given, operands, by_name, made[0], lengths)
    require_sizes(step)
    if all(each.is_alike for each in operands):
        return [_state_of_alike(step)] * len(made)
    rule = rule_of(step)
    if rule is None:
        raise MixesError("nothing is known of what it does along an axis.")
    state = rule(step)
    if state is not None:
        return [state] * len(made)
    places = [None if each is None else place_of(step, each) for each in made]
    why = "its result does not have each place of the axis once."
    return [place or Mixed(_step_label(value), why) for place in places]


def _state_of_alike(step: AxisStep) -> Alike:
    shape = step.out.meta.shape
    if step.is_pointwise:
        behind = [(each, len(each.meta.shape) - len(shape)) for each in step.operands]
        dims = [
            dim
            for dim, _ in enumerate(shape)
            if all(each.suits(dim + offset) for each, offset in behind)
        ]
        return Alike(frozenset(dims))
    if step.is_view:
        (viewed,) = step.operands
        if all(map(viewed.suits, range(len(viewed.meta.shape)))):
            return Alike(EVERY_DIM)
    return Alike()


def _is_fill(value: Value) -> bool:
    """Whether all elements are one number, or drawn each by itself."""
    is_drawn = value.op in operators.IN_PLACE_OF and value.op is not _BY_TENSOR
    return is_drawn or _FILLS.fullmatch(bare_name(value.op)) is not None


_BY_TENSOR = torch.ops.aten.bernoulli.Tensor
_ZEROS = ("zeros", "new_zeros", "zeros_like")
_FILLS = re.compile(
    r"(new_)?(zeros|ones|full|empty|rand|randn|randint)(_like)?|scalar_tensor|fill"
)
