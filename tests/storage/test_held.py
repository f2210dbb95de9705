"""What a storage says that it will hold is what is held, whoever asks it."""

import io
import pickle
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from remat import RematError, checkpoint_name, plan, policies, remat, report, storage
from remat._graph.meta import TensorMeta
from remat._regions.waiting import parts_of, wait
from remat.policies import Recompute, Save, Value
from remat.storage import AbstractStorage, Cast, Chain, Offload, Place, Stored
from tests.storage.test_conformance import STORAGES, VALUES, numbers
from tests.support import held_bytes, in_turn

pytestmark = pytest.mark.filterwarnings("ignore::remat.RematWarning")

FIRST = Place()


@dataclass(frozen=True)
class Halves(AbstractStorage):
    """A user's storage, which says nothing of its bytes: half of the bits, and more."""

    is_exact: ClassVar[bool] = False

    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        if value.dtype is not torch.float32:
            return Stored.whole(value)
        high = value.bfloat16()
        low = (value - high).bfloat16().view(-1)[::2].clone()
        return Stored((high, low), lambda parts: parts[0].float())


@dataclass(frozen=True)
class Largest(AbstractStorage):
    """A user's storage that has to see numbers."""

    is_exact: ClassVar[bool] = False

    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        if not value.is_floating_point() or float(value.max()) > 100:
            return Stored.whole(value)
        return Stored((value.half(),), lambda parts: parts[0].to(value.dtype))


@dataclass(frozen=True)
class Copying(AbstractStorage):
    """A user's storage that writes to a tensor of its own, which fake tensors refuse."""

    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        return Stored((BUFFER.copy_(value).clone(),), lambda parts: parts[0])


BUFFER = torch.zeros(6, 7)


@dataclass(frozen=True)
class Positions(AbstractStorage):
    """A user's storage of numbers and their positions: five times the value of no zeros."""

    is_exact: ClassVar[bool] = True

    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        shape, dtype, at = value.shape, value.dtype, value.nonzero()

        def decode(parts: Any) -> Tensor:
            numbers, at = parts
            return torch.zeros(shape, dtype=dtype).index_put(at.unbind(1), numbers)

        return Stored((value[at.unbind(1)], at), decode)


@dataclass(frozen=True)
class Averaged(AbstractStorage):
    """A user's storage whose only part is expanded."""

    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        row = value.float().mean(0, keepdim=True).to(value.dtype)
        return Stored((row.expand_as(value),), lambda parts: parts[0].contiguous())


@dataclass(frozen=True)
class Reading(AbstractStorage):
    """A user's storage that reads numbers, in a way that fake tensors have an error for."""

    read: Any
    is_exact: ClassVar[bool] = True

    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        self.read(value)
        return Stored.whole(value)


def _is_plain(value: Tensor) -> None:
    assert type(value) is Tensor


READS: dict[str, Any] = {
    "pickled": pickle.dumps,
    "saved": lambda value: torch.save(value, io.BytesIO()),
    "formatted": lambda value: f"{value.max():.3f}",
    "bytes": lambda value: bytes(value.untyped_storage()),
    "asserted": _is_plain,
    "looked up": lambda value: {1.0: 0}[float(value.max() * 0 + 1)],
}


