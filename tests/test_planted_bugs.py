"""The property test sees: ten bugs, planted one at a time, and each is caught.

Same strategies, same judge as `test_properties.py`, which is what passes without a bug.
"""

import pytest

from tests import planted
from tests.support import daily

pytestmark = pytest.mark.filterwarnings("ignore")


#: Those whose hunt is short.
DAILY = planted.BUGS.keys() - {"merged_draws", "opaque_name", "wrong_index_of_output"}


@pytest.mark.parametrize("planting", daily(planted.BUGS, DAILY))
def test_a_planted_bug_is_caught(planting):
    """The hunt among the functions that it breaks ends with a counterexample."""
    assert planted.hunt(*planting, shrink=False) is not None


def test_there_are_ten():
    """Each bug has its name."""
    assert len(planted.BUGS) == 10
