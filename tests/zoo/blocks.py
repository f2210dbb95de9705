"""The repeated layers of a model whose library has no hook for them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from remat import modules
from remat.modules._apply import matching

Classes = tuple[type[nn.Module], ...]


def repeated(model: nn.Module) -> Classes:
    """The classes of the layers in the longest list or sequence of layers that a model has.

    Layers are made of modules: a list of convolutions alone is not one of layers.

    Raises:
        LookupError: there is no such list.
    """
    lists = [
        found
        for each in model.modules()
        if isinstance(each, nn.ModuleList | nn.Sequential)
        and (found := [child for child in each if _is_layer(child)])
    ]
    if not lists:
        raise LookupError(f"{type(model).__name__} has no list of layers: name them.")
    # Of equally long ones the outermost.
    return tuple({type(layer) for layer in max(lists, key=len)})


def _is_layer(module: nn.Module) -> bool:
    return (
        type(module).forward is not nn.Module.forward
        and not isinstance(module, nn.Sequential)
        and any(module.children())
        and any(True for _ in module.parameters())
    )


def make_regions(
    model: nn.Module, options: Mapping[str, Any], where: Classes | str | None = None
) -> None:
    """Makes regions of the repeated layers, or of those that `where` names."""
    modules.apply(model, repeated(model) if where is None else where, **options)


def checkpoint_by_torch(model: nn.Module, where: Classes | str | None = None) -> None:
    """Puts torch's own checkpoint around the same layers."""
    chosen = repeated(model) if where is None else where
    for _, layer in matching(model, chosen):
        forward = partial(checkpoint, layer.forward, use_reentrant=False)
        object.__setattr__(layer, "forward", forward)
