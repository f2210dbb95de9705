"""Law 10, inert without grad.

"Under `no_grad` or `inference_mode`, or when nothing needs a reverse gradient (pure
forward mode included), `fun` runs as it is."
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from remat import TraceError, policies, remat, scan
from tests.support import assert_bitwise, assert_close, seeded

# torch.func.jvp itself calls torch.jit.script, and linearize leaves a dangling node.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    # Tests count runs by an iterator.
    pytest.mark.filterwarnings(r"ignore:.*\(count\) is read:remat.RematWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr:UserWarning"),
]


class Watched:
    """A function that counts, by an iterator, how often Python runs it."""

    def __init__(self, **options: Any) -> None:
        self._runs = itertools.count()

        def fun(x: Tensor) -> Tensor:
            next(self._runs)
            return torch.sin(torch.sin(x))

        self.fun = fun
        self.region = remat(fun, **options)

    def new_runs(self) -> int:
        """The runs since the last look."""
        count = next(self._runs)
        self._runs = itertools.count()
        return count


def quiet(x: Tensor) -> Tensor:
    """No derivative is wanted of a tensor that requires none."""
    return x


def frozen_linear() -> Callable[[Any], Tensor]:
    model = nn.Linear(3, 3, dtype=torch.float64).requires_grad_(False)
    return lambda region: region(model(seeded(2, 3)))


def in_no_grad(region: Any) -> Tensor:
    with torch.no_grad():
        return region(seeded(3).requires_grad_())


def in_inference_mode(region: Any) -> Tensor:
    with torch.inference_mode():
        return region(seeded(3))


def in_dual_level(region: Any) -> Any:
    with forward_ad.dual_level():
        return tuple(
            forward_ad.unpack_dual(
                region(forward_ad.make_dual(seeded(3), torch.ones(3).double()))
            )
        )


def in_jvp(region: Any) -> Any:
    return torch.func.jvp(region, (seeded(3),), (torch.ones(3).double(),))


def in_linearize(region: Any) -> Any:
    output, tangent = torch.func.linearize(region, seeded(3))
    return output, tangent(torch.ones(3).double())


INERT: dict[str, Callable[[Any], Any]] = {
    "plain_tensor": lambda region: region(seeded(3)),
    "frozen_module": frozen_linear(),
    "no_grad": in_no_grad,
    "inference_mode": in_inference_mode,
    "vmap": lambda region: torch.func.vmap(region)(seeded(2, 3)),
    "jvp": in_jvp,
    "dual_level": in_dual_level,
    "jacfwd": lambda region: torch.func.jacfwd(region)(seeded(3)),
    "jacfwd_jacfwd": lambda region: torch.func.jacfwd(torch.func.jacfwd(region))(seeded(3)),
    "linearize": in_linearize,
    "detached": lambda region: region(seeded(3).requires_grad_().detach()),
    "integers": lambda region: region(torch.arange(3)),
}  # fmt: skip


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("call", INERT.values(), ids=INERT)
def test_fun_runs_as_it_is(call: Callable[[Any], Any], engine: str) -> None:
    """The numbers are plain's, and Python runs `fun` at each call, as often as plain."""
    watched = Watched(engine=engine)
    expected = call(watched.fun)
    plain_runs = watched.new_runs()

    for _ in range(2):
        assert_bitwise(call(watched.region), expected)
        assert watched.new_runs() == plain_runs


def test_nothing_is_traced() -> None:
    """Without a gradient no trace is made, and the cache stays empty."""
    watched = Watched()
    for call in INERT.values():
        call(watched.region)

    assert watched.region.cache_info().misses == 0


def test_identity_returns_the_very_argument() -> None:
    """`fun` itself runs, so the result of an identity is the argument."""
    x = seeded(3)

    assert remat(quiet)(x) is x


class Listed(Tensor):
    """A tensor with functions of its own."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def nested(x: Tensor) -> Tensor:
    """The rows as a nested tensor."""
    return torch.nested.nested_tensor([*x], layout=torch.jagged)


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make", [Tensor.to_sparse, nested, lambda x: x.as_subclass(Listed)]
)
def test_a_tensor_that_cannot_be_traced_is_taken_where_nothing_is_differentiated(
    make: Callable[[Tensor], Tensor],
) -> None:
    """With gradients on; and refused as soon as one is wanted, by whichever tensor."""
    region = remat(lambda x, w: (x * 2.0, w.sin()))
    x, w = make(seeded(2, 3)), seeded(3)

    found, _ = region(x, w)

    assert type(found) is type(x * 2.0)
    assert not found.requires_grad
    with pytest.raises(TraceError):
        region(x, w.clone().requires_grad_())
    with pytest.raises(TraceError):
        region(make(seeded(2, 3)).requires_grad_(), w)


@pytest.mark.contract
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_cannot_be_traced_runs_without_grad(mode: Any) -> None:
    """Branches on values, randomness and effects are nobody's business here."""
    log = []

    def fun(x: Tensor) -> Tensor:
        log.append(1)
        return F.dropout(x, 0.5) if x.sum() > 0 else x.sin()

    with mode():
        remat(fun, policy=policies.save_matmul_outputs)(seeded(3))

    assert log == [1]


