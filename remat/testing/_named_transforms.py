"""Transforms by name, each from a function of tensors to a function of the same tensors.

So they compose: `transform("grad(vmap)")` is `grad` of `vmap` of a function. Other inputs of a
transform are made from the tensors: `vmap` stacks three different copies of each, and `jvp` uses
their cosines as tangents. Large results are reduced: `jacrev` takes three random sums of the
outputs, `jacfwd` and `hessian` take three random directions of the arguments.
"""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Flat = Callable[..., tuple[Tensor | None, ...]]
Cotangents = Callable[[int, Tensor], Tensor | None]
_NUM_DIRECTIONS = 3


def is_differentiable(leaf: object) -> bool:
    """Whether a leaf is a tensor that a transform can differentiate."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def scattered_like(tensor: Tensor, seed: int) -> Tensor:
    """What transforms are tried with: numbers from -1 to 1 without a pattern, always the same.

    They do not come from a generator, which torch would refuse inside vmap.
    """
    places = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device)
    angles = ((places + 1) * 12.9898 + seed * 78.233).reshape(tensor.shape)
    if tensor.is_complex():
        return torch.complex(angles.sin(), angles.cos()).to(tensor.dtype)
    return angles.sin().to(tensor.dtype)


def contiguous_cotangents(index: int, output: Tensor) -> Tensor:
    """A cotangent without a pattern for output number `index`."""
    return scattered_like(output, 1009 + index)


def _to_transform(outputs: Sequence[Tensor | None]) -> dict[int, Tensor]:
    found = {
        index: out
        for index, out in enumerate(outputs)
        if out is not None and is_differentiable(out)
    }
    if not found:
        raise ValueError("no output can be differentiated")
    return found


def _outputs_to_transform(f: Flat) -> Callable[..., tuple[Tensor, ...]]:
    return lambda *tensors: tuple(_to_transform(f(*tensors)).values())


def _sum_to_transform(outputs: Sequence[Tensor | None], seed: int) -> Tensor:
    terms: list[Tensor] = []
    for index, out in _to_transform(outputs).items():
        term = (out * scattered_like(out, seed + index)).sum()
        terms.append((term.real if term.is_complex() else term).to(torch.float64))
    return torch.stack(terms).sum()


def _loss_to_transform(f: Flat) -> Callable[..., Tensor]:
    return lambda *tensors: _sum_to_transform(f(*tensors), 1009)


def _sums_to_transform(f: Flat) -> Callable[..., Tensor]:
    def run(*tensors: Tensor) -> Tensor:
        outputs = f(*tensors)
        seeds = range(2003, 2003 + _NUM_DIRECTIONS)
        return torch.stack([_sum_to_transform(outputs, 100 * seed) for seed in seeds])

    return run


def _along(f: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[Any, Tensor]:
    """`f`, to transform, as a function of how far each random direction is gone, and its start."""

    def run(steps: Tensor) -> Any:
        moved: list[Tensor] = []
        for place, tensor in enumerate(tensors):
            parts = [
                step.to(tensor.dtype) * scattered_like(tensor, seed)
                for seed, step in enumerate(steps.unbind(), start=31 * place + 1)
            ]
            moved.append(tensor + torch.stack(parts).sum(0))
        return f(*moved)

    return run, tensors[0].new_zeros(_NUM_DIRECTIONS, dtype=torch.float64)


def _under_grad(f: Flat, *tensors: Tensor) -> tuple[Tensor, ...]:
    return torch.func.grad(_loss_to_transform(f), tuple(range(len(tensors))))(*tensors)


def _under_vjp(f: Flat, *tensors: Tensor) -> tuple[Tensor, ...]:
    made: Any = torch.func.vjp(_outputs_to_transform(f), *tensors)
    outputs, pull = made
    given = [contiguous_cotangents(k, out) for k, out in enumerate(outputs)]
    return (*outputs, *pull(tuple(given)))


def _under_jvp(f: Flat, *tensors: Tensor) -> tuple[Tensor, ...]:
    tangents = tuple(tensor.cos() for tensor in tensors)
    made: Any = torch.func.jvp(_outputs_to_transform(f), tensors, tangents)
    outputs, pushed = made
    return (*outputs, *pushed)


def _under_linearize(f: Flat, *tensors: Tensor) -> tuple[Tensor, ...]:
    with warnings.catch_warnings():
        # torch's own, of the constants that it folds.
        warnings.filterwarnings("ignore", "Attempted to insert a get_attr Node")
        outputs, push = torch.func.linearize(_outputs_to_transform(f), *tensors)
    return (*outputs, *push(*(tensor.cos() for tensor in tensors)))


def _under_vmap(f: Flat, *tensors: Tensor) -> tuple[Tensor | None, ...]:
    batches = [torch.stack([each, each * 0.5, each.cos()]) for each in tensors]
    return torch.func.vmap(f, randomness="different")(*batches)


def _under_jacrev(f: Flat, *tensors: Tensor) -> tuple[Tensor, ...]:
    places = tuple(range(len(tensors)))
    return torch.func.jacrev(_sums_to_transform(f), places)(*tensors)


def _under_jacfwd(f: Flat, *tensors: Tensor) -> tuple[Tensor, ...]:
    moved, start = _along(_outputs_to_transform(f), tensors)
    return torch.func.jacfwd(moved)(start)


def _under_hessian(f: Flat, *tensors: Tensor) -> tuple[Tensor, ...]:
    moved, start = _along(_loss_to_transform(f), tensors)
    return (torch.func.hessian(moved)(start),)


def _under_backward(f: Flat, *tensors: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients by plain autograd, a named transform that can be differentiated again."""
    wanted = [each if each.requires_grad else each.requires_grad_() for each in tensors]
    return gradients(f(*wanted), wanted, contiguous_cotangents, create_graph=True)


