"""Compares a value over the ranks of a group with one small collective."""

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from remat._errors import NotReplicatedError, refusal
from remat._torch import distributed
from remat.storage._bits import bytes_of
from remat.storage._stored import Place

if TYPE_CHECKING:  # a torch built without distributed has no such class
    from torch.distributed import ProcessGroup

_DTYPES = sorted(
    {each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str
)
_MOST_SIZES = 8  # of which a record has room
_CHUNK = 2**20  # words that are hashed at a time, so that little memory is needed


def require_replicated(value: Tensor, group: "ProcessGroup", place: Place) -> None:
    """Raises on every rank unless all ranks of the group hold the same value.

    The collective sends a record of fixed size, so that it also works if the values
    differ in shape or dtype. `place` says in the message which value it is.
    """
    mine = torch.tensor([*_record_of(value, place), 0], device=value.device)
    mine[-1] = _hash(value)
    records = distributed.gather_records(mine, group)
    rows: list[list[int]] = [cast("Any", record).tolist() for record in records]
    one = rows[0]
    others = [(rank, row) for rank, row in enumerate(rows) if row != one]
    if not others:
        return
    rank, other = others[0]
    if one[:-1] == other[:-1]:
        differ = f"holds other numbers on rank {rank} of the mesh than on rank 0."
    else:
        differ = f"is {_shown_record(other)} on rank {rank} of the mesh."
    raise refusal(
        NotReplicatedError,
        where=f"value {place.index} of a region, {_shown_record(one)} on rank 0, kept by `Shard`",
        what=differ,
        why="Each rank would keep its part, and the backward would read a mix of the ranks' "
        "values.",
        do="Make the ranks' inputs equal (one seed, one batch, a broadcast), or leave "
        "this value out of what is sharded.",
    )


def _record_of(value: Tensor, place: Place) -> list[int]:
    sizes = [*value.shape][:_MOST_SIZES]
    padding = [0] * (_MOST_SIZES - len(sizes))
    dtype = _DTYPES.index(value.dtype)
    return [place.index, dtype, value.dim(), value.numel(), *sizes, *padding]


def _shown_record(record: list[int]) -> str:
    _, dtype, num_sizes, _, *rest = record
    sizes = ", ".join(map(str, rest[: min(num_sizes, _MOST_SIZES)]))
    return f"{str(_DTYPES[dtype]).removeprefix('torch.')}[{sizes}]"


def _hash(value: Tensor) -> Tensor:
    """A hash of the bits, which two different values share about once in 2**64.

    The sum of the value's words, each multiplied by an odd number that depends on its
    position, in integers that wrap around: a change of one word always shows.
    """
    flat = bytes_of(value)
    whole = flat.numel() // 8 * 8
    found = torch.zeros((), dtype=torch.int64, device=value.device)
    aligned = flat[:whole] if flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    words = aligned.view(torch.int64)
    chunks = [words[first:][:_CHUNK] for first in range(0, len(words), _CHUNK)]
    for chunk in (*chunks, flat[whole:].to(torch.int64)):
        found = found * 6364136223846793005 + (chunk * _multipliers(chunk)).sum() + 1
    return found


def _multipliers(words: Tensor) -> Tensor:
    """Odd numbers, one per position; the constants are those of splitmix64, halved."""
    places = torch.arange(1, words.numel() + 1, device=words.device)
    mixed = places * 0x1E3779B97F4A7C15
    mixed = (mixed ^ mixed >> 30) * 0x3F58476D1CE4E5B9
    return (mixed ^ mixed >> 27) | 1
