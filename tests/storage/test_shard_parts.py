"""What of `Shard` needs no second process: cutting, comparing, and coming back together."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from remat import RematWarning, remat
from remat.storage import Restoration, Shard, Stored, _shard
from tests.storage.test_values import FakeMesh


class Alone(FakeMesh):
    """A mesh of one rank."""

    def size(self) -> int:
        return 1

    def get_coordinate(self) -> list[int]:
        return [0]


class Recorded:
    """A joint that adds one to each part, and notes what is asked of it."""

    num_ahead = 1

    def __init__(self) -> None:
        self.log: list[str] = []

    def start(self, parts: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        self.log.append(f"start {[int(part.sum()) for part in parts]}")

        def end() -> Sequence[Tensor]:
            self.log.append("end")
            return [part + 1 for part in parts]

        return end


def joined(part: Tensor | Stored, joint: Recorded) -> Stored:
    """A value that comes back by a joint."""
    return Stored((part,), lambda parts: parts[0], joint)


@pytest.mark.parametrize("is_dealt", [False, True], ids=["in_a_row", "dealt"])
@pytest.mark.parametrize("axis", [None, 0, 1, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_the_parts_of_all_ranks_are_the_value(
    size: int, axis: int | None, is_dealt: bool
) -> None:
    """They are equally long, own their memory, and join to the value."""
    value = torch.arange(2 * 5 * 3).view(2, 5, 3)
    cut = _shard._Cut(value.shape, axis, is_dealt and axis is not None)

    parts = [cut.part(value, size, rank) for rank in range(size)]

    length = -(-(30 if axis is None else value.shape[axis]) // size)
    assert {part.shape[axis or 0] for part in parts} == {length}
    assert not any(part.data_ptr() == value.data_ptr() for part in parts)
    assert torch.equal(cut.joined((torch.stack(parts),)), value)


def test_a_mesh_of_one_rank_warns_once_and_keeps() -> None:
    """The value is kept as it is, and a second call says nothing more."""
    mesh: Any = Alone()
    region = remat(lambda x: x.sin().sin(), saved_inputs=Shard(mesh))
    x = torch.ones(3, requires_grad=True)

    with pytest.warns(
        RematWarning, match=r"Shard\(.*has no effect: its mesh has one rank"
    ):
        y = region(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        region(x)

    y.sum().backward()
    assert x.grad is not None


def test_a_hash_shows_every_change() -> None:
    """Of one bit and of the order, in long values too."""
    value = torch.randn(3 * 2**20 + 5)
    first = int(_shard._hash(value))

    for place in (0, 1, 2**20, 2**21 - 1, 2**21, value.numel() - 1):
        changed = value.clone()
        changed.view(torch.int32)[place] ^= 1
        assert int(_shard._hash(changed)) != first
    assert int(_shard._hash(value.flip(0))) != first
    assert int(_shard._hash(value.roll(2**21))) != first
    assert int(_shard._hash(value.clone())) == first


def test_a_hash_is_of_the_numbers_not_of_their_place_in_memory() -> None:
    """A value that starts amid a word hashes alike, whatever its dtype."""
    for dtype in (torch.uint8, torch.bool, torch.bfloat16, torch.complex64):
        base = torch.randint(0, 2, (31,)).to(dtype)

        assert int(_shard._hash(base[3:])) == int(_shard._hash(base[3:].clone()))


def test_values_of_one_joint_and_dtype_come_back_together() -> None:
    """The work begins when the restoration is made, once for each kind."""
    joint, other = Recorded(), Recorded()
    storeds = [
        joined(torch.tensor([1]), joint),
        joined(torch.tensor([2]), other),
        Stored.whole(torch.tensor([3])),
        joined(torch.tensor([4]), joint),
        joined(torch.tensor([5.0]), joint),
    ]

    restoration = Restoration(storeds)

    assert joint.log == ["start [1, 4]", "start [5]"]
    assert other.log == ["start [2]"]
    assert [int(value) for value in restoration.finish()] == [2, 3, 3, 5, 6]


def test_what_is_stored_twice_comes_back_level_by_level() -> None:
    """A joint over another waits for it; values between are decoded once all are there."""
    joint = Recorded()
    inner = joined(torch.tensor([1]), joint)
    doubled = Stored((inner, torch.tensor([10])), lambda parts: parts[0] * parts[1])
    storeds = [joined(doubled, joint), joined(torch.tensor([5]), joint)]

    found = Restoration(storeds).finish()

    assert [int(value) for value in found] == [21, 6]
    assert joint.log == ["start [1, 5]", "end", "start [20]", "end"]


def test_a_value_that_is_asked_for_twice_is_sent_for_once() -> None:
    """So is what two saved tensors share."""
    joint = Recorded()
    stored = joined(torch.tensor([1]), joint)

    assert [int(each) for each in Restoration([stored, stored]).finish()] == [2, 2]
    assert joint.log == ["start [1]", "end"]
    assert int(stored.restore()) == 2
