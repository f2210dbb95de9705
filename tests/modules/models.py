"""A model of three layers with dropout and statistics, and one step of its training."""

from typing import Any

import pytest
import torch
from torch import nn

from remat import policies
from tests.support import seeded

WIDTH = 8


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)).sin())


class Block(nn.Module):
    """A layer with a dropout, and with statistics that its forward changes."""

    def __init__(self, index):
        super().__init__()
        self.index = index
        self.norm = nn.BatchNorm1d(WIDTH)
        self.mlp = Mlp()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, scale=1.0):
        return x + self.dropout(self.mlp(self.norm(x))) * scale


class Model(nn.Module):
    def __init__(self, num_layers=3):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(map(Block, range(num_layers)))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def a_model(kind: Any = Model, *args, dtype=torch.float64) -> Any:
    """A model with the same weights at every call."""
    torch.manual_seed(0)
    return kind(*args).to(dtype)


def a_step(model, *, seed=1, x=None):
    """Output, gradients and buffers after one forward and backward."""
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    x = seeded(6, WIDTH, dtype=dtype).requires_grad_() if x is None else x
    y = model(x)
    y.square().sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    buffers = {name: each.clone() for name, each in model.named_buffers()}
    return y.detach(), x.grad, gradients, buffers


OPTIONS = {
    "nothing": {},
    "matmuls": {"policy": policies.save_matmul_outputs},
    "rerun": {"engine": "rerun"},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
