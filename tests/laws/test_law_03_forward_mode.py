"""Law 3 under forward mode: a region's values and their tangents are one program.

A Hessian-vector product, forward mode over reverse mode, computes with plain PyTorch each
value once and its tangent once. With a region it computes again, in the backward, what the
policy does not permit to keep: it is asked about the tangents as about the values. Nothing is
computed more than that, and what torch multiplies by zeros is not computed at all.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from remat import chain, policies, remat, scan, schedules, storage
from tests.support import assert_bitwise, count_operators, in_turn, seeded, swept

# Forward mode itself compiles decompositions with torch.jit.script.
pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]

NUM_BLOCKS = 2
W, X = seeded(3, 5), seeded(4, 3, seed=1)
V = W.cos()

Unit = Callable[[Tensor, Tensor], Tensor]


def block(w: Tensor, x: Tensor) -> Tensor:
    """Two products; the backward needs the first again, and what is made of it."""
    return torch.tanh(x @ w).sin() @ w.t()


REGIONS: dict[str, Unit] = {
    "nothing": remat(block),
    "matmuls": remat(block, policy=policies.save_matmul_outputs),
    "everything": remat(block, policy=policies.everything_saveable),
}


def stacked(unit: Unit) -> Callable[[Tensor], Tensor]:
    """The blocks on top of each other, as a function of the weights."""

    def run(w: Tensor) -> Tensor:
        x = X
        for _ in range(NUM_BLOCKS):
            x = unit(w, x)
        return x

    return run


def loss(unit: Unit) -> Callable[[Tensor], Tensor]:
    """A number with a second derivative."""
    return lambda w: stacked(unit)(w).square().sum()


def leaf_pushed(unit: Unit) -> Tensor | None:
    """Plain autograd over forward mode."""
    leaf = W.clone().requires_grad_()
    jvp(loss(unit), (leaf,), (V,))[1].backward()
    return leaf.grad


def over_vectors(unit: Unit) -> Any:
    """Hessian-vector products for several vectors at once."""
    return vmap(lambda v: jvp(grad(loss(unit)), (W,), (v,)))(torch.stack([V, W]))


TRANSFORMS: dict[str, Callable[[Unit], Any]] = {
    "jvp": lambda f: jvp(stacked(f), (W,), (V,)),
    "jvp(grad)": lambda f: jvp(grad(loss(f)), (W,), (V,)),
    "jvp of a pullback": lambda f: jvp(vjp(stacked(f), W)[1], (X,), (X.cos(),)),
    "grad(jvp)": lambda f: grad(lambda w: jvp(loss(f), (w,), (V,))[1])(W),
    "grad(values and jvp)": lambda f: grad(
        lambda w: torch.stack(jvp(loss(f), (w,), (V,))).sum()
    )(W),
    "backward(jvp)": leaf_pushed,
    "vmap(jvp(grad))": over_vectors,
    "jacfwd(grad)": lambda f: jacfwd(grad(loss(f)))(W),
    "hessian": lambda f: hessian(loss(f))(W),
    "jvp(jvp(grad))": lambda f: jvp(
        lambda w: jvp(grad(loss(f)), (w,), (V,))[1], (W,), (W.sin(),)
    ),
    "grad(jvp(jvp))": lambda f: grad(
        lambda w: jvp(lambda w: jvp(loss(f), (w,), (V,))[1], (w,), (W.sin(),))[1]
    )(W),
}

#: Products that are computed once more where nothing is kept. The first product of a block has
#: one value, and a tangent by its weights; in the second block, one by its input too, which has
#: none in the first: 2 and 3. Forward mode twice has 3 and 8 of them: in the second block a
#: value, four tangents, three tangents of these. A pullback pushes no tangents of values: 1 and 1.
AGAIN = {
    "jvp": 0,
    "jvp(grad)": 5,
    "jvp of a pullback": 2,
    "grad(jvp)": 5,
    "grad(values and jvp)": 5,
    "backward(jvp)": 5,
    "vmap(jvp(grad))": 5,
    "jacfwd(grad)": 5,
    "grad(jvp(jvp))": 11,
}
#: Products of plain torch, one of whose factors is a tangent that is not there: in the first
#: block that of its input, in a pullback those of all values. Torch multiplies by zeros in their
#: place; a region knows the product, whatever it keeps.
BY_ZEROS = {
    "jvp": 0,
    "jvp(grad)": 2,
    "jvp of a pullback": 7,
    "grad(jvp)": 2,
    "grad(values and jvp)": 2,
    "backward(jvp)": 2,
    "vmap(jvp(grad))": 2,
    "jacfwd(grad)": 2,
    "grad(jvp(jvp))": 13,
}


def counts(transform: str, unit: Unit) -> tuple[int, int]:
    """Matrix products and hyperbolic tangents of one run, once everything is traced."""
    run = TRANSFORMS[transform]
    run(unit)
    found = count_operators(run, unit)
    return found["aten.mm"] + found["aten.bmm"], found["aten.tanh"]


@pytest.mark.parametrize(
    ("transform", "kind"), in_turn(AGAIN, ["nothing", "matmuls", "everything"])
)
def test_what_is_not_kept_is_computed_once_more(transform: str, kind: str) -> None:
    """With its tangents, and nothing else is: those of tanh are made of its values."""
    plain_products, _ = counts(transform, block)

    products, tanhs = counts(transform, REGIONS[kind])

    again = kind != "everything" and transform != "jvp"
    expected = AGAIN[transform] if kind == "nothing" else 0
    assert products - plain_products == expected - BY_ZEROS[transform]
    assert tanhs == NUM_BLOCKS * (2 if again else 1)


@pytest.mark.parametrize("kind", ["matmuls", *swept(["nothing", "everything"])])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_numbers_are_plains(transform: str, kind: str) -> None:
    """To rounding, in float64."""
    run = TRANSFORMS[transform]

    torch.testing.assert_close(run(REGIONS[kind]), run(block))


@pytest.mark.parametrize("kind", REGIONS)
def test_against_differences(kind: str) -> None:
    """A Hessian-vector product is what the gradient does along the vector."""
    step, gradient = 1e-5, grad(loss(REGIONS[kind]))

    found = jvp(gradient, (W,), (V,))[1]

    difference = gradient(W + step * V) - gradient(W - step * V)
    torch.testing.assert_close(found, difference / (2 * step), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", REGIONS)
def test_gradients_beside_tangents_keep_their_bits(kind: str) -> None:
    """The program of the values is merged with another one, and not replaced."""
    gradient = grad(loss(REGIONS[kind]))

    assert_bitwise(jvp(gradient, (W,), (V,))[0], gradient(W))


def test_what_a_storage_rounds_is_not_taken_for_the_value() -> None:
    """Tangents are those of the function, as if nothing had been rounded."""
    policy = policies.save_matmul_outputs.stored(storage.Cast(torch.float32))
    region = remat(block, policy=policy)

    (own, _), (plain, _) = (counts("jvp(grad)", each) for each in (region, block))

    assert own - plain == AGAIN["jvp(grad)"] - BY_ZEROS["jvp(grad)"]
    torch.testing.assert_close(
        jvp(grad(loss(region)), (W,), (V,))[1],
        jvp(grad(loss(block)), (W,), (V,))[1],
        rtol=1e-5,
        atol=1e-5,
    )


def test_inner_regions_bound_the_peak_there_too() -> None:
    """Each inner recomputation stays where it is, for values and for tangents."""
    inner = remat(block)
    outer = remat(lambda w, x: inner(w, inner(w, x)))
    counted: dict[str, int] = {}
    for name, run in (
        ("gradient", lambda: grad(loss(outer))(W)),
        ("product", lambda: jvp(grad(loss(outer)), (W,), (V,))),
    ):
        run()
        counted[name] = count_operators(run)["aten.tanh"]

    assert counted["product"] == counted["gradient"]
    torch.testing.assert_close(
        jvp(grad(loss(outer)), (W,), (V,)),
        jvp(grad(loss(lambda w, x: block(w, block(w, x)))), (W,), (V,)),
    )


def test_a_mapped_program_inside_a_trace() -> None:
    """What maps it is no call of the user's, whose tensors the outer trace would lift."""
    inner = remat(lambda x: torch.cat([x, x], -1).sin().chunk(2, -1)[1])
    outer = remat(lambda x: inner(x))

    found, expected = jacrev(jacfwd(outer))(X), jacrev(jacfwd(torch.sin))(X)
    torch.testing.assert_close(found, expected)


