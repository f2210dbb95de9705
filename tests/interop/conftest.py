"""Keeps what one test of a drop-in configures from the next one."""

from collections.abc import Iterator

import pytest

from remat._generators import trackers
from remat.interop.deepspeed import _Current


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No configuration of DeepSpeed and no registration of a tracker outlives a test."""
    monkeypatch.setattr(_Current, "value", None)
    before = dict(trackers.registered)
    yield
    trackers.registered.clear()
    trackers.registered.update(before)
