"""`engine="auto"`: traced, and where a trace is refused run again in the backward.

A call whose trace is refused runs again from then on, with one warning that names the line and the
reason. What would break a law raises as with `engine="trace"`.
"""

import itertools
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import dynamic as quantized

import remat.interop.torch as interop_torch
from remat import (
    CapturedTensorError,
    ImplicitRandomnessError,
    MutationError,
    PolicyError,
    RematWarning,
    TraceError,
    modules,
    policies,
    remat,
    storage,
)
from remat.interop import transformer_engine
from tests.rerun.functions import (
    TRANSFORMS,
    branches,
    data_dependent,
    item,
    opaque,
    traceable,
)
from tests.support import assert_bitwise, assert_close, grads, seeded

pytestmark = [pytest.mark.filterwarnings("ignore:`torch.jit.script")]

UNTRACEABLE = [branches, opaque, data_dependent, item]


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """The functions of other tests' calls have not been called."""
    for fun in (*UNTRACEABLE, traceable):
        for policy in (None, policies.everything_saveable):
            remat(fun, engine="auto", policy=policy).cache_clear()


@pytest.mark.contract
@pytest.mark.parametrize("fun", UNTRACEABLE)
def test_what_cannot_be_traced_runs_again_and_warns_once(fun: Any) -> None:
    """The warning names the region, the line and the reason, and stands at the user's call."""
    region, x = remat(fun, engine="auto"), seeded(4)

    with pytest.warns(RematWarning, match=r"functions\.py:\d+\): runs .* from now on"):
        first = grads(region, [x])
    again = grads(region, [-x]), grads(region, [seeded(7)])

    assert_bitwise(first, grads(fun, [x]))
    assert_bitwise(again[0], grads(fun, [-x]))
    assert_bitwise(again[1], grads(fun, [seeded(7)]))


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:.*runs the function again")
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_table_with_a_bound_of_its_norms_runs_again(kind: Any) -> None:
    """The second write of `max_norm` changes nothing; a trace refuses the first."""
    found: list[Any] = []
    for engine in (None, "rerun", "auto"):
        torch.manual_seed(0)
        table: Any = kind(5, 4, max_norm=1.0, dtype=torch.float64)
        region: Any = remat(table, engine=engine) if engine else table
        region(torch.tensor([[1, 2], [2, 4]])).sin().sum().backward()
        found += [table.weight.detach(), table.weight.grad]

    refused: Any = remat(kind(5, 4, max_norm=1.0))
    with pytest.raises(MutationError, match=r"engine=\"rerun\".*changes nothing here"):
        refused(torch.tensor([[0, 3]]))
    assert_bitwise(found[2:4], found[:2])
    assert_bitwise(found[4:], found[:2])


@pytest.mark.filterwarnings("ignore:.*runs the function again", "ignore:.*quantiz")
def test_an_object_of_a_class_in_cpp_runs_again() -> None:
    """Equal layers share a trace, which could not tell their packed weights apart."""
    layers = [quantized.Linear(4, 4), quantized.Linear(4, 4)]
    layers[1].set_weight_bias(layers[0].weight(), torch.ones(4))
    region = remat(lambda layer, x: layer(x).sin(), engine="auto")
    x = seeded(2, 4).float().requires_grad_()

    for layer in layers:
        assert_bitwise(region(layer, x), layer(x).sin())
    with pytest.raises(TraceError, match=r"takes a ScriptObject.*engine=\"rerun\""):
        remat(lambda x: layers[0](x))(x)


def test_the_warning_names_the_line_and_the_remedy() -> None:
    """It is the text of the refusal that says why."""
    with pytest.warns(RematWarning) as told:
        grads(remat(item, engine="auto"), [seeded(4)])

    text = str(told[0].message)
    assert len(told) == 1
    assert "functions.py:49: the function cannot be traced" in text
    assert text.endswith('Pass engine="rerun", and this is not told.')


@pytest.mark.contract
@pytest.mark.parametrize("policy", [None, policies.everything_saveable], ids=repr)
def test_what_can_be_traced_is(policy: Any) -> None:
    """It has programs, saves by its policy, and warns of nothing."""
    region, x = remat(traceable, engine="auto", policy=policy), seeded(4)

    assert_bitwise(grads(region, [x]), grads(traceable, [x]))

    assert region.cache_info().misses == 1
    assert len(region.programs(x)) == 2


