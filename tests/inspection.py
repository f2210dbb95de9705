"""What tests ask of a region: what it saves, what it says, and its programs.

The oracles that know nothing of the package stand in `tests/support.py`.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from remat import RematWarning, Residual, remat, saved_residuals
from tests.support import held_bytes, is_differentiable


def split_residuals(
    region: Callable[..., Any], *args: Any
) -> tuple[list[Residual], list[Residual]]:
    """The residuals that are arguments, by path, and those made inside."""
    residuals = saved_residuals(region, *args)
    arguments = [residual for residual in residuals if residual.path]
    return arguments, [residual for residual in residuals if not residual.path]


def assert_saves(
    region: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    names: list[str] | None = None,
    size_bytes: int | None = None,
    count: int | None = None,
) -> None:
    """The region saves exactly this, by its own account and by measurement."""
    _, made = split_residuals(region, *args)
    if names is not None:
        assert sorted(residual.name for residual in made) == sorted(names)
    if count is not None:
        assert len(made) == count
    if size_bytes is not None:
        assert sum(residual.size_bytes for residual in made) == size_bytes
    assert held_bytes(region, *args) == sum(residual.size_bytes for residual in made)


def warned(run: Callable[[], object]) -> list[str]:
    """The texts of the package's warnings while `run` runs; any other is an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        warnings.simplefilter("always", RematWarning)
        run()
    return [str(warning.message) for warning in caught]


def programs(fun: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """The forward and the backward of a region at these arguments."""
    wanted = tree_map_only(
        Tensor, lambda t: t.clone().requires_grad_(is_differentiable(t)), args
    )
    region: Any = remat(fun, rng="preserve")
    return region.programs(*wanted)


def inputs_of(program: Any) -> list[Tensor]:
    """Inputs of the layouts that a program knows; those that count are zeros."""
    metas = [value.meta for value in program.graph.values[: program.graph.num_inputs]]
    generator = torch.Generator().manual_seed(1)
    return [
        torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="cpu")
        .uniform_(0.1, 0.9, generator=generator)
        .to(torch.get_default_device())
        if meta.dtype.is_floating_point
        else torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype).zero_()
        for meta in metas
    ]
