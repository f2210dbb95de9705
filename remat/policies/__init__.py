"""Policies: which values of the forward are saved for the backward.

In comes a `Value`, out comes `Save` or `Recompute`. Each kind has a file.

- `_contract`: what a policy sees and answers, the base classes with their globs of names,
  unions and other combinations.
- `_as_policy`: what a user passes, made a policy, or the error that says why it is none.
- `_by_kind`: policies without parameters: everything, nothing, matrix products, attention.
- `_names`: by the names of `checkpoint_name`.
- `_by_op`: by operators or torch functions.
- `_by_size`: by bounds on sizes.
- `_of_jax`: JAX's ways to write a union, and offloading.
- `_budget`: a number of bytes, and the decisions of a plan.
- `_sizes`: sizes in bytes, shown and parsed.
"""

from remat.policies._as_policy import as_policy, from_callable
from remat.policies._budget import Budget, Planned, budget
from remat.policies._by_kind import (
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    everything_saveable,
    nothing_saveable,
    save_attention_outputs,
    save_matmul_outputs,
    save_matmul_outputs_no_batch,
)
from remat.policies._by_op import by_op
from remat.policies._by_size import by_size
from remat.policies._contract import (
    AbstractPolicy,
    Operand,
    Recompute,
    Save,
    Value,
    WholeProgram,
    decide,
)
from remat.policies._names import (
    save_any_names_but_these,
    save_anything_except_these_names,
    save_only_these_names,
)
from remat.policies._of_jax import (
    offload_dot_with_no_batch_dims,
    save_and_offload_only_these_names,
    save_from_both_policies,
)

__all__ = [
    "AbstractPolicy",
    "Budget",
    "Operand",
    "Planned",
    "Recompute",
    "Save",
    "Value",
    "WholeProgram",
    "as_policy",
    "budget",
    "by_op",
    "by_size",
    "decide",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "from_callable",
    "nothing_saveable",
    "offload_dot_with_no_batch_dims",
    "save_and_offload_only_these_names",
    "save_any_names_but_these",
    "save_anything_except_these_names",
    "save_attention_outputs",
    "save_from_both_policies",
    "save_matmul_outputs",
    "save_matmul_outputs_no_batch",
    "save_only_these_names",
]
