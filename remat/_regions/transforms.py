"""Functions made from flat functions: their pullback, their pushforward, their map.

Each is again a flat function (tensors in, tensors out), so that it can be traced, and
derived from, like the one it came from. They follow the operand layouts of `_regions.traced`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from remat._graph.meta import TensorMeta
from remat._torch import autograd, forward_ad, levels
from remat._tracing.trace import Flat


class Batch(NamedTuple):
    """How a vmap level maps the tensors of a region."""

    size: int  # the size of the mapped dimension
    randomness: str  # vmap's own option
    #: The mapped dimension of each physical tensor, None where it has none.
    dims: tuple[int | None, ...]
    metas: tuple[TensorMeta, ...]  # the metadata of the physical tensors


@final
@dataclasses.dataclass(frozen=True)
class Pull:
    """Which cotangents a pullback takes and which gradients it gives."""

    #: Indices, among what the function returns, of the outputs that have one.
    outputs: tuple[int, ...]
    wanted: tuple[int, ...]  # the operands whose gradient is asked for
    num_operands: int  # how many operands the function takes


def pullback(function: Flat, pull: Pull, *, create_graph: bool = True) -> Flat:
    """(operands, ..., cotangents) -> the gradients of the wanted operands."""

    def gradients(tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        operands = list(tensors[: pull.num_operands])
        cotangents = tensors[len(tensors) - len(pull.outputs) :]

        def outputs(*wanted: Tensor) -> tuple[Tensor, ...]:
            for index, tensor in zip(pull.wanted, wanted, strict=True):
                operands[index] = tensor
            returned = function(operands)
            return tuple(_require_output(returned[index]) for index in pull.outputs)

        wanted = [operands[index] for index in pull.wanted]
        if levels.interpreter_is_active():
            pull_back = torch.func.vjp(outputs, *wanted)[1]
            return pull_back(tuple(cotangents))
        # Unlike torch.func.vjp this takes users' autograd.Functions of the older form.
        return _gradients(outputs(*wanted), wanted, cotangents, create_graph)

    return gradients


def _chosen_outputs(
    returned: Sequence[Tensor | None], outputs: tuple[int, ...] | None
) -> tuple[Tensor, ...]:
    places = range(len(returned)) if outputs is None else outputs
    return tuple(_require_output(returned[place]) for place in places)


def _require_output(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "an output of the first trace is missing in this one"
    return tensor


def _gradients(
    outputs: Sequence[Tensor],
    wanted: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    create_graph: bool,
) -> Sequence[Tensor | None]:
    pairs = [
        (output, cotangent)
        for output, cotangent in zip(outputs, cotangents, strict=True)
        if output.requires_grad
    ]
    if not pairs:
        return [None] * len(wanted)
    differentiable, given = zip(*pairs, strict=True)
    if not create_graph:
        # DTensor's own backward complains of cotangents that could be differentiated.
        given = [autograd.detached(each) for each in given]
    return torch.autograd.grad(
        differentiable, wanted, given, create_graph=create_graph, allow_unused=True
    )


def pushforward(
    function: Flat, outputs: tuple[int, ...] | None, has_tangent: tuple[bool, ...]
) -> Flat:
    """(operands, ..., tangents) -> the tangents of these outputs, of all for None."""

    def tangents(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return _pushed(function, outputs, None, has_tangent, tensors)[1]

    return tangents


def with_pushforward(
    function: Flat,
    outputs: tuple[int, ...],
    moved: tuple[int, ...],
    has_tangent: tuple[bool, ...],
) -> Flat:
    """(operands, ..., tangents) -> these outputs, then the tangents of some of them.

    Args:
        function: what to push forward.
        outputs: which of its results to return.
        moved: which of these have a tangent.
        has_tangent: which operands have one.
    """

    def values_and_tangents(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        values, tangents = _pushed(function, outputs, moved, has_tangent, tensors)
        return [*values, *tangents]

    return values_and_tangents


def _pushed(
    function: Flat,
    outputs: tuple[int, ...] | None,
    moved: tuple[int, ...] | None,
    has_tangent: tuple[bool, ...],
    tensors: Sequence[Tensor],
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """These outputs, and the tangents of some of them; None is all."""
    operands = list(tensors[: len(has_tangent)])
    wanted = [k for k, each in enumerate(operands) if each.requires_grad]
    run = tracked(lambda given: _chosen_outputs(function(given), outputs), wanted)
    pushed = [index for index, has in enumerate(has_tangent) if has]
    given = tuple(tensors[len(tensors) - len(pushed) :])

    def of(*primals: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        for index, tensor in zip(pushed, primals, strict=True):
            operands[index] = tensor
        found = _chosen_outputs(run(operands), None)
        return _chosen_outputs(found, moved), found

    primals = tuple(operands[index] for index in pushed)
    with forward_ad.shared_dual_level():
        found: Any = torch.func.jvp(of, primals, given, has_aux=True)
    _, tangents, values = found
    return values, tangents


def tracked(function: Flat, wanted: Sequence[int]) -> Flat:
    """The function as it runs where these operands require grad.

    The wrappers of forward mode and of vmap hide that. Attention chooses its kernel by it,
    and torch decides by it whether to decompose an operator.
    """

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        operands = list(tensors)

        def of(*given: Tensor) -> tuple[Tensor, ...]:
            for index, tensor in zip(wanted, given, strict=True):
                operands[index] = tensor
            return _chosen_outputs(function(operands), None)

        given = [tensors[index] for index in wanted]
        return _outputs_of_vjp(of, given) if given else of()

    return run


def _outputs_of_vjp(
    function: Callable[..., tuple[Tensor, ...]], given: Sequence[Tensor]
) -> Sequence[Tensor]:
    """What a function returns under reverse mode, which refuses integer outputs."""
    kinds: list[bool] = []

    def apart(*primals: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        found = function(*primals)
        kinds[:] = [each.is_floating_point() or each.is_complex() for each in found]
        pairs = list(zip(found, kinds, strict=True))
        # One output at least, or torch raises; and one beside it.
        outputs = (*(each for each, is_real in pairs if is_real), primals[0])
        others = (*(each for each, is_real in pairs if not is_real), primals[0])
        return outputs, others

    found: Any = torch.func.vjp(apart, *given, has_aux=True)
    outputs, _, others = found
    real, whole = iter(outputs), iter(others)
    return [next(real) if is_real else next(whole) for is_real in kinds]


def mapped(
    function: Flat,
    outputs: tuple[int, ...] | None,
    batch: Batch,
    skip: int,
    are_apart: bool = False,
    unmapped: frozenset[int] = frozenset(),
) -> Flat:
    """The physical operands -> these outputs, each mapped over its first dimension.

    Args:
        function: what to map.
        outputs: which of its results to return, None for all.
        batch: how to map.
        skip: how many leading tensors of `batch` are not among the operands.
        are_apart: whether each result gets memory of its own, as the outputs of a program
            have: torch maps some operators by others, whose result may be an operand.
        unmapped: the places of outputs that no mapped tensor reaches, which are not mapped.
    """

    def of(*operands: Tensor) -> tuple[Tensor, ...]:
        return _chosen_outputs(function(operands), outputs)

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        dims = batch.dims[skip:]
        over = levels.restore_vmap(of, dims, batch.size, batch.randomness)
        found, found_dims = over(*tensors)
        firsts = [
            tensor if k in unmapped else mapped_first(tensor, dim, batch.size)
            for k, (tensor, dim) in enumerate(zip(found, found_dims, strict=True))
        ]
        return [each.clone() for each in firsts] if are_apart else firsts

    return run


def mapped_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """A physical tensor with its mapped dimension first, repeated if it has none."""
    if dim is None:
        return tensor.expand(size, *tensor.shape)
    return tensor if dim == 0 else tensor.movedim(dim, 0)
