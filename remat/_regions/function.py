"""A flat function that can be traced again: for its derivatives, or for other cotangents."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, final

from remat._graph.values import is_open
from remat._switches.numerics import Numerics
from remat._tracing.open_sizes import Templates
from remat._tracing.trace import Flat, Joint, Request, trace

# The function that a call is of, and the objects among its arguments.
Roots = tuple[object, ...]


@final
@dataclasses.dataclass(frozen=True)
class Function:
    """A flat function that can be executed again, for another trace.

    Attributes:
        build: from a call's roots to the function, tensors in and tensors out.
        restored: a context in which the state that the function reads is what it was.
        numerics: the switches under which the forward runs.
        backend: what compiles its programs, and those of its derivatives.
        templates: where those of its traces are kept that hold for other sizes; None if
            sizes do not vary.
        key: how it was derived, which tells its templates from those of others.
    """

    build: Callable[[Roots], Flat]
    restored: Callable[[Roots], contextlib.AbstractContextManager[Any]]
    numerics: Numerics
    backend: str | None = None
    templates: Templates | None = None
    key: tuple[Hashable, ...] = ()

    def derive(self, transform: Callable[[Flat], Flat], *step: Hashable) -> Function:
        """The same with another function made from this one.

        Args:
            transform: makes the other function.
            step: tells it from others that are made so from this one.
        """
        build = self.build

        def derived(roots: Roots) -> Flat:
            return transform(build(roots))

        return dataclasses.replace(self, build=derived, key=(*self.key, step))

    def joints(self, request: Request) -> tuple[Joint, ...]:
        """The joint graphs of a request, traced if no template holds."""
        if self.templates is None or any(map(is_open, request.operands)):
            return trace(request).joints
        return self.templates.joints(self.key, request)
