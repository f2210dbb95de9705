"""Random cotangents: the layout of each, and which outputs have none."""

from __future__ import annotations

import dataclasses
from typing import final

import torch
from torch import Tensor

from remat.testing.strategies._hypothesis import st

KINDS = ("contiguous", "expanded", "transposed", "sliced", "none")


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Cotangents:
    """A rule for the cotangent of each output; pass it to `assert_equivalent`.

    Attributes:
        kinds: one of "contiguous", "expanded" (one number, as from `.sum()`),
            "transposed", "sliced", "none" for each output; the last one for all others.

    Example:
        >>> import torch
        >>> from remat.testing.strategies import Cotangents
        >>> Cotangents(("transposed",))(0, torch.ones(2, 3)).stride()
        (1, 2)
    """

    kinds: tuple[str, ...] = ("contiguous",)

    def __call__(self, index: int, output: Tensor) -> Tensor | None:
        """The cotangent of output number `index`, None for none."""
        generator = torch.Generator().manual_seed(1009 + index)
        dtype = torch.complex128 if output.is_complex() else torch.float64

        def normal(*shape: int) -> Tensor:
            made = torch.randn(shape, generator=generator, dtype=dtype)
            return made.to(device=output.device, dtype=output.dtype)

        match self.kinds[min(index, len(self.kinds) - 1)]:
            case "none":
                return None
            case "expanded":
                return normal().expand(output.shape)
            case "transposed":
                order = tuple(reversed(range(output.dim())))
                return normal(*output.permute(order).shape).permute(order)
            case "sliced":
                return normal(*output.shape, 2)[..., 1]
            case _:
                return normal(*output.shape)


def cotangents() -> st.SearchStrategy[Cotangents]:
    """Rules for the cotangents of up to three outputs."""
    kinds = st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)
    return kinds.map(lambda found: Cotangents(tuple(found)))
