"""The report of what waits in a storage: bytes in memory and elsewhere."""

import dataclasses
from typing import Any, ClassVar, final

import pytest
import torch
from torch import Tensor

from remat import Report, checkpoint_name, policies, random, remat, report, storage
from tests.random.trackers import generator_state
from tests.reporting.models import batch, block, loss_of, parameters
from tests.support import seeded

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:remat.RematWarning"),
]


def test_storages_are_named() -> None:
    """A value that waits in another form says so, and counts in that form."""
    policy = policies.save_only_these_names("attn").stored(storage.Cast(torch.bfloat16))

    found = report(loss_of(remat(block, policy=policy)), parameters(), batch())

    value = next(each for each in found.values if each.name == "attn")
    assert value.storage == "Cast(dtype=torch.bfloat16)"
    assert value.size_bytes == 4 * batch().nbytes // 2


def test_inputs_that_wait_otherwise_count_so() -> None:
    """`saved_inputs` holds under the watcher too, and the value says how it waits."""
    how = storage.Cast(torch.bfloat16)
    region = remat(lambda t: t.sin().sin(), saved_inputs=how)

    found = report(lambda x: region(x * 2.0).sum(), torch.ones(64))

    (value,) = found.values
    assert (value.name, value.size_bytes, value.storage) == ("t", 128, repr(how))


