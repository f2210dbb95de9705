"""What tests of the drop-ins for several projects share."""

import torch
from torch import Tensor


def gradients(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """Of one backward."""
    return torch.autograd.grad(loss.square().sum(), leaves)
