"""Randomness that `rng="preserve"` keeps.

"`rng="preserve"`: allowed; recomputation draws
the same numbers and generators end where they would have ended without remat. None:
"keys" for functions, "preserve" where `fun` is an nn.Module or its method."
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import RematError, TraceError, checkpoint_name, policies, remat
from remat._generators import device_states
from remat._graph.meta import TensorMeta
from remat._rerun.state import RunState
from remat._torch import fakes
from remat._tracing.trace import Request, trace
from tests.support import (
    FakeDevice,
    assert_bitwise,
    assert_close,
    count_operators,
    default_generator,
    seeded,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore::remat.RematWarning"),
]
names = policies.save_only_these_names


def drop(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def at_start(x: Tensor) -> Tensor:
    return torch.sin(torch.sin(drop(x)))


def in_the_middle(x: Tensor) -> Tensor:
    return torch.sin(drop(torch.sin(x)) * 2)


def at_end(x: Tensor) -> Tensor:
    return drop(torch.sin(torch.sin(x)))


def three_draws(x: Tensor) -> Tensor:
    """Each draw differs; the first two have names."""
    h = checkpoint_name(drop(torch.sin(x)), "first")
    h = checkpoint_name(drop(torch.sin(h)), "second")
    return drop(torch.sin(h))


def dead_draw(x: Tensor) -> Tensor:
    """The first draw is needed by no gradient: its recomputation is left out."""
    y = drop(torch.sin(x)).detach() + 1
    return torch.sin(drop(torch.sin(x))) + y


def unused_draw(x: Tensor) -> Tensor:
    """The first draw is needed by nothing at all, and yet moves the generator."""
    torch.rand(7)
    return torch.sin(drop(torch.sin(x)))


def noise(x: Tensor) -> Tensor:
    """Other operators that draw, in place and not."""
    h = torch.sin(x + torch.randn_like(x)) * torch.rand(3, dtype=x.dtype)
    h = torch.sin(h * torch.empty_like(x).normal_()) * torch.bernoulli(
        torch.full_like(x, 0.5)
    )
    return torch.sin(h * torch.randint(1, 5, (3,)))[torch.randperm(2)]


def leaky(x: Tensor) -> Tensor:
    return F.rrelu(torch.sin(x), 0.1, 0.3, training=True).sin()


def attention(x: Tensor) -> Tensor:
    q = torch.sin(x)[None]
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).sin()[0]


inner = remat(in_the_middle, rng="preserve")


def nested(x: Tensor) -> Tensor:
    """Draws of its own around an inner region's."""
    return drop(torch.sin(inner(drop(x))))


FUNS = [
    at_start,
    in_the_middle,
    at_end,
    three_draws,
    dead_draw,
    unused_draw,
    noise,
    leaky,
    attention,
    nested,
]
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "first": {"policy": names("first")},
    "second": {"policy": names("second")},
    "everything": {"policy": policies.everything_saveable},
    "rerun": {"engine": "rerun"},
}


def plain_of(fun: Any) -> Any:
    """The function without any region, also inside."""
    if fun is not nested:
        return fun
    return lambda x: drop(torch.sin(in_the_middle(drop(x))))


def trained(fun: Any) -> list[Tensor]:
    """Two calls from one seed, then their backwards: values, gradients, generator."""
    torch.manual_seed(7)
    x = seeded(2, 3).requires_grad_()
    one, two = fun(x), fun(x)
    torch.rand(5)
    found = [one.detach(), two.detach(), torch.get_rng_state()]
    for y in (one, two):
        found += torch.autograd.grad(y, x, torch.cos(y.detach()), retain_graph=True)
        found += torch.autograd.grad(y.sum(), x)
    return [*found, torch.get_rng_state(), torch.rand(2)]


