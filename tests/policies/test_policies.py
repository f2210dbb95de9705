"""Policies decide as their names say, and are values: they compare, hash, pickle, print."""

import copy
import doctest
import pickle
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional

from remat import policies, remat, schedules, storage
from remat._errors import PolicyError
from remat.policies import (
    AbstractPolicy,
    Operand,
    Recompute,
    Save,
    Value,
    as_policy,
    by_op,
    by_size,
    decide,
    everything_saveable,
    from_callable,
    nothing_saveable,
    offload_dot_with_no_batch_dims,
    save_and_offload_only_these_names,
    save_any_names_but_these,
    save_anything_except_these_names,
    save_attention_outputs,
    save_from_both_policies,
    save_matmul_outputs,
    save_matmul_outputs_no_batch,
    save_only_these_names,
)
from remat.policies._operators import function_name
from remat.policies._sizes import parse_size, show_size
from remat.storage import AbstractStorage, Keep, Offload, Sparse

ATEN = torch.ops.aten


def value(
    op: Any = None,
    *names: str,
    shape: tuple[int, ...] = (8, 1024),
    size_bytes: int = 32768,
    function: str = "",
) -> Value:
    """A value of float32 that the user made at model.py:41."""
    return Value(
        op, names, shape, torch.float32, size_bytes, 0, "model.py:41", function
    )


def is_small(value: Value) -> bool:
    return value.size_bytes < 1024


def offload_mlp(value: Value) -> bool | Save:
    return "mlp" in value.names and Save(Offload())


VALUES = {
    "input": value(),
    "named input": value(None, "x"),
    "mm": value(ATEN.mm.default, function="matmul"),
    "named mm": value(ATEN.mm.default, "mlp", function="linear"),
    "two names": value(ATEN.mul.Tensor, "attn", "mlp_1"),
    "linear": value(ATEN.addmm.default, function="linear"),
    "bmm": value(ATEN.bmm.default, shape=(4, 8, 8), function="matmul"),
    "einsum": value(ATEN.bmm.default, shape=(1, 8, 8), function="einsum"),
    "conv": value(ATEN.convolution.default, shape=(1, 2, 3, 3), function="conv2d"),
    "conv1d": value(ATEN.convolution.default, shape=(4, 2, 8), function="conv1d"),
    "dot": value(ATEN.dot.default, shape=(), size_bytes=4, function="dot"),
    "scores": value(
        ATEN.bmm.default, shape=(4, 8, 8), function="scaled_dot_product_attention"
    ),
    "weights": value(ATEN._softmax.default, function="scaled_dot_product_attention"),
    "fused": value(ATEN._scaled_dot_product_flash_attention_for_cpu.default),
    "fused backward": value(
        ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
    ),
    "flash": value(ATEN._flash_attention_forward.default),
    "mha projection": value(
        ATEN.addmm.default, function="multi_head_attention_forward"
    ),
    "mha scores": value(
        ATEN.bmm.default, shape=(4, 8, 8), function="multi_head_attention_forward"
    ),
    "gelu": value(ATEN.gelu.default, function="gelu"),
    "sin": value(ATEN.sin.default, size_bytes=512, function="sin"),
}
MATMULS_NO_BATCH = {
    "mm", "named mm", "linear", "einsum", "conv", "conv1d", "dot", "mha projection",
}  # fmt: skip
NAMED = {"named input", "named mm", "two names"}

