"""What operators do to the axis that a function is tiled along, operator by operator.

A rule takes a step one of whose arguments has something of the axis, and says what its results
have of it. It raises `MixesError` where a result depends on several places of the axis at once.
An operator without a rule is taken to mix them.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any, TypeAlias, cast, final

import torch

from remat._graph import operators
from remat._graph.meta import TensorMeta
from remat._graph.values import Value
from remat._torch import schemas
from remat._user_lines import warn
from remat.layers._axis import Alike, Along, MixesError, State, Total


@final
@dataclasses.dataclass(frozen=True)
class Operand:
    """A tensor that a step reads: what it has of the axis, and its metadata."""

    state: State
    meta: TensorMeta
    sized: frozenset[int] = (
        frozenset()
    )  # the dimensions that are as long as the tile is

    def suits(self, dim: int) -> bool:
        """Whether it may meet the axis at a dimension, which it has nothing of."""
        dims = self.state.dims if isinstance(self.state, Alike) else ()
        is_spread = dim < 0 or self.meta.shape[dim] == 1 or self.meta.stride[dim] == 0
        return is_spread or dim in dims


@final
@dataclasses.dataclass(frozen=True)
class Step:
    """One operator: its arguments by name, and what the tensors among them have."""

    value: Value
    given: dict[str, Any]
    operands: tuple[Operand, ...]  # the tensors, in the order of the arguments
    by_name: dict[str, Operand]  # those that are arguments by themselves
    out: TensorMeta  # its first result
    length: int  # of the axis, in a tile

    @property
    def name(self) -> str:
        """Its operator's name, without "aten."."""
        return operators.short_name(self.value.op).removeprefix("aten.")

    @property
    def first(self) -> tuple[Along, TensorMeta]:
        """Where the axis is in its first tensor, the only one that has it."""
        one, *others = self.operands
        if isinstance(one.state, Along) and all(_is_alike(each) for each in others):
            return one.state, one.meta
        raise MixesError("the axis is in an argument in which it cannot be followed.")


Rule: TypeAlias = Callable[[Step], State]


def require_no_size(step: Step) -> None:
    """Refuses a step that makes other numbers of a dimension that is as long as a tile.

    Such a dimension is shorter than in the whole. What keeps each element in its place may
    have it, and so may what meets the axis there and is the same at each place of it.
    """
    if keeps_places(step):
        return
    has_axis = not all(map(_is_alike, step.operands))
    for each in step.operands:
        own = set[int]()
        if isinstance(each.state, Along):
            own = {each.state.dim}
        elif has_axis:
            own = {dim for dim in each.sized if each.suits(dim)}
        if each.sized - own:
            raise MixesError("it computes with as many values as a tile is long.")


def keeps_places(step: Step) -> bool:
    """Whether a step neither combines elements nor takes some of them."""
    if operators.returns_view(step.value.op):
        return step.name not in _PARTS
    return is_pointwise(step.value.op) or step.name in ("clone", "_to_copy", "repeat")


_PARTS = frozenset(["select", "slice", "diagonal", "as_strided", "unfold", "split"])


def rule_of(step: Step) -> Rule | None:
    """The rule of an operator; None where nothing is known of it."""
    op, name = step.value.op, step.name
    if any(isinstance(each.state, Total) for each in step.operands):
        return _linear
    if name in _RULES:
        return _RULES[name]
    if operators.returns_view(op):
        return _view
    return pointwise if is_pointwise(op) else None


def is_pointwise(op: Any) -> bool:
    """Whether torch says that an operator works element by element."""
    return isinstance(op, schemas.OpOverload) and torch.Tag.pointwise in op.tags


def pointwise(step: Step) -> State:
    """Each result is made of what stands at its own place, with broadcasting."""
    out, found = step.out, set[Along]()
    for each in step.operands:
        if isinstance(each.state, Along):
            found.add(_aligned(each.state, each.meta, out))
    if len(found) != 1:
        raise MixesError("the axis meets itself in another dimension.")
    (place,) = found
    for each in step.operands:
        _require_suits(each, place.dim - len(out.shape) + len(each.meta.shape))
    return place


def _aligned(state: Along, meta: TensorMeta, out: TensorMeta) -> Along:
    dim = state.dim + len(out.shape) - len(meta.shape)
    if out.shape[dim] != meta.shape[state.dim]:
        raise MixesError("the axis is broadcast.")
    return Along(dim, state.inner)


def _require_suits(operand: Operand, dim: int) -> None:
    if _is_alike(operand) and not operand.suits(dim):
        raise MixesError(
            f"it meets {operand.meta}, which has a value for each place within a tile but "
            "is the same for all tiles."
        )