@pytest.mark.contract
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("fun", FUNS)
def test_the_same_numbers_are_drawn(fun: Any, options: dict[str, Any]) -> None:
    """Values, gradients and the generator's state are bitwise plain's, twice over."""
    region = remat(fun, rng="preserve", **options)
    expected = trained(plain_of(fun))

    assert_bitwise(trained(region), expected)
    assert_bitwise(trained(region), expected)


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("fun", [in_the_middle, three_draws, nested])
def test_under_func_grad(fun: Any, engine: Any) -> None:
    """The mask of the gradient is the mask of the value, and the generator moves once."""

    def value_and_gradient(fun: Any) -> Any:
        torch.manual_seed(3)
        loss = torch.func.grad_and_value(lambda x: fun(x).sum())(seeded(2, 3))
        return loss, torch.get_rng_state()

    region = remat(fun, rng="preserve", engine=engine)
    found, expected = value_and_gradient(region), value_and_gradient(plain_of(fun))
    assert_close(found, expected)


@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_under_vmap(randomness: Any, engine: Any) -> None:
    """vmap(grad): the masks of values and gradients agree, and are alike or not."""
    region = remat(drop, rng="preserve", engine=engine)
    x = seeded(1, 64).expand(4, 64)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        y, pull, *_ = torch.func.vjp(region, x)
        return y, pull(torch.ones_like(y))[0]

    y, gradient = torch.func.vmap(run, randomness=randomness)(x)

    assert_close(gradient * x, y)
    assert (y == 0).any()
    assert (gradient == gradient[0]).all() == (randomness == "same")


def test_vmap_without_randomness_raises_as_plain_does() -> None:
    """`randomness="error"` is the default of vmap, and holds inside a region."""
    region = remat(drop, rng="preserve")

    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(torch.func.grad(lambda x: region(x).sum()))(seeded(2, 3))


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_second_derivatives_use_the_same_mask(engine: Any) -> None:
    """For y = (m x)^3 the second derivative is 6 m^2 y^(1/3)... read off the value."""
    region = remat(lambda x: drop(x) ** 3, rng="preserve", engine=engine)
    x = seeded(64).abs().requires_grad_()
    y = region(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)

    assert_close(first * x, 3 * y)
    assert_close(second * x * x, 6 * y)


def test_hessian_vector_products_use_the_same_mask() -> None:
    """Forward over reverse: f = (m x)^3 gives 6 m^3 x t, as 2 g t / x says."""
    region = remat(lambda x: drop(x) ** 3, rng="preserve")
    x = seeded(64).abs()
    gradient = torch.func.grad(lambda x: region(x).sum())
    g, product, *_ = torch.func.jvp(gradient, (x,), (torch.ones_like(x),))

    assert_close(product * x, 2 * g)


class Net(nn.Module):
    """A module with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.dropout(torch.sin(x)))

    method = remat(forward)

    @remat(policy=policies.everything_saveable)
    def factory(self, x: Tensor) -> Tensor:
        return self.forward(x)


@pytest.mark.contract
@pytest.mark.parametrize("way", ["module", "bound", "decorated", "factory"])
def test_modules_preserve_by_default(way: str) -> None:
    """An nn.Module, its bound method and its decorated method may draw."""
    net = Net()
    regions = {
        "module": lambda: remat(net),
        "bound": lambda: remat(net.forward),
        "decorated": lambda: net.method,
        "factory": lambda: net.factory,
    }

    assert_bitwise(trained(regions[way]()), trained(net))


def test_an_explicit_generator_is_preserved_or_refused() -> None:
    """Never another mask: a generator of the user's is right, or an error."""

    def run(wrap: Any) -> list[Tensor]:
        generator = torch.Generator().manual_seed(5)

        def fun(x: Tensor) -> Tensor:
            return torch.sin(x * torch.rand(3, generator=generator).double())

        x = seeded(2, 3).requires_grad_()
        (gradient,) = torch.autograd.grad(wrap(fun)(x).sum(), x)
        return [gradient, generator.get_state()]

    try:
        found = run(lambda fun: remat(fun, rng="preserve"))
    except RematError:
        return
    assert_bitwise(found, run(lambda fun: fun))


