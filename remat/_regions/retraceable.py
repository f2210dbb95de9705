"""A flat function that can be traced again: for its derivatives, or for other cotangents."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, final

from remat._graph.joint import Joint
from remat._graph.meta import TensorMeta, is_open
from remat._graph.values import Graph
from remat._programs.inside_traces import interpret
from remat._switches.numerics import Numerics
from remat._torch import autograd, tracer
from remat._tracing.open_sizes import Templates
from remat._tracing.trace import Flat, Request, trace, with_states

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
    #: Where those of its traces are kept that hold for other sizes; None if sizes do not
    #: vary.
    templates: Templates | None = None
    #: How it was derived, which tells its templates from those of others.
    key: tuple[Hashable, ...] = ()
    #: Whether it is a program, or made from one: its derivatives are those of its operators.
    is_program: bool = False

    def of_program(self, graph: Graph) -> Function:
        """A program of this function as a function: each of its steps can be differentiated."""

        def build(_: Roots) -> Flat:
            return lambda tensors: interpret(graph, tensors)

        # The casts of autocast are steps of the program.
        numerics = self.numerics._replace(autocast=())
        nothing = contextlib.nullcontext[Roots]
        return Function(build, nothing, numerics, self.backend, is_program=True)

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
        try:
            return self.traced(roots, operands, states, gradients=wants)
        except RuntimeError as error:
            if strict or not wants or not autograd.has_no_formula(error):
                raise
        return self.traced(roots, operands, states, gradients=False)
