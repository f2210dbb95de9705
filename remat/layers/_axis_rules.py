"""What operators do to the axis that a function is tiled along.

A rule takes a step one of whose arguments has something of the axis. It raises `MixesError`
where a result depends on several places of the axis at once. An operator without a rule is
taken to mix them. Where the axis is in a result is not for rules to say: traces of two lengths
show which dimension is as long as a tile.
"""

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any, TypeAlias, final

import torch

from remat._graph import operators
from remat._graph.meta import TensorMeta
from remat._graph.values import Value
from remat._torch import schemas
from remat._user_lines import warn
from remat.policies._by_op import bare_name


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Along:
    """Part of the axis: each step along dimension `dim` belongs to one place on it.

    The dimension may be a product of several, of which the axis is one: `inner` is the product
    of those behind it.
    """

    dim: int
    inner: int = 1


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Alike:
    """Nothing of the axis: the value is the same whichever tile runs.

    Along `dims` its slices are equal (or independent draws), so that they suit any tile.
    `is_zero` says that all of it is.
    """

    dims: frozenset[int] = frozenset()
    is_zero: bool = False


#: torch has no tensor of more dimensions.
EVERY_DIM = frozenset(range(64))


@final
class Total(enum.Enum):
    """Everything of the axis, in a way that tiles can make: their sum, or their mean."""

    SUM = "sum"
    MEAN = "mean"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """A random key, which each tile gets as one of its own."""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Mixed:
    """Several places of the axis at once, in a way that tiles cannot make.

    `step` is the operator that did so, with its line, and `why` says how.
    """

    step: str
    why: str


State: TypeAlias = Along | Alike | Total | Key | Mixed


class MixesError(Exception):
    """Raised by a rule where an operator mixes places of the axis; the text says how."""


@final
@dataclasses.dataclass(frozen=True)
class Operand:
    """A tensor: what it has of the axis, and its metadata in a tile and in the whole."""

    state: State
    meta: TensorMeta
    whole: TensorMeta

    @property
    def is_alike(self) -> bool:
        """Whether it has nothing of the axis."""
        return isinstance(self.state, Alike)

    @property
    def sized(self) -> tuple[int, ...]:
        """The dimensions whose length depends on that of the tile."""
        sizes = zip(self.meta.shape, self.whole.shape, strict=True)
        return tuple(dim for dim, (one, other) in enumerate(sizes) if one != other)

    def lengths(self, dim: int) -> tuple[int, int]:
        """How long a dimension is in a tile and in the whole."""
        return self.meta.shape[dim], self.whole.shape[dim]

    def suits(self, dim: int) -> bool:
        """Whether it may meet the axis at a dimension, which it has nothing of."""
        dims = self.state.dims if isinstance(self.state, Alike) else ()
        is_spread = dim < 0 or self.meta.shape[dim] == 1 or self.meta.stride[dim] == 0
        return is_spread or dim in dims


@final
@dataclasses.dataclass(frozen=True)
class AxisStep:
    """One operator: its arguments by name, and what the tensors among them have."""

    value: Value
    given: dict[str, Any]
    operands: tuple[Operand, ...]  # the tensors, in the order of the arguments
    by_name: dict[str, Operand]  # those that are arguments by themselves
    out: Operand  # its first result, whose state is not known yet
    lengths: tuple[int, int]  # of the axis, in a tile and in the whole

    @property
    def name(self) -> str:
        """Its operator's name, without "aten."."""
        return bare_name(self.value.op)

    @property
    def along(self) -> list[tuple[Along, Operand]]:
        """The operands that have part of the axis, and where."""
        pairs = [(each.state, each) for each in self.operands]
        return [(state, each) for state, each in pairs if isinstance(state, Along)]

    @property
    def first(self) -> tuple[Along, Operand]:
        """Where the axis is in its first tensor, the only one that has it."""
        one, *others = self.operands
        if isinstance(one.state, Along) and all(each.is_alike for each in others):
            return one.state, one
        raise MixesError("the axis is in an argument in which it cannot be followed.")

    @property
    def is_view(self) -> bool:
        """Whether its result shares memory with its argument."""
        return operators.returns_view(self.value.op)

    @property
    def is_pointwise(self) -> bool:
        """Whether it works element by element."""
        op: Any = self.value.op
        is_tagged = (
            isinstance(op, schemas.OpOverload) and torch.Tag.pointwise in op.tags
        )
        return is_tagged or self.name in _POINTWISE