@pytest.mark.contract
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("fun", [branches, item])
@pytest.mark.filterwarnings("ignore:.*from now on:remat.RematWarning")
def test_it_falls_back_in_the_middle_of_each_transform(
    transform: Any, fun: Any
) -> None:
    """Where plain PyTorch gives numbers they agree; where it raises, so does this."""
    region = remat(fun, engine="auto")
    try:
        expected = transform(fun, seeded(4))
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error)[:20].replace("(", ".")):
            transform(region, seeded(4))
        return

    assert_close(transform(region, seeded(4)), expected)


@pytest.mark.contract
def test_a_captured_value_decides_under_a_map_of_gradients() -> None:
    """The branch is on what is not mapped."""
    scale = seeded(3)

    def fun(x: Tensor) -> Tensor:
        return (x.sin() * float(scale.max())).sum()

    batch = seeded(2, 4)
    with pytest.warns(RematWarning, match="from now on"):
        found = torch.func.vmap(torch.func.grad(remat(fun, engine="auto")))(batch)

    assert_close(found, torch.func.vmap(torch.func.grad(fun))(batch))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"policy": policies.everything_saveable}, "policy=everything_saveable"),
        ({"saved_inputs": storage.Cast(torch.bfloat16)}, "saved_inputs"),
        ({"saved_inputs": {"x": storage.Sparse()}, "verify": True}, "verify=True"),
        ({"dynamic_shapes": True}, "dynamic_shapes=True"),
        ({"backend": "inductor"}, "backend='inductor'"),
        ({"cache_size": 3}, "cache_size=3"),
    ],
    ids=["policy", "storage", "verify", "dynamic", "backend", "cache"],
)
def test_options_of_traces_have_no_effect_there(options: Any, named: str) -> None:
    """The warning says so; `engine="rerun"` refuses them."""
    with pytest.raises(
        (PolicyError, ValueError), match="has no effect with this engine"
    ):
        remat(item, engine="rerun", **options)
    region = remat(item, engine="auto", **options)

    with pytest.warns(RematWarning, match=f"{named}.* has no effect there"):
        found = grads(region, [seeded(4)])

    assert_bitwise(found, grads(item, [seeded(4)]))


def test_looking_at_a_call_that_runs_again_says_so() -> None:
    """There are no programs, no stages, and nothing is saved but the arguments."""
    region, x = remat(item, engine="auto"), seeded(4).requires_grad_()
    with pytest.warns(RematWarning):
        region(x)

    for look in (region.programs, region.stages, region.saved_residuals):
        with pytest.raises(
            TraceError, match=r"runs the function again .*functions\.py"
        ):
            look(x)
    region = remat(item, engine="rerun")
    for look in (region.programs, region.stages, region.saved_residuals):
        with pytest.raises(
            TraceError, match=r"cannot be looked at .*Measure what a call"
        ):
            look(x)


def test_a_cleared_cache_tries_to_trace() -> None:
    """What was refused is forgotten with the traces."""
    region = remat(item, engine="auto")
    for _ in range(2):
        with pytest.warns(RematWarning, match="from now on"):
            grads(region, [seeded(4)])
        region.cache_clear()


@pytest.mark.contract
def test_an_error_of_the_users_is_no_refusal() -> None:
    """It is raised as it is, and calls that raise nothing are traced."""

    def of_four(x: Tensor) -> Tensor:
        if x.shape[0] != 4:
            raise ValueError("four of them")
        return x.sin()

    region = remat(of_four, engine="auto")
    with pytest.raises(ValueError, match="four of them"):
        region(seeded(3).requires_grad_())
    region(seeded(4).requires_grad_())

    assert region.cache_info().misses == 1