# Each policy, with the names of those of VALUES that it saves.
SAVED: list[tuple[AbstractPolicy, set[str]]] = [
    (nothing_saveable, set()),
    (everything_saveable, set(VALUES)),
    (save_matmul_outputs, MATMULS_NO_BATCH | {"bmm"}),
    (save_matmul_outputs_no_batch, MATMULS_NO_BATCH),
    (save_attention_outputs, {"scores", "weights", "fused", "flash"}),
    (save_only_these_names(), set()),
    (save_only_these_names("mlp"), {"named mm"}),
    (save_only_these_names("mlp*"), {"named mm", "two names"}),
    (save_only_these_names("MLP*", "?"), {"named input"}),
    (save_any_names_but_these(), NAMED),
    (save_any_names_but_these("mlp*"), {"named input"}),
    (save_anything_except_these_names(), set(VALUES)),
    (save_anything_except_these_names("mlp_*", "x"), set(VALUES) - {"two names", "named input"}),
    (
        save_from_both_policies(save_matmul_outputs_no_batch, save_only_these_names("x")),
        MATMULS_NO_BATCH | {"named input"},
    ),
    (
        save_and_offload_only_these_names(
            names_which_can_be_saved=["mlp"],
            names_which_can_be_offloaded=["attn"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
        {"named mm", "two names"},
    ),
    (offload_dot_with_no_batch_dims("device", "pinned_host"), MATMULS_NO_BATCH),
    (offload_dot_with_no_batch_dims("device", "unpinned_host"), MATMULS_NO_BATCH),
    (by_op(ATEN.mm.default), {"mm", "named mm"}),
    (by_op(ATEN.bmm), {"bmm", "einsum", "scores", "mha scores"}),
    (by_op("addmm"), {"linear", "mha projection"}),
    (by_op("aten.*mm"), {"mm", "named mm", "linear", "bmm", "einsum", "scores", "mha projection", "mha scores"}),
    (by_op("*t"), {"dot"}),
    (by_op("aten.mul.*"), {"two names"}),
    (by_op("aten.mul.Scalar"), set()),
    (by_op(torch.sin, functional.gelu), {"sin", "gelu"}),
    (by_op(torch.mm), {"mm", "named mm"}),
    (by_op(functional.linear), {"named mm", "linear"}),
    (by_op(ATEN.linear.default, "sin"), {"named mm", "linear", "sin"}),
    (by_op("aten.matmul", "sin"), {"mm", "bmm", "sin"}),
    (by_op(torch.matmul, torch.Tensor.dot), {"mm", "bmm", "dot"}),
    (by_op(torch.Tensor.__matmul__), {"mm", "bmm"}),
    (by_op(torch.Tensor.sin_), {"sin"}),
    (by_op(torch.linalg.inv, torch.fft.fft, functional.max_pool2d), set()),
    (by_op(torch.Tensor.__truediv__, torch.Tensor.__rmatmul__), {"mm", "bmm"}),
    (by_op(functional.scaled_dot_product_attention), {"scores", "weights"}),
    (by_op("*"), set(VALUES) - {"input", "named input"}),
    (by_size(max_bytes=512), {"dot", "sin"}),
    (by_size(min_bytes="512 B", max_bytes="1KiB"), {"sin"}),
    (by_size(min_bytes="32KiB"), set(VALUES) - {"dot", "sin"}),
    (from_callable(is_small), {"dot", "sin"}),
    (from_callable(offload_mlp), {"named mm"}),
    (~save_matmul_outputs, set(VALUES) - MATMULS_NO_BATCH - {"bmm"}),
    (save_matmul_outputs | save_attention_outputs, MATMULS_NO_BATCH | {"bmm", "scores", "weights", "fused", "flash"}),
    (save_matmul_outputs & save_any_names_but_these(), {"named mm"}),
    (save_only_these_names("x").stored(Offload()), {"named input"}),
]  # fmt: skip
POLICIES = [policy for policy, _ in SAVED]
NAMESPACE = {**vars(policies), **vars(storage), "is_small": is_small, "offload_mlp": offload_mlp}  # fmt: skip

each_policy = pytest.mark.parametrize("policy", POLICIES, ids=repr)


@pytest.mark.parametrize(("policy", "saved"), SAVED, ids=map(repr, POLICIES))
def test_saves_what_it_says(policy: AbstractPolicy, saved: set[str]):
    """A policy saves exactly the values that the table lists."""
    found = {
        name for name, each in VALUES.items() if isinstance(decide(policy, each), Save)
    }

    assert found == saved


@pytest.mark.parametrize(
    ("policy", "saved"),
    [
        (POLICIES[14], {"named mm": Keep(), "two names": Offload()}),
        (POLICIES[15], {"mm": Offload(pin=True)}),
        (POLICIES[16], {"mm": Offload(pin=False)}),
        (POLICIES[-1], {"named input": Offload()}),
        (from_callable(offload_mlp), {"named mm": Offload()}),
        (from_callable(offload_mlp) | everything_saveable, {"named mm": Offload()}),
        (everything_saveable | from_callable(offload_mlp), {"named mm": Keep()}),
    ],
    ids=repr,
)
def test_says_how_values_wait(policy: AbstractPolicy, saved: dict[str, Any]):
    """The storage is the one that the policy names."""
    for name, expected in saved.items():
        assert decide(policy, VALUES[name]) == Save(expected)


def test_a_name_of_both_lists_is_kept():
    """A value with a name to save and one to offload is kept as it is."""
    policy = save_and_offload_only_these_names(
        names_which_can_be_saved=("attn",),
        names_which_can_be_offloaded=("mlp_*",),
        offload_src="device",
        offload_dst="pinned_host",
    )

    assert decide(policy, VALUES["two names"]) == Save()


def test_a_higher_order_operator_has_a_bare_name():
    """Flex attention is attention, by operator or by function."""
    flex = value(torch.ops.higher_order.flex_attention)

    assert decide(save_attention_outputs, flex) == Save()
    assert decide(by_op("flex_attention"), flex) == Save()
    assert decide(by_op(torch.ops.higher_order.flex_attention), flex) == Save()
    assert decide(save_attention_outputs, value(function="flex_attention")) == Save()


def test_names_of_jax():
    """JAX's names are the same objects."""
    assert policies.dots_saveable is save_matmul_outputs
    assert policies.dots_with_no_batch_dims_saveable is save_matmul_outputs_no_batch


# Policies are values.


@each_policy
def test_repr_rebuilds(policy: AbstractPolicy):
    """Evaluating what is printed gives an equal policy."""
    assert eval(repr(policy), NAMESPACE) == policy


@each_policy
def test_pickles_and_copies(policy: AbstractPolicy):
    """A policy comes back equal from pickle and from a copy, with the same hash."""
    for other in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):
        assert other == policy
        assert hash(other) == hash(policy)


def test_unlike_policies_differ():
    """No two policies of the table are equal."""
    assert len(set(POLICIES)) == len(POLICIES)


@pytest.mark.parametrize("make", [policies.budget, schedules.Budget])
def test_one_byte_is_not_the_whole(make: Any):
    """As numbers 1 and 1.0 are equal; as sizes they are not, nor are their traces one."""
    one, whole = make(1), make(1.0)

    assert one != whole
    assert len({one, whole, make(1), make(1.0)}) == 2


@pytest.mark.parametrize(
    "policy", [p for p in POLICIES if repr(p).isidentifier()], ids=repr
)
def test_policies_without_parameters_are_one_object(policy: AbstractPolicy):
    """They print as their public name, and come back as themselves."""
    assert getattr(policies, repr(policy)) is policy
    assert pickle.loads(pickle.dumps(policy)) is policy
    assert copy.deepcopy(policy) is policy
    with pytest.raises(FrozenInstanceError):
        policy.rule = is_small  # type: ignore[attr-defined]


@each_policy
def test_policies_are_frozen(policy: AbstractPolicy):
    """No field can be set."""
    for field in policy.__dataclass_fields__:  # type: ignore[attr-defined]
        with pytest.raises(FrozenInstanceError):
            setattr(policy, field, None)


@pytest.mark.parametrize(
    "name",
    [n for n in policies.__all__ if isinstance(getattr(policies, n), AbstractPolicy)],
)
def test_examples_of_policies_run(name: str):
    """The documentation of a policy object is found, and its example is right."""
    policy = getattr(policies, name)
    test = doctest.DocTestParser().get_doctest(policy.__doc__, {}, name, None, None)

    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize(
    ("policy", "globs"),
    [
        (nothing_saveable, ()),
        (from_callable(is_small), ()),
        (by_op("mm"), ()),
        (by_size(1), ()),
        (offload_dot_with_no_batch_dims("device", "pinned_host"), ()),
        (save_only_these_names("a", "b*"), ("a", "b*")),
        (save_any_names_but_these("a"), ("a",)),
        (save_anything_except_these_names("a"), ("a",)),
        (~save_only_these_names("a"), ("a",)),
        (save_only_these_names("a").stored(Keep()), ("a",)),
        (save_only_these_names("a") | save_any_names_but_these("b", "a"), ("a", "b")),
        (save_only_these_names("b") & save_any_names_but_these("a"), ("b", "a")),
        (save_from_both_policies(save_only_these_names("a"), is_small), ("a",)),
        (POLICIES[14], ("mlp", "attn")),
    ],
    ids=repr,
)
def test_globs(policy: AbstractPolicy, globs: tuple[str, ...]):
    """A policy tells the globs that it mentions, those of its parts once each."""
    assert policy.globs == globs


@pytest.mark.parametrize(
    ("glob", "name", "expected"),
    [
        ("mlp", "mlp", True),
        ("mlp", "mlp_1", False),
        ("mlp_*", "mlp_1", True),
        ("MLP_*", "mlp_1", False),
        ("mlp_?", "mlp_12", False),
        ("mlp_[12]", "mlp_2", True),
        ("layer[0]", "layer[0]", True),
    ],
)
def test_glob_matches(glob: str, name: str, expected: bool):
    """Globs are those of fnmatch, case counts, and a name fits itself."""
    assert AbstractPolicy.glob_matches(glob, name) is expected


def test_save_from_both_policies_is_itself():
    """JAX's union answers as `|` does, and is another value."""
    first, second = save_only_these_names("a"), by_size(1)
    both = save_from_both_policies(first, second)

    assert both != first | second
    assert repr(both) == f"save_from_both_policies({first!r}, {second!r})"
    assert save_from_both_policies(None, second) == save_from_both_policies(
        nothing_saveable, second
    )


def test_from_callable_compares_by_function():
    """Equal functions make equal policies; a policy stays what it is."""
    assert from_callable(is_small) == from_callable(is_small)
    assert from_callable(is_small) != from_callable(offload_mlp)
    assert from_callable(nothing_saveable) is nothing_saveable
    assert repr(from_callable(lambda _: True)) == "from_callable(<lambda>)"


def test_as_policy():
    """None is the default, a policy stays what it is, a function becomes one."""
    assert as_policy(None) is nothing_saveable
    assert as_policy(save_matmul_outputs) is save_matmul_outputs
    assert as_policy(is_small) == from_callable(is_small)


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


# Messages, word for word.


def message_of(error: type[Exception], function: Any, *args: Any, **kwargs: Any) -> str:
    """The text of the error that a call raises."""
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def test_values_print_as_messages_name_them():
    """Names, dtype, shape, size, operator and line, as far as they are known."""
    whole = value(ATEN.mm.default, "mlp_1", "mlp")
    bare = Value(None, (), (), torch.int8, 1)

    assert str(whole) == (
        'the value "mlp_1", "mlp" (float32[8, 1024], 32.0 KiB, made by aten.mm at '
        "model.py:41)"
    )
    assert str(bare) == "an unnamed value (int8[], 1 B, an input)"


A_CLASS = "is a class and a decision must be an instance."
BAD_ANSWERS: dict[str, tuple[Any, str]] = {
    "none": (
        None,
        "None. The function ended without a `return`, or a branch of it did. Return True "
        "or False in every branch.",
    ),
    "class Save": (Save, f"`Save`. `Save` {A_CLASS} Return `Save()`."),
    "class Recompute": (
        Recompute,
        f"`Recompute`. `Recompute` {A_CLASS} Return `Recompute()`.",
    ),
    "class Offload": (
        Offload,
        f"`Offload`. `Offload` {A_CLASS} Return `Save(storage.Offload())`, or "
        "`Recompute()` to drop the value.",
    ),
    "class int": (
        int,
        f"`int`. `int` {A_CLASS} Return `Save()`, or `Recompute()` to drop the value.",
    ),
    "storage": (
        Sparse(),
        "Sparse(min_saving=0.25). A storage says how a value is kept, not that it is "
        "saved. Return `Save(Sparse(min_saving=0.25))`, or `Recompute()` to drop the "
        "value.",
    ),
    "policy": (
        nothing_saveable,
        "the policy nothing_saveable. A policy must be asked, and its answer returned; a "
        "function that makes a policy must be called before it is passed on. Pass the "
        "answered policy itself, or return its answer for the value.",
    ),
    "numpy": (
        np.bool_(True),
        "a `numpy.bool`. An array is not a decision, even with a single element. Return "
        "`bool(...)` of it.",
    ),
    "tensor": (
        torch.tensor(True),
        "a `torch.Tensor`. An array is not a decision, even with a single element. Return "
        "`bool(...)` of it.",
    ),
    "int": (
        1,
        "1, of type int. A decision is a bool, a `Save` or a `Recompute`. Return "
        "`Save()`, `Recompute()`, True or False.",
    ),
    "text": (
        "save",
        "'save', of type str. A decision is a bool, a `Save` or a `Recompute`. Return "
        "`Save()`, `Recompute()`, True or False.",
    ),
}


@pytest.mark.parametrize("kind", BAD_ANSWERS)
def test_other_answers_are_refused(kind: str):
    """The message names value and policy, and says what to return instead."""
    answer, expected = BAD_ANSWERS[kind]

    def my_policy(_: Value) -> Any:
        return answer

    where = (
        'the value "mlp_1" (float32[8, 1024], 32.0 KiB, made by aten.mm at model.py:41)'
    )
    for policy, name in (
        (my_policy, "my_policy"),
        (from_callable(my_policy), "from_callable(my_policy)"),
    ):
        message = message_of(
            PolicyError, decide, policy, value(ATEN.mm.default, "mlp_1")
        )
        assert message == f"{where}: the policy {name} answered {expected}"


@pytest.mark.parametrize(
    "compose",
    [
        lambda p: p | everything_saveable,
        lambda p: p & everything_saveable,
        lambda p: ~p,
        lambda p: p.stored(Keep()),
        lambda p: save_from_both_policies(p, everything_saveable),
    ],
    ids=["or", "and", "not", "stored", "both"],
)
def test_other_answers_are_refused_inside_compositions(compose: Any):
    """An operand's answer is judged as a policy's, and the operand is named."""

    def my_policy(_: Value) -> Any:
        return 0

    policy = compose(from_callable(my_policy))

    message = message_of(PolicyError, decide, policy, value())

    assert "the policy from_callable(my_policy) answered 0, of type int." in message


def test_errors_of_a_policy_pass():
    """What a policy raises itself reaches the caller."""

    def broken(_: Value) -> bool:
        raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer"):
        decide(from_callable(broken), value())


def without_hash() -> Any:
    """An object that can be called but not hashed."""

    class Rule:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, _: Value) -> bool:
            return True

        def __repr__(self) -> str:
            return "rule"

    return Rule()


