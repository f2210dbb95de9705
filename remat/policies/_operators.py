"""How operators and functions are named, in policies and in what policies see.

`aten.mm.default` is an overload of the packet `aten.mm`, whose bare name is `mm`.
"""

import torch

from remat._graph.operators import short_name


def bare_name(op: object) -> str:
    """Returns the name of an operator of ATen without `aten.`; others stay whole."""
    return short_name(op).removeprefix("aten.")


def function_name(function: object) -> str:
    """The name in `Value.function` of the torch function that a user called, or `""`.

    A method, a Python operator (reflected or not) and an in-place variant have the name
    of the function that they stand for.
    """
    name = str(getattr(function, "__name__", ""))
    if not (name.startswith("__") and name.endswith("__")):
        return name.removesuffix("_")
    name = name.removeprefix("__").removesuffix("__")
    # `__rmatmul__` and `__imul__` stand for `matmul` and `mul`, `__invert__` for itself.
    is_variant = name[0] in "ri" and hasattr(torch.Tensor, f"__{name[1:]}__")
    return name[1:] if is_variant else name
