"""`Shard` in worlds of two and four ranks; `shard_checks.py` has what each rank checks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.storage import shard_checks
from tests.storage.worlds import names_in, run

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
            known[size] = run(shard_checks, size, folder, limit_s=120)
        return known[size]

    return outcomes


@pytest.mark.contract
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", names_in(shard_checks))
def test_on_every_rank(
    ended: Callable[[int], dict[str, list[str]]], name: str, size: int
) -> None:
    """What the name says holds on each rank."""
    failures = [failure for failure in ended(size)[name] if failure]

    assert not failures, "\n".join(failures)
