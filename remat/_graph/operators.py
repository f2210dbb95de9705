"""What single operators do: which are views, which draw, which write in place.

Judged by schema and arguments, not by tags alone: attention with `dropout_p=0` carries the
tag of a random operator and draws nothing.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from remat._torch import schemas

_aten = torch.ops.aten

# Identity on the numbers; autograd puts them everywhere.
TRANSPARENT = frozenset(
    {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}
)

#: In a graph, a `detach` of the user's, past which no gradient and no tangent flows.
DETACHED: Any = _aten.detach.default
#: In a graph, what was computed under `no_grad`: no gradient flows past it.
UNRECORDED: Any = _aten.alias.default

#: By their short names those whose result holds what was in memory before.
UNINITIALIZED = frozenset(
    {
        *("aten.empty", "aten.empty_like", "aten.empty_permuted", "aten.empty_strided"),
        *("aten.new_empty", "aten.new_empty_strided"),
    }
)

# Where among their arguments these take a tensor of which they read the sizes and strides alone.
_BY_SIZES: dict[Any, int] = {
    **dict.fromkeys([_aten.ones_like.default, _aten.zeros_like.default], 0),
    **dict.fromkeys([_aten.full_like.default, _aten.new_full.default], 0),
    **dict.fromkeys([_aten.new_ones.default, _aten.new_zeros.default], 0),
    _aten.avg_pool2d_backward.default: 1,
    _aten.avg_pool3d_backward.default: 1,
    _aten._adaptive_avg_pool2d_backward.default: 1,
    _aten._adaptive_avg_pool3d_backward.default: 1,
    _aten.max_pool2d_with_indices_backward.default: 1,
    _aten.max_pool3d_with_indices_backward.default: 1,
    _aten.adaptive_max_pool2d_backward.default: 1,
    _aten.adaptive_max_pool3d_backward.default: 1,
    _aten.reflection_pad1d_backward.default: 1,
    _aten.reflection_pad2d_backward.default: 1,
    _aten.reflection_pad3d_backward.default: 1,
    _aten.replication_pad1d_backward.default: 1,
    _aten.replication_pad2d_backward.default: 1,
    _aten.replication_pad3d_backward.default: 1,
    _aten.nll_loss_backward.default: 1,
    _aten.nll_loss2d_backward.default: 1,
}
_CONVOLUTION_BACKWARD = _aten.convolution_backward.default

#: Refuses a lazy conjugate. A trace of `x.real` has it, as what stands for `x` is not one.
AS_REAL: Any = _aten.view_as_real.default

#: Their parts share storage although their schema says otherwise, and what says so.
DECLARED_SPLIT: dict[Any, Any] = {
    _aten.unsafe_split.Tensor: _aten.split.Tensor,
    _aten.unsafe_split_with_sizes.default: _aten.split_with_sizes.default,
}
# So do what these return, and the parts above.
_HIDDEN_VIEWS = frozenset(
    {_aten._unsafe_view.default, _aten._reshape_alias.default, *DECLARED_SPLIT}
)

# The arguments that say whether a random operator draws at all, and the value of each at
# which it does not.
_SILENT = {"dropout_p": 0.0, "train": False, "training": False}


# Of draws from keys: from the arguments and the result to the bytes that the kernel holds beside it.
WORKSPACES: dict[Any, Callable[[Sequence[Any], Any], int]] = {}


class ValueLike(Protocol):
    """The attributes of a graph's value that this module reads."""

    @property
    def op(self) -> Callable[..., Any] | None: ...
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> tuple[tuple[str, Any], ...]: ...


