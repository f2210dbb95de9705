"""`interop.torch`: what torch's own tests of checkpointing ask, and what more is promised.

Tests that stand for one of torch's own name it in their docstring, with its file, here and in
test_torch_*.py: docs/interop_torch.md is the table of all of them.
"""

import contextlib
import functools
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as peer
from torch import nn

from remat import ImplicitRandomnessError, RematWarning, SideEffectError, TraceError
from remat._calls import cache, decorated
from remat.interop.torch import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from tests.interop.layers import MM, product
from tests.support import (
    OperatorCounter,
    assert_bitwise,
    assert_close,
    backward_operators,
    run,
    seeded,
)

pytestmark = [
    pytest.mark.contract,
    # Forward mode itself compiles decompositions with torch.jit.script.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]
each_variant = pytest.mark.parametrize("use_reentrant", [None, False, True])


def relus() -> Any:
    """Six layers, as torch's tests have them."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(10, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU()),
        *(nn.Linear(4, 3), nn.ReLU()),
    )


def with_gradients(model, call):
    """Output, the input's gradient and the parameters'."""
    x = seeded(2, 10, dtype=torch.float32).requires_grad_()
    model.zero_grad()
    out = call(x)
    out.sum().backward()
    return out.detach(), x.grad, [each.grad for each in model.parameters()]


PARTS = {
    "sequential": lambda model: model,
    "list": lambda model: list(model.children()),
    "module list": lambda model: nn.ModuleList(model.children()),
    "functions": lambda model: [each.__call__ for each in model.children()],
}


@each_variant
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_sequential(parts, use_reentrant):
    """test_utils.py: test_checkpoint, test_checkpoint_module_list."""
    model = relus()
    expected = with_gradients(model, model)

    found = with_gradients(
        model,
        lambda x: checkpoint_sequential(
            parts(model), 2, x, use_reentrant=use_reentrant
        ),
    )

    assert_bitwise(found, expected)


def test_sequential_recomputes_all_segments_but_the_last():
    """test_utils.py: test_checkpoint_trigger, counted by operators and not by Python calls."""
    layers = [torch.sin] * 10

    counts = [
        backward_operators(
            lambda x, n=n: checkpoint_sequential(layers, n, x), seeded(3)
        )["aten.sin"]
        for n in (2, 5, 10)
    ]

    # A segment of k sines recomputes k - 1 of them: the last one's input is what it needs.
    assert counts == [4, 4, 0]


@pytest.mark.parametrize("segments", [0, 7])
def test_sequential_out_of_bounds(segments):
    """Torch's own error is about the step of a range."""
    with pytest.raises(ValueError, match=r"6 functions can be divided into 1 to 6"):
        checkpoint_sequential(relus(), segments, seeded(2, 10))


def test_sequential_takes_one_argument():
    """test_utils.py: test_checkpoint_sequential_deprecated_multiple_args and ..._no_args."""
    with pytest.raises(TypeError):
        checkpoint_sequential(relus(), 1, seeded(1), seeded(1), seeded(1))  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError):
        checkpoint_sequential(relus(), 1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"\(preserve=...\): is no option"):
        checkpoint_sequential(relus(), 2, seeded(1), preserve=True)


def test_sequential_of_one_segment():
    """The last segment recomputes nothing, and it is the only one."""
    with pytest.warns(RematWarning, match="recomputes nothing"):
        checkpoint_sequential([torch.sin], 1, seeded(1))


