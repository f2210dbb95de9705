"""What all ranks of a world hold alike, and a function of it."""

import torch
from torch import Tensor

from remat import checkpoint_name
from tests.storage.parallel import WIDTH

BATCH, SEQ = 2, 7


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    """What all ranks hold."""
    return torch.randn(BATCH, SEQ, WIDTH, dtype=dtype)


def curve(x: Tensor) -> Tensor:
    """Needs its input in the backward, and the sine of it."""
    return torch.sin(checkpoint_name(torch.sin(x) * 2, "mid")).cos()
