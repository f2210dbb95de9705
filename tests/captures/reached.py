"""What functions reach in the tests: globals, closures, defaults, objects and modules."""

# Objects are given attributes that their classes do not declare: that is the subject.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportMissingImports=false

import types
from dataclasses import dataclass

import torch
from torch import nn

from remat._captures.bake_spots import cover
from remat._captures.covered import Covered
from remat._captures.reads import recording
from remat._captures.walk import Survey

X = torch.ones(2, 2)
W = torch.ones(2, 2)
SCALE = 2.0
RATES = [0.1, 0.2]
TABLE = {"w": torch.ones(2, 2), "gain": 3}
HOLDER = types.SimpleNamespace(w=torch.ones(2, 2), gain=1, unread=5)


def bake(*roots, run=None) -> Covered:
    """Surveys, runs, and covers, with every reached tensor counted as used."""
    seen = Survey(roots)
    with recording(seen) as reads:
        (run or roots[0])(X)
    return cover(seen, reads, [*seen.tensors])


def inner_helper(x):
    return x * SCALE


def outer_helper(x):
    return inner_helper(x) + RATES[0]


def through_helpers(x):
    return outer_helper(x)


def uses_global(x):
    return x @ W


def uses_table(x):
    return x @ TABLE["w"] * TABLE["gain"]


def uses_holder(x):
    return x @ HOLDER.w * HOLDER.gain


def closure(w, scale=1.0):
    def inner(x):
        return x @ w * scale

    return inner


def adds_to_holder(x):
    HOLDER.gain += 1
    return x


class Affine:
    """A callable object of the user's."""

    offset = 0.5

    def __init__(self, w):
        self.w = w
        self.scale = 2.0
        self.unread = 1

    def __call__(self, x):
        return self.method(x)

    def method(self, x):
        return x @ self.w * self.scale + self.offset


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("scale", "w")

    def __init__(self, w):
        self.w = w
        self.scale = 2.0

    def __call__(self, x):
        return x @ self.w * self.scale


@dataclass
class Config:
    """A configuration that a module carries."""

    gain: float
    unread: int = 0


class Block(nn.Module):
    """A module with what modules usually have."""

    def __init__(self, layer_idx=0, gain=2.0):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("mean", torch.zeros(2))
        self.layer_idx = layer_idx
        self.config = Config(gain)
        self.sizes = [1, 2]
        self.bias = None

    def forward(self, x):
        if self.bias is not None:
            x = x + self.bias
        x = self.drop(self.linear(x)) + self.mean
        return x * self.config.gain + sum(self.sizes)


def set_global(name, value):
    """Changes a global of this module."""
    globals()[name] = value


CHANGES = {
    "global through two helpers": (
        through_helpers,
        lambda: set_global("SCALE", 3.0),
        "global `SCALE` was 2.0 and is 3.0",
    ),
    "list item through a helper": (
        through_helpers,
        lambda: RATES.__setitem__(0, 1.0),
        "global `RATES[0]` was 0.1 and is 1.0",
    ),
    "list appended": (
        through_helpers,
        lambda: RATES.append(1),
        "global `RATES` was a list of 2 items and has changed",
    ),
    "dict item": (
        uses_table,
        lambda: TABLE.__setitem__("gain", 4),
        "global `TABLE['gain']` was 3 and is 4",
    ),
    "dict key added": (
        uses_table,
        lambda: TABLE.__setitem__("more", 4),
        "global `TABLE` was a dict with the keys ('w', 'gain') and has changed",
    ),
    "attribute of a global": (
        uses_holder,
        lambda: setattr(HOLDER, "gain", 2),
        "global `HOLDER.gain` was 1 and is 2",
    ),
    "tensor gone": (
        uses_global,
        lambda: set_global("W", None),
        "global `W` was a Tensor and is None",
    ),
    "global deleted": (
        through_helpers,
        lambda: globals().__delitem__("SCALE"),
        "global `SCALE` was 2.0 and is gone",
    ),
}


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, tied=True):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.unread = nn.Linear(2, 2)
        if tied:
            self.second.weight = self.first.weight
            self.unread.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))