#: Rules return None where each place of the axis is kept in a dimension of its own.
Rule: TypeAlias = Callable[[AxisStep], Along | Total | None]

_POINTWISE = (
    "clone", "_to_copy", "lift_fresh_copy", "native_dropout", "bernoulli", "complex", "polar",
    "hardswish", "_prelu_kernel", "log_sigmoid_forward",
)  # fmt: skip
_PARTS = frozenset(["select", "slice", "diagonal", "as_strided", "unfold", "split"])


def require_sizes(step: AxisStep) -> None:
    """Refuses a step that makes other numbers of a dimension that is as long as a tile.

    Such a dimension is shorter than in the whole. What keeps each element in its place may
    have it, and so may what meets the axis there and is the same at each place of it.
    """
    is_view = step.is_view and step.name not in _PARTS
    keeps_places = is_view or step.is_pointwise or step.name == "repeat"
    has_axis = bool(step.along)
    if keeps_places and not has_axis:
        return
    if len({state.inner for state, _ in step.along}) > 1:
        raise MixesError("the axis meets itself in another order.")
    for each in step.operands:
        if isinstance(each.state, Along):
            continue
        if not has_axis and each.sized:
            raise MixesError("it computes with as many values as a tile is long.")
        if not all(map(each.suits, each.sized)):
            raise MixesError(
                f"it meets {each.meta}, which has a value for each place within a tile but "
                "is the same for all tiles."
            )


def rule_of(step: AxisStep) -> Rule | None:
    """The rule of an operator; None where nothing is known of it."""
    if any(isinstance(each.state, Total) for each in step.operands):
        return _linear_in_total
    if step.name in _RULES:
        return _RULES[step.name]
    return _keeps_places if step.is_view or step.is_pointwise else None


def place_of(step: AxisStep, result: Operand) -> Along | None:
    """Where the axis is in a result, if this has each place of the axis once."""
    (inner, lengths), *others = {
        (state.inner, each.lengths(state.dim)) for state, each in step.along
    }
    dims = result.sized
    is_there = len(dims) == 1 and result.lengths(dims[0]) == lengths
    return Along(dims[0], inner) if is_there and not others else None


def _keeps_places(step: AxisStep) -> None:
    """Moves elements, or computes each of what stands at its own place."""
    if step.name in ("diagonal", "as_strided"):
        raise MixesError("it takes a part of the axis.")


def _linear_in_total(step: AxisStep) -> Total:
    """What is made of a sum or a mean over the axis: where that is linear, one again."""
    totals = [each for each in step.operands if not each.is_alike]
    kinds = [each.state for each in totals]
    name, kind, is_only = step.name, kinds[0], len(kinds) == 1
    is_cut_off = totals[0].meta.is_differentiable > step.out.meta.is_differentiable
    if name in ("add", "sub"):
        # A mean of equal values is that value, a sum is not.
        is_linear = kind is Total.MEAN or len(kinds) == len(step.value.args)
    elif name in ("stack", "cat"):
        is_linear = kind is Total.MEAN or len(kinds) == len(step.operands)
    elif name == "div":
        is_rounded = step.given.get("rounding_mode") is not None
        is_linear = is_only and not step.operands[0].is_alike and not is_rounded
    elif step.is_view:
        is_linear = is_only and step.out.meta.dtype == totals[0].meta.dtype
    else:
        is_linear = is_only and name in _KEEP_TOTALS
    is_linear = is_linear and not is_cut_off and not any(map(_wraps, totals))
    if len({*kinds}) == 1 and is_linear and isinstance(kind, Total):
        return kind
    raise MixesError("what was summed along the axis is not used linearly.")


def _wraps(total: Operand) -> bool:
    """Whether sums of this dtype are no sums of numbers: of booleans, and of short integers."""
    dtype = total.meta.dtype
    return dtype.itemsize < 4 and not dtype.is_floating_point


