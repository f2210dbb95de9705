"""Regions on torch's own distributed engines, in worlds of two and four ranks.

The modules `*_checks.py` beside this have what each rank checks.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import (
    context_parallel_checks,
    data_parallel_checks,
    expert_checks,
    pipeline_checks,
    sharded_around_checks,
    tensor_parallel_checks,
    two_dimensional_checks,
)
from tests.storage.worlds import checks_in, run

WORLDS: dict[int, tuple[Any, ...]] = {
    2: (
        data_parallel_checks,
        sharded_around_checks,
        tensor_parallel_checks,
        pipeline_checks,
        expert_checks,
        context_parallel_checks,
    ),
    4: (two_dimensional_checks, context_parallel_checks),
}


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[int], dict[str, list[str]]]:
    """How the checks ended in a world of some size, which is started once."""
    known: dict[int, dict[str, list[str]]] = {}

    def outcomes(size: int) -> dict[str, list[str]]:
        if size not in known:
            folder: Path = tmp_path_factory.mktemp(f"engines_{size}")
            known[size] = run(WORLDS[size], size, folder, limit_s=240)
        return known[size]

    return outcomes


@pytest.mark.contract
@pytest.mark.parametrize(
    ("size", "name"),
    [(size, name) for size, found in WORLDS.items() for name in checks_in(found)],
)
def test_on_every_rank(
    ended: Callable[[int], dict[str, list[str]]], size: int, name: str
) -> None:
    """What the name says holds on each rank."""
    failures = [failure for failure in ended(size)[name] if failure]

    assert not failures, "\n".join(failures)