def test_second_derivative():
    """test_utils.py: test_checkpoint_valid, with either variant."""
    model = relus()

    def gradients(call):
        x = seeded(2, 10, dtype=torch.float32).requires_grad_()
        (first,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return first.detach(), second

    for use_reentrant in (True, False):
        found = gradients(
            lambda x, v=use_reentrant: checkpoint_sequential(
                model, 2, x, use_reentrant=v
            )
        )
        assert_close(found, gradients(model))


@each_variant
def test_random_numbers(use_reentrant):
    """test_utils.py: test_checkpoint_rng_cpu, test_checkpoint_rng_gpu on a device."""
    first, second = nn.Dropout(), nn.Dropout()

    def gradient(call):
        torch.manual_seed(0)
        x = torch.ones(200, requires_grad=True)
        call(first(x)).sum().backward()
        return x.grad, torch.rand(1)

    found = gradient(lambda x: checkpoint(second, x, use_reentrant=use_reentrant))

    assert_bitwise(found, gradient(second))


def test_random_numbers_not_preserved():
    """test_utils.py: test_checkpoint_not_preserve_rng_state_and_without_reentrant."""
    x = torch.ones(5, requires_grad=True)
    with pytest.raises(
        ImplicitRandomnessError, match=r"preserve_rng_state=False.*draws.*Leave"
    ):
        checkpoint(nn.Dropout(), x, use_reentrant=False, preserve_rng_state=False)

    # Nothing is drawn here, and nothing is in the way.
    checkpoint(nn.Dropout().eval(), x, preserve_rng_state=False).sum().backward()


@each_variant
def test_arguments_and_results_of_any_kind(use_reentrant):
    """test_utils.py: test_checkpoint_non_tensor, ..._non_tensor_inputs_outputs, ..._no_tensors."""

    def mixed(t1, t2, scale, t3):
        t4, t5 = t1 + t2 * t3, t1 * t2 + t3
        t4 *= scale
        t5 *= scale
        return scale, t4, None, True, t5, "bar", t1

    def call(*args):
        return checkpoint(mixed, *args, use_reentrant=use_reentrant)

    args = (
        seeded(10).requires_grad_(),
        seeded(10, seed=1).requires_grad_(),
        3,
        seeded(10, seed=2),
    )
    (outputs, gradients), (expected, expected_gradients) = (
        run(call, args),
        run(mixed, args),
    )
    assert_bitwise(outputs, expected)
    # t1 comes back too: its gradient is a sum with a part from outside of the call.
    assert_close(gradients, expected_gradients)
    assert call(0.5, 0.25, 3, 2.0) == mixed(0.5, 0.25, 3, 2.0)

    out = call(*args)
    out[1].sum().backward(retain_graph=True)
    out[4].sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out[1].sum().backward()


def test_partial_gradient():
    """test_utils.py: test_checkpoint_partial_grad, where nothing of torch's error is left."""
    x, y = seeded(4).requires_grad_(), seeded(4)
    out = checkpoint(lambda a, b: (a.sin(), b.sin()), x, y, use_reentrant=True)
    out[0].sum().backward()
    assert [each.requires_grad for each in out] == [True, False]

    assert not checkpoint(lambda a, b: b.sin(), x, y, use_reentrant=True).requires_grad


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_autocast(dtype):
    """test_autograd.py: test_checkpointing_non_reentrant_autocast_cpu, and ..._autocast_gpu."""

    def products(x, y, z):
        z = torch.mm(torch.mm(x, y), z)
        assert z.dtype is (dtype or torch.float32)
        return z

    args = [
        seeded(3, 3, seed=i, dtype=torch.float32).requires_grad_() for i in range(3)
    ]

    def under(call):
        kind, lower = args[0].device.type, dtype or torch.bfloat16
        with torch.autocast(kind, lower, enabled=dtype is not None):
            return call(*args)

    found, expected = under(functools.partial(checkpoint, products)), under(products)
    assert_bitwise(
        torch.autograd.grad(found.sum(), args),
        torch.autograd.grad(expected.sum(), args),
    )


class Product(torch.autograd.Function):
    """A function of the user's, which saves inputs and what it made of them."""

    @staticmethod
    def forward(ctx: Any, x, y):
        w = x * y
        ctx.save_for_backward(x, y, w)
        return w + w

    @staticmethod
    def backward(ctx: Any, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, y, w = ctx.saved_tensors
        again = ctx.saved_tensors
        assert all(
            a is b or a.shape == b.shape for a, b in zip((x, y, w), again, strict=True)
        )
        return gradient * y * 2, gradient * x * 2


def test_custom_function():
    """test_autograd.py: test_checkpointing_without_reentrant_custom_function_works.

    Saved tensors may be read twice, which torch's raises on.
    """

    def product(x, y):
        return Product.apply(x.sin(), y).cos()

    args = (seeded(3), seeded(3, seed=1))

    assert_bitwise(
        run(functools.partial(checkpoint, product), args), run(product, args)
    )


def test_other_contexts_are_refused():
    """test_autograd.py: test_checkpointing_without_reentrant_with_context_fn.

    test_activation_checkpointing.py: invalid_context.
    """
    x = seeded(3).requires_grad_()
    with pytest.raises(
        NotImplementedError, match=r"no second run.*Enter the first context"
    ):
        checkpoint(
            torch.exp,
            x,
            context_fn=lambda: (OperatorCounter(), contextlib.nullcontext()),
        )
    with pytest.raises(ValueError, match=r"only supported when use_reentrant=False"):
        checkpoint(
            torch.exp, x, context_fn=lambda: noop_context_fn(), use_reentrant=True
        )
    for context_fn in (noop_context_fn, peer.noop_context_fn):
        checkpoint(
            torch.exp, x, context_fn=context_fn, use_reentrant=False
        ).sum().backward()


def test_use_reentrant_need_not_be_said():
    """test_autograd.py: ..._warns_if_use_reentrant_not_passed_explcitly, which ours does not."""
    checkpoint(torch.exp, seeded(3).requires_grad_())


@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_a_function_that_changes(engine):
    """test_autograd.py: test_checkpoint_detects_non_determinism.

    A trace refuses a function that counts its calls; a run again finds the count of the
    first, where torch's finds another and raises.
    """
    calls = []

    def changing(x):
        calls.append(1)
        return x.sin().exp() if len(calls) < 2 else x.sin() * torch.ones(2)

    x = seeded(1).requires_grad_()
    if engine == "trace":
        with pytest.raises(SideEffectError):
            checkpoint(changing, x, engine=engine)
        return
    checkpoint(changing, x, engine=engine).sum().backward()

    assert_bitwise(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])
    assert len(calls) == 1


@pytest.mark.parametrize("input_requires_grad", [True, False])
def test_many_calls(input_requires_grad):
    """test_autograd.py: test_checkpointing, test_checkpointing_without_reentrant."""

    class Holder(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, data):
            return self.module(data)

    torch.manual_seed(0)
    holder = Holder(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)))
    inputs = [seeded(1, 4, seed=i, dtype=torch.float32) for i in range(20)]
    found = []
    for call in (holder, functools.partial(checkpoint, holder, use_reentrant=False)):
        holder.zero_grad()
        outs = [
            call(data=x.clone().requires_grad_(input_requires_grad)) for x in inputs
        ]
        torch.stack(outs).mean().backward()
        found.append([each.grad for each in holder.parameters()])

    assert_close(*found)


