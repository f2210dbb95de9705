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
from tests.support import swept

pytestmark = pytest.mark.apart

#: How many ranks a world has, and what they check.
World = tuple[int, tuple[Any, ...]]

DAILY: World = (
    2,
    (
        data_parallel_checks,
        tensor_parallel_checks,
    ),
)
#: They compose what the first world checks.
SWEPT: tuple[World, ...] = (
    (
        2,
        (
            sharded_around_checks,
            pipeline_checks,
            expert_checks,
            context_parallel_checks,
        ),
    ),
    (4, (two_dimensional_checks, context_parallel_checks)),
)


def checks_of(world: World) -> list[tuple[World, str]]:
    """Each check in a world, by its name."""
    return [(world, name) for name in checks_in(world[1])]


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[World], dict[str, list[str]]]:
    """How the checks ended in a world, which is started once."""
    known: dict[World, dict[str, list[str]]] = {}

    def outcomes(world: World) -> dict[str, list[str]]:
        if world not in known:
            size, modules = world
            folder: Path = tmp_path_factory.mktemp(f"engines_{size}")
            known[world] = run(modules, size, folder, limit_s=240)
        return known[world]

    return outcomes


@pytest.mark.contract
@pytest.mark.parametrize(
    "check",
    [*checks_of(DAILY), *swept(check for world in SWEPT for check in checks_of(world))],
    ids=lambda check: f"{check[0][0]}-{check[1]}",
)
def test_on_every_rank(
    ended: Callable[[World], dict[str, list[str]]], check: tuple[World, str]
) -> None:
    """What the name says holds on each rank."""
    world, name = check
    failures = [failure for failure in ended(world)[name] if failure]

    assert not failures, "\n".join(failures)