SAVEABLE = "Pass `policies.everything_saveable` or `policies.nothing_saveable`, or a "


def by_torch(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return True


NOT_POLICIES: dict[str, tuple[Any, str]] = {
    "torch's": (
        by_torch,
        f"got {by_torch!r}. A policy is called with one `Value` and nothing else. "
        "Write it as `def policy(value)`, of `value.op`, `value.names`, `value.shape` and so on. One "
        "of torch's, `(ctx, op, *args, **kwargs)`, goes into "
        "`create_selective_checkpoint_contexts` of `remat.interop.torch`.",
    ),
    "text": (
        "attn",
        "got 'attn'. A string is not a policy. Pass `policies.save_only_these_names('attn')` "
        "to save the values of that name, or a policy of `policies` itself, unquoted.",
    ),
    "list": (
        ["attn"],
        "got ['attn']. A collection is not a policy. Pass "
        "`policies.save_only_these_names(*names)` to save the values of these names, or "
        "join policies with `|`.",
    ),
    "bool": (
        True,
        "got True. That is a decision about one value, not a policy. "
        f"{SAVEABLE}function of a value that returns the decision.",
    ),
    "decision": (
        Recompute(),
        "got Recompute(). That is a decision about one value, not a policy. "
        f"{SAVEABLE}function of a value that returns the decision.",
    ),
    "storage": (
        Keep(),
        "got Keep(). A storage says how values are kept, not which. Pass "
        "`policies.everything_saveable.stored(Keep())`.",
    ),
    "factory": (
        save_only_these_names,
        "got save_only_these_names. `save_only_these_names` makes a policy and is not "
        "one itself. Call it: `save_only_these_names(...)`.",
    ),
    "policy class": (
        type(save_only_these_names()),
        "got SaveOnlyTheseNames. `SaveOnlyTheseNames` makes a policy and is not one "
        "itself. Call it: `SaveOnlyTheseNames(...)`.",
    ),
    "class": (
        Save,
        "got Save. `Save` is a class, and a policy is a function of a value. Pass an "
        "instance that can be called, or a function.",
    ),
    "number": (
        0.5,
        "got 0.5. It cannot be called, and a policy is a function of a value. Pass a "
        "policy of `policies`, a function of a value, or None.",
    ),
    "no hash": (
        without_hash(),
        "got rule. It cannot be hashed, but traced programs are looked up by their policy. "
        "Give its class `__hash__`, or pass a function.",
    ),
}


@pytest.mark.parametrize("kind", NOT_POLICIES)
def test_what_is_no_policy_is_refused(kind: str):
    """The message says what was probably meant, wherever it was passed."""
    candidate, expected = NOT_POLICIES[kind]

    both = "save_from_both_policies(...)"
    assert message_of(PolicyError, as_policy, candidate) == f"policy: {expected}"
    assert message_of(PolicyError, as_policy, candidate, "p") == f"p: {expected}"
    assert message_of(PolicyError, save_from_both_policies, None, candidate) == (
        f"{both}: {expected}"
    )
    assert message_of(PolicyError, from_callable, candidate) == (
        f"from_callable(function): {expected}"
    )


@pytest.mark.parametrize(
    "name",
    [
        "by_op",
        "by_size",
        "from_callable",
        "offload_dot_with_no_batch_dims",
        "save_and_offload_only_these_names",
        "save_any_names_but_these",
        "save_anything_except_these_names",
        "save_from_both_policies",
        "save_only_these_names",
    ],
)
def test_functions_that_make_policies_must_be_called(name: str):
    """Passing the function itself says: call it."""
    message = message_of(PolicyError, as_policy, getattr(policies, name))

    assert message.endswith(f"Call it: `{name}(...)`.")


class LateAnnotations:
    """A function of Python 3.14 whose annotation names what is missing at run time."""

    @property
    def __annotations__(self) -> Any:  # type: ignore[override]
        raise NameError("Value")

    def __call__(self, _: Value) -> bool:
        return True


def test_annotations_need_not_be_known():
    """A policy whose annotations cannot be evaluated is one all the same."""
    assert decide(as_policy(LateAnnotations()), value()) == Save()


def test_operands_must_be_policies():
    """A plain function is told of `from_callable`, on either side."""
    callable_hint = (
        "A plain callable does not say how it combines, compares or prints. Write "
        "`policies.from_callable(is_small)` for it."
    )
    other_hint = (
        "It is not a policy. Combine policies only; `p.stored(storage)` says how values "
        "wait."
    )
    wrong: Any = is_small

    for symbol, combine in {
        "|": lambda: nothing_saveable | wrong,
        "&": lambda: nothing_saveable & wrong,
        "| ": lambda: wrong | nothing_saveable,
        "& ": lambda: wrong & nothing_saveable,
    }.items():
        message = message_of(PolicyError, combine)
        where = f"an operand of `{symbol.strip()}` between policies"
        assert message == f"{where}: got {is_small!r}. {callable_hint}"
    for operand in (Keep(), None, Save):
        message = message_of(PolicyError, nothing_saveable.__or__, operand)
        where = "an operand of `|` between policies"
        assert message == f"{where}: got {operand!r}. {other_hint}"


def test_policies_have_no_truth():
    """`p and q` would be `q`, so that a policy is neither true nor false."""
    message = message_of(PolicyError, bool, save_matmul_outputs)

    assert message == (
        "the policy save_matmul_outputs: was asked whether it is true. `p or q` and `p "
        "and q` pick one operand, and `not p` is a bool; none of these combines "
        "policies. Write `p | q`, `p & q` or `~p`; to test for None, write `p is None`."
    )


def test_a_storage_must_be_an_instance():
    """The class is told to be called, anything else what a storage is."""
    assert message_of(PolicyError, Save, Offload) == (
        "Save(storage=...): got `Offload`, which is not a storage value. `Offload` is "
        "a class and a storage must be an instance. Pass `storage.Offload()`."
    )
    assert message_of(PolicyError, save_matmul_outputs.stored, "cpu") == (
        "save_matmul_outputs.stored(...): got `'cpu'`, which is not a storage value. A "
        "storage must be an instance of a class of `storage`. Pass `storage.Keep()`."
    )


@pytest.mark.parametrize(
    "make",
    [save_only_these_names, save_any_names_but_these, save_anything_except_these_names],
)
def test_names_are_strings(make: Any):
    """A list of names is told to be unpacked, anything else to be a string."""
    why = "Each name or glob is a string and a separate argument."
    where = f"{make.__name__}(*globs)"

    assert message_of(PolicyError, make, ["a", "b"]) == (
        f"{where}: got ['a', 'b'], of type list. {why} Unpack the collection: `*names`."
    )
    assert message_of(PolicyError, make, "a", 1) == (
        f'{where}: got 1, of type int. {why} Pass strings, as in `"attn", "mlp_*"`.'
    )


def both(**changes: Any) -> AbstractPolicy:
    """JAX's policy of two lists, with some arguments changed."""
    return save_and_offload_only_these_names(
        **{
            "names_which_can_be_saved": ["a"],
            "names_which_can_be_offloaded": ["b"],
            "offload_src": "device",
            "offload_dst": "pinned_host",
            **changes,
        }
    )


BOTH = "save_and_offload_only_these_names"
MEMORY = 'Values move from the memory "device" to host memory.'
HOSTS = 'Pass "pinned_host" or "unpinned_host".'


def test_lists_of_names_are_lists():
    """A single text, or none, is refused with the list to pass."""
    where = f"{BOTH}(names_which_can_be_saved=...)"
    why = "This argument is a list of names, as in JAX."

    assert message_of(PolicyError, both, names_which_can_be_saved="a") == (
        f"{where}: got 'a', of type str. {why} Pass `['a']`."
    )
    assert message_of(PolicyError, both, names_which_can_be_saved=None) == (
        f"{where}: got None, of type NoneType. {why} Pass a list of strings."
    )
    assert message_of(PolicyError, both, names_which_can_be_offloaded=[1]).startswith(
        f"{BOTH}(names_which_can_be_offloaded=...): got 1, of type int."
    )


def test_lists_of_names_have_nothing_in_common():
    """A name is either saved or offloaded, as in JAX."""
    message = message_of(ValueError, both, names_which_can_be_offloaded=["c", "a"])

    assert message == (
        f"{BOTH}(...): ['a'] are among both the names to save and the names to "
        "offload. A value is either kept as it is or offloaded. Leave each name in one of the two."
    )


@pytest.mark.parametrize("memory", ["host", "device", "cpu"])
def test_unknown_destinations_are_refused(memory: str):
    """JAX takes an unknown memory for the device; here it is an error."""
    expected = f"(offload_dst=...): the memory '{memory}' is not known here. {MEMORY} "

    assert message_of(ValueError, both, offload_dst=memory) == (
        f"{BOTH}{expected}{HOSTS}"
    )
    assert message_of(ValueError, offload_dot_with_no_batch_dims, "device", memory) == (
        f"offload_dot_with_no_batch_dims{expected}{HOSTS}"
    )


def test_unknown_sources_are_refused():
    """Values are made on the device."""
    message = message_of(
        ValueError, offload_dot_with_no_batch_dims, "pinned_host", "pinned_host"
    )

    assert message == (
        "offload_dot_with_no_batch_dims(offload_src=...): the memory 'pinned_host' is "
        f'not known here. {MEMORY} Pass "device".'
    )


BY_OP_HINT = (
    'Pass an operator such as `torch.ops.aten.mm` or "aten.mm", or a function such as '
    "`torch.sin`; a value of your own function is best named with `checkpoint_name` and "
    "saved by `save_only_these_names`."
)


@pytest.mark.parametrize(
    "name",
    ["mn", "aten.mn", "aten.mm.dflt", "aten.mn.default", "nolib.mm", "a.b.c.d", "", "a-b", "nn", "float32", "Tensor"],
)  # fmt: skip
def test_unknown_operator_names_are_refused(name: str):
    """A name without a glob must be one that torch knows."""
    assert message_of(PolicyError, by_op, name) == (
        f"by_op(*targets): got {name!r}. torch has no operator or function of that name. "
        f"{BY_OP_HINT}"
    )


@pytest.mark.parametrize(
    "target",
    [
        is_small,
        len,
        3,
        None,
        torch.nn.GELU,
        torch.nn.utils.clip_grad_norm_,
        ["mm"],
        np.sin,
    ],
    ids=lambda target: getattr(target, "__name__", repr(target)),
)
def test_other_targets_are_refused(target: Any):
    """A function that is not torch's makes no values that an operator names."""
    assert message_of(PolicyError, by_op, target) == (
        f"by_op(*targets): got {target!r}. It is neither an operator nor a function of "
        f"torch. {BY_OP_HINT}"
    )


def test_by_op_needs_a_target():
    """No target would save nothing."""
    assert message_of(PolicyError, by_op) == (
        "by_op(): got no target. Nothing would be saved. Pass operators, as in "
        '`by_op("aten.mm")`, or use nothing_saveable.'
    )


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.sin, "sin"),
        (functional.scaled_dot_product_attention, "scaled_dot_product_attention"),
        (functional.relu, "relu"),
        (torch.Tensor.add_, "add"),
        (torch.Tensor.__matmul__, "matmul"),
        (torch.Tensor.__rmatmul__, "matmul"),
        (torch.Tensor.__imul__, "mul"),
        (torch.Tensor.__invert__, "invert"),
        (object(), ""),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_function_names(function: Any, name: str):
    """Methods, operators and in-place variants are named as the function itself."""
    assert function_name(function) == name


