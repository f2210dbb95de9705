"""Offloading: a saved value waits in other memory and comes back before it is read.

The literature calls this swapping or activation offloading: vDNN [1] moves feature maps
to pinned host memory over PCIe while other layers run, and prefetches them; torch has
`torch.autograd.graph.save_on_cpu`, without prefetch. Copies between an accelerator and
host memory run on separate streams (`_transfer`); copies between two accelerators, and
to files, run on the compute stream.

References:
    [1] vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural
    Network Design. M. Rhu et al., 2016. https://arxiv.org/abs/1602.08124, section 3.
"""

import dataclasses
import os
import tempfile
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from remat._errors import explain, refuse, require_count, require_type, show_type
from remat._graph.meta import TensorMeta
from remat._user_lines import warn
from remat.storage._contract import AbstractStorage
from remat.storage._stored import FIRST, Held, Place, Stored, first_part
from remat.storage._transfer import Fetch, has_streams, lane_of

_BUS = 16  # how much slower a bus is than the memory of a device: PCIe 5 and HBM 3


@final
@dataclass(frozen=True, slots=True)
class Offload(AbstractStorage):
    """Moves the value to another device, or to a file, while it waits.

    Laws: exact; comes back on the device that it left.

    Args:
        device: where the value waits, as `torch.device` reads it.
        pin: whether host memory is page-locked, so that copies overlap with compute.
        min_bytes: smaller values stay where they are.
        max_bytes: larger values stay where they are; None for no bound.
        prefetch: how many regions ahead of the backward values are copied back from
            host memory; each then holds its values on the device until its backward. 0
            fetches them when they are read. It has no effect on values that wait
            elsewhere.
        path: the folder of the files, or None for memory.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a number is negative, `max_bytes` is below `min_bytes`, or torch
            knows no such device.

    Example:
        >>> from remat import storage
        >>> storage.Offload(min_bytes=2**20).device
        'cpu'
    """

    device: str = "cpu"
    pin: bool = True
    min_bytes: int = 0
    max_bytes: int | None = None
    prefetch: int = 1
    path: str | None = None

    is_exact: ClassVar[bool] = True

    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        """Copies the value to where it waits; values of other sizes are kept."""
        if not self._takes(value.nbytes):
            return Stored.whole(value)
        home = value.device
        if self.path is not None:
            self._warn_of_prefetch("files are read where they are needed", place)
            return _moved_to_home(_in_file(value, self.path), home)
        device = torch.device(self.device)
        if device == home:
            if place.call == 0:
                warn(
                    where="storage.Offload(...)",
                    what=f'has no effect on a value that is on "{home}" already.',
                    why="Its device is where the value would wait.",
                    do="Pass `path=...` to let values wait in files, or leave `Offload` "
                    "out.",
                )
            return Stored.whole(value)
        if device.type == "cpu" and has_streams(home):
            lane = lane_of(home, self.pin)
            fetch = Fetch(lane, self.prefetch)
            return Stored((lane.send(value),), first_part, fetch, lane.settle)
        self._warn_of_prefetch(f'values come back from "{device}" when read', place)
        return _moved_to_home(value.to(device), home)

    def _warn_of_prefetch(self, why: str, place: Place) -> None:
        if self.prefetch == 1 or place.call > 0:
            return
        warn(
            where=repr(self),
            what=f"has no use for prefetch={self.prefetch}:",
            why=f"{why}.",
            do="Leave `prefetch` out.",
        )

    def held(self, meta: TensorMeta) -> Held:
        """Nothing on the value's device, if the value is moved."""
        value = meta.once
        device = torch.device("cpu" if self.path else self.device)
        is_near = self.path is None and device == meta.device
        if is_near or not self._takes(value.size_bytes):
            return Held.whole(meta)
        away = dataclasses.replace(value, device=device)
        return Held((), (away,), _BUS * value.size_bytes)

    def leaves(self, meta: TensorMeta) -> bool:
        """Whether the value is of a size that stays; of its device `store` warns."""
        return not self._takes(meta.once.size_bytes)

    def _takes(self, size_bytes: int) -> bool:
        most = size_bytes if self.max_bytes is None else self.max_bytes
        return size_bytes > 0 and self.min_bytes <= size_bytes <= most

    def __post_init__(self) -> None:
        device = "Offload(device=...)"
        wanted = "a device as a string, as in `str(device)`"
        require_type(device, self.device, str, wanted=wanted)
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise refuse(
                device,
                self.device,
                why="torch knows no device of that name.",
                do='Pass "cpu", or an accelerator by its name and number.',
            ) from error
        require_type("Offload(pin=...)", self.pin, bool, wanted="True or False")
        require_count("Offload(min_bytes=...)", self.min_bytes, at_least=0)
        require_count("Offload(prefetch=...)", self.prefetch, at_least=0)
        if self.max_bytes is not None:
            require_count("Offload(max_bytes=...)", self.max_bytes, at_least=0)
            if self.max_bytes < self.min_bytes:
                raise refuse(
                    "Offload(max_bytes=...)",
                    self.max_bytes,
                    why=f"With min_bytes={self.min_bytes} no value would be offloaded.",
                    do="Pass a `max_bytes` that is not below `min_bytes`, or None.",
                )
        require_type(
            "Offload(path=...)",
            self.path,
            (str, type(None)),
            wanted="a folder as a string, as in `str(path)`, or None",
        )


def _moved_to_home(waiting: Tensor, home: torch.device) -> Stored:
    return Stored((waiting,), lambda parts: parts[0].to(home))


def _in_file(value: Tensor, folder: str) -> Tensor:
    """A copy in a memory-mapped file without a name, which is freed with the tensor."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            # A full disk would otherwise show only when the mapped memory is written,
            # by a signal that ends the process. macOS has no such call.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, value.nbytes)
            mapped = torch.from_file(
                file.name, True, value.nbytes, dtype=torch.uint8, device="cpu"
            )
    except OSError as error:
        text = explain(
            where=f"Offload(path={folder!r})",
            what="cannot make a file for a value "
            f"{show_type(value.dtype, value.shape)} of {value.nbytes} bytes.",
            why=f"The system reports: {error.strerror}.",
            do="Pass a folder that exists and can be written, on a disk with room for all "
            "values that wait at one time.",
        )
        raise OSError(error.errno, text) from error
    return mapped.view(value.dtype).view(value.shape).copy_(value)