@pytest.mark.contract
def test_what_raises_only_in_a_trace_runs_again() -> None:
    """Its own error, for the class of a stand-in, is a refusal like torch's."""

    def checks(x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            raise TypeError("plain tensors only")
        return x.sin()

    region = remat(checks, engine="auto")
    with pytest.warns(RematWarning, match=r"test_auto\.py:\d+: .*plain tensors only"):
        found = grads(region, [seeded(4)])

    assert_bitwise(found, grads(torch.sin, [seeded(4)]))


def test_what_a_policy_raises_is_no_refusal_of_a_trace() -> None:
    """Its own error is told, not run around."""

    def policy(value: policies.Value) -> bool:
        raise ZeroDivisionError(value.op)

    with pytest.raises(ZeroDivisionError, match="aten"):
        grads(remat(traceable, engine="auto", policy=policy), [seeded(4)])


@pytest.mark.contract
@pytest.mark.parametrize("kind", [TypeError, AttributeError, KeyError])
def test_an_error_that_speaks_of_a_stand_in_is_a_refusal_of_every_trace(
    kind: Any,
) -> None:
    """As of `type(weight)(numbers)` in the offloading hooks of accelerate."""

    def checks(x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            raise kind(f"{type(x).__name__} takes no numbers")
        return x.sin()

    with pytest.raises(
        TraceError, match=r"test_auto\.py:\d+: .*takes no numbers.*rerun"
    ):
        grads(remat(checks), [seeded(4)])


class PerExample(nn.Linear):
    """Keeps what it is given for a hook that takes it once, as those of opacus do."""

    def forward(self, input: Tensor) -> Tensor:
        y, given = super().forward(input), [input.detach()]

        def hook(gradient: Tensor) -> None:
            self.norms = (gradient.T @ given.pop()).norm()

        y.register_hook(hook)
        return y.tanh()


@pytest.mark.contract
def test_what_raises_only_in_the_backward_of_a_trace_runs_again() -> None:
    """The first trace, which calls the hook for two layouts, notes the line and the remedy."""

    def of(engine: Any) -> tuple[Any, ...]:
        torch.manual_seed(0)
        layer = PerExample(4, 4, dtype=torch.float64)
        region = remat(layer, engine=engine) if engine else layer
        found = grads(region, [seeded(3, 4)])
        return found, layer.norms

    with pytest.raises(IndexError) as raised:
        of("trace")
    (note,) = raised.value.__notes__
    assert re.match(r"test_auto\.py:\d+: the function raises in its.*rerun", note)
    with pytest.warns(RematWarning, match="IndexError: pop from empty list"):
        found = of("auto")

    assert_bitwise(found, of(None))


@pytest.mark.contract
def test_a_refused_trace_has_drawn_nothing() -> None:
    """The numbers are those of a plain call, and generators end where it would leave them."""

    def noisy(x: Tensor) -> Tensor:
        y = torch.dropout(x, 0.5, True)
        return y.cos() if bool((y > 0).any()) else torch.dropout(y, 0.5, True)

    plain, ends = [], []
    for fun in (noisy, remat(noisy, engine="auto", rng="preserve")):
        torch.manual_seed(3)
        with warnings.catch_warnings(action="ignore", category=RematWarning):
            plain.append(grads(fun, [seeded(4)]))
        ends.append(torch.rand(()))

    assert_bitwise(plain[1], plain[0])
    assert torch.equal(*ends)


HIDDEN = itertools.repeat(seeded(4).requires_grad_())


def add_(x: Tensor) -> Tensor:
    x += 1
    return x.sin()


@pytest.mark.contract
@pytest.mark.parametrize(
    ("fun", "options", "error"),
    [
        (lambda x: x * next(HIDDEN), {}, CapturedTensorError),
        (lambda x: torch.dropout(x, 0.5, True), {}, ImplicitRandomnessError),
        (lambda x: x.sin().sin(), {"policy": lambda value: 3}, PolicyError),
        (lambda x: add_(x * 1 if x.dim() > 1 else x), {}, MutationError),
    ],
    ids=["gradient", "randomness", "policy", "mutation"],
)
def test_a_law_is_not_given_up(fun: Any, options: Any, error: Any) -> None:
    """What would lose a gradient, or draw other numbers, raises as with the trace."""
    with pytest.raises(error):
        remat(engine="auto", **options)(fun)(seeded(4).requires_grad_())


@pytest.mark.contract
def test_a_generator_of_the_users_is_followed() -> None:
    """The trace's error names rerun, so that runs."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)

    def noisy(x: Tensor) -> Tensor:
        return x * torch.rand(4, generator=generator, dtype=x.dtype)

    with pytest.warns(RematWarning, match="from now on"):
        found = grads(remat(noisy, engine="auto", rng="preserve"), [seeded(4)])

    generator.manual_seed(0)
    assert_bitwise(found, grads(noisy, [seeded(4)]))


class Counting(nn.Module):
    """Counts in the first of its buffers, then branches."""

    tokens: Tensor
    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tokens", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("bias", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.tokens += 1
        return item(x + self.bias)


@pytest.mark.contract
def test_a_refused_trace_leaves_buffers_in_their_order() -> None:
    """Which is that of `state_dict`, and the objects stay the same."""
    model = Counting()
    before = dict(model.named_buffers())
    region: Any = remat(model, engine="auto")
    region.cache_clear()

    with pytest.warns(RematWarning, match="from now on"):
        grads(region, [seeded(4)])

    after = dict(model.named_buffers())
    assert [*after] == ["tokens", "bias"]
    assert all(after[name] is before[name] for name in before)
    assert_bitwise(model.tokens, torch.ones(4, dtype=torch.float64))


class Layer(nn.Module):
    """A layer that can be traced, or not: equal code, other parts."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.router = router

    def forward(self, x: Tensor) -> Tensor:
        y = self.router(self.linear(x))
        routes = isinstance(self.router, nn.Tanh)
        return y.cos() if routes and bool((y > 0).any()) else y.sin()


@pytest.mark.contract
@pytest.mark.parametrize("first", [0, 1], ids=["refused first", "traced first"])
def test_a_model_of_which_some_layers_cannot_be_traced(first: int) -> None:
    """Those run again, with one warning, and the others are traced."""
    kinds = [nn.Tanh, nn.Sigmoid]
    model = nn.Sequential(*(Layer(kinds[(i + first) % 2]()) for i in range(4)))
    plain = grads(model, [seeded(3, 4)])
    modules.apply(model, Layer, engine="auto", policy=policies.save_matmul_outputs)
    region: Any = model[0].forward
    region.cache_clear()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = grads(model, [seeded(3, 4)])
        grads(model, [seeded(5, 4)])

    refused = [each for each in told if "from now on" in str(each.message)]
    assert_bitwise(found, plain)
    assert len(refused) == 1
    assert region.cache_info().misses == 2


@pytest.mark.contract
def test_the_first_call_of_a_lazy_module_runs_as_it_is() -> None:
    """It makes the parameters, and one warning says so; the next call is traced."""

    first, second = (nn.LazyLinear(4, dtype=torch.float64) for _ in range(2))
    model = nn.Sequential(first, nn.Tanh(), second)
    region: Any = remat(model, engine="auto")
    x = seeded(3, 4)
    region.cache_clear()

    with pytest.warns(RematWarning, match=r"runs its first call as it is") as told:
        found = grads(region, [x])
    again = grads(region, [x])

    assert_bitwise((found, again), (grads(model, [x]),) * 2)
    assert len([each for each in told if each.category is RematWarning]) == 1
    assert region.cache_info().misses == 1


@pytest.mark.contract
def test_a_loss_of_one_row_that_torch_takes_for_a_row_of_one() -> None:
    """Torch's shape for a trace differs from its kernel's."""
    target = torch.tensor([1, 0, -1])

    def fun(x: Tensor) -> Tensor:
        return nn.functional.multilabel_margin_loss(x, target, reduction="none")

    region = remat(fun, engine="auto")
    assert_bitwise(grads(region, [seeded(3)]), grads(fun, [seeded(3)]))
    assert region.cache_info().misses == 1


@pytest.mark.contract
def test_inside_a_trace_the_region_around_is_refused_or_falls_back() -> None:
    """A trace has no numbers for what runs again."""
    inner, x = remat(item, engine="auto"), seeded(4)

    def outer(x: Tensor) -> Tensor:
        return inner(x.sin()).sin()

    with pytest.raises(TraceError, match=r"functions\.py"):
        grads(remat(outer), [x])
    with pytest.warns(RematWarning, match="from now on"):
        found = grads(remat(outer, engine="auto"), [x])

    assert_bitwise(found, grads(lambda x: item(x.sin()).sin(), [x]))


@pytest.mark.contract
def test_the_drop_ins_take_it() -> None:
    """As an option of torch's, and as a region that is handed to the others."""
    x = seeded(4)

    with pytest.warns(RematWarning, match="from now on"):
        found = grads(lambda x: interop_torch.checkpoint(item, x, engine="auto"), [x])
    region = remat(item, engine="auto", rng="preserve")
    region.cache_clear()
    with pytest.warns(RematWarning, match="from now on"):
        again = grads(lambda x: transformer_engine.checkpoint(region, x), [x])

    assert_bitwise(found, grads(item, [x]))
    assert_bitwise(again, grads(item, [x]))


def test_torch_compile_runs_it_between_two_graphs() -> None:
    """What Dynamo traces is a part of the graph; what it does not, falls back outside of it."""
    region, other = remat(item, engine="auto"), remat(traceable, engine="auto")

    def step(x: Tensor) -> Tensor:
        return region(other(x * 2)).sum()

    x = seeded(4).requires_grad_()
    with pytest.warns(RematWarning, match="from now on"):
        found = torch.compile(step, backend="aot_eager")(x)

    (gradient,) = torch.autograd.grad(found, x)
    (expected,) = torch.autograd.grad(item(traceable(x * 2)).sum(), x)
    assert_close(gradient, expected)
    assert other.cache_info().misses == 0
