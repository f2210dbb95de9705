"""`interop.torch`: policies, as torch's `TestSelectiveActivationCheckpoint` has them."""

import functools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as peer
from torch._library.effects import EffectType
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import dropout

from remat import PolicyError, RematWarning
from remat.interop.torch import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from tests.interop.layers import MM, nested, product, save_mm
from tests.support import LiveBytes, assert_bitwise, backward_operators, run, seeded

pytestmark = [
    pytest.mark.contract,
    # Forward mode itself compiles decompositions with torch.jit.script.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]


def save_mm_with_the_enum_of_torch(ctx, op, *args, **kwargs):
    """The same over torch's."""
    chosen = peer.CheckpointPolicy
    return chosen.MUST_SAVE if op == MM else chosen.PREFER_RECOMPUTE


SELECTIVE = {
    "list": [MM],
    "function": save_mm,
    "enum of torch": save_mm_with_the_enum_of_torch,
    "bool": lambda ctx, op, *args, **kwargs: op == MM,
    "made anew": lambda *args: (lambda ops: lambda c, op, *a: op in ops)({MM})(*args),
}


@pytest.mark.parametrize(
    "made_by",
    [create_selective_checkpoint_contexts, peer.create_selective_checkpoint_contexts],
)
@pytest.mark.parametrize("policy", SELECTIVE.values(), ids=SELECTIVE)
def test_selective(policy, made_by):
    """test_autograd.py: test_flops_and_mem; contexts that torch makes will do as well."""
    args = (seeded(8, 8).requires_grad_(), seeded(8, 8, seed=1).requires_grad_())

    def selective(x, y):
        context_fn = functools.partial(made_by, policy)
        return checkpoint(product, x, y, use_reentrant=False, context_fn=context_fn)

    assert_bitwise(run(selective, args), run(product, args))
    # Two products for the gradients, and none for the recomputation.
    assert backward_operators(selective, *args)["aten.mm"] == 2
    assert backward_operators(nested(product), *args)["aten.mm"] == 3


def held(call, *args):
    """Bytes that wait between forward and backward."""
    call(*args)
    with LiveBytes() as memory:
        out = call(*args)
        return memory.live - out.untyped_storage().nbytes()


def test_bytes():
    """test_autograd.py: test_flops_and_mem, its bytes; test_storage_lifetime."""
    args = (seeded(8, 8).requires_grad_(), seeded(8, 8, seed=1).requires_grad_())
    context_fn = functools.partial(create_selective_checkpoint_contexts, [MM])

    assert held(product, *args) == 2 * 8 * 8 * 8
    assert held(nested(product), *args) == 0
    assert (
        held(functools.partial(checkpoint, product, context_fn=context_fn), *args)
        == 8 * 8 * 8
    )

    with LiveBytes() as memory:
        out = checkpoint(product, *args, context_fn=context_fn)
        out.backward()
        del out
        for each in args:
            each.grad = None
    assert memory.live == 0


def test_an_offloaded_output_waits_elsewhere():
    """torch recomputes what its MUST_CPU_OFFLOAD means; ours is an offload."""

    def offload(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_CPU_OFFLOAD if op == MM else False

    context_fn = functools.partial(create_selective_checkpoint_contexts, offload)
    args = (seeded(8, 8).requires_grad_(), seeded(8, 8, seed=1).requires_grad_())

    # On a CPU it is there already, which the storage itself says.
    with pytest.warns(RematWarning, match="Offload"):
        checkpoint(product, *args, context_fn=context_fn).backward()


SEEN: list[Any] = []


def test_what_a_policy_is_told():
    """The operator, what it took and what it made, as tensors without data."""
    SEEN.clear()

    def policy(ctx, op, *args, **kwargs):
        shapes = [tuple(each.shape) for each in args if isinstance(each, torch.Tensor)]
        SEEN.append(
            (str(op), shapes, tuple(ctx.op_output.shape), ctx.is_recompute, kwargs)
        )
        return op == MM and args[1].shape[1] == 2

    def two(x, y, z):
        return ((x @ y).sin() @ z).sin()

    args = [seeded(3, 4), seeded(4, 2), seeded(2, 5)]
    context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
    counts = backward_operators(
        functools.partial(checkpoint, two, context_fn=context_fn), *args
    )

    assert SEEN[:2] == [
        ("aten.mm.default", [(3, 4), (4, 2)], (3, 2), False, {}),
        ("aten.sin.default", [(3, 2)], (3, 2), False, {}),
    ]
    assert len(SEEN) == 4
    assert counts["aten.mm"] == 4 + 1


@pytest.mark.filterwarnings("ignore:.*the region saves no memory")
def test_what_a_policy_is_told_is_in_no_graph_of_the_caller():
    """test_activation_checkpointing.py: test_sac_traces_through_eager_ac_under_non_strict."""
    context_fn = functools.partial(create_selective_checkpoint_contexts, save_mm)

    def gradient(x, y):
        out = checkpoint(product, x, y, use_reentrant=False, context_fn=context_fn)
        return torch.autograd.grad(out, x)

    args = [seeded(4, 4).requires_grad_(), seeded(4, 4, seed=1)]
    graph = make_fx(gradient)(*args)
    targets = Counter(node.target for node in graph.graph.nodes)

    assert_bitwise(graph(*args), gradient(*args))
    assert targets[MM] == 2
    assert not any("empty" in str(each) for each in targets)


def test_a_graph_of_the_caller_repeats_a_draw():
    """test_activation_checkpointing.py: test_checkpoint_with_rng_op_under_non_strict.

    And test_checkpoint_traces_through_eager_ac_under_non_strict, and
    test_checkpoint_recompute_preserves_nested_fx_trace_policy.
    """

    def gradient(x):
        out = nested(lambda x: dropout(x.sin()) * x)(x)
        return *torch.autograd.grad(out.sum(), x), out

    args = [seeded(50).requires_grad_()]
    graph = make_fx(gradient)(*args)
    targets = Counter(node.target for node in graph.graph.nodes)

    torch.manual_seed(0)
    expected = gradient(*args)
    torch.manual_seed(0)
    assert_bitwise(graph(*args), expected)
    assert targets[torch.ops.aten.sin.default] == 2


def test_policies_of_equal_closures_share_a_trace():
    """torch's habit is a new policy at each call, with a counter of its own."""
    SEEN.clear()

    def every_other():
        counts = Counter()

        def policy(ctx, op, *args, **kwargs):
            counts[op] += 1
            SEEN.append(op)
            return op == MM and counts[op] % 2 == 1

        return create_selective_checkpoint_contexts(policy)

    def chain(x):
        return (((x @ x).sin() @ x).sin() @ x).sin()

    x = [seeded(4, 4)]
    chained = functools.partial(checkpoint, chain, context_fn=every_other)
    # Seven products for the gradients of three, and the second recomputed.
    assert backward_operators(chained, *x)["aten.mm"] == 6 + 1
    for _ in range(3):
        run(chained, x)
    assert len(SEEN) == 6


SAVED = None
ASKED = 0


def names_a_global(ctx, op, *args, **kwargs):
    return SAVED is not None and op in SAVED


def names_it_in_a_generator(ctx, op, *args, **kwargs):
    return any(SAVED is not None and op in SAVED for _ in range(1))


def calls_what_names_it(ctx, op, *args, **kwargs):
    return names_a_global(ctx, op)


@pytest.mark.filterwarnings("ignore:.*permits no value here")
@pytest.mark.parametrize(
    "policy", [names_a_global, names_it_in_a_generator, calls_what_names_it]
)
def test_a_global_that_a_policy_names_is_watched(policy, monkeypatch):
    """A call after it has changed asks the policy anew, as torch does at each call."""
    context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
    selective = functools.partial(checkpoint, product, context_fn=context_fn)
    args = (seeded(8, 8), seeded(8, 8, seed=1))

    assert backward_operators(selective, *args)["aten.mm"] == 3
    monkeypatch.setitem(globals(), "SAVED", {MM})
    assert backward_operators(selective, *args)["aten.mm"] == 2


def counts_in_a_global(ctx, op, *args, **kwargs):
    global ASKED
    ASKED += 1
    return False


@pytest.mark.filterwarnings("ignore:.*permits no value here")
def test_a_policy_that_counts_in_a_global_is_asked_once():
    """What it assigns itself is no reason to ask it anew."""
    context_fn = functools.partial(
        create_selective_checkpoint_contexts, counts_in_a_global
    )
    args = (seeded(8, 8).requires_grad_(), seeded(8, 8, seed=1))

    checkpoint(product, *args, context_fn=context_fn)
    asked = ASKED
    checkpoint(product, *args, context_fn=context_fn)
    assert ASKED == asked > 0


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ([2], ValueError, "expected an overload of an operator, and got 2"),
        ([torch.ops.aten.sin], ValueError, r"Pass torch.ops.aten.sin.default"),
        (2, TypeError, "either a function or a list"),
    ],
)
def test_bad_inputs(given, error, text):
    """test_autograd.py: test_bad_inputs."""
    with pytest.raises(error, match=text):
        create_selective_checkpoint_contexts(given)


