"""The property test sees: ten bugs, planted one at a time, and each is caught.

Same strategies, same judge as `test_properties.py`, which is what passes without a bug.
"""

import pytest

from tests import planted

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("bug", "kind"), planted.BUGS.values(), ids=planted.BUGS)
def test_a_planted_bug_is_caught(bug, kind):
    """The hunt among the functions that it breaks ends with a counterexample."""
    assert planted.hunt(bug, kind, shrink=False) is not None


def test_there_are_ten():
    """Each bug has its name."""
    assert len(planted.BUGS) == 10
