"""The naming operator: `checkpoint_name` marks a value in a trace and changes nothing.

The value itself is returned, so a name does not affect aliases, in-place operators or
transforms. The mark is an operator without outputs, which only a trace ever runs.
"""

from typing import TypeVar

import torch
from torch.fx.node import has_side_effect

from remat._errors import shown
from remat._torch import dtensor, levels, modes, schemas, tracer, trees

_T = TypeVar("_T")


def _mark_nothing(value: torch.Tensor, name: str) -> None:
    """The kernel of the mark, which is there to be recorded."""


_SCHEMA = "(Tensor value, str name) -> ()"
MARK = schemas.define("mark", _SCHEMA, kernel=_mark_nothing, fake=_mark_nothing)
has_side_effect(MARK)
schemas.leave_out_of_compilers(MARK)


def mark(tensor: torch.Tensor, name: str) -> None:
    """Records `name` for a tensor of the running trace, below all wrappers."""
    with levels.leave_functorch():
        MARK(dtensor.local_part(levels.unwrapped(tensor)), name)


# In Dynamo's graphs of `vmap`, which have marks of batches in them.
schemas.LIBRARY.impl("mark", mark, "FuncTorchBatched")


def checkpoint_name(x: _T, name: str) -> _T:
    """Names the tensors of a pytree, so that policies can speak of them.

    The identity: the same tensors come back. Inside a region each tensor is marked with
    `name`; anywhere else nothing happens. A name covers every alias of the value (`view`,
    `transpose`, `detach`), and the helper outputs of the operator that makes it. Several
    values may share a name, and arguments may be named.

    Args:
        x: a pytree with tensors of any shape and dtype among its leaves.
        name: what policies will match, by glob.

    Returns:
        `x` itself.

    Raises:
        TypeError: if `name` is not a string.

    Example:
        >>> import torch
        >>> from remat import checkpoint_name, policies, remat
        >>> @remat(policy=policies.save_only_these_names("hidden"))
        ... def f(x):
        ...     return checkpoint_name(x.sin(), "hidden").sin().sin()
        >>> x = torch.zeros(2, requires_grad=True)
        >>> [residual.name for residual in f.saved_residuals(x)]
        ['hidden', 'x']
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"checkpoint_name(x, name) takes a string as the name, not {shown(name)}. The "
            "value comes first: checkpoint_name(x, 'hidden')."
        )
    if torch.compiler.is_dynamo_compiling():
        for tensor in trees.tensor_leaves(x):
            MARK(tensor, name)
    elif tracer.proxy_is_active() or modes.hear_names():
        for tensor in trees.tensor_leaves(x):
            mark(tensor, name)
    return x