def test_what_no_tangent_reaches_has_none() -> None:
    """Neither an output, nor a value that is saved: zeros would be held and multiplied."""

    def f(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh((x * x).sin() @ w), x.exp()

    region = remat(f, policy=policies.everything_saveable)
    with forward_ad.dual_level():
        _, still = region(forward_ad.make_dual(W, V), X)
        assert forward_ad.unpack_dual(still).tangent is None
    gradient = grad(lambda w: region(w, X)[0].square().sum())
    jvp(gradient, (W,), (V,))
    ran = count_operators(lambda: jvp(gradient, (W,), (V,)))
    assert not ran["aten.zeros_like"]


@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_tangents_of_what_has_no_gradient_beside_what_has_one(engine: Any) -> None:
    """A captured weight wants a gradient, the input has a tangent: each output has its own."""
    w = W.clone().requires_grad_()

    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.sin(w), torch.sigmoid(x), torch.tanh(x @ w)

    def looked_at(f: Callable[[Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
        with forward_ad.dual_level():
            _, moved, both = f(forward_ad.make_dual(X, X.cos()))
            assert (moved.requires_grad, both.requires_grad) == (False, True)
            # Typed partially in torch.
            pairs: list[Any] = [forward_ad.unpack_dual(each) for each in (moved, both)]
            found = pairs[1].primal.sum() + pairs[1].tangent.sin().sum()
            gradients = torch.autograd.grad(found, w)
        return [*(tensor.detach() for pair in pairs for tensor in pair), *gradients]

    for expected, each in zip(
        looked_at(f), looked_at(remat(f, engine=engine)), strict=True
    ):
        torch.testing.assert_close(each, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "run",
    [
        lambda step, x: chain([step] * 3, schedule=schedules.Every(2))(x),
        lambda step, x: scan(
            lambda x, _: (step(x), None), x, length=3, schedule=schedules.Sqrt()
        )[0],
        lambda step, x: remat(step, engine="rerun")(step(step(x))),
    ],
    ids=["chain", "scan", "rerun"],
)
def test_gradients_of_tangents_outside_of_torch_func(
    run: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor],
) -> None:
    """Forward mode by `forward_ad` alone, and reverse mode over it."""
    weight, x = W.clone().requires_grad_(), X.clone().requires_grad_()

    def step(x: Tensor) -> Tensor:
        return torch.tanh(x @ weight).sin() @ weight.t()

    def gradients(run: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        with forward_ad.dual_level():
            out: Any = forward_ad.unpack_dual(run(forward_ad.make_dual(x, X.cos())))
            found = out.primal.sin().sum() + out.tangent.sin().sum()
            return (out.tangent.detach(), *torch.autograd.grad(found, (weight, x)))

    pairs = zip(
        gradients(lambda x: step(step(step(x)))),
        gradients(lambda x: run(step, x)),
        strict=True,
    )
    for expected, found in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
