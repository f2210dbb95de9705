"""The bytes of a tensor, and small integers packed several to a byte."""

import torch
import torch.nn.functional as F
from torch import Tensor


def bytes_of(value: Tensor) -> Tensor:
    """The memory of a contiguous tensor of any dtype, as uint8 of shape (n,)."""
    # A dimension of size 1 may have any stride, by which torch refuses to view the dtype.
    return value.as_strided((value.numel(),), (1,)).view(torch.uint8)


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Packs numbers below 2**bits, uint8 of shape (n,), lowest bits first."""
    if bits == 8:
        return numbers
    per_byte = 8 // bits
    missing = -numbers.numel() % per_byte
    filled = F.pad(numbers, (0, missing)) if missing else numbers  # else a copy, too
    rows = filled.view(-1, per_byte)
    packed = rows[:, 0].clone()
    for place in range(1, per_byte):
        packed |= rows[:, place] << bits * place
    return packed


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack`, for `count` numbers."""
    if bits == 8:
        return packed
    mask = 2**bits - 1
    columns = [packed >> bits * place & mask for place in range(8 // bits)]
    return torch.stack(columns, dim=1).view(-1)[:count]
