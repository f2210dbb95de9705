"""Pytrees of tensors and None."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from remat._errors import CarryError, refusal
from remat._torch import trees


@final
@dataclasses.dataclass(frozen=True)
class Tree:
    """The structure of a pytree of tensors.

    Attributes:
        spec: torch's description of the pytree.
        is_tensor: for each leaf whether it is a tensor; the others are None.
    """

    spec: Any
    is_tensor: tuple[bool, ...]

    @classmethod
    def of(cls, tree: Any) -> tuple[list[Tensor], Tree]:
        """The tensors of a pytree, and what puts them together again."""
        leaves, spec = trees.flatten(tree)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return tensors, cls(spec, tuple(isinstance(leaf, Tensor) for leaf in leaves))

    def put_together(self, tensors: Sequence[Tensor]) -> Any:
        """The pytree of other tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if each else None for each in self.is_tensor]
        return trees.unflatten(leaves, self.spec)

    def tensors_of(self, tree: Any, where: str) -> list[Tensor]:
        """The tensors of another pytree, numbers as tensors, in the order of this one.

        Raises:
            CarryError: a leaf of it is not a tensor, number or None.
            ValueError: it has another structure.
        """
        leaves = trees.leaves_up_to(tree, self.spec)
        made = [as_tensor(leaf, where) for leaf in leaves]
        if [each is not None for each in made] != list(self.is_tensor):
            raise ValueError("None where there was a tensor, or the other way round")
        return [each for each in made if each is not None]


NOTHING = Tree.of(None)[1]


def as_tensors(tree: Any, where: str) -> Any:
    """A pytree whose Python numbers have become tensors.

    Raises:
        CarryError: a leaf is not a tensor, number or None.
    """
    leaves, spec = trees.flatten(tree)
    return trees.unflatten([as_tensor(leaf, where) for leaf in leaves], spec)


def as_tensor(leaf: Any, where: str) -> Tensor | None:
    """A leaf, of a number a tensor.

    Raises:
        CarryError: it is not a tensor, number or None.
    """
    if leaf is None or isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, (bool, int, float, complex)):
        return torch.tensor(leaf)
    raise refusal(
        CarryError,
        where=f"scan: a leaf of {where}",
        what=f"is a {type(leaf).__name__}, {leaf!r}.",
        why="Carries and stacked outputs must be tensors.",
        do="Make it a tensor, or let the function capture it.",
    )