def test_by_size_needs_bounds_with_room():
    """No bound, or no size between them, is refused."""
    assert message_of(ValueError, by_size) == (
        "by_size(): got no bound. Every value would be saved. Pass `min_bytes`, "
        "`max_bytes` or both, or use everything_saveable."
    )
    assert message_of(ValueError, by_size, 2, 1) == (
        "by_size(min_bytes=..., max_bytes=...): got 2 and 1 bytes. No size lies between "
        "them, so nothing would be saved. Swap the two."
    )


@pytest.mark.parametrize(
    ("size", "size_bytes"),
    [(0, 0), (7, 7), ("7B", 7), ("1.5 KiB", 1536), ("512MiB", 2**29), ("1TiB", 2**40)],
)
def test_sizes_are_read(size: Any, size_bytes: int):
    """A size is a number of bytes, or a number and a unit."""
    assert parse_size(size, where="here") == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**19, "1.5 MiB"), (2**31, "2.0 GiB")],
)  # fmt: skip
def test_sizes_are_shown(size_bytes: int, text: str):
    """A size is shown in the largest unit that it reaches."""
    assert show_size(size_bytes) == text


@pytest.mark.parametrize("size", ["512KB", "12", "KiB", "-1KiB", "1e3 B"])
def test_unreadable_sizes_are_refused(size: str):
    """The message lists the units."""
    assert message_of(ValueError, by_size, max_bytes=size) == (
        f"by_size(max_bytes=...): the size {size!r} cannot be read. A size is a number "
        'and one of the units B, KiB, MiB, GiB, TiB. Write it like "512KiB", or pass a '
        "number of bytes."
    )


