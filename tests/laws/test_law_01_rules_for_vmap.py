"""Law 1. Same numbers: under `vmap`, an `autograd.Function` with a rule of its own keeps it.

"Sums with contributions from outside the call, and every other transform, agree to
rounding (`torch.testing.assert_close` defaults; suites run in float64)."
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, hessian, jacrev, jvp, vjp, vmap
from torch.nn import functional as F

from remat import checkpoint_name, policies, remat
from tests.support import assert_close, seeded

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")

calls = []


@torch.library.custom_op("remat_tests::counted_sine", mutates_args=())
def kernel(x: Tensor) -> Tensor:
    calls.append(x.shape)
    return x.sin()


@kernel.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Sine(torch.autograd.Function):
    """A sine by a kernel for batches, and what no loop gives: the sine of the batch's sum."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return kernel(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return Slope.apply(grad_outputs[0], *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        return Slope.apply(grad_inputs[0], *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        x = args[0].movedim(in_dims[0], 0)
        return Sine.apply(x) - x.sum(0, keepdim=True).sin(), 0


class Slope(torch.autograd.Function):
    """The derivative of `Sine`, which is tripled where it is mapped."""

    @staticmethod
    def forward(given: Tensor, x: Tensor) -> Tensor:
        return given * x.cos()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        given, x = ctx.saved_tensors
        return grad_outputs[0] * x.cos(), -grad_outputs[0] * given * x.sin()

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        given, x = ctx.saved_tensors
        return grad_inputs[0] * x.cos() - grad_inputs[1] * given * x.sin()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        given, x = (
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(args, in_dims, strict=True)
        )
        return Slope.apply(given, x) * 3, 0


def block(x: Tensor) -> Tensor:
    return checkpoint_name(Sine.apply(x * 2), "sine").exp() * x


def around(x: Tensor) -> Tensor:
    return remat(block, policy=policies.everything_saveable)(x.cos()) + x


def dropping(x: Tensor) -> Tensor:
    return F.dropout(Sine.apply(F.dropout(x * 2)).exp()) * x


def summed(fun: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: fun(x).sum()


TRANSFORMS: dict[str, Callable[[Any], Callable[[Tensor], Any]]] = {
    "vmap": vmap,
    "grad(vmap)": lambda f: grad(lambda x: vmap(f)(x).sum()),
    "vmap(grad)": lambda f: vmap(grad_and_value(summed(f))),
    "vmap(vjp)": lambda f: vmap(lambda x: vjp(f, x)[1](x)),
    "vmap(vmap(grad))": lambda f: lambda x: vmap(vmap(grad(summed(f))))(x[:, None]),
    "jacrev": lambda f: lambda x: jacrev(f)(x[0]),
    "vmap(jacrev)": lambda f: vmap(jacrev(f)),
    "vmap(jvp)": lambda f: vmap(lambda x: jvp(f, (x,), (x,))),
    "vmap(jvp(grad))": lambda f: vmap(lambda x: jvp(grad(summed(f)), (x,), (x,))),
    "vmap(hessian)": lambda f: vmap(hessian(summed(f))),
    "vmap(grad(grad))": lambda f: vmap(grad(summed(grad(summed(f))))),
    "grad(vmap(grad))": lambda f: grad(lambda x: vmap(grad(summed(f)))(x).sum()),
    "backward(vmap(grad))": lambda f: (
        lambda x: torch.autograd.grad(
            vmap(grad(summed(f)))(x.requires_grad_()).sum(), x
        )
    ),
}
OPTIONS = {
    "nothing": {},
    "everything": {"policy": policies.everything_saveable},
    "rerun": {"engine": "rerun"},
    "auto": {"engine": "auto"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_rule_that_is_no_loop(
    transform: Callable[[Any], Callable[[Tensor], Any]], options: dict[str, Any]
) -> None:
    """Forward, backward and tangents are mapped by the user's rules, at each call."""
    plain, mapped = transform(block), transform(remat(block, **options))

    for seed in range(2):
        assert_close(mapped(seeded(4, 3, seed=seed)), plain(seeded(4, 3, seed=seed)))


@pytest.mark.parametrize("name", ["vmap(grad)", "vmap(grad(grad))", "vmap(hessian)"])
def test_a_rule_in_a_region_inside_another_one(name: str) -> None:
    """The region around is mapped by it, too."""
    policy = policies.save_only_these_names("sine")
    found = TRANSFORMS[name](remat(around, policy=policy))

    assert_close(found(seeded(4, 3)), TRANSFORMS[name](around)(seeded(4, 3)))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_a_rule_between_draws(randomness: str) -> None:
    """The recomputation draws again what plain torch has drawn once."""

    def drawn(fun: Any) -> Any:
        torch.manual_seed(5)
        of = grad_and_value(summed(fun))
        return vmap(of, randomness=randomness)(seeded(4, 3)), torch.rand(1)

    region = remat(dropping, rng="preserve", policy=policies.everything_saveable)

    assert_close(drawn(region), drawn(dropping))


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("vmap(grad)", {}, 2),
        ("vmap(grad)", {"policy": policies.everything_saveable}, 2),
        ("vmap(vjp)", {}, 2),
        ("vmap(hessian)", {}, 2),
        ("grad(vmap)", {"policy": policies.everything_saveable}, 1),
        ("jacrev", {}, 2),
    ],
)
def test_a_kernel_runs_for_the_batch(
    name: str, options: dict[str, Any], count: int
) -> None:
    """Once in the forward and once where it runs again, not once for each example."""
    found = TRANSFORMS[name](remat(block, **options))
    found(seeded(16, 3))
    calls.clear()

    found(seeded(16, 3))

    assert len(calls) == count
