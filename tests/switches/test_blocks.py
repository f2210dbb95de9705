"""Blocks that say what the regions inside, on this thread, do."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager

import pytest

from remat import disabled, first_order
from remat._switches import blocks

pytestmark = pytest.mark.contract


@pytest.mark.parametrize(
    ("block", "is_inside"),
    [(disabled, blocks.is_disabled), (first_order, blocks.is_first_order)],
    ids=["disabled", "first_order"],
)
def test_blocks_of_generators_end_in_any_order(
    block: Callable[[], AbstractContextManager[None]], is_inside: Callable[[], bool]
) -> None:
    """The one that was opened first may end first: the other holds, and none afterwards."""

    def batches() -> Generator[bool]:
        with block():
            yield is_inside()
            yield is_inside()

    first, second = batches(), batches()
    seen = [next(first), next(second)]
    first.close()
    seen.append(next(second))
    second.close()

    assert seen == [True, True, True]
    assert not is_inside()