def test_every_way_of_the_backward():
    """test_autograd.py: test_checkpoint_valid_reset_on_error, ..._correct_grad."""
    found = []
    for call in (
        torch.exp,
        functools.partial(checkpoint, torch.exp, use_reentrant=True),
    ):
        x = seeded(2, 2).requires_grad_()
        found.append(torch.autograd.grad(call(x).sum(), x))
        call(x).sum().backward(inputs=[x])
        found[-1] += (x.grad,)

    assert_bitwise(*found)


@each_variant
def test_detached(use_reentrant):
    """test_autograd.py: test_checkpointing_without_reentrant_detached_tensor."""

    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            with torch.no_grad():
                return self.linear(x)

    module, x = Detached(), torch.ones(2, 2, requires_grad=True)
    out = checkpoint(module, x, use_reentrant=use_reentrant)
    assert not out.requires_grad
    out += x
    out.sum().backward()
    assert_bitwise(x.grad, torch.ones(2, 2))


def test_hooks_of_a_tensor_run_once():
    """test_autograd.py: test_checkpointing_without_reentrant_parameter_used_in_an_out."""
    w, x = seeded(3).requires_grad_(), seeded(3, seed=1).requires_grad_()
    calls = []
    w.register_hook(calls.append)

    checkpoint(lambda x: w * x, w * x, use_reentrant=False).sum().backward()

    assert len(calls) == 1
    assert_close(w.grad, 2 * w * x)


def test_data_parallel():
    """test_autograd.py: test_checkpointing_without_reentrant_dataparallel, on a CPU."""
    module = nn.DataParallel(nn.Linear(2, 2).double())
    args = [seeded(2, 2)]
    assert_bitwise(run(functools.partial(checkpoint, module), args), run(module, args))


def test_containers():
    """test_autograd.py: test_checkpointing_without_reentrant_arbitrary_input_output."""
    linear = nn.Linear(5, 5).double()

    def model(inputs):
        return {"result": linear(inputs["tensor"])}

    x = {"tensor": seeded(5, 5)}
    assert_bitwise(run(functools.partial(checkpoint, model), [x]), run(model, [x]))


