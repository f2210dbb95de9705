"""Random functions: first everything is drawn, then the drawn statements run.

Nothing is drawn after a statement has run. Otherwise the draws would depend on torch's results,
which may vary, while hypothesis requires that a strategy is repeatable. So an operand is drawn as
a number, which is taken modulo the number of values that exist by then.
"""

import dataclasses
import warnings
from typing import Any, final

import torch
from torch import Tensor

from remat import policies as _policies
from remat._errors import require_choice
from remat.policies import AbstractPolicy
from remat.testing._named_transforms import COMPOSITIONS, TRANSFORMS
from remat.testing.strategies._operators import GROUPS, SIMPLE, Statement
from remat.testing.strategies._program import (
    CAPTURED_OPERANDS,
    CELLS,
    GLOBALS,
    NAMESPACE,
    Inner,
    Program,
    Step,
)
from remat.testing.strategies._tensors import TensorSpec, shapes, st, tensors

_REFUSED = (RuntimeError, IndexError, ValueError)
# What generated functions call their values.
_NAMES = ("a", "b", "c")


def policies() -> st.SearchStrategy[AbstractPolicy]:
    """Policies that ask for no storage but `Keep`, and combinations of two of them."""
    globs = st.lists(st.sampled_from(_NAMES), min_size=1, max_size=2, unique=True)
    fixed: list[AbstractPolicy] = [
        _policies.nothing_saveable,
        _policies.everything_saveable,
        _policies.save_matmul_outputs,
    ]
    simple = st.one_of(
        st.sampled_from(fixed),
        globs.map(lambda names: _policies.save_only_these_names(*names)),
        globs.map(lambda names: _policies.save_any_names_but_these(*names)),
        globs.map(lambda names: _policies.save_anything_except_these_names(*names)),
        st.sampled_from([8, 32]).map(lambda size: _policies.by_size(min_bytes=size)),
    )
    unions = st.tuples(simple, simple).map(lambda pair: pair[0] | pair[1])
    return st.one_of(simple, unions)


def transforms() -> st.SearchStrategy[str]:
    """The names of single transforms and of compositions of two, single ones first."""
    return st.one_of(st.sampled_from(TRANSFORMS), st.sampled_from(COMPOSITIONS))


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

    They shrink to a few simple statements without regions inside.

    Args:
        draw: hypothesis passes it.
        max_steps: how many statements a function has at most.
        max_inner: how many regions it has inside at most.
        kinds: which statements it may have besides pointwise ones, names, `detach` and
            transposition: "plain" (reductions, norms, products, indexing, operators
            with several outputs), "in place", "capture" (modules, Python numbers),
            "draw" (random numbers of the default generator), "state" (buffers).
        captures: whether operands may be captured tensors: globals, cells, attributes.
    """
    for kind in kinds:
        require_choice("kinds", kind, tuple(GROUPS), of="strategies.programs")
    statements = [*SIMPLE, *(each for kind in kinds for each in GROUPS[kind])]
    shape = draw(shapes())
    arguments = tuple(
        draw(tensors(shape=shape, seed=seed)) for seed in range(draw(st.integers(1, 2)))
    )
    operands = st.tuples(_NUMBERS, _NUMBERS)
    choice = st.tuples(st.sampled_from(statements), operands, st.sampled_from(_NAMES))
    choices = draw(st.lists(choice, min_size=1, max_size=max_steps))
    outputs = draw(st.lists(_NUMBERS, max_size=2))
    span = st.builds(Inner, _NUMBERS, _NUMBERS, policies())
    spans = draw(st.lists(span, max_size=max_inner))
    writer = _Writer(arguments, captures)
    for drawn in choices:
        writer.add(*drawn)
    return _with_inner(writer.program(outputs), spans)


# They stand for operands, and for where regions inside start and stop: large enough for
# each operand of a long function to be as likely as the next.
_NUMBERS = st.integers(0, 255)


@final
class _Writer:
    """Makes steps from choices, and runs each to know the shapes of its results."""

    def __init__(self, arguments: tuple[TensorSpec, ...], captures: bool) -> None:
        self.arguments = arguments
        self.steps: list[Step] = []
        self.values: dict[str, Any] = {**NAMESPACE}
        width = arguments[0].shape[-1]
        for name, code in (GLOBALS | CELLS).items():
            self.values[name] = eval(code.format(width=width), dict(self.values))
        for place, spec in enumerate(arguments):
            self.values[f"x{place}"] = spec.make()
        self.operands = [f"x{place}" for place in range(len(arguments))]
        self.captured = list(CAPTURED_OPERANDS) if captures else []
        self.makes: list[str] = []

    def add(self, statement: Statement, numbers: tuple[int, int], name: str) -> None:
        there = [*self.operands, *self.captured]
        numbers_used = numbers[: statement.num_operands]
        operands = tuple(there[number % len(there)] for number in numbers_used)
        name = name if statement.name == "name" else ""
        first = len(self.makes)
        makes = tuple(f"v{first + place}" for place in range(statement.num_results))
        step = Step(statement, operands, makes, name)
        alike = dataclasses.replace(step, operands=operands[:1] * len(operands))
        for each in dict.fromkeys((step, alike)):
            if self._runs(each):
                self.steps.append(each)
                self.makes += each.makes
                made = [(name, self.values[name]) for name in each.makes]
                self.operands += [
                    k for k, v in made if v.is_floating_point() and v.dim() == 2
                ]
                return

    def _runs(self, step: Step) -> bool:
        """Whether torch takes a step, whatever state generators and warnings are in."""
        values = dict(self.values)
        generators = torch.random.fork_rng(devices=[])  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        try:
            with generators, torch.no_grad(), warnings.catch_warnings():
                # torch gives some warnings once a process: as errors they would refuse
                # the first step of a kind, and no later one.
                warnings.simplefilter("ignore")
                torch.default_generator.manual_seed(0)
                exec("\n".join(step.lines), values)
        except _REFUSED:
            return False
        made: list[Tensor] = [values[name] for name in step.makes]
        if not all(each.numel() and bool(each.isfinite().all()) for each in made):
            return False
        self.values |= {name: values[name] for name in step.makes}
        return True

    def program(self, numbers: list[int]) -> Program:
        """The program of the steps that its chosen outputs need, and of all effects."""
        if not self.makes:
            return Program(self.arguments, (), ("x0",))
        others = [self.makes[number % len(self.makes)] for number in numbers]
        outputs = tuple(dict.fromkeys([self.operands[-1], *others]))
        needed, kept = {*outputs}, list[Step]()
        for step in reversed(self.steps):
            has_effect = step.statement.kind in ("draw", "state")
            if has_effect or needed.intersection(step.makes):
                needed.update(step.operands)
                kept.append(step)
        return Program(self.arguments, tuple(reversed(kept)), outputs)


def _with_inner(program: Program, spans: list[Inner]) -> Program:
    found: list[Inner] = []
    first = 0
    for span in spans:
        if first >= len(program.steps):
            break
        start = first + span.start % (len(program.steps) - first)
        stop = start + 1 + span.stop % (len(program.steps) - start)
        inner = Inner(start, stop, span.policy)
        if program.gives(inner):
            found.append(inner)
            first = stop
    return dataclasses.replace(program, inner=tuple(found))
