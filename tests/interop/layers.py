"""Functions, an operator and a policy that tests of torch's checkpoints share."""

import functools

import torch

from remat.interop.torch import CheckpointPolicy, checkpoint

MM = torch.ops.aten.mm.default


def nested(function):
    return functools.partial(checkpoint, function, use_reentrant=False)


def save_mm(ctx, op, *args, **kwargs):
    """A policy as torch's documentation writes it, over this package's enum."""
    return CheckpointPolicy.MUST_SAVE if op == MM else CheckpointPolicy.PREFER_RECOMPUTE


def product(x, y):
    return torch.mm(x.cos(), y).sin().sum()