def test_a_meaningless_answer():
    """Anything but a bool and a CheckpointPolicy."""
    context_fn = functools.partial(
        create_selective_checkpoint_contexts, lambda *args: "save"
    )
    with pytest.raises(
        PolicyError, match=r"answered 'save' about .*aten.sin.*CheckpointPolicy"
    ):
        checkpoint(
            lambda x: x.sin().cos(), seeded(3).requires_grad_(), context_fn=context_fn
        )


def test_contexts_for_another_checkpoint():
    """Ours would silently do nothing in torch's."""
    context_fn = functools.partial(create_selective_checkpoint_contexts, [MM])
    with pytest.raises(
        RuntimeError, match=r"carries a policy to interop.torch.checkpoint"
    ):
        peer.checkpoint(
            torch.sin, seeded(3), use_reentrant=False, context_fn=context_fn
        )


def test_a_saved_output_that_the_function_changes():
    """test_autograd.py: test_version_counter; right here without allowing anything."""

    def fn(x):
        return x.sin().mul_(2).cos().exp()

    sin = torch.ops.aten.sin.default
    context_fn = functools.partial(create_selective_checkpoint_contexts, [sin])
    args = [seeded(3)]
    assert_bitwise(
        run(functools.partial(checkpoint, fn, context_fn=context_fn), args),
        run(fn, args),
    )


