"""The property test sees: ten bugs, planted one at a time, and each is caught.

Same strategies, same judge as `test_properties.py`, which is what passes without a bug.
"""

import pytest

from tests import planted
from tests.support import daily

pytestmark = pytest.mark.filterwarnings("ignore")


#: Their hunts are long; one among each kind of functions is left.
LONG = {
    *("contiguous_cotangents", "merged_draws", "opaque_name", "stale_global"),
    "wrong_index_of_output",
}
DAILY = planted.BUGS.keys() - LONG


@pytest.mark.parametrize("planting", daily(planted.BUGS, DAILY))
def test_a_planted_bug_is_caught(planting):
    """The hunt among the functions that it breaks ends with a counterexample."""
    assert planted.hunt(*planting, shrink=False) is not None


def test_there_are_ten():
    """Each bug has its name."""
    assert len(planted.BUGS) == 10