@pytest.mark.parametrize("give", ["own", "default"])
def test_an_explicit_generator_runs_again(give: str) -> None:
    """`engine="rerun"` notes it where it is first handed over, the default one is known."""

    def run(wrap: Any) -> list[Tensor]:
        torch.manual_seed(3)
        own = torch.Generator(torch.get_default_device()).manual_seed(5)
        generator = own if give == "own" else default_generator()

        def fun(x: Tensor) -> Tensor:
            x = torch.sin(drop(x) * torch.rand(3, generator=generator).double())
            return torch.sin(x * torch.empty(3).normal_(generator=generator).double())

        x = seeded(2, 3).requires_grad_()
        one, two = wrap(fun)(x), wrap(fun)(x)
        states = [own.get_state(), torch.get_rng_state()]
        gradients = [*torch.autograd.grad(two.sum(), x)]
        gradients += torch.autograd.grad(one.sum(), x)
        return [*states, *gradients, own.get_state(), torch.get_rng_state()]

    found = run(lambda fun: remat(fun, rng="preserve", engine="rerun"))

    assert_bitwise(found, run(lambda fun: fun))


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_exception_half_way(place: str, engine: Any) -> None:
    """Between two draws: the generator is where plain code would have left it."""
    raises = False

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if raises and place == "forward":
                raise ZeroDivisionError
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            if raises:
                raise ZeroDivisionError
            return gradients[0]

    def fun(x: Tensor) -> Tensor:
        return drop(torch.sin(Failing.apply(drop(torch.sin(x)))))

    def run(fun: Any) -> Tensor:
        torch.manual_seed(7)
        with pytest.raises(ZeroDivisionError):
            fun(seeded(4, 4).requires_grad_()).sum().backward()
        return torch.get_rng_state()

    raises = True
    found = run(remat(fun, rng="preserve", engine=engine))

    # A trace runs both halves at once, on tensors without data, before it draws.
    seeds = torch.Generator().manual_seed(7).get_state()
    assert_bitwise(found, seeds if engine == "trace" else run(fun))


@pytest.mark.contract
def test_a_draw_that_raises_in_a_program() -> None:
    """The backward of a program puts the generator back also where a redraw raises."""
    region = remat(lambda x, p: torch.sin(x * torch.bernoulli(p)), rng="preserve")
    x, p = seeded(4).requires_grad_(), torch.full((4,), 0.5).double()
    y = region(x, p)
    p.data.fill_(2.0)
    before = torch.get_rng_state()

    with pytest.raises(RuntimeError, match="p_in >= 0"):
        y.sum().backward()

    assert_bitwise(torch.get_rng_state(), before)


def test_states_of_a_device_are_recorded_and_put_back(fake_device: FakeDevice) -> None:
    """The way of an accelerator's generator, which is the CPU's but for two functions."""
    device = torch.device("cuda", 0)
    before = device_states.record(device)

    ended = torch.full((16,), 3, dtype=torch.uint8)
    fake_device.states[0] = ended.clone()
    found = device_states.swap(before, device)

    assert_bitwise(found, ended)
    assert_bitwise(fake_device.states[0], before)


def test_a_trace_on_a_device_records_its_generator(fake_device: FakeDevice) -> None:
    """Each draw on a device is preceded by a state of that device's, of 16 bytes."""

    def fun(operands: Any) -> list[Tensor]:
        (x,) = operands
        return [drop(torch.sin(drop(torch.sin(x))))]

    meta = TensorMeta((4,), (1,), torch.float32, torch.device("cuda", 0))
    joint = trace(Request(fun, (meta,), gradients=False)).joints[0]

    states = [joint.graph.values[ref.index] for ref in joint.states]
    assert [state.args for state in states] == [(torch.device("cuda", 0),)] * 2
    assert [str(state.meta) for state in states] == ["uint8[16]"] * 2
    assert [value.op for value in joint.graph.values].count(device_states.STATE) == 2