def constant(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that the traced function made from literals."""
    return tensor


def short_name(op: Any) -> str:
    """Its name without the overload: "aten.mm" for torch.ops.aten.mm.default."""
    if isinstance(op, schemas.OpOverload):
        return str(op.overloadpacket)
    return "input" if op is None else getattr(op, "__name__", str(op))


def full_name(op: Any) -> str:
    """Its name with the overload, the same in every process."""
    return op.name() if isinstance(op, schemas.OpOverload) else short_name(op)


def is_mutable(op: Any) -> bool:
    """Whether an operator writes to one of its arguments."""
    return isinstance(op, schemas.OpOverload) and schemas.schema_of(op).is_mutable


def is_settled_by(op: Any) -> bool:
    """Whether an operator's write, done a second time, changes nothing: of `max_norm`."""
    return op is torch.ops.aten.embedding_renorm.default


def is_check(op: Any) -> bool:
    """Whether an operator only checks: it returns nothing, and may raise."""
    return isinstance(op, schemas.OpOverload) and not schemas.schema_of(op).returns


def viewed(value: ValueLike) -> int | None:
    """The index of the value whose storage this one shares, None if it has its own."""
    is_op = isinstance(value.op, schemas.OpOverload)
    is_view = is_op and value.args and returns_view(value.op)
    return getattr(value.args[0], "index", None) if is_view else None


def read_by_sizes(value: ValueLike) -> Sequence[Any]:
    """The arguments of which an operator reads the sizes and strides alone."""
    if value.op is _CONVOLUTION_BACKWARD and not value.kwargs:
        # The gradient of the input reads the weight, and that of the weight the input.
        _, given, weight, *_, (gives_inputs, gives_weights, _) = value.args
        return [
            *([] if gives_weights else [given]),
            *([] if gives_inputs else [weight]),
        ]
    place = _BY_SIZES.get(value.op)
    return [] if place is None else [value.args[place]]


def ends_gradient(value: ValueLike) -> bool:
    """Whether a value is another one, for all but its derivatives."""
    return value.op in (DETACHED, UNRECORDED)


def _has_view_schema(op: Any) -> bool:
    if op in _HIDDEN_VIEWS:
        return True
    if not isinstance(op, schemas.OpOverload):
        return False  # one that takes functions
    aliases = [each.alias_info for each in schemas.schema_of(op).returns]
    return bool(aliases) and all(each and not each.is_write for each in aliases)


#: Whether the result of an operator shares storage with an argument.
returns_view: Callable[[Any], bool] = functools.cache(_has_view_schema)


def may_draw(op: Any) -> bool:
    """Whether an operator takes numbers from a generator with some arguments."""
    is_op = isinstance(op, schemas.OpOverload)
    return is_op and torch.Tag.nondeterministic_seeded in op.tags


def draws(value: ValueLike) -> bool:
    """Whether an operator takes numbers from a generator when it is called so."""
    return draws_with(value.op, value.args, dict(value.kwargs))


def draws_with(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator takes numbers from a generator with these arguments."""
    if not may_draw(op):
        return False
    given = arguments(op, args, kwargs)
    return all(given.get(name, None) != silent for name, silent in _SILENT.items())


# The in-place operator that became a pure one, and the inverse.
IN_PLACE_OF: dict[Any, Any] = {
    _aten.bernoulli.p: _aten.bernoulli_.float,
    _aten.bernoulli.Tensor: _aten.bernoulli_.Tensor,
    _aten.uniform.default: _aten.uniform_.default,
    _aten.normal_functional.default: _aten.normal_.default,
    _aten.exponential.default: _aten.exponential_.default,
    _aten.geometric.default: _aten.geometric_.default,
    _aten.cauchy.default: _aten.cauchy_.default,
    _aten.log_normal.default: _aten.log_normal_.default,
    _aten.random.default: _aten.random_.default,
    _aten.random.to: _aten.random_.to,
    getattr(_aten.random, "from"): getattr(_aten.random_, "from"),
}
PURE_OF = {in_place: pure for pure, in_place in IN_PLACE_OF.items()}


def draws_from(value: ValueLike) -> torch.Generator | None:
    """The generator that an operator is told to draw from, None for the default one."""
    given = (*value.args, *(each for _, each in value.kwargs))
    return next((each for each in given if isinstance(each, torch.Generator)), None)


def arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """An operator's arguments by name, defaults included."""
    declared = schemas.schema_of(op).arguments
    named = {x.name: x.default_value for x in declared if x.has_default_value()}
    named.update(zip((each.name for each in declared), args, strict=False))
    return named | kwargs


def is_rng_state(op: Any) -> bool:
    """Whether an operator returns the state of a generator or of a tracker."""
    return short_name(op) in ("remat.rng_state", "remat.stream_state")


def is_keyed(op: Any) -> bool:
    """Whether an operator draws from a key, or derives keys: see `remat.random`."""
    return isinstance(op, schemas.OpOverload) and op.name().startswith("remat::random_")


def maker(value: ValueLike, values: Sequence[ValueLike]) -> Any:
    """The operator behind a value: past getitem and matmul's last view."""
    while value.op is operator.getitem or value.op in _HIDDEN_VIEWS:
        index: int = value.args[0].index
        value = values[index]
    return value.op


def made_by(value: ValueLike, values: Sequence[ValueLike]) -> str:
    return short_name(maker(value, values))