def test_outputs_require_no_grad() -> None:
    """Under `no_grad` the outputs require none, as plain."""
    watched = Watched()
    x = seeded(3).requires_grad_()
    assert watched.region(x).requires_grad

    with torch.no_grad():
        assert not watched.region(x).requires_grad
    with torch.inference_mode():
        assert watched.region(x).is_inference()


def test_a_call_with_grad_between_is_a_region() -> None:
    """Inert calls before and after do not change what a call with grad does."""
    watched = Watched()

    def gradient(fun: Any) -> Tensor:
        x = seeded(3).requires_grad_()
        return torch.autograd.grad(fun(x).sum(), x)[0]

    watched.region.cache_clear()  # that of the code: others count by iterators of their own
    in_no_grad(watched.region)
    assert watched.new_runs() == 1
    assert_bitwise(gradient(watched.region), gradient(watched.fun))
    assert watched.region.cache_info().misses == 1
    watched.new_runs()  # those of the trace and of plain code
    in_no_grad(watched.region)
    assert watched.new_runs() == 1


def test_a_frozen_argument_with_a_trained_capture_is_a_region() -> None:
    """Only the captured weight needs a gradient, and it gets it."""
    weight = nn.Parameter(seeded(3))
    x = seeded(3, seed=1)

    def fun(x: Tensor) -> Tensor:
        return torch.sin(torch.sin(x * weight))

    found = torch.autograd.grad(remat(fun)(x).sum(), weight)
    assert_bitwise(found, torch.autograd.grad(fun(x).sum(), weight))


def test_no_grad_inside_a_transform() -> None:
    """`no_grad` around the region inside `torch.func.grad` cuts, as plain."""

    def loss(fun: Any) -> Any:
        def run(x: Tensor) -> Tensor:
            with torch.no_grad():
                y = fun(x)
            return (x * y).sum()

        return run

    x = seeded(3)
    watched = Watched()
    found = torch.func.grad(loss(watched.region))(x)
    assert_close(found, torch.func.grad(loss(watched.fun))(x))


def test_forward_over_reverse_is_a_region() -> None:
    """Where a reverse gradient is wanted under a jvp, the numbers are right too."""
    watched = Watched()
    x, t = seeded(3), seeded(3, seed=1)

    def second(fun: Any) -> Any:
        gradient = torch.func.grad(lambda x: fun(x).sum())
        return torch.func.jvp(gradient, (x,), (t,))

    assert_close(second(watched.region), second(watched.fun))


def swept(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A scan of two steps."""
    return lambda x: scan(lambda carry, _: (f(carry), None), x, length=2)[0]


#: Reverse mode inside of inference mode, which it switches off for its own level.
REVERSE: dict[str, Callable[[Any], Callable[[Tensor], Any]]] = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](x)[0],
    "vmap_grad": lambda f: torch.func.vmap(torch.func.grad(f)),
    "grad_grad": lambda f: torch.func.grad(
        lambda x: torch.func.grad(lambda x: f(x).sum())(x).sum()
    ),
    "jvp_grad": lambda f: (
        lambda x: torch.func.jvp(torch.func.grad(lambda x: f(x).sum()), (x,), (x,))
    ),
    "hessian": lambda f: torch.func.hessian(lambda x: f(x).sum()),
    "scan": lambda f: torch.func.grad(lambda x: swept(f)(x).sum()),
}


@pytest.mark.contract
@pytest.mark.parametrize("transform", REVERSE.values(), ids=REVERSE)
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_a_transform_inside_of_inference_mode_is_as_outside(
    engine: str, transform: Callable[[Any], Callable[[Tensor], Any]]
) -> None:
    """And what it has traced serves where the mode is off."""
    watched = Watched(engine=engine)
    watched.region.cache_clear()
    x = seeded(3)
    expected = transform(watched.fun)(x)

    with torch.inference_mode():
        assert_close(transform(watched.region)(x), expected)
    assert_close(transform(watched.region)(x), expected)


@pytest.mark.contract
@pytest.mark.parametrize(
    "name", ["grad", "vmap_grad", "grad_grad", "jvp_grad", "hessian", "scan"]
)
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_a_transform_takes_what_was_made_in_inference_mode(
    engine: str, name: str
) -> None:
    """Of which torch itself records nothing, unless a transform wraps it."""
    watched = Watched(engine=engine)
    expected = REVERSE[name](watched.fun)(seeded(3))

    with torch.inference_mode():
        x = seeded(3)
        assert x.is_inference()
        assert_close(REVERSE[name](watched.region)(x), expected)
