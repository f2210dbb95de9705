"""The policy that decides by the operator or the torch function that made a value.

All targets become globs of names, which print, compare and pickle; the number of dots says
whether one matches overloads, operators, or bare names and functions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, final

import torch
from torch.nn import functional

from remat._errors import PolicyError, shown
from remat._graph.operators import short_name
from remat._torch import schemas
from remat.policies._contract import AbstractPolicy, Value
from remat.policies._names import show_call


@final
@dataclass(frozen=True, slots=True, repr=False)
class ByOp(AbstractPolicy):
    """What `by_op` makes."""

    targets: tuple[str, ...]

    def __call__(self, value: Value, /) -> bool:
        if value.op is None:
            return False
        names = (str(value.op), short_name(value.op), bare_name(value.op))
        return any(
            target.count(".") == name.count(".") and fnmatchcase(name, target)
            for target in self.targets
            for name in filter(None, (*names, value.function))
        )

    def __repr__(self) -> str:
        return show_call("by_op", self.targets)


def by_op(*targets: str | Callable[..., Any]) -> AbstractPolicy:
    """Saves the values that these operators or torch functions make.

    Args:
        targets: each one of

            - an overload, `torch.ops.aten.mm.default`, or `"aten.mm.default"`;
            - an operator with all its overloads, `torch.ops.aten.mm` or `"aten.mm"`;
              one that is made of others, such as `torch.ops.aten.linear`, means the
              function of that name;
            - a torch function, `torch.sin` or `torch.nn.functional.linear`, or its name
              `"sin"`: what the operator `aten.sin` makes, and all that is made while
              the user's call of that function runs;
            - a glob of these names, such as `"aten.*mm*"` or `"*mm"`. A glob that fits
              no operator saves nothing.

    Returns:
        The policy.

    Raises:
        PolicyError: there is no target, torch knows no such operator or function, or
            the target is something else.

    Example:
        >>> import torch
        >>> from remat import policies
        >>> policies.by_op(torch.ops.aten.mm, torch.nn.functional.gelu, "aten.sum.*")
        by_op('aten.mm', 'gelu', 'aten.sum.*')
    """
    if not targets:
        raise PolicyError.of(
            where="by_op()",
            what="got no target.",
            why="Nothing would be saved.",
            do='Pass operators, as in `by_op("aten.mm")`, or use nothing_saveable.',
        )
    return ByOp(tuple(dict.fromkeys(map(_target_as_glob, targets))))


def is_target(candidate: object) -> bool:
    """Whether this is an operator or a function of torch that `by_op` takes."""
    is_operator = isinstance(candidate, schemas.OpOverload | schemas.OpOverloadPacket)
    return is_operator or _is_torch_function(candidate)


def _target_as_glob(target: object) -> str:
    match target:
        case str():
            if not _is_op_name(target):
                raise _not_op(target, "torch has no operator or function of that name.")
            return target.split(".")[1] if _is_taken_apart(target) else target
        case schemas.OpOverload() | schemas.OpOverloadPacket():
            return _target_as_glob(str(target))
        case _ if _is_torch_function(target):
            return function_name(target)
        case _:
            raise _not_op(target, "It is neither an operator nor a function of torch.")


def _is_op_name(name: str) -> bool:
    if any(character in name for character in "*?["):
        return True
    space, *path = name.split(".")
    if not path:
        return _is_target_name(name)
    found: Any = getattr(torch.ops, space, None)
    for each in path:
        found = getattr(found, each, None)
    return len(path) <= 2 and found is not None


def _is_taken_apart(name: str) -> bool:
    """Whether a target names an ATen operator that torch decomposes before a trace."""
    space, *path = name.split(".")
    if space != "aten" or not path:
        return False
    operator: Any = getattr(torch.ops.aten, path[0], None)
    overloads = path[1:] or getattr(operator, "overloads", list)()
    # The default one speaks for all; where there is none, as for `aten.softmax`, each does.
    deciding = ["default"] if "default" in overloads else overloads
    candidates = [getattr(operator, each, None) for each in deciding]
    return any(schemas.is_composite(each) for each in candidates if each)


def _is_target_name(name: str) -> bool:
    owners = (torch.ops.aten, torch.ops.higher_order, torch, functional, torch.Tensor)
    found = (getattr(owner, name, None) for owner in owners)
    is_found = any(callable(each) and not isinstance(each, type) for each in found)
    return is_found or hasattr(torch.Tensor, f"__{name}__")


def _is_torch_function(target: object) -> bool:
    """Whether a target is a function of torch; methods of its tensors have no module."""
    owner = getattr(target, "__objclass__", target)
    module = str(getattr(owner, "__module__", None)).partition(".")[0]
    is_of_torch = module == "torch" and not isinstance(target, type)
    return is_of_torch and _is_target_name(function_name(target))


def _not_op(target: object, why: str) -> PolicyError:
    do = (
        'Pass each by itself, an operator such as `torch.ops.aten.mm` or "aten.mm", or a function '
        "such as `torch.sin`; a value of your own function is best named with "
        "`checkpoint_name` and saved by `save_only_these_names`."
    )
    what = f"got {shown(target)}."
    return PolicyError.of(where="by_op(*targets)", what=what, why=why, do=do)


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
