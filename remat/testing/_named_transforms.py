"""Transforms by name, each from a function of tensors to a function of the same tensors.

So they compose: `transform("grad(vmap)")` is `grad` of `vmap` of a function. Other inputs of a
transform are made from the tensors: `vmap` stacks three different copies of each, and `jvp` uses
their cosines as tangents. Large results are reduced: `jacrev` takes three random sums of the
outputs, `jacfwd` and `hessian` take three random directions of the arguments.
"""

import functools
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from remat._errors import require_type

Flat = Callable[..., tuple[Tensor | None, ...]]
Cotangents = Callable[[int, Tensor], Tensor | None]
_NUM_DIRECTIONS = 3
_func: Any = torch.func


def is_differentiable(leaf: object) -> TypeGuard[Tensor]:
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
    found = {k: out for k, out in enumerate(outputs) if is_differentiable(out)}
    if not found:
        raise ValueError("no output can be differentiated")
    return found


def _outputs_to_transform(f: Flat, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(_to_transform(f(*tensors)).values())


def _sum_to_transform(outputs: Sequence[Tensor | None], seed: int) -> Tensor:
    terms: list[Tensor] = []
    for index, out in _to_transform(outputs).items():
        # The gradient of this by `out` is what scatters, and not its conjugate.
        term = (out * scattered_like(out, seed + index).conj()).sum()
        terms.append((term.real if term.is_complex() else term).to(torch.float64))
    return torch.stack(terms).sum()


def _loss_to_transform(f: Flat, *tensors: Tensor) -> Tensor:
    return _sum_to_transform(f(*tensors), 1009)


def _sums_to_transform(f: Flat, *tensors: Tensor) -> Tensor:
    outputs = f(*tensors)
    seeds = range(2003, 2003 + _NUM_DIRECTIONS)
    return torch.stack([_sum_to_transform(outputs, 100 * seed) for seed in seeds])


def _along_directions(
    f: Callable[..., Any], tensors: Sequence[Tensor]
) -> tuple[Any, Tensor]:
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


def _transformed(name: str, f: Flat, *tensors: Tensor) -> tuple[Tensor | None, ...]:
    """What a function gives for these tensors under one transform."""
    outputs = functools.partial(_outputs_to_transform, f)
    loss = functools.partial(_loss_to_transform, f)
    places = tuple(range(len(tensors)))
    match name:
        case "backward":  # by plain autograd, such that it can be differentiated again
            given = [k if k.requires_grad else k.requires_grad_() for k in tensors]
            return gradients(f(*given), given, contiguous_cotangents, create_graph=True)
        case "grad":
            return _func.grad(loss, places)(*tensors)
        case "vjp":
            found, pull = _func.vjp(outputs, *tensors)
            given = [contiguous_cotangents(k, out) for k, out in enumerate(found)]
            return (*found, *pull(tuple(given)))
        case "jvp":
            tangents = tuple(tensor.cos() for tensor in tensors)
            found, pushed = _func.jvp(outputs, tensors, tangents)
            return (*found, *pushed)
        case "vmap":
            batches = [torch.stack([each, each * 0.5, each.cos()]) for each in tensors]
            return _func.vmap(f, randomness="different")(*batches)
        case "jacrev":
            sums = functools.partial(_sums_to_transform, f)
            return _func.jacrev(sums, places)(*tensors)
        case "jacfwd":
            moved, start = _along_directions(outputs, tensors)
            return _func.jacfwd(moved)(start)
        case "hessian":
            moved, start = _along_directions(loss, tensors)
            return (_func.hessian(moved)(start),)
        case _:
            with warnings.catch_warnings():
                # torch's own, of the constants that it folds.
                warnings.filterwarnings("ignore", "Attempted to insert a get_attr Node")
                found, push = _func.linearize(outputs, *tensors)
            return (*found, *push(*(tensor.cos() for tensor in tensors)))


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


_COMPOSED = ("backward", "grad", "vjp", "jvp", "vmap", "jacrev", "jacfwd")

#: Single transforms.
TRANSFORMS = (*_COMPOSED, "hessian", "linearize")

#: Compositions of two.
COMPOSITIONS = (
    "backward(backward)",
    *(f"{a}({b})" for a, b in itertools.product(_COMPOSED, _COMPOSED[1:])),
)

_FEW = ("grad", "jvp", "vmap")

#: The default of `assert_equivalent`.
USUAL = (
    *TRANSFORMS,
    "backward(backward)",
    "backward(vmap)",
    *(f"{a}({b})" for a, b in itertools.product(_FEW, _FEW)),
)


def parse_transform(name: str) -> tuple[str, ...]:
    """The transforms in a name, the outermost first; refuses what is none, or out of place."""
    wanted = "a name, as in transforms=['grad', 'vmap(grad)']"
    require_type("assert_equivalent(transforms=...)", name, str, wanted=wanted)
    parts = tuple(name.replace(" ", "").rstrip(")").split("("))
    known = (*TRANSFORMS, "functional_call")
    is_nested = re.fullmatch(r"[^()]+(\([^()]+)*\)*", name) is not None
    is_nested = is_nested and name.count("(") == name.count(")")
    inner = itertools.dropwhile("backward".__eq__, parts)
    is_placed = "backward" not in inner and "functional_call" not in parts[:-1]
    if not (is_nested and is_placed and all(part in known for part in parts)):
        raise ValueError(
            f"the transform {name!r} is none that assert_equivalent knows. They are "
            f"{', '.join(known)}, and compositions, outermost first: 'vmap(grad)'. "
            "'backward' is outermost, as plain autograd does not run inside torch.func, "
            "and 'functional_call', which replaces a module's parameters, innermost."
        )
    return parts


def under_transforms(parts: Sequence[str], f: Flat) -> Flat:
    """A function under named transforms, the last name first."""
    for part in reversed(parts):
        f = functools.partial(_transformed, part, f)
    return f
