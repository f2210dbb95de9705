"""Random functions, drawn statement by statement; each one runs when it is drawn."""

from __future__ import annotations

import dataclasses
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from remat._names import checkpoint_name
from remat.testing.strategies._hypothesis import st
from remat.testing.strategies._operators import GROUPS, SIMPLE, Statement
from remat.testing.strategies._policies import NAMES, policies
from remat.testing.strategies._program import (
    CAPTURED_OPERANDS,
    CELLS,
    GLOBALS,
    Inner,
    Program,
    Step,
)
from remat.testing.strategies._tensors import TensorSpec, normal, shapes, tensors

_REFUSED = (RuntimeError, IndexError, ValueError)


@st.composite
def programs(
    draw: st.DrawFn,
    *,
    max_steps: int = 6,
    max_inner: int = 2,
    kinds: tuple[str, ...] = ("plain", "in place", "capture"),
    captures: bool = True,
) -> Program:
    """Random pure functions of one or two matrices, and what to call them with.

    They shrink to few, simple statements without regions inside.

    Args:
        draw: hypothesis passes it.
        max_steps: how many statements a function has at most.
        max_inner: how many regions it has inside at most.
        kinds: what its statements may be besides pointwise ones, names, `detach` and
            transposition: "plain" (reductions, norms, products, indexing, operators with
            several outputs), "in place", "capture" (modules, Python numbers), "draw"
            (random numbers of the default generator), "state" (buffers).
        captures: whether operands may be captured tensors: globals, cells, attributes.
    """
    statements = [*SIMPLE, *(each for kind in kinds for each in GROUPS[kind])]
    shape = draw(shapes())
    arguments = tuple(
        draw(tensors(shape=shape, seed=seed)) for seed in range(draw(_counts(1, 2)))
    )
    writer = _Writer(arguments, captures)
    for _ in range(draw(_counts(1, max_steps))):
        writer.add(draw, draw(st.sampled_from(statements)))
    program = writer.program(draw)
    return _with_inner(draw, program, draw(_counts(0, max_inner)))


def _counts(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


@final
class _Writer:
    """Draws steps and runs each, to know the shapes of what it makes."""

    def __init__(self, arguments: tuple[TensorSpec, ...], captures: bool) -> None:
        self.arguments = arguments
        self.steps: list[Step] = []
        self.values: dict[str, Any] = {
            "torch": torch,
            "F": F,
            "normal": normal,
            "checkpoint_name": checkpoint_name,
        }
        width = arguments[0].shape[-1]
        for name, code in (GLOBALS | CELLS).items():
            self.values[name] = eval(code.format(width=width), dict(self.values))
        for place, spec in enumerate(arguments):
            self.values[f"x{place}"] = spec.make()
        self.operands = [f"x{place}" for place in range(len(arguments))]
        self.captured = list(CAPTURED_OPERANDS) if captures else []
        self.makes: list[str] = []

    def add(self, draw: st.DrawFn, statement: Statement) -> None:
        """Adds a statement with drawn operands, unless there are none that it takes."""
        operands = tuple(
            draw(st.sampled_from([*self.operands, *self.captured]))
            for _ in range(statement.num_operands)
        )
        name = draw(st.sampled_from(NAMES)) if statement.name == "name" else ""
        number = len(self.makes)
        other = f"v{number + 1}" if statement.has_other else ""
        step = Step(statement, operands, f"v{number}", other, name)
        alike = dataclasses.replace(step, operands=operands[:1] * len(operands))
        for each in dict.fromkeys((step, alike)):
            if self._runs(each):
                self.steps.append(each)
                self.makes += each.makes
                self.operands += [k for k in each.makes if self._is_matrix(k)]
                return

    def _runs(self, step: Step) -> bool:
        values = dict(self.values)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
                exec("\n".join(step.lines), values)
        except _REFUSED:
            return False
        made: list[Tensor] = [values[name] for name in step.makes]
        if not all(each.numel() and bool(each.isfinite().all()) for each in made):
            return False
        self.values |= {name: values[name] for name in step.makes}
        return True

    def _is_matrix(self, name: str) -> bool:
        tensor: Tensor = self.values[name]
        return tensor.is_floating_point() and tensor.dim() == 2

    def program(self, draw: st.DrawFn) -> Program:
        """The program of the steps that its drawn outputs need, and of all effects."""
        if not self.makes:
            return Program(self.arguments, (), ("x0",))
        others = draw(st.lists(st.sampled_from(self.makes), max_size=2))
        outputs = tuple(dict.fromkeys([self.operands[-1], *others]))
        needed, kept = {*outputs}, list[Step]()
        for step in reversed(self.steps):
            has_effect = step.statement.kind in ("draw", "state")
            if has_effect or needed.intersection(step.makes):
                needed.update(step.operands)
                kept.append(step)
        return Program(self.arguments, tuple(reversed(kept)), outputs)


def _with_inner(draw: st.DrawFn, program: Program, count: int) -> Program:
    found: list[Inner] = []
    first = 0
    for _ in range(count):
        if first >= len(program.steps):
            break
        start = draw(st.integers(first, len(program.steps) - 1))
        stop = draw(st.integers(start + 1, len(program.steps)))
        inner = Inner(start, stop, draw(policies()))
        if program.gives(inner):
            found.append(inner)
            first = stop
    return dataclasses.replace(program, inner=tuple(found))
