"""Policies decide as their names say, and are values: they compare, print and pickle."""

import copy
import doctest
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch.nn import functional

from remat import policies, remat, schedules
from remat.policies import (
    AbstractPolicy,
    Operand,
    Save,
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
from remat.policies._by_op import function_name
from remat.policies._sizes import parse_size, show_size
from remat.storage import Keep, Offload
from tests.policies.values import ATEN, NAMESPACE, is_small, offload_mlp, value

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
    "conv backward": value(ATEN.convolution_backward.default, shape=(4, 2, 8)),
    "dot": value(ATEN.dot.default, shape=(), size_bytes=4, function="dot"),
    "scores": value(
        ATEN.bmm.default,
        shape=(4, 8, 8),
        function="scaled_dot_product_attention",
        is_result=False,
    ),
    "weights": value(
        ATEN._softmax.default, function="scaled_dot_product_attention", is_result=False
    ),
    "attended": value(
        ATEN.bmm.default, shape=(4, 8, 2), function="scaled_dot_product_attention"
    ),
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
    "mm", "named mm", "linear", "einsum", "conv", "conv1d", "conv backward", "dot",
    "mha projection",
}  # fmt: skip
NAMED = {"named input", "named mm", "two names"}

# Each policy, with the names of those of VALUES that it saves.
SAVED: list[tuple[AbstractPolicy, set[str]]] = [
    (nothing_saveable, set()),
    (everything_saveable, set(VALUES)),
    (save_matmul_outputs, MATMULS_NO_BATCH | {"bmm"}),
    (save_matmul_outputs_no_batch, MATMULS_NO_BATCH),
    (save_attention_outputs, {"attended", "fused", "flash"}),
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
    (by_op(ATEN.bmm), {"bmm", "einsum", "scores", "attended", "mha scores"}),
    (by_op("addmm"), {"linear", "mha projection"}),
    (by_op("aten.*mm"), {"mm", "named mm", "linear", "bmm", "einsum", "scores", "attended", "mha projection", "mha scores"}),
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
    (by_op(functional.scaled_dot_product_attention), {"scores", "weights", "attended"}),
    (by_op("*"), set(VALUES) - {"input", "named input"}),
    (by_size(max_bytes=512), {"dot", "sin"}),
    (by_size(min_bytes="512 B", max_bytes="1KiB"), {"sin"}),
    (by_size(min_bytes="32KiB"), set(VALUES) - {"dot", "sin"}),
    (from_callable(is_small), {"dot", "sin"}),
    (from_callable(offload_mlp), {"named mm"}),
    (~save_matmul_outputs, set(VALUES) - MATMULS_NO_BATCH - {"bmm"}),
    (save_matmul_outputs | save_attention_outputs, MATMULS_NO_BATCH | {"bmm", "attended", "fused", "flash"}),
    (save_matmul_outputs & save_any_names_but_these(), {"named mm"}),
    (save_only_these_names("x").stored(Offload()), {"named input"}),
]  # fmt: skip
POLICIES = [policy for policy, _ in SAVED]

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


def test_jaxs_policies_are_what_they_stand_for():
    """Two that are written in different ways compare, and share traces."""
    first, second = save_only_these_names("a"), by_size(1)

    assert save_from_both_policies(first, second) == first | second
    assert save_from_both_policies(None, second) == nothing_saveable | second
    assert offload_dot_with_no_batch_dims("device", "pinned_host") == (
        save_matmul_outputs_no_batch.stored(Offload())
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


def test_a_policy_sees_what_an_operator_took():
    """Tensors by shape, dtype, device and strides, lists as tuples, anything else as it is."""
    seen = {}

    def policy(value):
        seen[str(value.op)] = (value.args, value.kwargs)
        return hash(value) is None

    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4, dtype=torch.float32)
    remat(lambda x, w: torch.cat([x @ w, x], dim=1).sum(0, dtype=torch.float64), policy=policy)(x, w)  # fmt: skip

    here = torch.get_default_device()
    left, right, made = (
        Operand((rows, columns), torch.float32, here, (columns, 1))
        for rows, columns in ((2, 3), (3, 4), (2, 4))
    )
    assert seen["aten.mm.default"] == ((left, right), ())
    assert seen["aten.cat.default"] == (((made, left), 1), ())
    assert seen["aten.sum.dim_IntList"][1] == (("dtype", torch.float64),)
