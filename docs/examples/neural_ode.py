"""A neural ODE: 1,000 steps of a solver, of which ten states wait.

The state of a neural ODE [1] follows a network, dx/dt = f(x), here by 1,000 Runge-Kutta steps
of order four. The gradient through the solver is the exact one of what was computed, which
that of the adjoint equation is not, but the plain loop keeps all that each step computed.
`scan` keeps one state a step. A schedule keeps fewer: `Sqrt()` [2] about sqrt(1,000), and as
many recorded steps at a time; `Revolve(10)` [3] ten, for more runs of the steps.

Prints, for the plain loop and for `scan`, what waits between forward and backward, the peak,
and the loss; then the loss after training on spirals, whose states have a closed form.

[1] R. T. Q. Chen et al., Neural Ordinary Differential Equations, 2018,
    https://arxiv.org/abs/1806.07366
[2] T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016,
    https://arxiv.org/abs/1604.06174
[3] A. Griewank and A. Walther, Algorithm 799: Revolve, ACM Transactions on Mathematical
    Software 26(1), 2000, https://doi.org/10.1145/347837.347846
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from remat import scan, schedules
from remat.reporting import LiveBytes

WIDTH, BATCH, TIME = 16, 128, 3.0

Params = dict[str, Tensor]
Solver = Callable[[Params, Tensor, int], Tensor]  # the last of so many steps


def field(params: Params, x: Tensor) -> Tensor:
    """The velocity at some places, both (batch, 2)."""
    return torch.tanh(x @ params["in"] + params["bias"]) @ params["out"]


def runge_kutta(params: Params, x: Tensor, dt: float) -> Tensor:
    """The state one step later, (batch, 2)."""
    k1 = field(params, x)
    k2 = field(params, x + dt / 2 * k1)
    k3 = field(params, x + dt / 2 * k2)
    k4 = field(params, x + dt * k3)
    return x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def by_loop(params: Params, x: Tensor, length: int) -> Tensor:
    """The last state, by a plain loop."""
    for _ in range(length):
        x = runge_kutta(params, x, TIME / length)
    return x


def by_scan(schedule: schedules.AbstractSchedule | None) -> Solver:
    """The same by `scan`, under a schedule."""

    def solve(params: Params, x: Tensor, length: int) -> Tensor:
        def step(x: Tensor, _: None) -> tuple[Tensor, None]:
            return runge_kutta(params, x, TIME / length), None

        last, _ = scan(step, x, length=length, schedule=schedule)
        return last

    return solve


SOLVERS = {
    "loop": by_loop,
    "scan": by_scan(None),
    "scan, Sqrt()": by_scan(schedules.Sqrt()),
    "scan, Revolve(10)": by_scan(schedules.Revolve(10)),
}


def spirals() -> tuple[Tensor, Tensor]:
    """First and last states of dx/dt = x A, both (batch, 2)."""
    turning = torch.tensor([[-0.1, 1.0], [-1.0, -0.1]])
    start = torch.randn(BATCH, 2)
    return start, start @ torch.linalg.matrix_exp(turning * TIME)


def main() -> None:
    """Compares the gradients by all solvers, and trains with one."""
    parser = argparse.ArgumentParser(description="A neural ODE by scan.")
    parser.add_argument("--length", type=int, default=1000, help="of the solvers")
    parser.add_argument("--steps", type=int, default=2, help="of training")
    options = parser.parse_args()

    torch.manual_seed(0)
    start, end = spirals()
    params = {
        "in": torch.randn(2, WIDTH).requires_grad_(),
        "bias": torch.zeros(WIDTH).requires_grad_(),
        "out": (torch.randn(WIDTH, 2) / WIDTH).requires_grad_(),
    }

    def loss_by(solve: Solver) -> Tensor:
        return (solve(params, start, options.length) - end).square().mean()

    gradients, peaks = [], []
    print("                       waits        peak  loss")
    for name, solve in SOLVERS.items():
        with LiveBytes() as live:
            loss = loss_by(solve)
            waiting_mib = live.current_bytes / 2**20
            gradients.append(torch.autograd.grad(loss, list(params.values())))
        peaks.append(live.peak_bytes)
        peak_mib = live.peak_bytes / 2**20
        print(f"{name:17} {waiting_mib:6.2f} MiB  {peak_mib:6.2f} MiB  {loss:.8f}")

    loop, scanned, *scheduled = gradients
    torch.testing.assert_close(scanned, loop)  # the steps' shares are added otherwise
    for each in scheduled:
        assert all(map(torch.equal, each, scanned))
    assert peaks[3] < peaks[2] < 0.2 * peaks[0]

    optimizer = torch.optim.Adam(params.values(), lr=0.2)
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss_by(SOLVERS["scan, Sqrt()"]).backward()
        optimizer.step()
    loss = loss_by(by_loop)
    print(f"after {options.steps} steps of Adam the loss is {loss:.4f}")


if __name__ == "__main__":
    main()
