"""The helpers that choose what the laws are tried on."""

import itertools

import pytest

from tests.support import pairwise


@pytest.mark.parametrize("lengths", [(4, 6, 4), (2, 2, 2), (7, 3, 2), (3, 3, 3, 3)])
def test_any_two_values_of_two_axes_meet(lengths: tuple[int, ...]) -> None:
    """In at most a third more cases than the two longest axes need."""
    axes = [range(length) for length in lengths]

    found = pairwise(*axes)

    for one, other in itertools.combinations(range(len(axes)), 2):
        wanted = set(itertools.product(axes[one], axes[other]))
        assert {(case[one], case[other]) for case in found} == wanted
    *_, second, first = sorted(lengths)
    assert len(found) == len(set(found)) <= first * second * 4 / 3


def test_of_two_axes_it_is_the_product() -> None:
    """There is nothing to leave out."""
    assert sorted(pairwise("ab", "xyz")) == list(itertools.product("ab", "xyz"))