#: Linear in one operand where the others are the same for all tiles.
_KEEP_TOTALS = frozenset(
    ["mul", "neg", "clone", "_to_copy", "sum", "mean", "mm", "bmm", "mv", "dot"]
)


def _reshape(step: AxisStep) -> Along:
    """A view that merges dimensions, or splits them."""
    state, operand = step.first
    (dim, *others), inner = step.out.sized or (0,), 0
    for given, made, length in zip(
        (operand.meta, operand.whole),
        (step.out.meta, step.out.whole),
        step.lengths,
        strict=True,
    ):
        block = state.inner * math.prod(given.shape[state.dim + 1 :])
        behind, whole = (math.prod(made.shape[k:]) for k in (dim + 1, dim))
        if math.prod(made.shape) != math.prod(given.shape):
            raise MixesError("it reads elements as others of another dtype.")
        if not whole:
            raise MixesError("it has no elements by which the axis could be followed.")
        is_inside = behind <= block and block * length <= whole
        if others or not is_inside or block % behind or whole % (block * length):
            raise MixesError("it merges the axis with others in another order.")
        inner = block // behind
    return Along(dim, inner)


def _along_dims(step: AxisStep) -> Total | None:
    """Works along the dimensions that an argument names: reductions, softmax, sorts."""
    state, operand = step.first
    named: Any = step.given.get("dims", step.given.get("dim"))
    count = len(operand.meta.shape)
    listed: Any = [named] if isinstance(named, int) else named or range(count)
    if state.dim not in {each % count for each in listed}:
        return None
    if step.name in _TOTALS:
        return _TOTALS[step.name]
    raise MixesError("it works along the axis.")


_TOTALS = {
    "sum": Total.SUM,
    "nansum": Total.SUM,
    "count_nonzero": Total.SUM,
    "mean": Total.MEAN,
}


def _last_dims(count: Callable[[AxisStep], int]) -> Rule:
    """The rule of what works along its last dimensions."""

    def rule(step: AxisStep) -> None:
        state, operand = step.first
        if state.dim >= len(operand.meta.shape) - count(step):
            raise MixesError("it works along the axis.")

    return rule


def _besides_dim(step: AxisStep) -> None:
    """Joins, reads or writes along `dim`, and place by place otherwise."""
    named = step.given["dim"] % len(step.operands[0].meta.shape)
    dims = {state.dim for state, _ in step.along} - {named}
    # What has one place there is not broadcast, but meets the first place of each tile.
    if len(dims) != 1 or not all(dims.issubset(each.sized) for each in step.operands):
        raise MixesError("it takes elements from anywhere on the axis.")


def _add_by_index(step: AxisStep) -> Total | None:
    """Adds to rows that an index names; over the axis that is a sum, if they begin as zeros."""
    is_scatter = step.name == "scatter_add"
    source = step.by_name["src" if is_scatter else "source"]
    dim = step.given["dim"] % max(len(source.meta.shape), 1)
    pairs = [(step.by_name["index"], dim if is_scatter else 0), (source, dim)]
    # Unlike lengths: of the longer one only a part is read.
    is_there = len({each.lengths(place) for each, place in pairs}) == 1 and all(
        place in each.sized
        and (not isinstance(each.state, Along) or each.state.dim == place)
        for each, place in pairs
    )
    base = step.by_name["self"].state
    begins_as_zeros = isinstance(base, Alike) and base.is_zero
    if is_there and begins_as_zeros and not step.out.sized:
        return Total.SUM
    if is_scatter:
        return _besides_dim(step)
    raise MixesError("it adds to rows that are not zero, or that the axis has.")


def _bucketize(step: AxisStep) -> None:
    if step.first and step.by_name["boundaries"].sized:
        raise MixesError("it counts as many boundaries as a tile is long.")


def _index_by_tensors(step: AxisStep) -> None:
    """Indexing by tensors: in what is the same for all, or the same for all."""
    source, *indices = step.operands
    dims = [0]
    if "indices" in step.given and step.name == "index":
        dims = [k for k, each in enumerate(step.given["indices"]) if each is not None]
    elif "dim" in step.given:
        dims = [step.given["dim"] % len(source.meta.shape)]
    state, is_alike = source.state, all(each.is_alike for each in indices)
    is_beside = isinstance(state, Along) and is_alike and state.dim not in dims
    if not (is_beside or source.is_alike):
        raise MixesError("it takes elements from anywhere on the axis.")


