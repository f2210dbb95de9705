"""The laws on random functions, under every transform and compositions of two."""

from hypothesis import given

from tests.properties import BUDGET, cases, check


@BUDGET
@given(cases())
def test_a_region_is_its_function(case):
    """Numbers, gradients, state, residuals and recomputed operators of random functions."""
    check(case)
