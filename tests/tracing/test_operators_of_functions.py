"""Operators that take functions (`torch.cond`, a scan): one value each, differentiated as torch does."""

import gc
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses import FakeTensor

from remat import (
    ImplicitRandomnessError,
    PolicyError,
    RematWarning,
    TraceError,
    checkpoint_name,
    plan,
    policies,
    random,
    remat,
)
from tests.support import assert_bitwise, assert_close, seeded, swept

pytestmark = [
    pytest.mark.contract,
    # Dynamo's own, of a scan.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]
rows: Any = map_rows
W = seeded(3, seed=5).requires_grad_()
Function = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _without_graphs() -> None:
    torch._dynamo.reset()


class Scaled(torch.autograd.Function):
    """A product with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        a, b = ctx.saved_tensors
        return 3 * grad * b, grad * a


def own(x: Tensor) -> Tensor:
    """What the function has made, and its argument, are captured."""
    y = x * 2
    return torch.cond(
        x.sum() > 0, lambda z: x * y.sin() * z, lambda z: z.cos() + y, (x,)
    )


def several(x: Tensor) -> Tensor:
    found: dict[str, Tensor] = torch.cond(
        x.sum() > 0,
        lambda x: {"a": x * W, "b": x.sin()},
        lambda x: {"a": x.cos(), "b": x * 2},
        (x,),
    )
    return found["a"] * found["b"]


def nested(x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return torch.cond(x.max() > 1, lambda x: x * W, torch.cos, (x,))

    return torch.cond(x.sum() > 0, inner, lambda x: x.cos(), (x,))


def in_place(x: Tensor) -> Tensor:
    def write(x: Tensor) -> Tensor:
        y = x.sin()
        y.mul_(2)
        y[0] = 0
        return y * W

    z = x * 1
    z.add_(1)
    found = torch.cond(x.sum() > 0, write, lambda x: x.cos(), (z,)) * 1
    return found.mul_(2)


def custom(x: Tensor) -> Tensor:
    y = x * 2
    return torch.cond(
        x.sum() > 0,
        lambda x: Scaled.apply(x, W),
        lambda x: Scaled.apply(y, x),
        (x,),
    )


inner_region = remat(lambda x: (x.sin() * W).cos())


def cut(x: Tensor) -> Tensor:
    def yes(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x.sin()
        return y * x + x.detach() * x

    return torch.cond(x.sum() > 0, yes, lambda x: x.cos(), (x,))


def scanned(x: Tensor) -> Tensor:
    y = x.sin().sum(0)
    carry, found = scan(
        lambda carry, row: (carry + row * W, {"a": (carry * row * y).clone()}),
        x[0] * 1,
        x,
        reverse=True,
    )
    return found["a"] + carry


LIMIT = torch.tensor(50.0, dtype=torch.float64)


def loop(x: Tensor) -> Tensor:
    """How often it runs depends on numbers; both functions reach tensors."""
    y, zero = x.sin(), torch.zeros((), dtype=torch.int64)
    found: dict[str, Tensor] = while_loop(
        lambda i, z: (z["a"].square().sum() < LIMIT) & (i < 9),
        lambda i, z: (i + 1, {"a": 1.5 * z["a"] + torch.sin(z["a"] * W) + y}),
        (zero, {"a": x * 1}),
    )[1]
    return found["a"]


def loop_in_loop(x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return while_loop(
            lambda z: z.abs().sum() < LIMIT, lambda z: (2 * z + W.cos(),), (y,)
        )[0]

    zero = torch.zeros((), dtype=torch.int64)
    return while_loop(
        lambda i, _: i < 2, lambda i, y: (i + 1, inner(y).sin()), (zero, x)
    )[1]


def loop_without_gradient(x: Tensor) -> Tensor:
    zero = torch.zeros((), dtype=torch.int64)
    return (
        x
        * while_loop(
            lambda _, y: y.abs().sum() < LIMIT,
            lambda i, y: (i + 1, 2 * y),
            (zero, x.detach()),
        )[0]
    )


def counted(x: Tensor) -> Tensor:
    return (
        x
        * while_loop(
            lambda i, _: i < 3, lambda i, y: (i + 1, y.sin()), (0, x.detach())
        )[1]
    )


CONDITIONS: dict[str, Function] = {
    "plain": lambda x: torch.cond(
        x.sum() > 0, lambda x: x.exp().tanh(), torch.sigmoid, (x,)
    ),
    "captured": lambda x: torch.cond(
        x.sum() > 0, lambda x: x * W, lambda x: x.cos(), (x,)
    ),
    "no operands": lambda x: torch.cond(x.sum() > 0, lambda: x.sin(), lambda: x.cos()),
    "constants": lambda x: torch.cond(
        x.sum() > 0, lambda x: x * torch.tensor([1.0, 2.0, 3.0]), torch.cos, (x,)
    ),
    "own": own,
    "several": several,
    "nested": nested,
    "in place": in_place,
    "region inside": lambda x: torch.cond(
        x.sum() > 0, lambda x: inner_region(x) * 2, lambda x: x.cos(), (x,)
    ),
}
#: What the others are made of.
DAILY = ("captured", "in place", "no operands")
#: What is in others too.
SIMPLE = ("plain", "constants", "own", "loop", "several", "nested")
LOOPS: dict[str, Function] = {
    "map": lambda x: rows(lambda row: row.sin() * W, x),
    "scan": scanned,
    "loop": loop,
    "loop in loop": loop_in_loop,
    "loop without gradient": loop_without_gradient,
}
ALL = CONDITIONS | LOOPS | {"custom": custom, "cut": cut}


def with_gradients(fun: Function, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = fun(x)
    found = torch.autograd.grad(
        (y * y.detach().cos()).sum(), [x, W], allow_unused=True, materialize_grads=True
    )
    return [y.detach(), *found]


@pytest.mark.parametrize(
    "name", [*(name for name in ALL if name not in SIMPLE), *swept(SIMPLE)]
)
def test_values_and_gradients_are_those_of_plain_torch(name: str) -> None:
    """One trace has both functions of a condition: each is taken once, and once more."""
    fun, positive = ALL[name], seeded(2, 3).abs()
    region = remat(fun)

    for x in (positive, -positive):
        expected = with_gradients(fun, x)
        assert_bitwise(with_gradients(region, x), expected)
        assert_bitwise(with_gradients(region, x), expected)
        weights = expected[0].cos()
        found = torch.func.grad(lambda x, w=weights: (region(x) * w).sum())(x)
        assert_bitwise(found, expected[1])


@pytest.mark.parametrize(
    "name", [*DAILY, *swept(name for name in CONDITIONS if name not in DAILY)]
)
def test_a_condition_is_mapped(name: str) -> None:
    """Where a predicate is mapped, both functions run, whatever either returns."""
    fun, x = CONDITIONS[name], seeded(2, 3).abs()
    both = torch.stack([x, -x])
    region = remat(fun)

    assert_close(torch.vmap(region)(both), torch.stack([fun(x), fun(-x)]))
    found = torch.vmap(torch.func.grad(lambda x: region(x).sin().sum()))(both)
    expected = [torch.func.grad(lambda x: remat(fun)(x).sin().sum())(x) for x in both]
    assert_close(found, torch.stack(expected))


def as_python(mask: Any, yes: Any, no: Any, operands: Any = ()) -> Any:
    return yes(*operands) if mask else no(*operands)


@pytest.mark.parametrize(
    "name",
    ["cut", "loop", *DAILY, *swept(name for name in CONDITIONS if name not in DAILY)],
)
def test_a_second_derivative_is_right_or_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of torch's own condition it is zero, without a word."""
    fun, x = ALL[name], seeded(2, 3).abs().requires_grad_()
    second = torch.func.grad(
        lambda x: torch.func.grad(lambda x: remat(fun)(x).sin().sum())(x).sin().sum()
    )
    if name in ("cut", "region inside", "loop"):
        with pytest.raises(TraceError, match=r"functions\.py:\d+: .*twice.*rerun"):
            second(x.detach())
        return
    found = second(x.detach())

    monkeypatch.setattr(torch, "cond", as_python)
    (once,) = torch.autograd.grad(fun(x).sin().sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(once.sin().sum(), x)
    assert_close(found, expected)


def of_recorded(fun: Function, x: Tensor) -> Tensor:
    """A second derivative by plain autograd."""
    (first,) = torch.autograd.grad(fun(x).sin().sum(), x, create_graph=True)
    return torch.autograd.grad(first.sin().sum(), x)[0]


def test_a_graph_of_the_backward_is_refused() -> None:
    """torch's own second derivative is wrong, without a word."""
    x = seeded(2, 3).requires_grad_()

    with pytest.raises(TraceError, match=r"functions\.py:\d+: .*differentiated twice"):
        of_recorded(remat(ALL["loop"]), x)


def test_a_graph_of_the_backward_of_a_condition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch gives it no gradient at all; a region opens the programs of both ways."""
    fun, x = ALL["plain"], seeded(2, 3).requires_grad_()
    found = [of_recorded(remat(fun), x) for _ in range(2)]

    monkeypatch.setattr(torch, "cond", as_python)
    assert_close(found, [of_recorded(fun, x)] * 2)


SECOND: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, w: (x @ w).sin(),
    "transposed": lambda x, w: (x @ w.t()).cos(),
    "vector": lambda x, w: (x[0] @ w).sin() + x,
    "linear of a vector": lambda x, w: F.linear(x[0], w).sin() + x,
    "softmax": lambda x, w: (x @ w).softmax(-1),
}
SAVING = {
    "nothing": policies.nothing_saveable,
    "everything": policies.everything_saveable,
    "operator": policies.by_op("cond"),
    "name": policies.save_only_these_names("a"),
}


def of_penalty(fun: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
    """The gradients of a gradient penalty, by plain autograd."""
    x, w = (seeded(3, 3, seed=k).abs().requires_grad_() for k in range(2))
    found = torch.autograd.grad(fun(x, w).sin().sum(), (x, w), create_graph=True)
    penalty = torch.stack([each.square().sum() for each in found]).sum()
    return torch.autograd.grad(penalty, (x, w))


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *itertools.product(SECOND, ["everything"]),
        *[("vector", each) for each in SAVING],
    ],
)
def test_a_gradient_penalty_from_the_first_call_on(name: str, policy: str) -> None:
    """What waits in the first call has no gradient of its own: the backward runs from operands."""
    yes = SECOND[name]

    def fun(x: Tensor, w: Tensor) -> Tensor:
        found = torch.cond(x.sum() > 0, yes, lambda x, w: x * 2, (x, w))
        return checkpoint_name(found, "a").sin() * x

    region = remat(fun, policy=SAVING[policy])
    expected = of_penalty(lambda x, w: yes(x, w).sin() * x)

    for _ in range(2):
        assert_close(of_penalty(region), expected)


@pytest.mark.parametrize("policy", SAVING)
def test_no_second_derivative_of_what_has_none(policy: str) -> None:
    """torch's formula for silu's cannot be differentiated; the second call lost gradients."""
    region = remat(
        lambda x, w: checkpoint_name(
            torch.cond(
                *(x.sum() > 0, lambda x, w: F.silu(x @ w), lambda x, w: x * 2, (x, w))
            ),
            "a",
        ).sin(),
        policy=SAVING[policy],
    )

    for _ in range(2):
        with pytest.raises(TraceError, match=r"functions\.py:\d+: .*twice"):
            of_penalty(region)


def test_a_second_derivative_of_a_map() -> None:
    def second(fun: Function) -> Tensor:
        def first(x: Tensor) -> Tensor:
            return torch.func.grad(lambda x: fun(x).sin().sum())(x).sin().sum()

        return torch.func.grad(first)(seeded(3, 3))

    assert_close(second(remat(LOOPS["map"])), second(lambda x: x.sin() * W))


def test_a_loop_that_does_not_run_gives_what_it_was_given() -> None:
    """torch's own gradient is that of one iteration."""
    x = seeded(2, 3).requires_grad_()
    y = remat(
        lambda x: while_loop(lambda z: z.sum() > 99, lambda z: (z * W,), (x,))[0]
    )(x)

    assert_bitwise(y, x)
    assert_bitwise(torch.autograd.grad(y.sum(), x)[0], torch.ones_like(x))


def test_of_the_iterations_of_a_loop_nothing_is_held() -> None:
    """Of any number of them: what the loop is given is, and what it returns."""
    x = seeded(2, 3).requires_grad_()
    region = remat(loop_in_loop, policy=policies.everything_saveable)

    held = {r.shape for r in region.saved_residuals(x)}
    assert held <= {(), (2, 3), (3,)}
    assert_bitwise(with_gradients(region, x), with_gradients(loop_in_loop, x))


def test_a_loop_is_not_timed() -> None:
    """On the zeros that operators are timed with it might never end."""
    timed = plan(lambda x: loop(x).sin(), budget=0.5, costs="measured")

    with pytest.raises(PolicyError, match=r'while_loop.*may never end.*costs="flops"'):
        timed(seeded(2, 3).requires_grad_())


@pytest.mark.parametrize("name", ["map", "loop", *swept(["scan", "plain"])])
def test_a_transform_that_torch_lacks_names_the_line(name: str) -> None:
    fun, x = ALL[name], seeded(2, 3)
    gradient = torch.func.grad(lambda x: remat(fun)(x).sin().sum())

    with pytest.raises(
        TraceError, match=r"functions\.py:\d+: .*no rule for `\w+` under"
    ):
        torch.func.jvp(gradient, (x,), (x,))
    if name == "map":
        with pytest.raises(TraceError, match=r"no rule for `map_impl` under vmap"):
            torch.vmap(gradient)(torch.stack([x, x]))


def chained(x: Tensor) -> Tensor:
    y = torch.cond(x.sum() > 0, lambda x: (x * W).exp(), torch.cos, (x,))
    return checkpoint_name(y, "branch").sin().exp()


@pytest.mark.parametrize(
    ("policy", "saved"),
    [
        (policies.nothing_saveable, []),
        (policies.save_only_these_names("branch"), ["cond"]),
        (policies.by_op("cond"), ["cond"]),
        (policies.by_op(torch.ops.higher_order.cond), ["cond"]),
        (
            policies.from_callable(lambda v: v.op is torch.ops.higher_order.cond),
            ["cond"],
        ),
    ],
)
def test_it_is_one_value(policy: policies.AbstractPolicy, saved: list[str]) -> None:
    x = seeded(2, 3).requires_grad_()
    region = remat(chained, policy=policy)

    permitted = [r for r in region.saved_residuals(x) if "permitted" in r.reason]
    assert [each.op for each in permitted] == saved
    forward, backward = region.programs(x)
    assert forward.operators.count("cond") == 1
    # Its own backward, and the operator again unless its value is saved.
    assert backward.operators.count("cond") == (1 if saved else 2)
    assert_bitwise(with_gradients(region, x), with_gradients(chained, x))


@pytest.mark.parametrize("name", ["plain", "loop"])
def test_its_graphs_hold_no_tensors(name: str) -> None:
    """Those of steps that nothing reads, either."""

    def without_data() -> int:
        gc.collect()
        return sum(isinstance(each, FakeTensor) for each in gc.get_objects())

    before, region = without_data(), remat(ALL[name])
    region(seeded(2, 3).requires_grad_())

    assert without_data() == before


def test_a_name_inside_warns() -> None:
    def yes(x: Tensor) -> Tensor:
        return checkpoint_name(x.sin(), "inner").cos()

    def fun(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, yes, torch.cos, (x,))

    x = seeded(2, 3).requires_grad_()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        remat(fun)(x)

    texts = [str(each.message) for each in found if each.category is RematWarning]
    assert [text for text in texts if "the name 'inner' at test_operators" in text]
    assert_bitwise(with_gradients(remat(fun), x), with_gradients(fun, x))


@pytest.mark.parametrize("rng", ["keys", "preserve"])
def test_a_draw_inside_is_refused(rng: Any) -> None:
    def drop(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x)

    with pytest.raises(
        ImplicitRandomnessError, match=r"dropout at .*functions\.py:\d+"
    ):
        remat(lambda x: torch.cond(x.sum() > 0, drop, torch.cos, (x,)), rng=rng)(
            seeded(3).requires_grad_()
        )


def test_a_draw_by_a_key_inside_is_drawn_again() -> None:
    key = random.key(3)

    def fun(x: Tensor) -> Tensor:
        return torch.cond(
            x.sum() > 0, lambda x: random.dropout(key, x.sin(), 0.5), torch.cos, (x,)
        )

    def branch(x: Tensor) -> Tensor:
        return random.dropout(key, x.sin(), 0.5)

    x = seeded(2, 3).abs()
    assert_bitwise(with_gradients(remat(fun), x), with_gradients(branch, x))


def returned(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x, lambda x: x.cos(), (x,))


def written(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = torch.cond(x.sum() > 0, lambda x: x.add_(1) * 2, torch.cos, (x * 1,))
    return x * y


REFUSED: dict[str, tuple[Function, str]] = {
    "returns an operand": (returned, "asks for a clone"),
    "writes to an operand": (written, "writes to what it is given"),
    "carries a number": (counted, "not a tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_the_line(name: str) -> None:
    fun, why = REFUSED[name]

    with pytest.raises(TraceError, match=rf"functions\.py:\d+: .*{why}.*rerun"):
        remat(fun)(seeded(2, 3).requires_grad_())
    for other in CONDITIONS.values():
        assert other(seeded(2, 3)).shape == (2, 3)


def test_a_function_that_catches_the_refusal_is_refused() -> None:
    """On numbers it would have gone the other way."""

    def fun(x: Tensor) -> Tensor:
        try:
            return counted(x)
        except (NotImplementedError, TraceError):
            return x * 2

    with pytest.raises(TraceError, match="carries a number"):
        remat(fun)(seeded(3).requires_grad_())


def scanned_alone(x: Tensor) -> Tensor:
    return scan(lambda c, row: (c + row, (c * row).clone()), x[0] * 1, x)[1]


def loop_alone(x: Tensor) -> Tensor:
    return while_loop(lambda y: y.abs().sum() < 99, lambda y: (2 * y,), (x,))[0]


@pytest.mark.parametrize("fun", [CONDITIONS["plain"], scanned_alone, loop_alone])
def test_a_function_that_runs_again_may_take_functions(fun: Function) -> None:
    x = seeded(2, 3)

    found = with_gradients(remat(fun, engine="rerun"), x)
    assert_bitwise(found, with_gradients(fun, x))


def test_torch_compile_sees_a_region_with_one() -> None:
    fun, x = CONDITIONS["captured"], seeded(2, 3)
    compiled = torch.compile(remat(fun), backend="aot_eager", fullgraph=True)
    assert_close(with_gradients(compiled, x), with_gradients(fun, x))


def test_torch_compile_is_told_of_the_backward_of_a_loop() -> None:
    compiled = torch.compile(remat(loop), backend="aot_eager")

    with pytest.raises(
        BackendCompilerFailed, match="Its backward cannot be in a graph"
    ):
        compiled(seeded(2, 3))
    with torch.no_grad():
        assert_close(compiled(seeded(2, 3)), loop(seeded(2, 3)))
