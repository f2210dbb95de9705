"""A graph inside another trace: run step by step, so that names and lines arrive there.

There a program may be mapped by vmap, and has operators that plain code does not call: those
that users' code is taken apart into, and those that replace writes in place. Some are replaced
by others that torch can map.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from remat._errors import TraceError
from remat._generators import compiled_draws, device_states, streams
from remat._graph import operators
from remat._graph.meta import TensorMeta, device_of, metas_in
from remat._graph.values import (
    Graph,
    Value,
    last_uses,
    read_as_real,
    replace_refs,
    step_behind,
)
from remat._programs import by_places
from remat._torch import levels, modes, schemas, tracer
from remat._torch.taking_functions import Applied
from remat._tracing import importing, naming, refusals, taken_functions

_aten = torch.ops.aten


def interpret(graph: Graph, inputs: Sequence[Tensor]) -> list[Any]:
    """Runs a graph step by step inside another trace, which learns names and lines."""
    last = last_uses(graph)
    env: dict[int, Any] = dict(enumerate(inputs))
    with modes.unseen_by_traces():
        env |= {index: env[index].resolve_conj() for index in read_as_real(graph)}
        for index, value in enumerate(graph.values):
            if value.op is not None:
                try:
                    env[index] = _run_inside_trace(value, env, graph.values)
                except RuntimeError as error:
                    refused = refusals.of_a_step(error, value.source)
                    if refused is None:
                        raise
                    raise refused from error
            for name in value.names:
                naming.mark(env[index], name)
            for freed in last.get(index, ()):
                del env[freed]
    return [None if ref is None else env[ref.index] for ref in graph.outputs]


def _run_inside_trace(
    value: Value, env: dict[int, Any], values: Sequence[Value]
) -> Any:
    assert value.op is not None
    args, kwargs = replace_refs((value.args, value.kwargs), env.__getitem__)
    traced = tracer.active_graph()
    before = len(traced.nodes)
    handles_state = value.state is not None or value.op is device_states.STATE
    if handles_state and tracer.is_in_compiler():
        out = _draw_with_state(value, args, dict(kwargs), env)
    elif value.is_redraw:
        assert value.state is not None
        found = device_states.swap(env[value.state.index], device_of(value.meta))
        out = _draw(value, args, dict(kwargs))
        device_states.swap(found, device_of(value.meta))
    elif operators.draws(value):
        out = _draw(value, args, dict(kwargs))
    elif value.op is device_states.STATE:
        # In the outer trace it may be that of a tracker.
        stream = streams.current(*args)
        is_own = stream in ("", streams.UNKNOWN)
        out = device_states.STATE(*args) if is_own else streams.STATE(stream)
    else:
        if isinstance(value.op, Applied) and _is_recorded(args):
            taken_functions.require_derivative(value.op, value.source)
        op = _ENDS.get(value.op) or by_places.replaced(
            value, values, is_mapped=levels.is_mapped()
        )
        out = _of_its_dtype(value, values, _run(op, args, dict(kwargs)))
    if isinstance(value.op, Applied):
        taken_functions.require_first_order(out, value.source)
    if operators.draws(value):
        _require_one_draw(value, [*traced.nodes][before:])
    note = importing.Note(
        value.source,
        _FUNCTIONS.get(value.op, value.function),
        is_recorded=value.op is not operators.UNRECORDED,
        stream=_stream_around(value),
        rank=value.rank if value.is_repeat else -1,
    )
    importing.annotate(traced, before, note)
    return out


def _without_gradient(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        # `alias` would share the tangent, with its gradient.
        return tensor.expand_as(tensor)


#: How a gradient ends in an outer trace, and the function that this is noted as.
_ENDS: dict[Any, Callable[[Tensor], Tensor]] = {operators.UNRECORDED: _without_gradient}
_FUNCTIONS: dict[Any, str] = {
    operators.DETACHED: "detach",
    operators.UNRECORDED: importing.UNRECORDED,
}


def _of_its_dtype(value: Value, values: Sequence[Value], found: Any) -> Any:
    """A value as the graph has it; in mixed precision, rules for vmap and parts widen some."""
    if not isinstance(found, Tensor) or not isinstance(value.meta, TensorMeta):
        return found
    if found.dtype != value.meta.dtype:
        return found.to(value.meta.dtype)
    if levels.dual_level_is_active() and _is_of_several_dtypes(value, values):
        return _apply_same_dtype(found)
    return found


def _is_of_several_dtypes(value: Value, values: Sequence[Value]) -> bool:
    """Whether an operator's results that may have tangents, as a norm's, differ in dtype."""
    dtypes = {each.dtype for each in metas_in(step_behind(value, values).meta)}
    return sum(each.is_floating_point or each.is_complex for each in dtypes) > 1


class _TangentOfSameDtype(torch.autograd.Function):
    """A value whose tangent has its dtype. Torch's rules for norms of halves by floats give others.

    Obsolete when they do not. Under autocast plain code casts such a tangent where it is used.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.dtype = output.dtype

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0]

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        return grad_inputs[0].to(ctx.dtype).view_as(grad_inputs[0])


