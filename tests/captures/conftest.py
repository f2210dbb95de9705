"""Gives each test globals of its own."""

import types

import pytest

from tests.captures import reached


@pytest.fixture(autouse=True)
def fresh_globals(monkeypatch):
    """Each test may change the globals of `reached`."""
    for name in ("W", "SCALE"):
        monkeypatch.setattr(reached, name, getattr(reached, name))
    monkeypatch.setattr(reached, "RATES", [0.1, 0.2])
    monkeypatch.setattr(reached, "TABLE", dict(reached.TABLE))
    holder = types.SimpleNamespace(**vars(reached.HOLDER))
    monkeypatch.setattr(reached, "HOLDER", holder)
