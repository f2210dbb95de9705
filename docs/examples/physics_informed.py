"""A physics-informed network: the Korteweg-de Vries equation, with its third derivative.

A network u(t, x) is trained until it satisfies u_t + 6 u u_x + u_xxx = 0 at random points,
and is the known wave at the start and at the ends [1]. Its derivatives are forward mode,
three times over (`jvp`), which makes eight numbers of each activation; the gradient of the
loss is reverse mode over all of it. With each layer a region, only what lies between layers
waits.

Prints, without and with regions, the peak of one gradient, and the loss; then the error of
the trained network against the solution in closed form, a soliton.

[1] M. Raissi, P. Perdikaris, G. E. Karniadakis, Physics-informed neural networks, Journal of
    Computational Physics 378, 2019, https://doi.org/10.1016/j.jcp.2018.10.045, section 3.2
"""

import argparse
import itertools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad_and_value, jvp

from remat import remat
from remat.reporting import LiveBytes

WIDTH, LAYERS, POINTS, SPEED, REACH = 16, 4, 200, 1.0, 5.0

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
Field = Callable[[Tensor], Tensor]  # from points (t, x), shape (n, 2), to u, shape (n,)


def soliton(at: Tensor) -> Tensor:
    """The solution: a wave that keeps its form, and moves to the right."""
    t, x = at.unbind(-1)
    return SPEED / 2 / torch.cosh(SPEED**0.5 / 2 * (x - SPEED * t)).square()


def layer(weights: Tensor, bias: Tensor, h: Tensor) -> Tensor:
    """One hidden layer."""
    return torch.tanh(h @ weights + bias)


def network(params: list[Tensor], layer: Layer) -> Field:
    """The network as a function of points alone."""

    def u(at: Tensor) -> Tensor:
        h = at / at.new_tensor([1.0, REACH])
        *hidden, last = params
        for weights, bias in zip(hidden[::2], hidden[1::2], strict=True):
            h = layer(weights, bias, h)
        return h @ last

    return u


def derivative(u: Field, axis: int) -> Field:
    """The derivative of a field by t (axis 0) or x (axis 1), itself a field."""

    def du(at: Tensor) -> Tensor:
        direction = torch.zeros_like(at)
        direction[:, axis] = 1
        return jvp(u, (at,), (direction,))[1]

    return du


def residual(u: Field) -> Field:
    """By how much a field misses the equation."""
    u_t, u_x = derivative(u, 0), derivative(u, 1)
    u_xxx = derivative(derivative(u_x, 1), 1)
    return lambda at: u_t(at) + 6 * u(at) * u_x(at) + u_xxx(at)


def loss_of(
    params: list[Tensor], inside: Tensor, border: Tensor, layer: Layer
) -> Tensor:
    """Mean squares of what is missed inside, and on the border."""
    u = network(params, layer)
    missed = u(border) - soliton(border)
    return residual(u)(inside).square().mean() + 10 * missed.square().mean()


def points() -> tuple[Tensor, Tensor]:
    """Random points of (0, 1) x (-REACH, REACH); the start, and both ends."""
    scale = torch.tensor([1.0, 2 * REACH])
    uniform = (torch.rand(2, POINTS, 2) - torch.tensor([0.0, 0.5])) * scale
    inside, border = uniform.double()
    border[: POINTS // 2, 0] = 0
    border[POINTS // 2 :, 1] = border[POINTS // 2 :, 1].sign() * REACH
    return inside, border


def main() -> None:
    """Compares one gradient without and with regions, and trains with them."""
    parser = argparse.ArgumentParser(description="A PINN with third derivatives.")
    parser.add_argument("--steps", type=int, default=100)
    num_steps = parser.parse_args().steps

    torch.manual_seed(0)
    params: list[Tensor] = []
    for rows, columns in itertools.pairwise([2] + LAYERS * [WIDTH]):
        weights = torch.randn(rows, columns).double() / rows**0.5
        params += [weights, torch.zeros(columns).double()]
    params.append(torch.randn(WIDTH).double() / WIDTH**0.5)
    inside, border = points()

    region = remat(layer)
    gradients, peaks = [], []
    print("         peak of a gradient  loss")
    for name, each in {"plain": layer, "regions": region}.items():
        with LiveBytes() as live:
            gradient, loss = grad_and_value(loss_of)(params, inside, border, each)
        gradients.append(gradient)
        peaks.append(live.peak_bytes)
        print(f"{name:8} {peaks[-1] / 2**20:14.2f} MiB  {loss:.12f}")
    torch.testing.assert_close(*gradients)
    assert peaks[1] < 0.5 * peaks[0]

    for each in params:
        each.requires_grad_()
    search = {"line_search_fn": "strong_wolfe", "tolerance_change": 0}
    optimizer = torch.optim.LBFGS(params, max_iter=num_steps, **search)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(params, inside, border, region)
        loss.backward()
        return loss

    optimizer.step(closure)
    fresh, _ = points()
    right = soliton(fresh)
    missed = (network(params, layer)(fresh) - right).abs().max()
    print(
        f"after {num_steps} steps of L-BFGS the largest error is {missed:.4f} "
        f"of {right.max():.4f}"
    )


if __name__ == "__main__":
    main()