def test_senseless_sizes_are_refused():
    """A size is not negative, and neither a bool nor a float."""
    assert message_of(ValueError, by_size, -1) == (
        "by_size(min_bytes=...): the size -1 is negative. No value has fewer than zero "
        "bytes. Pass zero or more bytes, or None for no bound."
    )
    for size, kind in ((True, "bool"), (1.5, "float")):
        assert message_of(PolicyError, by_size, size) == (
            f"by_size(min_bytes=...): got {size}, of type {kind}. A size is an int in "
            'bytes, or a string with a unit. Pass, for example, 524288 or "512KiB".'
        )


def test_a_policy_sees_what_an_operator_took():
    """Tensors by shape, dtype and device, lists as tuples, anything else as it is."""
    seen = {}

    def policy(value):
        seen[str(value.op)] = (value.args, value.kwargs)
        return hash(value) is None

    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4, dtype=torch.float32)
    remat(lambda x, w: torch.cat([x @ w, x], dim=1).sum(0, dtype=torch.float64), policy=policy)(x, w)  # fmt: skip

    cpu = torch.device("cpu")
    left, right, made = (
        Operand(shape, torch.float32, cpu) for shape in ((2, 3), (3, 4), (2, 4))
    )
    assert seen["aten.mm.default"] == ((left, right), ())
    assert seen["aten.cat.default"] == (((made, left), 1), ())
    assert seen["aten.sum.dim_IntList"][1] == (("dtype", torch.float64),)