def test_a_rerun_puts_a_devices_generator_back(fake_device: FakeDevice) -> None:
    """Also of a device that only an operand shows; and where the run raises."""
    with fakes.fake_mode(torch.device("cuda", 0)):
        operand = torch.empty(3, device=torch.device("cuda", 0))
    state = RunState([], [operand])
    starts: list[int] = []

    def draw() -> None:
        starts.append(int(fake_device.states[0][0]))
        fake_device.states[0] += 1

    def draw_and_fail() -> None:
        draw()
        raise ZeroDivisionError

    with state.around():
        draw()
    draw()
    with pytest.raises(ZeroDivisionError), state.around():
        draw_and_fail()

    assert starts == [0, 1, 0]
    assert int(fake_device.states[0][0]) == 2


@pytest.mark.contract
def test_a_redraw_under_a_vmap_that_forbids_draws() -> None:
    """jacrev maps a backward without randomness: a draw that runs again there is no draw."""

    def fun(x: torch.Tensor) -> torch.Tensor:
        return (x * torch.rand(x.shape, dtype=x.dtype)).sin()

    x = torch.arange(3.0, dtype=torch.float64)

    def moved(f):
        torch.manual_seed(0)
        return torch.func.jvp(torch.func.jacrev(f), (x,), (x.cos(),))

    found, expected = moved(remat(fun, rng="preserve")), moved(fun)

    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def _repeated(fun: Any, randomness: Any) -> Any:
    """One draw, then backwards that are mapped: of it alone, and of a gradient by it."""
    x, rows = seeded(4), torch.eye(4, dtype=torch.float64)

    def pulled(x: Tensor) -> Tensor:
        pull = torch.func.vjp(fun, x)[1]
        return torch.func.vmap(lambda row: pull(row)[0], randomness=randomness)(rows)

    again = torch.func.grad(lambda x: pulled(x).sin().sum())(x)
    inside = torch.func.vmap(pulled, randomness="different")(seeded(3, 4))
    return pulled(x), again, inside, torch.func.jacrev(torch.func.jacrev(fun))(x)


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_a_vmap_after_the_draw_repeats_it(randomness: str, engine: Any) -> None:
    """Its randomness is for what is drawn in it, and a recomputation draws nothing new."""

    def fun(x: Tensor) -> Tensor:
        return drop(x.sin() * x.sum())

    found, expected = (
        (torch.manual_seed(0), _repeated(each, randomness))[1]
        for each in (remat(fun, rng="preserve", engine=engine), fun)
    )

    assert_close(found, expected)


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_a_map_of_cotangents_draws_by_the_kernel_of_the_forward(
    randomness: str, engine: Any
) -> None:
    """Dropout is one on accelerators. vmap's rule for it calls others, which draw other numbers."""

    def fun(x: Tensor) -> Tensor:
        return torch.native_dropout(x.sin() * x.sum(), 0.5, True)[0]

    region = remat(fun, rng="preserve", engine=engine)

    seen = count_operators(_repeated, region, randomness)

    assert seen["aten.native_dropout"] > 4
    assert not seen["aten.bernoulli_"]


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("fun", [in_the_middle, torch.sin], ids=["draws", "does not"])
@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_what_no_example_has_for_itself(randomness: Any, fun: Any, engine: Any) -> None:
    """Draws for each example differ also where the region is given nothing that is mapped."""
    weights, draws = seeded(3, seed=1), fun is in_the_middle

    def gradient(fun: Any) -> Tensor:
        torch.manual_seed(0)
        x = seeded(8).requires_grad_()

        def scaled(weight: Tensor) -> Tensor:
            y = fun(x)
            # What depends on no draw is the same for each, and tells its value.
            return y * weight if draws or y.sum() > -99 else y

        mapped = torch.func.vmap(scaled, randomness=randomness)(weights)
        return torch.autograd.grad(mapped.sin().sum(), x)[0]

    region = remat(fun, rng="preserve", engine=engine)
    if randomness == "error" and draws:
        with pytest.raises(RuntimeError, match="randomness error mode"):
            gradient(region)
    else:
        assert_close(gradient(region), gradient(fun))