def _is_alike(operand: Operand) -> bool:
    return isinstance(operand.state, Alike)


def _linear(step: Step) -> State:
    """What is made of a sum or a mean over the axis: where that is linear, one again."""
    kinds = [each.state for each in step.operands if not _is_alike(each)]
    name, kind, is_only = step.name, kinds[0], len(kinds) == 1
    if name in ("add", "sub"):
        # A mean of equal values is that value, a sum is not.
        is_linear = kind is Total.MEAN or len(kinds) == len(step.value.args)
    elif name == "div":
        is_linear = is_only and not _is_alike(step.operands[0])
    elif name == "_to_copy":
        given = step.operands[0].meta
        is_linear = given.is_differentiable == step.out.is_differentiable
    else:
        is_linear = is_only and (
            name in _KEEP_TOTALS or operators.returns_view(step.value.op)
        )
    if len({*kinds}) != 1 or not is_linear:
        raise MixesError("what was summed along the axis is not used linearly.")
    return kind


_KEEP_TOTALS = frozenset(["mul", "neg", "clone", "sum", "mean"])


def _view(step: Step) -> State:
    """A view: found by what it makes of strides that tell where the axis is."""
    state, meta = step.first
    if step.name in ("diagonal", "as_strided") or not _is_whole(step, state.dim):
        raise MixesError("it takes a part of the axis.")
    strides = [int(dim == state.dim) for dim, _ in enumerate(meta.shape)]
    probe = torch.empty_strided(meta.shape, strides, dtype=meta.dtype, device="meta")
    args, kwargs = step.value.args[1:], dict(step.value.kwargs)
    made: Any = cast("Any", step.value.op)(probe, *args, **kwargs)
    first = made if isinstance(made, torch.Tensor) else made[0]
    sizes = zip(first.shape, first.stride(), strict=True)
    dims = [dim for dim, (size, stride) in enumerate(sizes) if stride and size > 1]
    if len(dims) != 1 or first.shape[dims[0]] != meta.shape[state.dim]:
        raise MixesError("it takes a part of the axis.")
    return Along(dims[0], state.inner)


def _is_whole(step: Step, dim: int) -> bool:
    """Whether a step is no slice of a dimension, by numbers that may fit a tile by chance."""
    given = step.given
    if step.name != "slice" or given["dim"] % len(step.out.shape) != dim:
        return True
    size = step.operands[0].meta.shape[dim]
    is_open = given["end"] is None or given["end"] in (size, sys.maxsize)
    return is_open and given["start"] in (None, 0)


