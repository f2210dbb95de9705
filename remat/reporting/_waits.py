"""Predicts from a value's metadata how many bytes it holds while it waits."""

from __future__ import annotations

import dataclasses
import sys
from typing import NamedTuple, final

import torch
from torch import Tensor

from remat._graph.values import TensorMeta
from remat._partition.costs import keyless
from remat._regions.waiting import densely
from remat._torch import fakes, isolation
from remat.storage import (
    AbstractStorage,
    Cast,
    Chain,
    Keep,
    Offload,
    Place,
    Quantize,
    Shard,
)


@final
class Waits(NamedTuple):
    """Bytes of what waits.

    Attributes:
        held_bytes: on the device of the value.
        elsewhere_bytes: in host memory, on another device, or in a file.
    """

    held_bytes: int = 0
    elsewhere_bytes: int = 0

    def plus(self, other: Waits) -> Waits:
        """The bytes of both."""
        return Waits(*map(sum, zip(self, other, strict=True)))


# Storages whose sizes follow from the value's size; the user's own may have side
# effects.
_BY_SIZES = (Keep, Cast, Quantize, Shard, Offload)


def waits(storage: AbstractStorage, meta: TensorMeta) -> Waits | None:
    """What a value like this will hold in a storage; nothing is stored.

    Args:
        storage: how it waits.
        meta: the value; of a DTensor this rank's part.

    Returns:
        The bytes; None where they depend on the numbers, as with `Sparse`, or where the
        storage is the user's own.
    """
    links = storage.links if isinstance(storage, Chain) else (storage,)
    if not all(isinstance(link, _BY_SIZES) for link in links):
        return None
    if all(isinstance(link, Keep) for link in links):
        return Waits(meta.size_bytes)
    # After the calls in which ranks compare what they hold.
    place = Place(call=sys.maxsize, spread=meta.placement)
    with isolation.isolated(), fakes.fake_mode(meta.device), torch.no_grad():
        plain = dataclasses.replace(meta, requires_grad=False, placement=None)
        dense, place, _ = densely(plain.empty(), place)
        parts = [_Part(dense, is_away=False)]
        for link in links:
            parts = [
                each
                for part in parts
                for each in part.through(link, place, meta.device)
            ]
    sizes = [0, 0]
    for part in parts:
        sizes[part.is_away] += part.tensor.nbytes
    return Waits(*sizes)


@final
class _Part(NamedTuple):
    """A tensor without data, for one that waits.

    Attributes:
        tensor: of its shape, dtype and device.
        is_away: whether it waits elsewhere than on the device of the value.
    """

    tensor: Tensor
    is_away: bool

    def through(
        self, link: AbstractStorage, place: Place, home: torch.device
    ) -> list[_Part]:
        """What one more storage leaves of it, a value of this device."""
        tensor = self.tensor
        if not isinstance(link, Offload):
            # What is made of a file's numbers is in memory again.
            return [
                _Part(each, self.is_away and (each is tensor or each.device != home))
                for each in keyless(link).store(tensor, place).tensors
            ]
        if not link.takes(tensor.nbytes, tensor.device):
            return [self]
        device = tensor.device if link.path else torch.device(link.device)
        return [_Part(torch.empty_like(tensor, device=device), is_away=True)]
