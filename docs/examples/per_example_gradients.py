"""Training with differential privacy: every example's gradient is clipped, then all are added.

DP-SGD [1] bounds what one example can change: it clips the gradient of each example to a
norm, adds them up, and adds noise of that norm. `vmap(grad(loss))` gives the gradients of
all examples at once [2], for the activations of all examples at once. With each stage of
the network a region, only the inputs of stages wait. Noise and data come from random keys.

Prints, without and with regions, the peak of a step, and the loss after training. The
network is to tell discs from rings in noisy pictures.

[1] M. Abadi et al., Deep Learning with Differential Privacy, 2016,
    https://arxiv.org/abs/1607.00133, algorithm 1
[2] Opacus and torch.func, https://docs.pytorch.org/functorch/stable/notebooks/per_sample_grads.html
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn import functional as F

from remat import random, remat
from remat.reporting import LiveBytes

STAGES, CHANNELS, SIZE, BATCH = 6, 8, 16, 32
CLIP, NOISE, RATE = 1.0, 0.5, 0.2

Tree = dict[str, Tensor]
Stage = Callable[[Tensor, Tensor], Tensor]


def stage(weights: Tensor, x: Tensor) -> Tensor:
    """One residual stage, (channel, row, column) in and out."""
    h = F.group_norm(x[None], 2)
    return x + F.conv2d(F.silu(h), weights, padding=1)[0]


def loss_of(params: Tree, picture: Tensor, label: Tensor, stage: Stage) -> Tensor:
    """The loss of one example: a picture, (row, column), and whether it is a ring."""
    x = F.conv2d(picture[None, None], params["in"], padding=1)[0]
    for weights in params["stages"]:
        x = stage(weights, x)
    return F.binary_cross_entropy_with_logits(
        x.square().mean((1, 2)) @ params["out"], label
    )


def clipped(
    params: Tree, picture: Tensor, label: Tensor, stage: Stage
) -> tuple[Tree, Tensor]:
    """The loss of one example, and its gradient scaled to a norm of at most CLIP."""
    gradient, loss = grad_and_value(loss_of)(params, picture, label, stage)
    norm = torch.stack([each.square().sum() for each in gradient.values()]).sum().sqrt()
    factor = (CLIP / norm).clamp(max=1.0)
    return {name: each * factor for name, each in gradient.items()}, loss


def step(
    params: Tree, batch: tuple[Tensor, Tensor], key: Tensor, stage: Stage
) -> tuple[Tree, Tensor]:
    """One step of DP-SGD: new parameters, and the mean loss before it."""
    each = vmap(clipped, in_dims=(None, 0, 0, None))
    gradients, losses = each(params, *batch, stage)
    keys = dict(zip(params, random.split(key, len(params)), strict=True))
    changed = {}
    for name, value in params.items():
        noise = random.normal(keys[name], value.shape, std=NOISE * CLIP)
        changed[name] = value - RATE * (gradients[name].sum(0) + noise) / BATCH
    return changed, losses.mean()


def draw(key: Tensor) -> tuple[Tensor, Tensor]:
    """A batch of noisy pictures, (batch, row, column), and which of them show rings."""
    keys = random.split(key, 3)
    labels = random.bernoulli(keys[0], (BATCH,)).float()
    center = random.uniform(keys[1], (BATCH, 2, 1, 1), minval=5, maxval=11)
    grid = torch.stack(torch.meshgrid(2 * [torch.arange(float(SIZE))], indexing="ij"))
    distance = (grid - center).square().sum(1).sqrt()
    inner = 3 * labels[:, None, None]
    shown = ((distance < 5) & (distance >= inner)).float()
    return shown + random.normal(keys[2], shown.shape, std=0.3), labels


def main() -> None:
    """Trains the network without and with regions."""
    parser = argparse.ArgumentParser(description="DP-SGD by vmap(grad).")
    parser.add_argument("--steps", type=int, default=40)
    num_steps = parser.parse_args().steps

    data_key, noise_key, *keys = random.split(random.key(0), 5)
    start = {
        "in": random.normal(keys[0], (CHANNELS, 1, 3, 3), std=1 / 3),
        "stages": random.normal(keys[1], (STAGES, CHANNELS, CHANNELS, 3, 3), std=0.05),
        "out": random.normal(keys[2], (CHANNELS,), std=0.1),
    }
    peaks, ends = [], []
    print("         peak of a step  loss after training")
    for name, each in {"plain": stage, "regions": remat(stage)}.items():
        params = start
        for number in range(num_steps):
            batch = draw(random.fold_in(data_key, number))
            params, _ = step(params, batch, random.fold_in(noise_key, number), each)
        with LiveBytes() as live:
            _, loss = step(params, draw(data_key), noise_key, each)
        peaks.append(live.peak_bytes)
        ends.append(params)
        print(f"{name:8} {peaks[-1] / 2**20:10.2f} MiB  {loss:.8f}")

    torch.testing.assert_close(ends[0], ends[1])
    assert peaks[1] < 0.5 * peaks[0]


if __name__ == "__main__":
    main()