def _reshape(step: Step) -> State:
    """A view that merges dimensions, or splits them."""
    state, meta = step.first
    block = state.inner * math.prod(meta.shape[state.dim + 1 :])
    behind = math.prod(step.out.shape)
    if behind != math.prod(meta.shape):
        raise MixesError("it reads elements as others of another dtype.")
    if not behind:
        raise MixesError("it has no elements by which the axis could be followed.")
    for dim, size in enumerate(step.out.shape):
        behind, whole = behind // size, behind
        is_inside = behind <= block and block * step.length <= whole
        if is_inside and block % behind == 0 and whole % (block * step.length) == 0:
            return Along(dim, block // behind)
    raise MixesError("it merges the axis with others in another order.")


def _along_dims(step: Step) -> State:
    """Works along the dimensions that an argument names: reductions, softmax, sorts."""
    state, meta = step.first
    named: Any = step.given.get("dims", step.given.get("dim"))
    count = len(meta.shape)
    listed: Any = [named] if isinstance(named, int) else named or range(count)
    dims = {each % count for each in listed}
    if state.dim in dims:
        return _over_axis(step.name)
    is_kept = len(step.out.shape) == count
    removed = 0 if is_kept else sum(each < state.dim for each in dims)
    return Along(state.dim - removed, state.inner)


def _over_axis(name: str) -> Total:
    if name in _TOTALS:
        return _TOTALS[name]
    raise MixesError("it works along the axis.")


_TOTALS = {"sum": Total.SUM, "nansum": Total.SUM, "mean": Total.MEAN}


def _last_dims(count: Callable[[Step], int]) -> Rule:
    """The rule of what works along its last dimensions."""

    def rule(step: Step) -> State:
        state, meta = step.first
        if state.dim >= len(meta.shape) - count(step):
            raise MixesError("it works along the axis.")
        return state

    return rule


def _besides_dim(step: Step) -> Along:
    """Joins, reads or writes along `dim`, and place by place otherwise."""
    found = {each.state for each in step.operands if not _is_alike(each)}
    (place, *others), ndim = found, len(step.operands[0].meta.shape)
    if others or not isinstance(place, Along) or place.dim == step.given["dim"] % ndim:
        raise MixesError("it takes elements from anywhere on the axis.")
    length = max(each.meta.shape[place.dim] for each in step.operands)
    for each in step.operands:
        _require_suits(each, place.dim)
        if each.meta.shape[place.dim] != length:  # it is not broadcast, but cut
            raise MixesError("it takes elements of the first places of each tile.")
    return place


def _stack(step: Step) -> State:
    """Joins along a new dimension."""
    place = pointwise(dataclasses.replace(step, out=step.operands[0].meta))
    assert isinstance(place, Along)
    is_behind = step.given["dim"] % len(step.out.shape) <= place.dim
    return Along(place.dim + is_behind, place.inner)


def _repeat(step: Step) -> State:
    state, meta = step.first
    dim = state.dim + len(step.out.shape) - len(meta.shape)
    if step.given["repeats"][dim] != 1:
        raise MixesError("it repeats the axis.")
    return Along(dim, state.inner)


def _looked_up(source: str, indices: str) -> Rule:
    """The rule of a table in which each place looks up rows of its own."""

    def rule(step: Step) -> State:
        table, places = step.by_name[source], step.by_name[indices]
        if not _is_alike(table) or not isinstance(places.state, Along):
            raise MixesError("it takes elements from anywhere on the axis.")
        offset = step.given.get("dim", 0) % len(table.meta.shape)
        return Along(places.state.dim + offset, places.state.inner)

    return rule


def _index(step: Step) -> State:
    """Indexing by tensors."""
    source, chosen = step.by_name["self"], step.given["indices"]
    firsts = [dim for dim, each in enumerate(chosen) if each is not None]
    is_together = firsts == [*range(firsts[0], firsts[0] + len(firsts))]
    indices = step.operands[1:]
    ndim = max(len(each.meta.shape) for each in indices)
    state = source.state
    if isinstance(state, Along) and all(map(_is_alike, indices)):
        if state.dim in firsts:
            raise MixesError("it takes elements from anywhere on the axis.")
        before = sum(each < state.dim for each in firsts)
        is_behind = not is_together or state.dim > firsts[0]
        return Along(state.dim - before + (ndim if is_behind else 0), state.inner)
    found = {
        Along(each.state.dim + ndim - len(each.meta.shape), each.state.inner)
        for each in indices
        if isinstance(each.state, Along)
    }
    if not _is_alike(source) or len(found) != 1:
        raise MixesError("it takes elements from anywhere on the axis.")
    (place,) = found
    for each in indices:
        _require_suits(each, place.dim - ndim + len(each.meta.shape))
    return Along(place.dim + (firsts[0] if is_together else 0), place.inner)


def _by_letters(text: str) -> Rule:
    """The rule of an operator whose dimensions have letters, as in an einsum.

    A letter that the result lacks is summed over after "->", and mixed after "=>". What
    stands behind "+" is broadcast against the result; "*" stands for dimensions that mix.
    """
    given, arrow, result = text.partition("->" if "->" in text else "=>")
    letters = dict(cast("tuple[str, str]", each.split(":")) for each in given.split())
    result = result.strip()

    def rule(step: Step) -> State:
        found = {
            (_letter(each, letters.get(name, "*")), each.state.inner)
            for name, each in step.by_name.items()
            if isinstance(each.state, Along)
        }
        if len(found) != 1:
            raise MixesError("it combines each place of the axis with others.")
        ((letter, inner),) = found
        is_summed = arrow == "->" and letter not in result
        if letter == "*" or (letter not in result and not is_summed):
            raise MixesError("it works along the axis.")
        for name, each in step.by_name.items():
            own = letters.get(name, "*")
            if letter in own:
                _require_suits(each, _dim(each, own, letter))
            elif is_summed and own.startswith("+"):
                raise MixesError("it adds something to each tile's part of a sum.")
        return Total.SUM if is_summed else Along(result.index(letter), inner)

    return rule


def _dim(operand: Operand, letters: str, letter: str) -> int:
    """The dimension that a letter stands for; negative if it is not there."""
    own = letters.removeprefix("+")
    behind = len(operand.meta.shape) - len(own) if letters.startswith("+") else 0
    return own.index(letter) + behind


def _letter(operand: Operand, letters: str) -> str:
    state = operand.state
    assert isinstance(state, Along)
    own = letters.removeprefix("+")
    at = state.dim
    if letters.startswith("+"):
        at += len(own) - len(operand.meta.shape)
    return own[at] if at < len(own) else "*"


_attention_dims = _by_letters(
    "query:bhqd key:bhkd value:bhkv attn_mask:+bhqk attn_bias:+bhqk => bhqv"
)
_batch_norm_dims = _by_letters("input:b* => b")


def _attention(step: Step) -> State:
    state = _attention_dims(step)
    is_over_queries = isinstance(state, Along) and state.dim == 2
    if is_over_queries and step.given.get("is_causal"):
        raise MixesError("its causal mask tells places on the axis apart.")
    return state


def _batch_norm(step: Step) -> State:
    is_training = step.given.get("training", step.given.get("train", False))
    if is_training:
        raise MixesError("it takes statistics along the batch.")
    return _batch_norm_dims(step)


def _loss(step: Step) -> State:
    """A loss of each element, then summed, averaged, or neither."""
    out = max((each.meta for each in step.operands), key=lambda meta: len(meta.shape))
    return _reduced(step, pointwise(dataclasses.replace(step, out=out)))


def _nll_loss(step: Step) -> State:
    """Of (N, C) or (N, C, d1, d2) and targets without C."""
    logits, targets = step.by_name["self"], step.by_name["target"]
    state = targets.state
    if not isinstance(logits.state, Along) or not isinstance(state, Along):
        raise MixesError("only one of its arguments has the axis.")
    behind = 1 if len(logits.meta.shape) > 1 and state.dim > 0 else 0
    if logits.state != Along(state.dim + behind, state.inner):
        raise MixesError("the axis is in different dimensions.")
    if step.given["reduction"] == 1:
        if step.given["weight"] is not None:
            raise MixesError("it averages by the weights of the targets.")
        warn(
            where="tiled: cross_entropy",
            what="averages over the targets that are not ignored.",
            why="Tiles are weighted by their sizes, which is the same only where no target "
            "is ignored.",
            do='Use `layers.tiled_cross_entropy`, or reduction="sum" and a division after '
            "the call.",
        )
    return _reduced(step, state)


def _reduced(step: Step, state: State) -> State:
    states: tuple[State, ...] = (state, Total.MEAN, Total.SUM)
    reduction: int = step.given["reduction"]
    return states[reduction]


def _size_of(argument: str) -> Callable[[Step], int]:
    return lambda step: len(step.given[argument])


_RULES: dict[str, Rule] = {
    name: rule
    for names, rule in (
        ("view _unsafe_view _reshape_alias", _reshape),
        (
            "clone _to_copy lift_fresh_copy native_dropout bernoulli complex polar bucketize "
            "nan_to_num",
            pointwise,
        ),
        (
            "sum nansum mean amax amin max min argmax argmin aminmax prod any all var var_mean "
            "std std_mean logsumexp norm linalg_vector_norm count_nonzero median nanmedian mode "
            "kthvalue _softmax _log_softmax _safe_softmax cumsum cumprod cummax cummin "
            "logcumsumexp sort argsort topk flip roll glu _fft_r2c _fft_c2c _fft_c2r",
            _along_dims,
        ),
        (
            "avg_pool2d max_pool2d_with_indices _adaptive_avg_pool2d upsample_nearest2d "
            "upsample_bilinear2d upsample_bicubic2d _upsample_nearest_exact2d pixel_shuffle "
            "pixel_unshuffle tril triu linalg_cholesky_ex linalg_inv_ex",
            _last_dims(lambda step: 2),
        ),
        ("constant_pad_nd", _last_dims(lambda step: len(step.given["pad"]) // 2)),
        ("native_layer_norm _fused_rms_norm", _last_dims(_size_of("normalized_shape"))),
        ("cat gather scatter scatter_add scatter_reduce", _besides_dim),
        ("stack", _stack),
        ("repeat", _repeat),
        ("index", _index),
        ("embedding", _looked_up("weight", "indices")),
        ("index_select", _looked_up("self", "index")),
        ("mm", _by_letters("self:ik mat2:kj -> ij")),
        ("addmm", _by_letters("self:+ij mat1:ik mat2:kj -> ij")),
        ("bmm", _by_letters("self:bik mat2:bkj -> bij")),
        ("baddbmm", _by_letters("self:+bij batch1:bik batch2:bkj -> bij")),
        ("mv", _by_letters("self:ik vec:k -> i")),
        ("dot", _by_letters("self:k tensor:k ->")),
        ("convolution native_group_norm", _by_letters("input:b* => b")),
        (
            "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
            "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
            _attention,
        ),
        (
            "native_batch_norm _native_batch_norm_legit_functional "
            "_native_batch_norm_legit_no_training",
            _batch_norm,
        ),
        (
            "mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss",
            _loss,
        ),
        ("nll_loss_forward nll_loss2d_forward", _nll_loss),
    )
    for name in names.split()
}
