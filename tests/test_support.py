"""The helpers that choose what the laws are tried on."""

import itertools

import pytest

from tests.support import in_turn, pairwise


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


@pytest.mark.parametrize("lengths", [(4, 6, 4), (2, 2), (7, 3, 2), (5,)])
def test_each_value_of_each_axis_has_its_turn(lengths: tuple[int, ...]) -> None:
    """Daily as many as the longest axis has; the product is left to the sweep, and whole."""
    axes = [range(length) for length in lengths]

    found = in_turn(*axes)

    assert [case.values for case in found] == [*itertools.product(*axes)]
    daily = [case.values for case in found if not case.marks]
    assert len(daily) == max(lengths)
    assert [{*column} for column in zip(*daily, strict=True)] == [
        {*axis} for axis in axes
    ]