def _product(step: AxisStep) -> Total | None:
    """A product of matrices or vectors, which may be summed over the axis."""
    names = ("mat1", "batch1", "self")
    left = next(step.by_name[name] for name in names if name in step.by_name)
    if len(left.meta.shape) - 1 not in left.sized:
        return None
    if step.name in ("addmm", "baddbmm"):
        raise MixesError("it adds something to each tile's part of a sum.")
    return Total.SUM


def _convolution(step: AxisStep) -> None:
    """Along the batch, or where the kernel has one place and stays at it."""
    dim, given = step.first[0].dim, step.given
    moves = [
        ([*given[name]] * dim)[dim - 2]
        for name in ("stride", "padding", "output_padding")
        if dim > 1
    ]
    if moves != [1, 0, 0] or step.by_name["weight"].meta.shape[dim] != 1:
        _of_batch(step)


def _attention(step: AxisStep) -> None:
    """Of queries (b, h, q, d), keys (b, h, k, d), values (b, h, k, v), and (b, h, q, v)."""
    dim, *more = {state.dim + 4 - len(each.meta.shape) for state, each in step.along}
    others = {2: ("key", "value"), 3: ("query", "key")}.get(dim, ())
    is_apart = not more and len(step.out.sized) == 1
    if not is_apart or not all(step.by_name[name].is_alike for name in others):
        raise MixesError("it combines each place of the axis with others.")
    if dim == 2 and step.given.get("is_causal"):
        raise MixesError("its causal mask tells places on the axis apart.")


def _batch_norm(step: AxisStep) -> None:
    if step.given.get("training", step.given.get("train", False)):
        raise MixesError("it takes statistics along the batch.")
    _of_batch(step)


def _loss(step: AxisStep) -> Total | None:
    """A loss of each element, then summed, averaged, or neither."""
    if len({state.dim - len(each.meta.shape) for state, each in step.along}) != 1:
        raise MixesError("the axis meets itself in another dimension.")
    return _by_reduction(step)


def _nll_loss(step: AxisStep) -> Total | None:
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
    return _by_reduction(step)


def _by_reduction(step: AxisStep) -> Total | None:
    reduction: int = step.given["reduction"]
    return (None, Total.MEAN, Total.SUM)[reduction]


_of_batch = _last_dims(lambda step: len(step.first[1].meta.shape) - 1)

_RULES: dict[str, Rule] = {
    name: rule
    for names, rule in (
        ("view _unsafe_view _reshape_alias", _reshape),
        ("stack repeat", _keeps_places),
        ("bucketize", _bucketize),
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
            "pixel_unshuffle tril triu linalg_cholesky_ex linalg_inv_ex linalg_matrix_exp",
            _last_dims(lambda step: 2),
        ),
        ("constant_pad_nd", _last_dims(lambda step: len(step.given["pad"]) // 2)),
        (
            "native_layer_norm _fused_rms_norm",
            _last_dims(lambda step: len(step.given["normalized_shape"])),
        ),
        ("cat gather scatter scatter_reduce slice_scatter linalg_cross", _besides_dim),
        ("index_add scatter_add", _add_by_index),
        ("index index_select embedding", _index_by_tensors),
        ("mm addmm bmm baddbmm mv dot", _product),
        ("convolution", _convolution),
        ("native_group_norm", _of_batch),
        (
            "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
            "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
            _attention,
        ),
        (
            "native_batch_norm _native_batch_norm_legit_functional "
            "_native_batch_norm_legit_no_training cudnn_batch_norm miopen_batch_norm "
            "remat.cudnn_batch_norm remat.miopen_batch_norm",
            _batch_norm,
        ),
        (
            "mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss "
            "binary_cross_entropy_with_logits",
            _loss,
        ),
        ("nll_loss_forward nll_loss2d_forward", _nll_loss),
    )
    for name in names.split()
}