def test_more_than_one_output():
    """test_autograd.py: test_function_with_more_than_one_output, ..._already_has_autograd_meta."""

    def fn(x, y):
        variance, mean = torch.var_mean(x)
        return (mean * variance).sin().exp(), y.view(-1)

    ops = [torch.ops.aten.var_mean.correction, torch.ops.aten.view.default]
    context_fn = functools.partial(create_selective_checkpoint_contexts, ops)
    args = [seeded(3), torch.tensor([1, 2, 3])]
    saving = functools.partial(checkpoint, fn, context_fn=context_fn)

    assert_bitwise(run(saving, args), run(fn, args))
    assert backward_operators(saving, *args)["aten.var_mean"] == 0


@torch.library.custom_op("remat_interop::sine_and_two", mutates_args=())
def sine_and_two(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """An operator of the user's, one of whose outputs is no tensor."""
    SEEN.append("forward")
    return x.sin(), 2


@sine_and_two.register_fake
def _(x):
    return torch.empty_like(x), 2


sine_and_two.register_autograd(
    lambda ctx, gradient, _: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def test_an_output_that_is_no_tensor():
    """test_autograd.py: test_function_with_non_tensor_output."""

    def fn(x):
        sine, two = sine_and_two(x)
        return (sine * x.sin().exp()).sin() * two

    op = torch.ops.remat_interop.sine_and_two.default
    context_fn = functools.partial(create_selective_checkpoint_contexts, [op])
    saving = functools.partial(checkpoint, fn, context_fn=context_fn)
    args = [seeded(3)]
    assert_bitwise(run(saving, args), run(fn, args))
    SEEN.clear()

    run(saving, args)

    assert SEEN == ["forward"]


@torch.library.custom_op("remat_interop::noted_sine", mutates_args=())
def noted_sine(x: torch.Tensor) -> torch.Tensor:
    """An operator with an effect: the order of its calls matters."""
    SEEN.append("noted")
    return x.sin()


noted_sine.register_fake(torch.empty_like)
noted_sine.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)
noted_sine.register_effect(EffectType.ORDERED)


@pytest.mark.filterwarnings("ignore:.*permits no value here")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("answer", "times"),
    [
        (False, 1),
        (CheckpointPolicy.PREFER_RECOMPUTE, 1),
        (CheckpointPolicy.MUST_RECOMPUTE, 2),
    ],
)
def test_an_operator_with_an_effect_runs_once(answer, times, compiled):
    """Operators with a registered effect, as with torch 2.15's contexts."""
    torch.compiler.reset()

    def policy(*_, **__):
        return answer

    def fn(x):
        return noted_sine(x).exp().exp().sum()

    def selective(x):
        return checkpoint(fn, x, context_fn=lambda: made(policy))

    made = create_selective_checkpoint_contexts
    if compiled:
        selective = torch.compile(selective, backend="aot_eager")
    args = [seeded(3)]
    expected = run(fn, args)
    run(selective, args)  # a first call, which traces
    SEEN.clear()

    assert_bitwise(run(selective, args), expected)
    assert ["noted"] * times == SEEN
