"""Policies without parameters: everything, nothing, and matrix products or attention.

The latter two save the most work per byte. A product of n x n matrices costs n operations for
each element of its output, so saving it avoids more recomputation per byte than saving an
elementwise result. These policies leave out the products inside attention, whose outputs grow
with the square of the sequence; not keeping these is the point of recomputation. The output of
attention is small, and `save_attention_outputs` saves it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from remat.policies._by_op import bare_name
from remat.policies._contract import AbstractPolicy, Operand, Stored, Value
from remat.storage import AbstractStorage

# A leading dimension of the output of these is a batch, where the output has three.
_BATCHED = frozenset(
    {"bmm", "baddbmm", "_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"}
)
_UNBATCHED = (
    "mm addmm addbmm linear matmul _addmm_activation _int_mm _scaled_mm _scaled_mm_v2 "
    "_weight_int8pack_mm _weight_int4pack_mm _sparse_mm _sparse_semi_structured_linear "
    "mkldnn_linear mkldnn._linear_pointwise "
    "mv addmv dot vdot "  # as JAX's dot_general counts too
    "convolution convolution_overrideable _convolution cudnn_convolution "
    "cudnn_convolution_transpose miopen_convolution mkldnn_convolution "
    "mkldnn._convolution_pointwise "
    "convolution_backward"  # at a further order, whose products by a backward are these
)
_MATMULS = _BATCHED.union(_UNBATCHED.split())
_ATTENTION_FUNCTIONS = frozenset({"scaled_dot_product_attention", "flex_attention"})
_ATTENTION_OPERATORS = [
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
    "flex_attention",
]


@final
@dataclass(frozen=True, eq=False, repr=False)
class ParameterFreePolicy(AbstractPolicy):
    """A policy without parameters; stands as a decorator above its rule.

    Laws: it is equal to itself only, prints as its name, and copies and pickles to the
    same object. Its rule is a function at the top of its module.
    """

    rule: Callable[[Value], bool]

    def __post_init__(self) -> None:
        """Takes the rule's name, module and documentation, as `functools.wraps` does."""
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            object.__setattr__(self, name, getattr(self.rule, name))

    def __call__(self, value: Value, /) -> bool:
        return self.rule(value)

    def __repr__(self) -> str:
        return self.rule.__name__

    def __reduce__(self) -> str:
        """The name under which pickle finds this object in its module."""
        return self.rule.__name__


@ParameterFreePolicy
def nothing_saveable(_value: Value, /) -> bool:
    """Saves nothing: everything is recomputed from the inputs. The default.

    Laws: `~nothing_saveable` saves what `everything_saveable` does;
    `nothing_saveable | p` saves what `p` does.

    Example:
        >>> from remat import policies
        >>> policies.as_policy(None) is policies.nothing_saveable
        True
    """
    return False


@ParameterFreePolicy
def everything_saveable(_value: Value, /) -> bool:
    """Permits every value: what the backward reads is saved, as without remat.

    Laws: `everything_saveable & p` saves what `p` does, with `Keep()`.

    Example:
        >>> from remat import policies, storage
        >>> policies.everything_saveable.stored(storage.Keep())
        everything_saveable.stored(Keep())
    """
    return True


def idle_storage(policy: AbstractPolicy) -> AbstractStorage | None:
    """The storage of `nothing_saveable.stored(...)`, which stores nothing; else None."""
    if not isinstance(policy, Stored) or policy.storage.keeps:
        return None
    return policy.storage if policy.policy is nothing_saveable else None


def saves_nothing(policy: AbstractPolicy) -> bool:
    """Whether a policy is meant to save nothing, in whatever storage."""
    bare = policy.policy if isinstance(policy, Stored) else policy
    return bare is nothing_saveable


@ParameterFreePolicy
def save_matmul_outputs(value: Value, /) -> bool:
    """Saves the outputs of matrix products and convolutions, as the user wrote them.

    These are mm, addmm, bmm, baddbmm, products with vectors, convolutions, and the
    quantized, grouped and sparse kinds; in a derivative of a derivative also those of which
    a backward is made. The products inside
    `scaled_dot_product_attention` and `multi_head_attention_forward` do not count:
    `save_matmul_outputs | save_attention_outputs` saves attention's output too.

    Laws: `dots_saveable` is the same object.

    Example:
        >>> from remat import policies
        >>> policies.dots_saveable is policies.save_matmul_outputs
        True
    """
    return _is_matmul(value)


@ParameterFreePolicy
def save_matmul_outputs_no_batch(value: Value, /) -> bool:
    """Saves what `save_matmul_outputs` does, without products that have a batch.

    A product with a batch is a bmm, a baddbmm or a grouped product whose output has a
    leading dimension other than 1, and both of whose factors have the batch. `torch.einsum`
    writes every contraction as a bmm, those without a batch with a leading 1; and `vmap` and
    `matmul` expand a factor that is the same for the whole batch.

    Laws: saves a part of what `save_matmul_outputs` does;
    `dots_with_no_batch_dims_saveable` is the same object.

    Example:
        >>> from remat import policies
        >>> policies.save_matmul_outputs_no_batch
        save_matmul_outputs_no_batch
    """
    is_batched = bare_name(value.op) in _BATCHED and value.shape[0] != 1
    is_shared = any(
        isinstance(each, Operand) and each.stride[:1] == (0,)
        for each in value.args[-2:]  # the factors, after what baddbmm adds
    )
    return _is_matmul(value) and (is_shared or not is_batched)


@ParameterFreePolicy
def save_attention_outputs(value: Value, /) -> bool:
    """Saves the outputs of attention, with the helpers that its backward reads.

    These are what `scaled_dot_product_attention` or `flex_attention` returns, and a fused
    kernel's log-sum-exp. Where torch has no fused kernel, as on a CPU for attention with
    dropout, the call is a chain of plain operators: nothing else of it is saved, so that the
    scores, whose size is quadratic, are recomputed. Attention that is written without such a
    call is not known as attention: name its output (`checkpoint_name`).

    Example:
        >>> from remat import policies
        >>> policies.save_matmul_outputs | policies.save_attention_outputs
        save_matmul_outputs | save_attention_outputs
    """
    name = bare_name(value.op)
    is_fused = name.startswith("_scaled_dot_product_")
    is_operator = name in _ATTENTION_OPERATORS or (
        is_fused and not name.endswith("_backward")
    )
    return is_operator or (value.is_result and value.function in _ATTENTION_FUNCTIONS)


# The names that JAX gave to the two.
dots_saveable: AbstractPolicy = save_matmul_outputs
dots_with_no_batch_dims_saveable: AbstractPolicy = save_matmul_outputs_no_batch


def _is_matmul(value: Value) -> bool:
    name = bare_name(value.op)
    match value.function:
        case "scaled_dot_product_attention":
            return False
        case "multi_head_attention_forward":
            # Its projections are products of matrices, its attention has a batch.
            return name in _MATMULS - _BATCHED
        case _:
            return name in _MATMULS
