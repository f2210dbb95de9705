"""Random policies, and random transforms by name; simplest first."""

from __future__ import annotations

from remat import policies as _policies
from remat.policies import AbstractPolicy
from remat.testing._transforms import COMPOSITIONS, TRANSFORMS
from remat.testing.strategies._hypothesis import st

#: The names that generated functions give to their values.
NAMES = ("a", "b", "c")


def policies() -> st.SearchStrategy[AbstractPolicy]:
    """Policies that ask for no storage but `Keep`, and combinations of two of them."""
    simple = st.one_of(
        st.sampled_from(
            [
                _policies.nothing_saveable,
                _policies.everything_saveable,
                _policies.save_matmul_outputs,
            ]
        ),
        _globs().map(lambda names: _policies.save_only_these_names(*names)),
        _globs().map(lambda names: _policies.save_any_names_but_these(*names)),
        _globs().map(lambda names: _policies.save_anything_except_these_names(*names)),
        st.sampled_from([8, 32]).map(lambda size: _policies.by_size(min_bytes=size)),
    )
    return st.one_of(simple, st.builds(_either, simple, simple))


def _either(
    p: _policies.AbstractPolicy, q: _policies.AbstractPolicy
) -> _policies.AbstractPolicy:
    return p | q


def _globs() -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True)


def transforms() -> st.SearchStrategy[str]:
    """The names of single transforms and of compositions of two, single ones first."""
    return st.one_of(st.sampled_from(TRANSFORMS), st.sampled_from(COMPOSITIONS))
