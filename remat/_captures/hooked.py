"""Weights that torch's older hooks compute before each call of a module.

`torch.nn.utils.spectral_norm`, `weight_norm` and pruning store the weight in a plain
attribute, where a trace would leave a stand-in. The stand-in is removed after the trace.
After each call the weight is computed again, from the parameters and buffers as the call
left them, so that the attribute holds what it would without remat, gradient included.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from remat._captures import Step, Survey, look, put
from remat._torch import modules


def put_back(survey: Survey) -> tuple[tuple[Step, ...], ...]:
    """Removes the stand-ins of a trace from the attributes that hooks compute.

    Tells the steps from the roots to each module that has any.
    """
    ways: list[tuple[Step, ...]] = []
    for node in survey.nodes.values():
        if not isinstance(node.value, nn.Module):
            continue
        names = [name for name, _ in _made_by_hooks(node.value)]
        for name in names:
            put(node.value, ("var", name), node.content["var", name])
        if names:
            ways.append(tuple(step for _, step in node.path))
    return tuple(ways)


def refresh(way: tuple[Step, ...], roots: tuple[object, ...]) -> None:
    """Computes what hooks compute again, in the module that stands at the end of `way`."""
    module = functools.reduce(look, way, roots)
    assert isinstance(module, nn.Module)
    for name, make in _made_by_hooks(module):
        setattr(module, name, make())


def _made_by_hooks(module: nn.Module) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The attributes that hooks set, and what computes them, without a power iteration."""
    for hook in modules.forward_pre_hooks(module):
        match hook:
            case SpectralNorm():
                make = functools.partial(hook.compute_weight, do_power_iteration=False)
                yield hook.name, functools.partial(make, module)
            case WeightNorm():
                yield hook.name, functools.partial(hook.compute_weight, module)
            case BasePruningMethod():
                mask: Callable[..., Any] = hook.apply_mask  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
                yield modules.pruned_name(hook), functools.partial(mask, module)
            case _:
                pass
