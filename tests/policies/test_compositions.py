"""Policies under `|`, `&` and `~`: union, intersection and complement."""

import pickle
from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from remat.policies import (
    AbstractPolicy,
    Save,
    by_size,
    decide,
    everything_saveable,
    nothing_saveable,
    save_any_names_but_these,
    save_from_both_policies,
    save_only_these_names,
)
from remat.storage import AbstractStorage, Keep, Offload, Sparse
from tests.policies.values import ATEN, NAMESPACE, value

# The algebra, against sets of values and a table of storages.

LEAVES: list[AbstractPolicy] = [
    nothing_saveable,
    everything_saveable,
    save_only_these_names("a"),
    save_only_these_names("b"),
    save_only_these_names("a", "c").stored(Offload()),
    save_any_names_but_these("c").stored(Sparse()),
]
NAMES = [(), ("a",), ("b",), ("c",), ("a", "b"), ("b", "c")]
UNIVERSE = [value(ATEN.mm.default, *names) for names in NAMES]

Answer = AbstractStorage | None


@dataclass(frozen=True)
class Tree:
    """A policy, and what it must answer for each of UNIVERSE: a storage, or None."""

    policy: AbstractPolicy
    truth: tuple[Answer, ...]

    def __or__(self, other: "Tree") -> "Tree":
        pairs = zip(self.truth, other.truth, strict=True)
        truth = tuple(b if a is None else a for a, b in pairs)
        return Tree(self.policy | other.policy, truth)

    def __and__(self, other: "Tree") -> "Tree":
        pairs = zip(self.truth, other.truth, strict=True)
        truth = tuple(None if b is None else a for a, b in pairs)
        return Tree(self.policy & other.policy, truth)

    def __invert__(self) -> "Tree":
        truth = tuple(Keep() if a is None else None for a in self.truth)
        return Tree(~self.policy, truth)

    def stored(self, how: AbstractStorage) -> "Tree":
        truth = tuple(None if a is None else how for a in self.truth)
        return Tree(self.policy.stored(how), truth)


def leaf_truth(names: tuple[str, ...]) -> list[Answer]:
    """What each of LEAVES answers for a value of these names, written out."""
    return [
        None,
        Keep(),
        Keep() if "a" in names else None,
        Keep() if "b" in names else None,
        Offload() if {"a", "c"} & set(names) else None,
        Sparse() if names and "c" not in names else None,
    ]


TRUTHS = list(zip(*map(leaf_truth, NAMES), strict=True))
leaves = st.sampled_from([Tree(p, t) for p, t in zip(LEAVES, TRUTHS, strict=True)])
storages = st.sampled_from([Keep(), Offload(), Sparse() >> Offload()])
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(Tree.__or__, inner, inner),
        st.builds(Tree.__and__, inner, inner),
        st.builds(Tree.__invert__, inner),
        st.builds(Tree.stored, inner, storages),
    ),
    max_leaves=6,
)


def answers(policy: AbstractPolicy) -> tuple[Answer, ...]:
    """The storage that a policy says for each of UNIVERSE, None where it recomputes."""
    decisions = [decide(policy, each) for each in UNIVERSE]
    return tuple(d.storage if isinstance(d, Save) else None for d in decisions)


def is_saved(policy: AbstractPolicy) -> list[bool]:
    """Which of UNIVERSE a policy saves."""
    return [answer is not None for answer in answers(policy)]


@given(trees)
def test_composed_policies_answer_as_the_sets_do(tree: Tree):
    """Operators are union, intersection and complement; the left storage wins."""
    assert answers(tree.policy) == tree.truth


@given(trees)
def test_composed_policies_are_values(tree: Tree):
    """A composed policy is rebuilt by its repr and by pickle, hash included."""
    policy = tree.policy

    assert eval(repr(policy), NAMESPACE) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert hash(pickle.loads(pickle.dumps(policy))) == hash(policy)


@given(trees, trees, trees)
def test_laws_of_the_operators(a: Tree, b: Tree, c: Tree):
    """Associativity with storage; commutativity, De Morgan, involution of what is saved."""
    p, q, r = a.policy, b.policy, c.policy

    assert answers((p | q) | r) == answers(p | (q | r))
    assert answers((p & q) & r) == answers(p & (q & r))
    assert answers(p | p) == answers(p & p) == answers(p)
    assert answers(p | nothing_saveable) == answers(nothing_saveable | p) == answers(p)
    assert answers(p & everything_saveable) == answers(p)
    assert answers(~(p | q)) == answers(~p & ~q)
    assert answers(~(p & q)) == answers(~p | ~q)
    assert answers(~~p) == answers(p.stored(Keep()))
    assert is_saved(p | q) == is_saved(q | p)
    assert is_saved(p & q) == is_saved(q & p)
    assert is_saved(p & (q | r)) == is_saved((p & q) | (p & r))
    assert answers(save_from_both_policies(p, q)) == answers(p | q)
    assert answers(p.stored(Sparse()).stored(Offload())) == answers(p.stored(Offload()))
    assert set((p | q).globs) == set(p.globs) | set(q.globs)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ((nothing_saveable | by_size(1)) | by_size(2), "nothing_saveable | by_size(min_bytes=1) | by_size(min_bytes=2)"),
        (nothing_saveable | (by_size(1) | by_size(2)), "nothing_saveable | (by_size(min_bytes=1) | by_size(min_bytes=2))"),
        ((nothing_saveable | by_size(1)) & by_size(2), "(nothing_saveable | by_size(min_bytes=1)) & by_size(min_bytes=2)"),
        (~(nothing_saveable & by_size(1)), "~(nothing_saveable & by_size(min_bytes=1))"),
        ((~nothing_saveable).stored(Keep()), "(~nothing_saveable).stored(Keep())"),
        (~nothing_saveable.stored(Keep()), "~nothing_saveable.stored(Keep())"),
    ],
)  # fmt: skip
def test_reprs_have_no_needless_brackets(policy: AbstractPolicy, expected: str):
    """Brackets stand only where Python would read something else without them."""
    assert repr(policy) == expected
