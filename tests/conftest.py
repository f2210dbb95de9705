"""Makes every test start alike: one thread, the same seeds, the same examples."""

import random
from typing import Any

import hypothesis
import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from remat import _rng
from tests.support import FakeDevice

# One thread: the tensors are small, and a sum is split in the same way on every machine.
torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "remat", derandomize=True, deadline=None, database=None
)
hypothesis.settings.load_profile("remat")

# They start several processes each, once for all tests of a file.
WORLDS = ("tests/storage/test_shard.py", "tests/distributed/")


class WorldsTogether(LoadScopeScheduling):
    """Hands out tests one by one, those that start a world of ranks to one process."""

    def _split_scope(self, nodeid: str) -> str:
        return "worlds" if nodeid.startswith(WORLDS) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> WorldsTogether:
    """Groups by file: pytest 9.2 does not let xdist 3.8 see its `xdist_group` marks."""
    return WorldsTogether(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs an accelerator where there is none."""
    if torch.accelerator.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator"))


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Stands in for `torch.cuda` where generator states are read and set."""
    device = FakeDevice()
    monkeypatch.setattr(_rng, "_module", lambda kind: device)
    return device
