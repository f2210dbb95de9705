"""In-place operators of a trace, replaced by pure ones.

Obsolete when torch.func.functionalize leaves whole the operators that it decomposes.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

_torch: Any = torch


def functionalized(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its in-place operators replaced, its views kept.

    It does what torch.func.functionalize does, but is not a transform. Under a transform
    torch decomposes some operators (binary_cross_entropy_with_logits), which changes bits.
    """

    def run(*args: Tensor) -> list[Tensor | None]:
        with _functionalization_active():
            wrapped = [_torch._to_functional_tensor(each) for each in args]
            outputs = [
                None if each is None else value_of(each) for each in function(*wrapped)
            ]
            for given, each in zip(args, wrapped, strict=True):
                changed = value_of(each)
                if changed is not given:
                    given.copy_(changed)
            return outputs

    return run


def put_for(tensor: Tensor, new: Tensor) -> None:
    """Writes `new` to a tensor inside of `functionalized`.

    `copy_` would do the same by a copy of its own.
    """
    _torch._functionalize_replace(tensor, value_of(new))
    _torch._functionalize_commit_update(tensor)
    _torch._sync(tensor)


@contextlib.contextmanager
def _functionalization_active() -> Generator[None]:
    # AOTAutograd switches this key off around all that it calls.
    excluded: Any = _torch._C._dispatch_tls_local_exclude_set()
    permitted = excluded.remove(torch._C.DispatchKey.Functionalize)
    included = _torch._C._dispatch_tls_local_include_set()
    with _torch._C._ForceDispatchKeyGuard(included, permitted):
        _torch._enable_functionalization(reapply_views=True)
        try:
            yield
        finally:
            _torch._disable_functionalization()


def value_of(tensor: Tensor) -> Tensor:
    """What a tensor inside of `functionalized` stands for now."""
    if not _torch._is_functional_tensor(tensor):
        return tensor
    _torch._sync(tensor)
    return _torch._from_functional_tensor(tensor)
