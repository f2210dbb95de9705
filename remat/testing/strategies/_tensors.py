"""Tensors described by shape, strides, dtype and seed, which print as Python."""

import dataclasses
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "remat.testing.strategies needs hypothesis, which is not installed. In a clone, "
        "python -m pip install '.[testing]'. The rest of remat.testing works without."
    ) from error


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A contiguous standard normal tensor, the same at every call and for every dtype.

    Example:
        >>> from remat.testing.strategies import normal
        >>> bool((normal(2, 3) == normal(2, 3)).all())
        True
    """
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return wide.to(torch.get_default_device(), dtype)


_Shape = tuple[int, ...]
# Memory layouts: how many dimensions one needs, the shape to make, and the view of it to take.
_LAYOUTS: dict[str, tuple[int, Callable[[_Shape], _Shape], str]] = {
    "contiguous": (0, lambda shape: shape, ""),
    "transposed": (2, lambda shape: (*shape[:-2], shape[-1], shape[-2]), ".mT"),
    "expanded": (1, lambda shape: (1, *shape[1:]), ".expand({})"),
    "sliced": (1, lambda shape: (*shape[:-1], 2 * shape[-1]), "[..., ::2]"),
    "offset": (1, lambda shape: (shape[0] + 1, *shape[1:]), "[1:]"),
}


@final
@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class TensorSpec:
    """A tensor that can be made again and again, with the same numbers.

    Attributes:
        shape: the sizes of its dimensions.
        layout: how it lies in memory: "contiguous", "transposed", "expanded", "sliced"
            or "offset".
        dtype: a floating dtype.
        seed: which numbers it holds.
        requires_grad: whether it is a leaf that wants a gradient.
    """

    shape: tuple[int, ...]
    layout: str = "contiguous"
    dtype: torch.dtype = torch.float64
    seed: int = 0
    requires_grad: bool = False

    def make(self) -> Tensor:
        """The tensor, fresh."""
        return eval(repr(self), {"normal": normal, "torch": torch})

    def __repr__(self) -> str:
        """The code that makes the tensor."""
        _, base, view = _LAYOUTS[self.layout]
        view = view.format(", ".join(map(str, self.shape)))
        arguments = [*map(str, base(self.shape))]
        arguments += [f"seed={self.seed}"] if self.seed else []
        arguments += [f"dtype={self.dtype}"] if self.dtype != torch.float64 else []
        gradient = ".requires_grad_()" if self.requires_grad else ""
        return f"normal({', '.join(arguments)}){view}{gradient}"


def shapes(
    *, min_dims: int = 2, max_dims: int = 2, max_size: int = 3
) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes with sizes from 1 to `max_size`; they shrink to few and small dimensions."""
    sizes = st.integers(1, max_size)
    return st.lists(sizes, min_size=min_dims, max_size=max_dims).map(tuple)


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """Real floating dtypes, the widest first."""
    return st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.half])


@st.composite
def tensors(
    draw: st.DrawFn,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> TensorSpec:
    """Tensors of any layout, of one shape or of any; call `.make()` for the tensor."""
    if shape is None:
        shape = draw(shapes(min_dims=0, max_dims=3))
    known = [k for k, (num_dims, *_) in _LAYOUTS.items() if num_dims <= len(shape)]
    return TensorSpec(shape, draw(st.sampled_from(known)), dtype, seed)


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
            made = torch.randn(shape, generator=generator, dtype=dtype, device="cpu")
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
