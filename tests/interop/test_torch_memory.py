"""`interop.torch`: what waits, and what is freed when, as torch's tests of memory ask."""

import functools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.testing._internal.two_tensor import TwoTensor

from remat.interop.torch import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_wrapper,
    create_selective_checkpoint_contexts,
    get_device_states,
)
from tests.interop.layers import nested
from tests.support import LiveBytes, assert_bitwise, run, seeded

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_stack_of_layers_needs_less(use_reentrant):
    """test_autograd.py: test_checkpointing_without_reentrant_memory_savings.

    The wrapper needs as much as the function (test_checkpoint_wrapper.py:
    test_checkpoint_wrapper_parity).
    """
    again = functools.partial(checkpoint, use_reentrant=use_reentrant)
    plain = peak(lambda layer, x: layer(x))

    assert peak(again) == peak(lambda layer, x: layer(x), wrap=checkpoint_wrapper)
    # Two values inside of each of four layers wait, or those of the one that runs again.
    assert plain - peak(again) > 5 * 100 * 8 * 4


def peak(call, wrap=lambda layer: layer):
    """The most bytes that a step with four layers holds."""
    torch.manual_seed(0)
    layers = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))) for _ in range(4)]
    layers = [wrap(layer) for layer in layers]

    def step():
        x = torch.ones(100, 8, requires_grad=True)
        for layer in layers:
            x = call(layer, x)
        x.sum().backward()

    step()
    with LiveBytes() as memory:
        step()
    return memory.peak


def test_what_was_recomputed_is_freed_at_its_last_use():
    """test_utils.py: test_checkpointing_without_reentrant_early_free, also of a kept graph."""

    def chain(x):
        for _ in range(8):
            x = x**2
        return x.sum()

    def peak_of_backward(call, **options):
        x = torch.ones(1000, requires_grad=True)
        call(x).backward(**options)
        with LiveBytes() as memory:
            out = call(x)
            memory.reset_peak()
            before = memory.live
            out.backward(**options)
            del out
        return memory.peak - before

    eager, kept = (
        peak_of_backward(nested(chain), retain_graph=keep) for keep in (False, True)
    )

    assert kept == eager < 1.5 * 8 * 4000


@pytest.mark.filterwarnings("ignore:.*permits no value here")
def test_a_subclass_that_answers_for_its_sizes():
    """test_autograd.py: test_subclass_dispatching_sizes: a policy that saves sizes saves none."""
    sizes = torch.ops.aten.sym_size.default

    def save_sizes(ctx, op, *args, **kwargs):
        chosen = CheckpointPolicy
        return chosen.MUST_SAVE if op is sizes else chosen.PREFER_RECOMPUTE

    def fn(x):
        return (x * x.sum()).view(-1).view(4, 3).exp()

    def gradients(call):
        x = seeded(4, 3).requires_grad_()
        out = call(TwoTensor(x, x.clone()))
        out.sum().backward()
        return out.a.detach(), out.b.detach(), x.grad

    context_fn = functools.partial(create_selective_checkpoint_contexts, save_sizes)
    assert_bitwise(
        gradients(functools.partial(checkpoint, fn, context_fn=context_fn)),
        gradients(fn),
    )


@pytest.mark.filterwarnings("ignore:.*permits no value here")
def test_a_policy_counts_in_the_forward_alone():
    """test_autograd.py: test_policy_with_state: it is not asked again by the recomputation."""
    counts = []

    def count(ctx, op, *args, **kwargs):
        counts.append(len(counts) + 1)
        return False

    context_fn = functools.partial(create_selective_checkpoint_contexts, count)
    run(
        functools.partial(
            checkpoint, lambda x: x.sin().sin().sin(), context_fn=context_fn
        ),
        [seeded(3)],
    )

    assert counts == [1, 2, 3]


def test_states_of_devices_are_found_in_containers():
    """test_utils.py: test_get_device_states_recursive; a CPU has no states of this kind."""
    given = {"foo": torch.rand(2, device="cpu"), "bar": [torch.rand(2, device="cpu")]}

    assert [len(each) for each in get_device_states(given)] == [0, 0]


@pytest.mark.parametrize("is_inside", [False, True])
def test_what_waits_on_the_cpu(is_inside):
    """test_autograd.py: test_save_on_cpu_and_checkpoint."""

    def powers(x):
        with torch.autograd.graph.save_on_cpu() if is_inside else nullcontext():
            return x.pow(2).pow(2).sin()

    def outside(x):
        with torch.autograd.graph.save_on_cpu():
            return nested(powers)(x.exp()).sin()

    call = nested(powers) if is_inside else outside
    plain = powers if is_inside else lambda x: powers(x.exp()).sin()
    assert_bitwise(run(call, [seeded(2, 2)]), run(plain, [seeded(2, 2)]))


def test_a_block_mask():
    """test_autograd.py: test_checkpointing_without_reentrant_with_block_mask."""
    mask = create_block_mask(
        lambda b, h, q, k: q >= k, B=1, H=1, Q_LEN=128, KV_LEN=128, device="cpu"
    )
    x = seeded(4, 128).requires_grad_()

    assert_bitwise(nested(lambda x, mask: x * 2)(x, mask), x * 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("is_marked", [False, True])
def test_a_compiled_function_of_many_sizes(is_marked):
    """test_autograd.py: test_checkpoint_automatic_dynamic_graph_shadowing.

    And ..._dynamic_mark_dynamic_workaround, and ..._dynamic_lru_disabled_workaround,
    which would be two ways out.
    """
    torch.compiler.reset()

    def fn(x):
        return (x.sin() * x.sin().cos()).exp()

    compiled = torch.compile(fn, backend="aot_eager")
    x, y = seeded(4, 8).requires_grad_(), seeded(7, 8).requires_grad_()
    if is_marked:
        torch._dynamo.mark_dynamic(x, 0)
    (nested(compiled)(x).sum() + compiled(y).sum()).backward()

    assert_bitwise(x.grad, torch.autograd.grad(fn(x).sum(), x)[0])
