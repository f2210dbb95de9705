"""Random transforms, by name."""

from __future__ import annotations

from remat.testing._transforms import COMPOSITIONS, TRANSFORMS
from remat.testing.strategies._hypothesis import st


def transforms() -> st.SearchStrategy[str]:
    """The names of single transforms and of compositions of two, single ones first."""
    return st.one_of(st.sampled_from(TRANSFORMS), st.sampled_from(COMPOSITIONS))
