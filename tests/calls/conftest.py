"""Counts the calls that are looked up."""

from typing import Any

import pytest

from remat._calls import decorated


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one at each call that is looked up."""
    seen: list[int] = []
    call = decorated.DecoratedFunction._call

    def counted(region: Any, args: Any, kwargs: Any) -> Any:
        seen.append(1)
        return call(region, args, kwargs)

    monkeypatch.setattr(decorated.DecoratedFunction, "_call", counted)
    return seen
