"""Flat functions, tensors in and tensors out: traced again, and the functions made from them.

The pullback, the pushforward and the map of a flat function are flat functions again, so that
they can be traced, and derived from, like the one that they came from. They follow the operand
layouts of `_regions.traced`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from remat._errors import TraceError
from remat._graph.joint import Joint
from remat._graph.meta import TensorMeta, is_open
from remat._graph.values import Graph
from remat._programs.inside_traces import interpret
from remat._switches.numerics import Numerics
from remat._torch import autograd, levels, tracer
from remat._tracing.open_sizes import Templates
from remat._tracing.trace import Flat, Request, trace, with_states

_V = TypeVar("_V")

# The function that a call is of, and the objects among its arguments.
Roots = tuple[object, ...]


@final
@dataclasses.dataclass(frozen=True)
class Function:
    """A flat function that can be executed again, for another trace."""

    #: From a call's roots to the function, tensors in and tensors out.
    build: Callable[[Roots], Flat]
    #: A context in which the state that the function reads is what it was.
    restored: Callable[[Roots], contextlib.AbstractContextManager[Any]]
    numerics: Numerics  # the switches under which the forward runs
    #: What compiles its programs, and those of its derivatives.
    backend: str | None = None
    #: Where its traces that hold for other sizes are kept; None if sizes do not vary.
    templates: Templates | None = None
    #: How it was derived, which tells its templates from those of others.
    key: tuple[Hashable, ...] = ()
    #: Whether it is a program, or made from one: its derivatives are those of its operators.
    is_program: bool = False
    #: Whether its gradients are made by the formulas that torch has for those that it records.
    is_recorded: bool = False

    def recorded(self) -> Function:
        """The function whose gradients can be differentiated, also those of its programs."""
        return dataclasses.replace(
            self, is_recorded=True, key=(*self.key, ("recorded",))
        )

    def of_program(self, graph: Graph) -> Function:
        """A program of this function as a function: each of its steps can be differentiated."""
        # The casts of autocast are steps of the program.
        numerics = self.numerics._replace(autocast=())
        nothing = contextlib.nullcontext[Roots]
        run = functools.partial(interpret, graph)
        found = Function(
            lambda _: run, nothing, numerics, self.backend, is_program=True
        )
        return found.recorded() if self.is_recorded else found

    def derive(self, transform: Callable[[Flat], Flat], *step: Hashable) -> Function:
        """A function made from this one, under the switches of this one."""
        build = self.build

        def derived(roots: Roots) -> Flat:
            return transform(build(roots))

        return dataclasses.replace(self, build=derived, key=(*self.key, step))

    def traced(
        self,
        roots: Roots,
        operands: tuple[TensorMeta, ...],
        states: tuple[int, ...],
        *,
        cotangents: tuple[TensorMeta | None, ...] | None = None,
        backward_numerics: Numerics | None = None,
        gradients: bool = True,
    ) -> tuple[Joint, ...]:
        """The joint graphs of the function, traced if no template holds."""
        request = Request(
            self.build(roots),
            operands,
            cotangents,
            backward_numerics=backward_numerics,
            gradients=gradients,
            is_program=self.is_program,
            is_recorded=self.is_recorded,
        )
        with (
            tracer.one_trace_at_a_time(),
            self.restored(roots),
            self.numerics.applied(),
        ):
            if self.templates is None or any(map(is_open, operands)):
                joints = trace(request).joints
            else:
                joints = self.templates.joints(self.key, request)
        return tuple(with_states(joint, states) for joint in joints)

    def outline(
        self,
        roots: Roots,
        operands: tuple[TensorMeta, ...],
        states: tuple[int, ...],
        *,
        strict: bool = False,
    ) -> tuple[Joint, ...]:
        """The same for a derived function: with its backward where a gradient is wanted.

        Without one where an operator lacks a derivative, unless `strict`: who needs it
        then traces again.
        """
        wants = any(meta.requires_grad for meta in operands)
        if strict or not wants:
            return self.traced(roots, operands, states, gradients=wants)
        found = if_derivable(lambda: self.traced(roots, operands, states))
        return found or self.traced(roots, operands, states, gradients=False)


def interpreted(graph: Graph) -> Flat:
    """A program as a flat function; where it is traced under autocast, it holds its casts."""

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        with Numerics.current().settled():
            return interpret(graph, tensors)

    return run


def if_derivable(trace: Callable[[], _V]) -> _V | None:
    """What a trace gives; None where an operator lacks a derivative that it needs.

    Or has one that looks at values, as that of a complex `svd` does: who needs it is told then.
    """
    try:
        return trace()
    except TraceError:
        return None
    except RuntimeError as error:
        if not autograd.has_no_formula(error):
            raise
        return None


class Batch(NamedTuple):
    """How a vmap level maps the tensors of a region."""

    size: int  # the size of the mapped dimension
    randomness: str  # vmap's own option
    #: The mapped dimension of each physical tensor, None where it has none.
    dims: tuple[int | None, ...]
    metas: tuple[TensorMeta, ...]  # the metadata of the physical tensors
    #: Whether a level above takes a gradient, which shows in the function; one below does not.
    is_tracked: bool = True


class Pull(NamedTuple):
    """Which cotangents a pullback takes and which gradients it gives."""

    outputs: tuple[int, ...]  # which of what the function returns have a cotangent
    wanted: tuple[int, ...]  # the operands whose gradient is asked for
    num_operands: int  # how many operands the function takes
    #: Others that require a gradient, which the function may ask of them.
    tracked: tuple[int, ...] = ()


def pullback(
    function: Flat,
    pull: Pull,
    *,
    create_graph: bool = True,
    grad: Callable[..., Sequence[Tensor | None]] = torch.autograd.grad,
) -> Flat:
    """(operands, ..., cotangents) -> the gradients of the wanted operands.

    `grad` takes them by plain autograd, as `torch.autograd.grad` does.
    """

    def gradients(tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        if not pull.wanted:
            return []
        operands = tensors[: pull.num_operands]
        cotangents = tensors[len(tensors) - len(pull.outputs) :]

        def outputs(*wanted: Tensor) -> tuple[Tensor, ...]:
            given = _at_this_level(operands, pull.wanted, wanted, pull.tracked)
            return _chosen_outputs(function(given), pull.outputs)

        if levels.interpreter_is_active():
            # A map of cotangents alone is none of the function, which draws as it did before.
            with levels.outside_maps(operands) as operands:
                wanted = (operands[index] for index in pull.wanted)
                pull_back = torch.func.vjp(outputs, *wanted)[1]
            return pull_back(tuple(cotangents))
        wanted = [operands[index] for index in pull.wanted]
        # Unlike torch.func.vjp this takes users' autograd.Functions of the older form.
        pairs = zip(outputs(*wanted), cotangents, strict=True)
        differentiable = [pair for pair in pairs if pair[0].requires_grad]
        if not differentiable:
            return [None] * len(wanted)
        roots, given = zip(*differentiable, strict=True)
        if not create_graph:
            # DTensor's own backward complains of cotangents that could be differentiated.
            given = [each.detach() for each in given]
        return grad(roots, wanted, given, create_graph=create_graph, allow_unused=True)

    return gradients


def _at_this_level(
    operands: Sequence[Tensor],
    places: Sequence[int],
    primals: Sequence[Tensor],
    tracked: Sequence[int] = (),
) -> list[Tensor]:
    """The operands inside of a transform, some of them as it gives them.

    The others are wrapped, too: they may be written to, which torch.func refuses of captured ones.
    Those that are tracked require a gradient all the same.
    """
    active = levels.current_interpreter()
    given = dict(zip(places, primals, strict=True))
    if active is None:
        return [given.get(index, each) for index, each in enumerate(operands)]
    level = active[1].level()
    found = [
        given[index] if index in given else levels.wrap_at(each, level)
        for index, each in enumerate(operands)
    ]
    levels.require_gradients([found[index] for index in tracked])
    return found


def _chosen_outputs(
    returned: Sequence[Tensor | None], outputs: tuple[int, ...] | None
) -> tuple[Tensor, ...]:
    found = returned if outputs is None else [returned[k] for k in outputs]
    present = tuple(tensor for tensor in found if tensor is not None)
    assert len(present) == len(found), "an output of the first trace is missing here"
    return present


def pushforward(
    function: Flat,
    outputs: tuple[int, ...] | None,
    has_tangent: tuple[bool, ...],
    differentiated: Sequence[int],
    *,
    moved: tuple[int, ...] | None = None,
    with_values: bool = False,
) -> Flat:
    """(operands, ..., tangents) -> the tangents of these outputs, None for all results.

    `differentiated` are the operands that require grad where the function is called, which need not
    show below. `moved` says which outputs have a tangent, None for all; `with_values` puts the
    outputs first.
    """
    pushed = [index for index, has in enumerate(has_tangent) if has]

    def tangents(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        operands = list(tensors[: len(has_tangent)])
        run = tracked(
            lambda given: _chosen_outputs(function(given), outputs), differentiated
        )

        def of(*primals: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            found = _chosen_outputs(
                run(_at_this_level(operands, pushed, primals)), None
            )
            # One output at least, or torch raises: a backward may have no gradient to give.
            return (*_chosen_outputs(found, moved), primals[0]), found

        primals = tuple(operands[index] for index in pushed)
        given = tuple(tensors[len(tensors) - len(pushed) :])
        with levels.shared_dual_level():
            found: Any = torch.func.jvp(of, primals, given, has_aux=True)
        _, (*made, _), values = found
        return [*values, *made] if with_values else made

    return tangents


def tracked(function: Flat, wanted: Sequence[int]) -> Flat:
    """The function as it runs where these operands require grad.

    The wrappers of forward mode and of vmap hide that. Attention chooses its kernel by it,
    and torch decides by it whether to decompose an operator.
    """

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        operands, kinds = list(tensors), list[bool]()
        given = [tensors[index] for index in wanted]
        if not given:
            return _chosen_outputs(function(operands), None)

        def apart(*primals: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            """The outputs, and apart from these the integer ones, which reverse mode refuses."""
            given = _at_this_level(operands, wanted, primals)
            found = _chosen_outputs(function(given), None)
            kinds[:] = [each.is_floating_point() or each.is_complex() for each in found]
            whole = [not is_real for is_real in kinds]
            # One output at least, or torch raises; and one beside it.
            outputs = (*itertools.compress(found, kinds), primals[0])
            return outputs, (*itertools.compress(found, whole), primals[0])

        found: Any = torch.func.vjp(apart, *given, has_aux=True)
        real, whole = iter(found[0]), iter(found[2])
        return [next(real) if is_real else next(whole) for is_real in kinds]

    return run


def mapped(
    function: Flat,
    outputs: tuple[int, ...] | None,
    batch: Batch,
    skip: int,
    are_apart: bool = False,
    unmapped: frozenset[int] = frozenset(),
) -> Flat:
    """The physical operands -> these outputs, None for all, each mapped over its first dimension.

    The first `skip` tensors of `batch` are no operands. If `are_apart`, each result gets memory of
    its own, as the outputs of a program have: torch maps some operators by others, whose result may
    be an operand. `unmapped` are the places of outputs that no mapped tensor reaches.
    """

    def of(*operands: Tensor) -> tuple[Tensor, ...]:
        return _chosen_outputs(function(operands), outputs)

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        dims = batch.dims[skip:]
        over = levels.restore_vmap(of, dims, batch.size, batch.randomness)
        found, found_dims = over(*tensors)
        physical: list[Tensor] = []
        for k, (tensor, dim) in enumerate(zip(found, found_dims, strict=True)):
            if k not in unmapped:
                physical.append(mapped_first(tensor, dim, batch.size))
            else:  # a stack maps all that it returns: each example has the same
                physical.append(tensor if dim is None else tensor.select(dim, 0))
        return [each.clone() for each in physical] if are_apart else physical

    return run


def mapped_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """A physical tensor with its mapped dimension first, repeated if it has none."""
    if dim is None:
        return tensor.expand(size, *tensor.shape)
    return tensor if dim == 0 else tensor.movedim(dim, 0)
