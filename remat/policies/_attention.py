"""The policy that saves attention."""

from remat.policies._contract import Value
from remat.policies._operators import bare_name
from remat.policies._parameter_free import parameter_free

_FUNCTIONS = frozenset({"scaled_dot_product_attention", "flex_attention"})
_OPERATORS = frozenset(
    {
        "_flash_attention_forward",
        "_efficient_attention_forward",
        "_cudnn_attention_forward",
        "flex_attention",
    }
)


@parameter_free
def save_attention_outputs(value: Value, /) -> bool:
    """Saves the outputs of attention, with the helpers that its backward reads.

    These are the values that `scaled_dot_product_attention` or `flex_attention` makes,
    in any backend. Where torch has no fused kernel, attention is a chain of plain
    operators, and each value in it may be saved, the quadratic scores included: use a
    fused backend or `checkpoint_name` there.

    Example:
        >>> from remat import policies
        >>> policies.save_matmul_outputs | policies.save_attention_outputs
        save_matmul_outputs | save_attention_outputs
    """
    name = bare_name(value.op)
    is_fused = name.startswith("_scaled_dot_product_")
    is_operator = name in _OPERATORS or (is_fused and not name.endswith("_backward"))
    return is_operator or value.function in _FUNCTIONS
