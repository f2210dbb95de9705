"""Policies that save the outputs of matrix products, which save the most work per byte.

A product of n x n matrices costs n operations for each element of its output, so saving
it avoids more recomputation per byte than saving an elementwise result. These policies
leave out the products inside attention, whose outputs grow with the square of the
sequence; not keeping these is the point of recomputation.
"""

from remat.policies._contract import AbstractPolicy, Value
from remat.policies._operators import bare_name
from remat.policies._parameter_free import parameter_free

# A leading dimension of the output of these is a batch, where the output has three.
_BATCHED = frozenset(
    {"bmm", "baddbmm", "_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"}
)
_MATMULS = _BATCHED | {
    # products of two matrices
    "mm",
    "addmm",
    "addbmm",
    "linear",
    "matmul",
    "_addmm_activation",
    "_int_mm",
    "_scaled_mm",
    "_scaled_mm_v2",
    "_weight_int8pack_mm",
    "_weight_int4pack_mm",
    "_sparse_mm",
    "_sparse_semi_structured_linear",
    "mkldnn_linear",
    "mkldnn._linear_pointwise",
    # with a vector, as JAX's dot_general counts too
    "mv",
    "addmv",
    "dot",
    "vdot",
    # convolutions
    "convolution",
    "convolution_overrideable",
    "_convolution",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "miopen_convolution",
    "mkldnn_convolution",
    "mkldnn._convolution_pointwise",
}


@parameter_free
def save_matmul_outputs(value: Value, /) -> bool:
    """Saves the outputs of matrix products and convolutions, as the user wrote them.

    These are mm, addmm, bmm, baddbmm, products with vectors, convolutions, and the
    quantized, grouped and sparse kinds. The products inside
    `scaled_dot_product_attention` and `multi_head_attention_forward` do not count:
    `save_matmul_outputs | save_attention_outputs` saves attention's output too.

    Laws: `dots_saveable` is the same object.

    Example:
        >>> from remat import policies
        >>> policies.dots_saveable is policies.save_matmul_outputs
        True

    References:
        `dots_saveable` of `jax.checkpoint_policies`.
    """
    return _is_matmul(value)


@parameter_free
def save_matmul_outputs_no_batch(value: Value, /) -> bool:
    """Saves what `save_matmul_outputs` does, without products that have a batch.

    A product with a batch is a bmm, a baddbmm or a grouped product whose output has a
    leading dimension other than 1: `torch.einsum` writes every contraction as a bmm,
    those without a batch with a leading 1.

    Laws: saves a part of what `save_matmul_outputs` does;
    `dots_with_no_batch_dims_saveable` is the same object.

    Example:
        >>> from remat import policies
        >>> policies.save_matmul_outputs_no_batch
        save_matmul_outputs_no_batch

    References:
        `dots_with_no_batch_dims_saveable` of `jax.checkpoint_policies`.
    """
    return _is_matmul(value) and not _has_batch(value)


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


def _has_batch(value: Value) -> bool:
    is_batched = bare_name(value.op) in _BATCHED
    return is_batched and value.shape[0] != 1
