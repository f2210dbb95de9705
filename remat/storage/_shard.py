"""Sharding: each rank keeps its part of a value that all ranks of a mesh hold.

Megatron-LM calls this distributed saved activations [1]; ZeRO-R calls it partitioned
activation checkpointing [2]. It is for values that are the same on all ranks, such as
the input of a tensor-parallel layer.

A part is a copy: the caller's tensor is neither truncated nor kept alive. The parts of
the last ranks are padded with zeros, which are removed again.

References:
    [1] Reducing Activation Recomputation in Large Transformer Models. V. Korthikanti et
    al., 2022. https://arxiv.org/abs/2205.05198, section 5.
    [2] ZeRO: Memory Optimizations Toward Training Trillion Parameter Models.
    S. Rajbhandari et al., 2020. https://arxiv.org/abs/1910.02054, section 6.1.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, final

import torch
from einops import EinopsError, parsing
from torch import Tensor

from remat._errors import (
    NotReplicatedError,
    refusal,
    refuse,
    require_type,
    show_type,
    shown,
)
from remat._graph.meta import TensorMeta
from remat._torch import distributed, dtensor
from remat._user_lines import warn
from remat.storage._bits import bytes_of
from remat.storage._contract import AbstractStorage, rehearsed
from remat.storage._stored import FIRST, Held, Place, Stored

if TYPE_CHECKING:  # a torch built without distributed has no such module
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_DTYPES = sorted(
    {each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str
)
_MOST_SIZES = 8  # of which a record has room
_CHUNK = 2**20  # words that are hashed at a time, so that little memory is needed
_CHECKED_CALLS = 8  # of each function: several layers, or a first step and some more


@final
@dataclass(frozen=True, slots=True)
class Shard(AbstractStorage):
    """Keeps one rank's part of a replicated value, and gathers it back.

    Laws: exact if the value is the same on all ranks of the mesh. Each of t ranks keeps
    ceil(n / t) of n elements; with a pattern, the axis that it cuts has length
    ceil(length / t). Axes are the value's own, without dimensions that `vmap(grad)`
    adds; under `grad(vmap)` it has them, and `...` in a pattern stands for any axes. A
    replicated DTensor is sharded too and comes back as a DTensor; one that is already
    sharded along this mesh is kept unchanged.

    Args:
        mesh: a mesh of one dimension, as in `mesh["tp"]`.
        pattern: the value's axes in einops' notation, one of them with the name of the
            mesh dimension, as in `"batch (tp seq) d"`; None flattens the value and pads
            it. `(seq tp)` interleaves the axis over the ranks.
        replicated: `"check"` compares the ranks' values in the first eight calls of a
            function, and raises `NotReplicatedError` on all ranks if they differ;
            `"trust"` does not. In a region that takes or returns DTensors, a value that
            a policy saves may be part of one, and is compared in every call.

    Raises:
        TypeError: `mesh` is not a device mesh, or `pattern` not a string.
        ValueError: the mesh has more dimensions than one, the pattern does not name its
            dimension, or `replicated` is another word; when a value is stored: it has
            another number of dimensions than the pattern, this rank is not one of
            the mesh's, or a `Shard` in front of it in a chain has cut it over the same ranks.
        NotReplicatedError: when a value is stored: it is not the same on all ranks.

    Example:
        >>> import torch.distributed as dist
        >>> from remat import storage
        >>> alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        >>> dist.init_process_group("gloo", **alone)
        >>> mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> storage.Shard(mesh["tp"], "batch (tp seq) d").replicated
        'check'
        >>> dist.destroy_process_group()
    """

    mesh: "DeviceMesh"
    pattern: str | None = None
    replicated: Literal["check", "trust"] = "check"

    is_exact: ClassVar[bool] = True

    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        """Keeps a copy of this rank's part; restoring gathers all parts."""
        spread = dtensor.placement(value)
        if spread is not None:
            part = self.store(dtensor.local_part(value).contiguous(), place.of(spread))
            return Stored((part,), lambda parts: dtensor.in_place_of(parts[0], spread))
        if place.spread is not None and _is_cut(self, place):
            return Stored.whole(value)
        cut, size = self._cut(value, place.order), self.mesh.size()
        if self.mesh.get_coordinate() is None:
            raise refuse(
                "Shard(mesh=...)",
                self.mesh,
                why="This rank is not in the mesh, so it has no part to keep.",
                do="Pass a mesh of which this rank is one, or leave `Shard` out on this "
                "rank.",
            )
        if size == 1:
            if place.call == 0:
                warn(
                    where=repr(self),
                    what="has no effect: its mesh has one rank.",
                    why="The part that this rank keeps is the whole value.",
                    do="Pass a mesh of more ranks, or leave `Shard` out.",
                )
            return Stored.whole(value)
        group = self.mesh.get_group()
        before = [each.mesh for each in place.joints if isinstance(each, _Gather)]
        if any(_share_ranks(mesh.get_group(), group) for mesh in before):
            raise refuse(
                "Shard(mesh=...)",
                self.mesh,
                why="It follows another `Shard` over the same ranks in a chain: each of them "
                "already holds a different part, no longer the same value.",
                do="Remove one of the two; a chain may shard once over each of two mesh "
                "dimensions.",
            )
        is_checked = self.replicated == "check" and place.call < _CHECKED_CALLS
        if is_checked or place.may_differ:
            _require_replicated(value, group, place)
        if not value.numel():
            return Stored.whole(value)
        part = cut.part(value, size, self.mesh.get_local_rank())
        return Stored((part,), cut.joined, _Gather(self.mesh))

    def held(self, meta: TensorMeta) -> Held:
        """This rank's part; the way back brings the whole value."""
        found = rehearsed(self, meta)
        if not found.moved_bytes:
            return found
        return dataclasses.replace(found, moved_bytes=2 * meta.once.size_bytes)

    def _cut(self, value: Tensor, order: tuple[int | None, ...] | None) -> "_Cut":
        if self.pattern is None:
            return _Cut(value.shape, None, is_dealt=False)
        if order is None or len(order) != value.dim():
            # Not the user's value, but what an earlier storage made of it.
            order = tuple(range(value.dim()))
        count = sum(dim is not None for dim in order)
        groups = _axes_of_pattern(self.pattern)
        if "…" in groups:
            place = groups.index("…")
            groups[place : place + 1] = [[]] * max(count + 1 - len(groups), 0)
        if len(groups) != count:
            shape = [value.shape[order.index(dim)] for dim in range(count)]
            raise refuse(
                "Shard(pattern=...)",
                self.pattern,
                why=f"It has {len(groups)} axes, and the value to be stored has {count}: "
                f"{show_type(value.dtype, shape)}.",
                do="Write one axis for each dimension, name the inputs that have these in "
                f"`saved_inputs`, or pass None, which takes any value: Shard({self.mesh!r}).",
            )
        name = _name_of(self.mesh)
        axis = next(axis for axis, group in enumerate(groups) if name in group)
        is_dealt = len(groups[axis]) > 1 and groups[axis][-1] == name
        return _Cut(value.shape, order.index(axis), is_dealt)

    def __post_init__(self) -> None:
        _require_mesh(self.mesh)
        if self.pattern is not None:
            _require_pattern(self.pattern, _name_of(self.mesh))
        if self.replicated not in ("check", "trust"):
            raise refuse(
                "Shard(replicated=...)",
                self.replicated,
                why="Sharding needs the same value on all ranks.",
                do='Pass "check" to compare the ranks, or "trust" to trust them.',
            )