def gradients(
    outputs: Sequence[Tensor | None],
    wanted: Sequence[Tensor],
    cotangents: Cotangents,
    *,
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of some tensors by plain autograd; None where none flows."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for index, output in enumerate(outputs):
        if output is not None and output.requires_grad:
            cotangent = cotangents(index, output)
            pairs += [] if cotangent is None else [(output, cotangent)]
    if not pairs or not wanted:
        return (None,) * len(wanted)
    roots, given = zip(*pairs, strict=True)
    return torch.autograd.grad(
        roots, wanted, given, allow_unused=True, create_graph=create_graph
    )


# (function, *tensors) -> what the transformed function gives for these tensors.
_RULES: dict[str, Flat] = {
    "backward": _under_backward,
    "grad": _under_grad,
    "vjp": _under_vjp,
    "jvp": _under_jvp,
    "vmap": _under_vmap,
    "jacrev": _under_jacrev,
    "jacfwd": _under_jacfwd,
    "hessian": _under_hessian,
    "linearize": _under_linearize,
}

#: Single transforms.
TRANSFORMS = tuple(_RULES)

_OUTER = ("backward", "grad", "vjp", "jvp", "vmap", "jacrev", "jacfwd")
_INNER = ("grad", "vjp", "jvp", "vmap", "jacrev", "jacfwd")

#: Compositions of two.
COMPOSITIONS = (
    "backward(backward)",
    *(f"{outer}({inner})" for outer, inner in itertools.product(_OUTER, _INNER)),
)

_FEW = ("grad", "jvp", "vmap")

#: The default of `assert_equivalent`.
USUAL = (
    *TRANSFORMS,
    "backward(backward)",
    "backward(vmap)",
    *(f"{outer}({inner})" for outer, inner in itertools.product(_FEW, _FEW)),
)


def parse_transform(name: str) -> tuple[str, ...]:
    """The transforms in a name, the outermost first.

    Raises:
        ValueError: if a part of the name is not a transform, or not in this place.
    """
    parts = tuple(name.replace(" ", "").rstrip(")").split("("))
    known = (*TRANSFORMS, "functional_call")
    is_closed = name.count("(") == name.count(")")
    is_nested = re.fullmatch(r"[^()]+(\([^()]+)*\)*", name) is not None
    for place, part in enumerate(parts):
        if part not in known or not (is_closed and is_nested):
            raise ValueError(
                f"the transform {name!r}: {part!r} is none that assert_equivalent knows. "
                f"They are {', '.join(known)}, and compositions, outermost first: "
                "'vmap(grad)'."
            )
        if part == "backward" and any(outer != part for outer in parts[:place]):
            raise ValueError(
                f"the transform {name!r}: plain autograd does not run inside "
                "torch.func. Write 'backward' outermost: 'backward(vmap)'."
            )
        if part == "functional_call" and place != len(parts) - 1:
            raise ValueError(
                f"the transform {name!r}: functional_call replaces the parameters of "
                "the module itself. Write it innermost: 'grad(functional_call)'."
            )
    return parts


def apply(parts: Sequence[str], f: Flat) -> Flat:
    """A function under named transforms, the last name first."""
    for part in reversed(parts):
        f = functools.partial(_RULES[part], f)
    return f