_apply_same_dtype: Callable[..., Any] = _TangentOfSameDtype.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _draw_with_state(
    value: Value, args: Sequence[Any], kwargs: dict[str, Any], env: dict[int, Any]
) -> Any:
    """A draw inside the trace of a compiler; its state comes with it, not before."""
    if value.state is None:
        return None
    place, device = value.state.index, device_of(value.meta)
    if value.is_redraw:
        return compiled_draws.from_state(value, env[place], args, kwargs, device)
    out, env[place] = compiled_draws.with_state(value, args, kwargs, device)
    return out


def _stream_around(value: Value) -> str | None:
    """Whose numbers a draw takes in the outer trace; None leaves it to the generator."""
    if value.is_redraw:
        return ""
    if not value.stream:
        return None
    return streams.take_inside(value.stream, device_of(value.meta))


def _draw(value: Value, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs a draw in the outer trace, in place where the user's was."""
    assert value.op is not None
    # Such a map repeats the draw, and for some has rules that give other numbers.
    with levels.outside_maps(
        [each for each in args if isinstance(each, Tensor)]
    ) as found:
        below = iter(found)
        args = [next(below) if isinstance(each, Tensor) else each for each in args]
        in_place = operators.IN_PLACE_OF.get(value.op)
        if in_place is None or not _is_in_place(value, args[0]):
            return value.op(*args, **kwargs)
        return in_place(torch.empty_like(args[0]), *args[1:], **kwargs)


def _require_one_draw(value: Value, made: Sequence[fx.Node]) -> None:
    """Refuses a draw that vmap makes several, as `randperm`: one state repeats the first alone."""
    if sum(node.target is value.op for node in made) > 1:
        raise TraceError.of(
            where=f"{value.op} at {value.source}",
            what='draws under vmap(randomness="different") by an operator for each example.',
            why="A program repeats a draw from one state.",
            do="Draw by an operator that vmap maps (for a permutation torch.rand(n).argsort()), "
            'or use engine="rerun".',
        )


def _is_in_place(value: Value, like: Tensor) -> bool:
    """Always under `vmap(randomness="same")`: for that vmap has a rule, and of `like` reads the shape.

    Never where examples that draw apart share `like`.
    """
    active = levels.current_interpreter()
    if active is None or active[0] != "vmap":
        return value.in_place
    if active[1].randomness() == "same":
        return True
    _, (dim,) = levels.unwrap_batched([like], active[1].level())
    return value.in_place and dim is not None


def _index_fill(tensor: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
    """index_fill by a mask. In torch's rule for vmap one example writes over others."""
    if not tensor.dim():
        return value.clone()
    mask = torch.zeros(tensor.shape[dim], dtype=torch.bool, device=tensor.device)
    mask = mask.index_fill(0, index, True)
    rest = tensor.dim() - dim % tensor.dim() - 1
    return torch.where(mask.view(-1, *(1,) * rest), value, tensor)


def _copy(tensor: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """For vmap in a trace, copy in functional form: in the other's shape and dtype, carried out."""
    del non_blocking
    plain = source.to(tensor).resolve_conj().resolve_neg()
    return plain.expand(tensor.shape).contiguous()


def _select_scatter(tensor: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """For vmap in a trace, select_scatter by a slice: torch's rule has other gradients."""
    start = index % tensor.shape[dim]
    return torch.slice_scatter(tensor, source.unsqueeze(dim), dim, start, start + 1)


def _index_put(
    tensor: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
) -> Tensor:
    """For vmap in a trace, index_put by a mask of values that are the same wherever it is set."""
    mask = indices[0]
    if len(indices) > 1 or mask is None or mask.dtype is not torch.bool or accumulate:
        return _aten.index_put.default(tensor, indices, values, accumulate)
    rest = tensor.dim() - mask.dim()
    if values.dim() > rest:
        return _aten.index_put.default(tensor, indices, values)
    return torch.where(mask[(..., *[None] * rest)], values, tensor)


def _scattered(
    run: Callable[..., Tensor], tensor: Tensor, source: Tensor, dim: int = 0, *at: Any
) -> Tensor:
    """A write to a part of a complex tensor, as one to a part of its real and imaginary parts."""
    tensor, source = (
        torch.view_as_real(each.to(tensor.dtype).resolve_conj())
        for each in (tensor, source)
    )
    return torch.view_as_complex(run(tensor, source, dim % (tensor.dim() - 1), *at))


#: Backwards of norms, and which argument of each is the weight.
_NORM_BACKWARDS = {
    _aten.native_layer_norm_backward.default: 5,
    _aten.native_group_norm_backward.default: 4,
    _aten.native_batch_norm_backward.default: 2,
}


def _norm_backward(op: Any, *args: Any) -> Any:
    """For vmap in a trace, all in the dtype of the weight: torch's rules mix it with another."""
    weight = args[_NORM_BACKWARDS[op]]
    if weight is None or weight.dtype == args[1].dtype:
        return op(*args)
    dtype = weight.dtype
    return op(*[each.to(dtype) if isinstance(each, Tensor) else each for each in args])


# Obsolete when views do not mind how examples lie in memory, when torch's rules are right for
# index_fill where the values are mapped and the tensor is not, for the backwards of norms in mixed
# precision, and for the derivative of select_scatter, and when there are some for copy,
# which replaces a write to a strided view, for index_put by a mask, for lazy negation, which stands
# in a trace of `z.conj().imag`, and for the backward of a fused norm, which it would run example by
# example.
_BATCHABLE: dict[Callable[..., Any], Callable[..., Any]] = {
    _aten.view.default: _aten.reshape.default,
    _aten._unsafe_view.default: _aten.reshape.default,
    _aten._neg_view.default: _aten.neg.default,
    _aten.index_fill.int_Tensor: _index_fill,
    _aten.index_put.default: _index_put,
    _aten.copy.default: _copy,
    _aten.select_scatter.default: _select_scatter,
    schemas.FUSED_NORM_BACKWARD: schemas.DECOMPOSED[schemas.FUSED_NORM_BACKWARD],
    **{op: functools.partial(_norm_backward, op) for op in _NORM_BACKWARDS},
}


_SCATTERING = (_aten.slice_scatter.default, _aten.select_scatter.default)


def _run(op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operator; where it lacks the derivative that is recorded, with that of its parts."""
    is_mapped = levels.is_mapped()
    run = _BATCHABLE.get(op, op) if is_mapped else op
    parts = schemas.made_of_others(op)
    if op is _aten.index_fill.int_Tensor:
        # Torch's derivative by the value asks which indices there are. The backward of trace is
        # one. Obsolete when it does not.
        parts = _index_fill
    if op in _SCATTERING and args[0].is_complex():
        # Torch has a derivative for real numbers alone. Obsolete when it has one.
        parts = functools.partial(_scattered, run)
    if parts is None or not (_is_recorded(args) or levels.dual_level_is_active()):
        return run(*args, **kwargs)
    made: Any = parts(*args, **kwargs)
    if is_mapped:
        # To rounding is enough there, and vmap has no rules for some of these operators.
        return made
    whole = functools.partial(run, **kwargs)
    return _apply_whole(whole, args, *(made if isinstance(made, tuple) else (made,)))


def _is_recorded(args: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(
        levels.requires_grad_anywhere(each) for each in args if isinstance(each, Tensor)
    )


class _WithRuleOfParts(torch.autograd.Function):
    """An operator, with the derivatives of equal values that its parts have made."""

    generate_vmap_rule = True

    @staticmethod
    def forward(run: Callable[..., Any], args: Sequence[Any], *made: Any) -> Any:
        return run(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return None, None, *grad_outputs

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        _, _, *tangents = grad_inputs
        return tuple(tangents) if len(tangents) > 1 else tangents[0]


_apply_whole: Callable[..., Any] = _WithRuleOfParts.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