# `streams` is made for an accelerator, of which there is none here.
EACH = {name: each for name, each in STORAGES.items() if name != "streams"} | {
    "halves": Halves(),
    "halves and cast": Halves() >> Cast(torch.float8_e4m3fn),
    "quantize and own": storage.Quantize(8) >> Halves(),
    "file and cast": Offload(path=".") >> Cast(torch.bfloat16),
    "large": Offload(path=".", min_bytes=1000),
    "sparse, all numbers": storage.Sparse(),
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Files are made here, and here it is seen that none is left."""
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []


def hidden(x: Tensor) -> Tensor:
    """h: of x's form, with no zero where x is not below 0."""
    h = checkpoint_name((x + 2) * x.cosh(), "h")
    return h.sin().exp().sin()


LAYOUTS = {
    "odd": lambda: numbers(7, 37),
    "transposed": lambda: numbers(37, 9).t(),
    "permuted": lambda: numbers(2, 3, 5).permute(1, 2, 0),
    "sliced": lambda: numbers(8, 6)[::2, 1:4],
    "expanded": lambda: numbers(1, 3).expand(4, 3),
    "one": lambda: numbers(1),
    "double": lambda: numbers(5, 7, dtype=torch.float64),
}


@pytest.mark.contract
@pytest.mark.parametrize(("layout", "name"), in_turn(LAYOUTS, EACH))
def test_everything_states_the_bytes_that_are_measured(name: str, layout: str) -> None:
    """`saved_residuals`, a report and a plan, of a value that a policy saves."""
    x, how = LAYOUTS[layout](), EACH[name]

    def allow(value: Value) -> Save | Recompute:
        return Save(how) if "h" in value.names else Recompute()

    region = remat(hidden, policy=policies.save_only_these_names("h").stored(how))
    (row,) = report(lambda x: region(x).sum(), x).regions
    planned = plan(hidden, budget=policies.budget(10**6, allow=allow))(x)
    stated = [
        each.size_bytes for each in region.saved_residuals(x) if each.op != "input"
    ]

    assert stated == [option.size_bytes for (option,) in planned.problem.items]
    # With numbers the report knows what waits; before, nobody does.
    assert row.predicted_held_bytes == row.held_bytes <= stated[0]
    assert row.held_bytes == stated[0] or name == "chain"
    if "file" not in name and name not in ("large", "chain"):
        assert held_bytes(region, x) == stated[0]


@pytest.mark.contract
@pytest.mark.parametrize("name", EACH)
def test_a_value_of_any_kind_holds_what_is_stated(name: str) -> None:
    """Of each layout and dtype, by the memory of the tensors that wait."""
    how = EACH[name]
    for layout, make in VALUES.items():
        value = make()
        stated = how.held(TensorMeta.of(value))
        size_bytes = _waiting_bytes(value, how)

        assert size_bytes <= stated.size_bytes, layout
        assert size_bytes == stated.size_bytes or stated.is_bound, layout


def _waiting_bytes(value: Tensor, how: AbstractStorage) -> int:
    waiting = wait(value, how, FIRST)
    if waiting is value:  # a slice of its memory, or all of it several times
        return min(value.nbytes, value.untyped_storage().nbytes())
    here = [part for part in parts_of(waiting) if part.device == value.device]
    return sum(part.untyped_storage().nbytes() for part in here if not _is_file(part))


def _is_file(part: Tensor) -> bool:
    return part.device.type == "cpu" and part.untyped_storage().filename is not None


@pytest.mark.contract
def test_a_storage_that_sees_numbers_is_counted_whole() -> None:
    """More than is stated is never held, also where it is a link of a chain."""
    meta = TensorMeta.of(numbers(6, 7))

    assert Largest().held(meta).is_bound
    for how in (
        Largest(),
        Copying(),
        Largest() >> Cast(torch.bfloat16),
        storage.Sparse() >> Largest(),
    ):
        assert how.held(meta).size_bytes == 6 * 7 * 4
    assert (Cast(torch.bfloat16) >> Largest()).held(meta).size_bytes == 6 * 7 * 2


@pytest.mark.contract
@pytest.mark.parametrize("name", READS)
def test_no_error_that_a_tensor_without_numbers_causes_gets_out(name: str) -> None:
    """Whatever it is: a call goes through, so its value is counted whole."""
    how, x = Reading(READS[name]), numbers(6, 7)
    named = policies.save_only_these_names("h")
    region = remat(hidden, policy=named.stored(how))

    found = plan(hidden, budget=policies.budget(10**6, allow=named.stored(how)))(x)

    assert how.held(TensorMeta.of(x)).is_bound
    assert [each.size_bytes for (each,) in found.problem.items] == [x.nbytes]
    assert held_bytes(region, x) == x.nbytes
    assert report(lambda x: region(x).sum(), x).regions[0].held_bytes == x.nbytes
    assert region.saved_residuals(x)[0].size_bytes == x.nbytes


def test_our_own_errors_get_out() -> None:
    """What a storage does against its contract is said when it is asked."""

    def change(value: Tensor) -> None:
        value.add_(1)

    with pytest.raises(RematError, match="changed the value"):
        Reading(change).held(TensorMeta.of(numbers(6, 7)))


@pytest.mark.contract
@pytest.mark.parametrize(
    ("how", "size_bytes"),
    [
        (Positions(), 7 * 37 * 4),
        (Cast(torch.bfloat16) >> Positions(), 7 * 37 * 2),
        (Positions() >> Cast(torch.bfloat16), 7 * 37 * 4),
        (storage.Sparse() >> Positions(), 7 * 37 * 4),
    ],
    ids=repr,
)
def test_more_than_a_bound_is_never_held(how: Any, size_bytes: int) -> None:
    """A value of which a storage makes more than that, by its numbers, waits as it is."""
    x = numbers(7, 37)
    region = remat(hidden, policy=policies.save_only_these_names("h").stored(how))
    few = torch.zeros(7, 37).index_put(
        (torch.tensor(3), torch.tensor(4)), torch.ones(())
    )

    assert how.held(TensorMeta.of(x)).is_bound
    assert region.saved_residuals(x)[0].size_bytes == size_bytes
    assert held_bytes(region, x) <= size_bytes
    assert _waiting_bytes(few, Positions()) == 4 + 2 * 8


def test_an_expanded_value_counts_once() -> None:
    """Ten numbers, each of which stands for four."""
    meta = TensorMeta.of(torch.ones(10, 1).expand(10, 4))

    for how, size_bytes in (
        (storage.Keep(), 40),
        (Cast(torch.bfloat16), 20),
        (Halves(), 30),
        (Averaged(), 4),
    ):
        assert how.held(meta).size_bytes == size_bytes


def test_what_waits_elsewhere_is_told_apart() -> None:
    """A file's bytes, and those of another device, are not held; what is made of them is."""
    meta = TensorMeta.of(numbers(10, 10))

    def bytes_of(how: AbstractStorage) -> tuple[int, int]:
        held = how.held(meta)
        return held.size_bytes, held.elsewhere_bytes

    assert bytes_of(Offload(path=".")) == (0, 400)
    assert bytes_of(Offload(path=".") >> storage.Keep()) == (0, 400)
    assert bytes_of(Offload(path=".") >> Cast(torch.bfloat16)) == (200, 0)
    assert bytes_of(Offload("cuda:1") >> Cast(torch.bfloat16)) == (0, 200)
    assert (
        bytes_of(Offload())
        == bytes_of(Chain((storage.Keep(), storage.Keep())))
        == (400, 0)
    )