def _require_mesh(mesh: object) -> None:
    num_dimensions = getattr(mesh, "ndim", None)
    if num_dimensions is None or not hasattr(mesh, "mesh_dim_names"):
        raise refusal(
            TypeError,
            where="Shard(mesh=...)",
            what=f"got {shown(mesh)}, of type {type(mesh).__name__}.",
            why="The ranks that share a value are those of a device mesh.",
            do='Pass `init_device_mesh(...)["tp"]` of `torch.distributed`.',
        )
    if num_dimensions != 1:
        raise refuse(
            "Shard(mesh=...)",
            mesh,
            why=f"It has {num_dimensions} dimensions, and a value is cut along one.",
            do='Pick the dimension by its name, as in `mesh["tp"]`.',
        )


def _name_of(mesh: "DeviceMesh") -> str | None:
    names = mesh.mesh_dim_names
    return names[0] if names else None


def _require_pattern(pattern: object, name: str | None) -> None:
    argument = "Shard(pattern=...)"
    require_type(argument, pattern, str, wanted='a string such as "batch (tp seq) d"')
    if name is None:
        why = (
            "The mesh dimension has no name, so no axis of the pattern can refer to it."
        )
        do = "Make the mesh with `mesh_dim_names=...`, or pass None."
        raise refuse(argument, pattern, why=why, do=do)
    example = f'as in "batch ({name} seq) d".'
    try:
        found = [group for group in _axes_of_pattern(str(pattern)) if name in group]
    except EinopsError as error:
        why = f"einops cannot read it: {str(error).rstrip('.')}."
        do = f"Write the axes {example}"
        raise refuse(argument, pattern, why=why, do=do) from error
    if len(found) != 1:
        why = f'The mesh\'s dimension is "{name}", and one axis must have that name.'
        do = f"Name the axis that is cut, {example}"
    elif name not in (found[0][0], found[0][-1]):
        why = f'"{name}" is between other names, so there is no way to tell their lengths.'
        do = f"Write it first or last in its axis, {example}"
    else:
        return
    raise refuse(argument, pattern, why=why, do=do)