def test_backward_again():
    """test_autograd.py: test_can_only_trigger_recompute_once; here it may be triggered again."""
    sin = torch.ops.aten.sin.default
    context_fn = functools.partial(create_selective_checkpoint_contexts, [sin])
    x = seeded(3).requires_grad_()
    out = checkpoint(lambda x: x.sin().cos().exp(), x, context_fn=context_fn)

    first = torch.autograd.grad(out.sum(), x, retain_graph=True)
    assert_bitwise(torch.autograd.grad(out.sum(), x), first)


def test_under_torch_func():
    """Where torch's own raises."""
    x = seeded(4, 3)

    def loss(x):
        return checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False).sum()

    assert_close(torch.func.vmap(torch.func.grad(loss))(x), x.cos() * x.sin().exp())


def test_calls_share_a_trace(monkeypatch):
    """Lambdas, partials and bound methods that are made anew at each step."""
    layer = nn.Linear(4, 4).double()
    compile_call, traces = cache.compile_call, []
    monkeypatch.setattr(decorated, "_caches", {})
    monkeypatch.setattr(
        cache, "compile_call", lambda *args: traces.append(1) or compile_call(*args)
    )

    def step(scale):
        def body(x, factor):
            return layer(x).tanh() * factor

        x = seeded(2, 4)
        checkpoint(lambda x: body(x, scale).sin(), x).sum().backward()
        checkpoint(functools.partial(layer.forward), x).sum().backward()
        checkpoint(layer.forward, x).sum().backward()
        checkpoint_sequential([layer, torch.tanh, layer], 3, x).sum().backward()

    step(2.0)
    first = len(traces)
    for _ in range(3):
        step(2.0)

    assert first == len(traces) == 5


def test_decorator():
    """`checkpoint` without a function, on functions and on methods, as torch 2.15 has it."""

    class Scaled:
        def __init__(self, factor):
            self.factor = factor

        @checkpoint(use_reentrant=False)
        def apply(self, x):
            return (x * self.factor).sin().sin()

    @checkpoint(use_reentrant=False)
    def twice(x):
        return x.sin().sin()

    assert twice.__name__ == "twice"
    for call, counts in ((twice, 1), (Scaled(2.0).apply, 1)):
        assert backward_operators(call, seeded(3))["aten.sin"] == counts
    with pytest.raises(ValueError, match="is a decorator"):
        checkpoint(bogus=1)


def test_what_cannot_be_traced():
    """A branch on a value says what to do; `engine="rerun"` does it."""

    def branching(x):
        return x.sin().exp() if x.sum() > 0 else x.cos().exp()

    x = [seeded(3)]
    with pytest.raises(TraceError, match=r'engine="rerun"'):
        run(functools.partial(checkpoint, branching), x)
    assert_bitwise(
        run(functools.partial(checkpoint, branching, engine="rerun"), x),
        run(branching, x),
    )


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"determinism_check": "bits"}, ValueError, "determinism_check='bits'"),
        ({"engine": "jit"}, ValueError, "engine='jit'"),
        ({"debug": True, "use_reentrant": True}, ValueError, "use_reentrant=False"),
        (
            {"respect_saved_tensors_hooks": False},
            NotImplementedError,
            "passes them to the hooks",
        ),
        ({"debug": True}, RematWarning, "has no effect.*program that was traced"),
        ({"debug": True, "engine": "rerun"}, RematWarning, "that runs again is not"),
    ],
)
def test_options_that_cannot_be_kept(options, error, text):
    """Each raises, or warns, and says why."""
    x = seeded(3).requires_grad_()
    with pytest.raises(error, match=text):
        checkpoint(torch.sin, x, **options)


def test_surrounding_hooks_see_what_is_saved():
    """respect_saved_tensors_hooks=True is what regions do anyway."""
    packed = []
    context_fn = functools.partial(create_selective_checkpoint_contexts, [MM])
    args = (seeded(8, 8).requires_grad_(), seeded(8, 8, seed=1).requires_grad_())
    checkpoint(product, *args, context_fn=context_fn).backward()

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        checkpoint(
            product, *args, context_fn=context_fn, respect_saved_tensors_hooks=True
        )

    # The two inputs, and the product that the policy saves.
    assert packed == [(8, 8)] * 3
