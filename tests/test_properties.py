"""The laws on random functions, under every transform and compositions of two."""

import pytest
from hypothesis import given

from tests.properties import PROGRAMS, budget, cases, check


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_region_is_its_function(kind):
    """Numbers, gradients, state, residuals and recomputed operators of random functions.

    A quarter of what the hunts for planted bugs may try: each nest traces several times.
    """
    budget(kind, share=4)(given(cases(kind))(check))()
