"""Weights that torch's older hooks compute before each call of a module.

`torch.nn.utils.spectral_norm`, `weight_norm` and pruning store the weight in a plain
attribute, where a trace would leave a stand-in. The stand-in is removed after the trace.
After each call the weight is computed again, from the parameters and buffers as the call
left them, so that the attribute holds what it would without remat, gradient included.
"""

import functools

from torch import nn

from remat._captures import Step, Survey, look, put
from remat._torch.modules import made_by_hooks


def put_back(survey: Survey) -> tuple[tuple[Step, ...], ...]:
    """Removes the stand-ins of a trace from the attributes that hooks compute.

    Tells the steps from the roots to each module that has any.
    """
    ways: list[tuple[Step, ...]] = []
    for node in survey.nodes.values():
        if not isinstance(node.value, nn.Module):
            continue
        names = [name for name, _ in made_by_hooks(node.value)]
        for name in names:
            put(node.value, ("var", name), node.content["var", name])
        if names:
            ways.append(tuple(step for _, step in node.path))
    return tuple(ways)


def refresh(way: tuple[Step, ...], roots: tuple[object, ...]) -> None:
    """Computes what hooks compute again, in the module that stands at the end of `way`."""
    module = functools.reduce(look, way, roots)
    assert isinstance(module, nn.Module)
    for name, make in made_by_hooks(module):
        setattr(module, name, make())
