"""What is no policy, no decision, no name and no size is refused in words."""

import types
from typing import Any

import numpy as np
import pytest
import torch

from remat import policies
from remat._errors import PolicyError, shown
from remat.policies import (
    AbstractPolicy,
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
    save_from_both_policies,
    save_matmul_outputs,
    save_only_these_names,
)
from remat.storage import Keep, Offload, Sparse
from tests.policies.values import ATEN, is_small, value

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


A_CLASS = "A decision is an instance, not a class."
A_DECISION = "A decision is a bool, a `Save` or a `Recompute`."
RETURN = "Return `Save()`, `Recompute()`, True or False; of an array `bool(...)` of it."
BAD_ANSWERS: dict[str, tuple[Any, str]] = {
    "none": (
        None,
        "None, of type NoneType. The function ended without a `return`, or a branch of it "
        f"did. {RETURN}",
    ),
    "class Save": (
        Save,
        f"the class Save, of type type. {A_CLASS} Return `Save()`.",
    ),
    "class Offload": (
        Offload,
        f"the class Offload, of type ABCMeta. {A_CLASS} Return `Save(storage.Offload())`.",
    ),
    "storage": (
        Sparse(),
        "Sparse(min_saving=0.25), of type Sparse. A storage says how a value is kept, not "
        "that it is saved. Return `Save(Sparse(min_saving=0.25))`.",
    ),
    "policy": (
        nothing_saveable,
        "nothing_saveable, of type ParameterFreePolicy. A policy is asked, and a function "
        "that makes one is called first. Pass that policy itself, or return its answer for "
        "the value.",
    ),
    "numpy": (np.bool_(True), f"np.True_, of type bool. {A_DECISION} {RETURN}"),
    "tensor": (
        torch.tensor(True),
        f"a tensor bool[], of type Tensor. {A_DECISION} {RETURN}",
    ),
    "int": (1, f"1, of type int. {A_DECISION} {RETURN}"),
    "text": ("save", f"'save', of type str. {A_DECISION} {RETURN}"),
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


@pytest.mark.parametrize("compose", [lambda p: p, lambda p: ~p | p], ids=["p", "~p|p"])
def test_errors_of_a_policy_pass(compose: Any) -> None:
    """What a policy raises itself reaches the caller, with a note of the value."""

    def broken(_: Value) -> bool:
        raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer") as raised:
        decide(compose(from_callable(broken)), value())

    policy = "the policy from_callable(broken) was asked about it."
    assert raised.value.__notes__ == [f"{value()}: {policy}"]


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


NAMES = (
    "Names are not a policy. Pass `policies.save_only_these_names(*names)`, or a policy, "
    "unquoted."
)
A_FUNCTION = (
    "A policy is a function of a value, or an instance that can be called. Pass one of "
    "`policies`, or such a function; of a plan its `.policy`."
)
NOT_POLICIES: dict[str, tuple[Any, str]] = {
    "torch's": (
        by_torch,
        f"got {by_torch!r}. A policy is called with one `Value` and nothing else. "
        "Write it as `def policy(value)`, of `value.op`, `value.names`, `value.shape` and so on. One "
        "of torch's, `(ctx, op, *args, **kwargs)`, goes into "
        "`create_selective_checkpoint_contexts` of `remat.interop.torch`.",
    ),
    "text": ("attn", f"got 'attn'. {NAMES}"),
    "list": (["attn"], f"got ['attn']. {NAMES}"),
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
        "got ByNames. `ByNames` makes a policy and is not one "
        "itself. Call it: `ByNames(...)`.",
    ),
    "class": (Save, f"got the class Save. {A_FUNCTION}"),
    "operator": (
        ATEN.mm,
        "got <OpOverloadPacket(op='aten.mm')>. An operator makes values; a policy says "
        "which are saved. Pass `policies.by_op('aten.mm')` to save what it makes.",
    ),
    "has a policy": (
        types.SimpleNamespace(policy=save_only_these_names()),
        f"got namespace(policy=save_only_these_names()). {A_FUNCTION}",
    ),
    "number": (0.5, f"got 0.5. {A_FUNCTION}"),
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
        "budget",
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
        assert message == f"{where}: got {shown(operand)}. {other_hint}"


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
    rest = "which is not a storage value. A storage is an instance of a class of `storage`."
    assert message_of(PolicyError, Save, Offload) == (
        f"Save(storage=...): got the class Offload, {rest} Pass `storage.Offload()`."
    )
    assert message_of(PolicyError, save_matmul_outputs.stored, "cpu") == (
        f"save_matmul_outputs.stored(...): got 'cpu', {rest} "
        "Pass `storage.Keep()`, for example."
    )


@pytest.mark.parametrize(
    "make",
    [save_only_these_names, save_any_names_but_these, save_anything_except_these_names],
)
def test_names_are_strings(make: Any):
    """A list of names is told to be unpacked, anything else to be a string."""
    rest = (
        "Each name or glob is a string and a separate argument. Pass strings, as in "
        '`"attn", "mlp_*"`, or unpack a collection: `*names`.'
    )
    where = f"{make.__name__}(*globs)"

    assert message_of(PolicyError, make, ["a", "b"]) == (
        f"{where}: got ['a', 'b'], of type list. {rest}"
    )
    assert (
        message_of(PolicyError, make, "a", 1) == f"{where}: got 1, of type int. {rest}"
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
    'Pass each by itself, an operator such as `torch.ops.aten.mm` or "aten.mm", or a function such as '
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
        np.sin,
    ],
    ids=lambda target: getattr(target, "__name__", repr(target)),
)
def test_other_targets_are_refused(target: Any):
    """A function that is not torch's makes no values that an operator names."""
    assert message_of(PolicyError, by_op, target) == (
        f"by_op(*targets): got {shown(target)}. It is neither an operator nor a function of "
        f"torch. {BY_OP_HINT}"
    )


def test_by_op_needs_a_target():
    """No target would save nothing."""
    assert message_of(PolicyError, by_op) == (
        "by_op(): got no target. Nothing would be saved. Pass operators, as in "
        '`by_op("aten.mm")`, or use nothing_saveable.'
    )


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


@pytest.mark.parametrize("size", ["512kb", "12", "KiB", "-1KiB", "1e3 B"])
def test_unreadable_sizes_are_refused(size: str):
    """The message lists the units."""
    assert message_of(ValueError, by_size, max_bytes=size) == (
        f"by_size(max_bytes=...): the size {size!r} cannot be read. A size is a number "
        "and one of the units B, KiB, MiB, GiB, TiB, KB, MB, GB, TB. Write it like "
        '"512KiB", or pass a number of bytes.'
    )


def test_senseless_sizes_are_refused():
    """A size is not negative, and neither a bool nor a float."""
    assert message_of(ValueError, by_size, -1) == (
        "by_size(min_bytes=...): the size -1 is negative. No value has fewer than zero "
        "bytes. Pass zero or more bytes."
    )
    for size, kind in ((True, "bool"), (1.5, "float")):
        assert message_of(PolicyError, by_size, size) == (
            f"by_size(min_bytes=...): got {size}, of type {kind}. A size is an int in "
            'bytes, or a string with a unit. Pass, for example, 524288 or "512KiB".'
        )