def _pulled(fun: Any, x: Tensor, cotangent: Tensor) -> Tensor:
    return torch.func.vjp(fun, x)[1](cotangent)[0]


def _gradient(fun: Any, x: Tensor, cotangent: Tensor) -> Tensor:
    return torch.func.grad(lambda x: fun(x) @ cotangent)(x)


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("differentiated", [_pulled, _gradient])
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_gradients_of_what_no_example_has_for_itself(
    randomness: str, differentiated: Any, engine: Any
) -> None:
    """The masks are each example's own in the backward too, also in a second call."""
    given, weights = (seeded(4), seeded(4, seed=1)), seeded(3, seed=2)

    def gradients(fun: Any) -> Tensor:
        torch.manual_seed(0)
        return torch.func.vmap(
            lambda weight: differentiated(fun, *given) * weight, randomness=randomness
        )(weights)

    region = remat(in_the_middle, rng="preserve", engine=engine)

    for _ in range(2):
        assert_close(gradients(region), gradients(in_the_middle))


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("inner", ["same", "different"])
@pytest.mark.parametrize("outer", ["same", "different"])
def test_a_map_of_a_map(outer: str, inner: str, engine: Any) -> None:
    """Each says of its own examples whether they share a draw."""

    def gradient(fun: Any) -> Tensor:
        over = torch.func.vmap(torch.func.vmap(fun, randomness=inner), randomness=outer)
        torch.manual_seed(0)
        return torch.func.grad(lambda x: over(x).sin().sum())(seeded(2, 3, 4))

    region = remat(in_the_middle, rng="preserve", engine=engine)

    assert_close(gradient(region), gradient(in_the_middle))


def shuffled(x: Tensor) -> Tensor:
    return (torch.randperm(4) * x.sin()).sum()


@torch.library.custom_op(
    "tests_random::noise",
    mutates_args=(),
    tags=(torch.Tag.nondeterministic_seeded,),
)
def noise_of(x: Tensor) -> Tensor:
    """vmap has no rule for it."""
    return torch.rand_like(x)


@noise_of.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def noisy(x: Tensor) -> Tensor:
    return (torch.ops.tests_random.noise(x.detach()) * x.sin()).sum()


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("fun", "name"), [(shuffled, "randperm"), (noisy, "noise")])
def test_an_operator_for_each_example_is_refused(fun: Any, name: str) -> None:
    """vmap makes it several draws, of which one state repeats the first."""
    gradients: Any = torch.func.vmap(
        torch.func.grad(remat(fun, rng="preserve")), randomness="different"
    )

    with pytest.raises(
        TraceError, match=rf"{name}.* at .*by an operator for each example.*argsort"
    ):
        gradients(seeded(3, 4))


@pytest.mark.contract
@pytest.mark.parametrize("calls", [1, 2])
def test_a_derivative_that_a_trace_refuses_runs_again(calls: int) -> None:
    """Also that of a later call, whose trace is known and which is alike."""
    x, region = seeded(4), remat(shuffled, rng="preserve", engine="auto")

    def gradients(fun: Any) -> Tensor:
        torch.manual_seed(0)
        return torch.func.vmap(
            lambda weight: torch.func.grad(fun)(x) * weight, randomness="different"
        )(seeded(3, seed=1))

    for _ in range(calls):
        torch.func.grad(region)(x)

    assert_bitwise(gradients(region), gradients(shuffled))
    assert_bitwise(gradients(region), gradients(shuffled))
