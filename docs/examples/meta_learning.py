"""Meta-learning: MAML, whose gradient goes back through gradient steps.

MAML [1] looks for parameters from which a few gradient steps learn a new task; here a task
is a sinusoid, of which ten points are known (section 5.1). The gradient of the loss after
those steps goes back through each of them, and so through the gradient in it, for a batch of
tasks at once: `grad` of `vmap` of a loop over `grad`. All that the inner gradients computed
waits for it. With one inner step a region, only the parameters between the steps wait.

Prints, without and with regions, the peak of one outer step, and the loss on new tasks
before and after the inner steps.

[1] C. Finn, P. Abbeel, S. Levine, Model-Agnostic Meta-Learning for Fast Adaptation of Deep
    Networks, 2017, https://arxiv.org/abs/1703.03400
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from remat import random, remat
from remat.reporting import LiveBytes

WIDTH, INNER_STEPS, INNER_RATE, TASKS, POINTS = 40, 10, 0.02, 16, 10

Params = dict[str, Tensor]
Points = tuple[Tensor, Tensor]  # x and y, each (POINTS, 1)
InnerStep = Callable[[Params, Points], Params]


def error(params: Params, points: Points) -> Tensor:
    """The mean squared error of the network."""
    x, y = points
    h = torch.tanh(x @ params["w1"] + params["b1"])
    h = torch.tanh(h @ params["w2"] + params["b2"])
    return F.mse_loss(h @ params["w3"] + params["b3"], y)


def inner_step(params: Params, points: Points) -> Params:
    """One gradient step on a task."""
    slopes = grad(error)(params, points)
    return {name: p - INNER_RATE * slopes[name] for name, p in params.items()}


def adapted_error(
    params: Params, known: Points, new: Points, step: InnerStep
) -> Tensor:
    """The error on new points of a task, after some steps on the known ones."""
    for _ in range(INNER_STEPS):
        params = step(params, known)
    return error(params, new)


def loss_of(params: Params, tasks: tuple[Points, Points], step: InnerStep) -> Tensor:
    """The mean of that error over a batch of tasks."""
    return vmap(adapted_error, in_dims=(None, 0, 0, None))(params, *tasks, step).mean()


def draw(key: Tensor) -> tuple[Points, Points]:
    """Known and new points of a batch of sinusoids, of random height and phase."""
    height_key, phase_key, x_key = random.split(key, 3)
    height = random.uniform(height_key, (TASKS, 1, 1), minval=0.1, maxval=5.0)
    phase = random.uniform(phase_key, (TASKS, 1, 1), maxval=torch.pi)
    x = random.uniform(x_key, (TASKS, 2 * POINTS, 1), minval=-5.0, maxval=5.0)
    (x1, x2), (y1, y2) = x.chunk(2, 1), (height * torch.sin(x - phase)).chunk(2, 1)
    return (x1, y1), (x2, y2)


def initial_params(key: Tensor) -> Params:
    """A network of two hidden layers."""
    sizes = [(1, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)]
    params: Params = {}
    for layer, (rows, columns) in enumerate(sizes, start=1):
        own = random.fold_in(key, layer)
        params[f"w{layer}"] = random.normal(own, (rows, columns), std=rows**-0.5)
        params[f"b{layer}"] = torch.zeros(columns)
    return params


def train(num_steps: int, step: InnerStep, key: Tensor) -> Params:
    """The parameters after some steps of Adam."""
    start_key, data_key = random.split(key)
    params = initial_params(start_key)
    optimizer = torch.optim.Adam(params.values(), lr=0.003)
    for number in range(num_steps):
        slopes = grad(loss_of)(params, draw(random.fold_in(data_key, number)), step)
        for name, each in params.items():
            each.grad = slopes[name]
        optimizer.step()
    return params


def main() -> None:
    """Trains without and with regions."""
    parser = argparse.ArgumentParser(description="MAML on sinusoids.")
    parser.add_argument("--steps", type=int, default=100)
    num_steps = parser.parse_args().steps

    train_key, test_key = random.split(random.key(0))
    known, new = draw(test_key)
    ends, peaks = [], []
    print("         peak of a step  loss on new tasks  after the inner steps")
    for name, step in {"plain": inner_step, "regions": remat(inner_step)}.items():
        params = train(num_steps, step, train_key)
        with LiveBytes() as live:
            grad(loss_of)(params, (known, new), step)
        before = vmap(error, in_dims=(None, 0))(params, new).mean()
        after = loss_of(params, (known, new), step)
        ends.append(params)
        peaks.append(live.peak_bytes)
        print(f"{name:8} {peaks[-1] / 2**20:10.2f} MiB  {before:17.8f}  {after:.8f}")

    torch.testing.assert_close(ends[0], ends[1])
    assert peaks[1] < 0.5 * peaks[0]


if __name__ == "__main__":
    main()