def _axes_of_pattern(pattern: str) -> list[Any]:
    return list(parsing.ParsedExpression(pattern).composition)


@final
@dataclass(frozen=True, slots=True)
class _Cut:
    """How a value of some shape is cut into parts, and put together from them.

    An axis of None cuts the flattened value; one that is dealt is interleaved over the
    ranks instead of cut in blocks.
    """

    shape: torch.Size
    axis: int | None
    is_dealt: bool

    def part(self, value: Tensor, size: int, rank: int) -> Tensor:
        """A copy of the part of one of `size` ranks, padded to equal lengths."""
        axis = self.axis or 0
        rows = (value.reshape(-1) if self.axis is None else value).movedim(axis, 0)
        length = -(-len(rows) // size)
        own = rows[rank::size] if self.is_dealt else rows[rank * length :][:length]
        own = own.movedim(0, axis)
        if own.shape[axis] == length:
            return own.clone(memory_format=torch.contiguous_format)
        filled = own.new_zeros([*own.shape[:axis], length, *own.shape[axis + 1 :]])
        filled.narrow(axis, 0, own.shape[axis]).copy_(own)
        return filled

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        axis = self.axis or 0
        stacked = parts[0].movedim(0, axis + self.is_dealt)
        length = self.shape.numel() if self.axis is None else self.shape[axis]
        whole = stacked.flatten(axis, axis + 1).narrow(axis, 0, length)
        return whole.contiguous().view(self.shape)


@final
@dataclass(frozen=True, slots=True)
class _Gather:
    """Brings the parts of all ranks of a mesh, of any number of values at once."""

    mesh: "DeviceMesh"

    num_ahead: int = 1  # one overlaps with a region; more would only queue up

    def start(self, parts: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        size = self.mesh.size()
        rows = [bytes_of(part) for part in parts]
        row = rows[0] if len(rows) == 1 else torch.cat(rows)
        every = row.new_empty(size, row.numel())
        work = distributed.start_gather(every.view(-1), row, self.mesh.get_group())
        lengths = [row.numel() for row in rows]

        def end() -> Sequence[Tensor]:
            work.wait()
            ends = [*itertools.accumulate(lengths)]
            return [
                every[:, end - length : end].view(part.dtype).view(size, *part.shape)
                for part, length, end in zip(parts, lengths, ends, strict=True)
            ]

        return end


def _is_cut(shard: Shard, place: Place) -> bool:
    """Whether the ranks of a mesh hold different parts of a DTensor; refuses a sum's terms."""
    spread = place.spread
    along = [
        placement
        for dim, placement in enumerate(spread.placements)
        if _share_ranks(spread.mesh.get_group(dim), shard.mesh.get_group())
    ]
    if any(placement.is_partial() for placement in along):
        raise NotReplicatedError.of(
            where=f"value {place.index} of a region, a DTensor of {[*spread.shape]} "
            f"placed as {spread.placements}, stored by {shard!r}",
            what="is partial: each rank holds one term of a sum.",
            why="No rank holds the whole value, so none can keep a part of it.",
            do="Reduce it first: `value.redistribute(placements=[Replicate()])`.",
        )
    return not all(placement.is_replicate() for placement in along)


def _share_ranks(one: Any, other: Any) -> bool:
    """Whether two groups share more ranks than this one."""
    first, second = map(distributed.ranks_of, (one, other))
    return len({*first} & {*second}) > 1


def _require_replicated(value: Tensor, group: "ProcessGroup", place: Place) -> None:
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
    raise NotReplicatedError.of(
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
    return show_type(_DTYPES[dtype], rest[: min(num_sizes, _MOST_SIZES)])


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
