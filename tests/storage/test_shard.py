"""`Shard`, and collectives in regions, in worlds of two and four ranks.

`held_checks.py`, `shard_checks.py`, `shard_agreement_checks.py`, `collective_checks.py` and
`peer_checks.py` have what each rank checks.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.storage import (
    collective_checks,
    held_checks,
    peer_checks,
    shard_agreement_checks,
    shard_checks,
)
from tests.storage.worlds import checks_in, run
from tests.support import swept

MODULES = (
    held_checks,
    shard_checks,
    shard_agreement_checks,
    collective_checks,
    peer_checks,
)

Outcomes = dict[int, dict[str, list[str]]]


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[int], dict[str, list[str]]]:
    """How the checks ended in a world of some size, which is started once."""
    known: Outcomes = {}

    def outcomes(size: int) -> dict[str, list[str]]:
        if size not in known:
            folder: Path = tmp_path_factory.mktemp(f"world_{size}")
            known[size] = run(MODULES, size, folder, limit_s=240)
        return known[size]

    return outcomes


# Four are for our own arithmetic, which also shows in two.
SIZES = [pytest.param(2, marks=pytest.mark.contract), *swept([4])]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", checks_in(MODULES))
def test_on_every_rank(
    ended: Callable[[int], dict[str, list[str]]], name: str, size: int
) -> None:
    """What the name says holds on each rank."""
    failures = [failure for failure in ended(size)[name] if failure]

    assert not failures, "\n".join(failures)