def hidden(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """h: (10, 40) with many zeros; t: (10, 24)."""
    h = checkpoint_name(torch.relu(x @ p["up"]), "h")
    return x + checkpoint_name(torch.tanh(h @ p["down"]), "t")


# For both of 400 and 240 numbers of four bytes: bytes in memory, and in a file.
FOLDER = "a folder"
# Elsewhere, for values of an accelerator: what is made of a file's numbers stays with the host.
IS_HOST = torch.get_default_device().type == "cpu"
WAITS: dict[str, tuple[storage.AbstractStorage, tuple[int, int], tuple[int, int]]] = {
    "keep": (storage.Keep(), (1600, 0), (960, 0)),
    "cast": (storage.Cast(torch.bfloat16), (800, 0), (480, 0)),
    # A byte a number, and a step and a minimum of two bytes each a group of 32.
    "quantize": (storage.Quantize(8, group_size=32), (452, 0), (272, 0)),
    "by_chance": (
        storage.Quantize(2, group_size=40, stochastic=True, key=random.key(0)),
        (140, 0),
        (84, 0),
    ),
    "file": (storage.Offload(path=FOLDER), (0, 1600), (0, 960)),
    "large": (storage.Offload(path=FOLDER, min_bytes=1000), (0, 1600), (960, 0)),
    "both": (
        storage.Quantize(8, group_size=32) >> storage.Offload(path=FOLDER),
        (0, 452),
        (0, 272),
    ),
    "back": (
        storage.Offload(path=FOLDER) >> storage.Cast(torch.bfloat16),
        (800, 0) if IS_HOST else (0, 800),
        (480, 0) if IS_HOST else (0, 480),
    ),
}


def in_folder(how: Any, path: Any) -> Any:
    """The storage with its files in this folder."""
    if isinstance(how, storage.Offload):
        return dataclasses.replace(how, path=str(path))
    if isinstance(how, storage.Chain):
        return storage.Chain(tuple(in_folder(link, path) for link in how.links))
    return how


@pytest.mark.contract
@pytest.mark.parametrize("name", WAITS)
def test_what_waits_in_a_storage_is_foretold(name: str, tmp_path: Any) -> None:
    """Bytes in memory and elsewhere, of saved values and of inputs, by both ways."""
    how, h, t = WAITS[name]
    how = in_folder(how, tmp_path)
    p = {"up": seeded(24, 40).float(), "down": seeded(40, 24).float()}
    x = seeded(10, 24).float()
    saved = remat(hidden, policy=policies.save_only_these_names("*").stored(how))
    given = remat(hidden, saved_inputs={"x": how})

    found = report(lambda p, x: saved(p, x).sum(), p, x)
    (row,) = found.regions
    measured = row.held_bytes, row.elsewhere_bytes
    assert measured == (h[0] + t[0], h[1] + t[1])
    assert measured == (row.predicted_held_bytes, row.predicted_elsewhere_bytes)
    assert (found.held_bytes - found.output_bytes, found.elsewhere_bytes) == measured
    assert ("elsewhere" in str(found)) is (measured[1] > 0)

    (row,) = report(lambda p, x: given(p, x.sin()).sum(), p, x).regions
    measured = row.held_bytes, row.elsewhere_bytes
    assert measured == t
    assert measured == (row.predicted_held_bytes, row.predicted_elsewhere_bytes)


@pytest.mark.parametrize(
    ("how", "size_bytes"),
    [(storage.Keep(), 8 * 24), (storage.Cast(torch.bfloat16), 36)],
)
def test_views_of_one_base_are_foretold(how: Any, size_bytes: int) -> None:
    """As it is a view holds all of its base, once; what a storage copies is its own."""
    region = remat(lambda a, b: a.sin() * b.sin(), saved_inputs=how)

    def loss(x: Tensor) -> Tensor:
        base = x * 2.0
        return region(base[:3], base[1:4]).sum()

    (row,) = report(loss, seeded(8, 3)).regions

    assert row.held_bytes == row.predicted_held_bytes == size_bytes


def test_what_waits_elsewhere_does_not_make_the_peak(tmp_path: Any) -> None:
    """Values in files take no memory: at the peak those of the first layer are left."""
    policy = policies.save_only_these_names("*")
    p = {"up": seeded(24, 40).float(), "down": seeded(40, 24).float()}
    x = seeded(10, 24).float()

    def peak(policy: Any) -> Report:
        layer = remat(hidden, policy=policy)
        return report(lambda p, x: layer(p, layer(p, layer(p, x))).sum(), p, x)

    kept = peak(policy)
    away = peak(policy.stored(storage.Offload(path=str(tmp_path))))

    assert kept.held_bytes - away.held_bytes == away.elsewhere_bytes == 3 * (1600 + 960)
    assert kept.peak.size_bytes - away.peak.size_bytes == 1600 + 960
    assert max(away.timeline.total_bytes) == away.peak.size_bytes
    assert sum(value.size_bytes for value in away.values) == (
        away.held_bytes - away.output_bytes + away.elsewhere_bytes
    )


FIRST = storage.Place()


@final
@dataclasses.dataclass(frozen=True)
class Halves(storage.AbstractStorage):
    """A storage of the user's own: the first half of the numbers waits."""

    is_exact: ClassVar[bool] = False

    def store(self, value: Tensor, place: storage.Place = FIRST) -> storage.Stored:
        half = value.reshape(-1)[: value.numel() // 2].clone()
        return storage.Stored(
            (half,), lambda parts: torch.cat([parts[0]] * 2).view(value.shape)
        )


@pytest.mark.contract
@pytest.mark.parametrize("how", [storage.Sparse(), Halves()], ids=["sparse", "own"])
def test_bytes_that_nothing_foretells_are_those_measured(how: Any) -> None:
    """How many zeros there are, and what a user's storage does, no shape tells."""
    x = torch.relu(seeded(64))
    policy = policies.save_only_these_names("a").stored(how) | (
        policies.save_only_these_names("b")
    )
    region = remat(
        lambda x: checkpoint_name(checkpoint_name(x * 2.0, "a").sin(), "b").square(),
        policy=policy,
    )

    (row,) = report(lambda x: region(x).sum(), x).regions

    bits = 64 // 8
    first = int((x != 0).sum()) * 8 + bits if how == storage.Sparse() else 64 * 4
    assert row.held_bytes == row.predicted_held_bytes == first + 64 * 8
    assert row.elsewhere_bytes == row.predicted_elsewhere_bytes == 0


@pytest.mark.contract
def test_generator_states_are_held_as_predicted() -> None:
    """A region that draws holds the state from which it draws again."""
    region: Any = remat(
        lambda x: torch.nn.functional.dropout(x.sin(), 0.5).sin(), rng="preserve"
    )

    (row,) = report(lambda x: region(x).sum(), torch.ones(64)).regions

    assert row.held_bytes == row.predicted_held_bytes == generator_state().nbytes
