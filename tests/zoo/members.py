"""What the zoo is made of: a model, a batch for it, and which of its modules recompute."""

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

Batch = Mapping[str, Any]
Model = nn.Module


@dataclass(frozen=True)
class Member:
    """One model of the zoo.

    Attributes:
        name: the library and what it calls the model: "timm/resnet18".
        build: makes the model, with random weights, in train mode.
        batch: draws the arguments of a call of it, by keyword.
        recompute: makes its layers regions with the options of `remat`.
        recompute_by_torch: makes its layers recompute by torch's own checkpoint.
    """

    name: str
    build: Callable[[], Model]
    batch: Callable[[Model], Batch]
    recompute: Callable[[Model, Mapping[str, Any]], object]
    recompute_by_torch: Callable[[Model], object]


def imported(name: str) -> Any:
    """A module of a library that the zoo is made from, by name: type checkers go without.

    Raises:
        ImportError: the library is not installed; says how it can be.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"tests.zoo needs {name.partition('.')[0]}, which is not installed. Run "
            "pip install -e '.[dev,zoo]', or choose other models with --match."
        ) from error


def version_of(library: str) -> str:
    """The release that is installed, or nothing."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""
