"""Permission by brute force: what a random function saves and recomputes, from its text.

Nothing here looks at a graph of the engine. It knows of nine statements what their
derivatives read, and walks back by the words of law 2.
"""

from collections import Counter

import torch

from remat import policies
from remat.policies import Save
from remat.testing.strategies import Program
from remat.testing.strategies._operators import SIMPLE
from remat.testing.strategies._program import Step

#: What the derivative of each operator reads; the others are aliases and read nothing.
READS = {
    "sin": "operand",
    "cos": "operand",
    "tanh": "result",
    "sigmoid": "result",
    "mul": "other operand",
    "add": "nothing",
}
#: What the derivative of some of them computes of the operand, which the function may have
#: computed too: then it is one value.
COMPUTES = {"sin": "cos", "cos": "sin"}
COUNTED = ("sin", "cos", "tanh", "sigmoid", "clone")


def is_simple(program: Program) -> bool:
    """Whether the oracle knows every statement."""
    known = {statement.name for statement in SIMPLE}
    return {step.statement.name for step in program.steps} <= known


class Oracle:
    """The values of a simple program: whose alias each is, and whether gradients flow."""

    def __init__(self, program: Program, policy: policies.AbstractPolicy) -> None:
        self.policy = policy
        self.makers: dict[str, Step] = {}
        self.root: dict[str, str] = {}
        self.number: dict[str, object] = {}
        self.stops: set[str] = set()
        self.names: dict[object, set[str]] = {}
        for step in program.steps:
            self._enter(step)
        self.used = self._used(program)

    def _enter(self, step: Step) -> None:
        out, kind = step.makes[0], step.statement.name
        self.makers[out] = step
        operands = tuple(self.number.get(k, k) for k in step.operands)
        self.root[out], self.number[out] = out, (kind, operands)
        if kind not in READS:
            (operand,) = step.operands
            self.root[out] = self.root.get(operand, operand)
            if kind != "transpose":
                self.number[out] = operands[0]
        if kind == "name":
            owner = self.root[out]
            named = self.names.setdefault(self.number.get(owner, owner), set())
            named.add(step.name)
        if kind == "detach" or not any(self.flows(k) for k in step.operands):
            self.stops.add(out)

    def flows(self, value: str) -> bool:
        """Whether a gradient flows to a value; it does to every argument and capture."""
        return value not in self.stops

    def _used(self, program: Program) -> set[str]:
        """The values through which gradients flow back from the outputs."""
        used = {out for out in program.outputs if self.flows(out)}
        for step in reversed(program.steps):
            if step.makes[0] in used:
                used |= {k for k in step.operands if self.flows(k)}
        return used

    def _reads(self, step: Step) -> set[str]:
        match READS.get(step.statement.name):
            case "operand":
                return set(step.operands)
            case "result":
                return {step.makes[0]}
            case "other operand":
                one, other = step.operands
                pairs = ((one, other), (other, one))
                return {read for read, needs in pairs if self.flows(needs)}
            case _:
                return set()

    def permits(self, value: str) -> bool:
        """Whether the policy permits a value that is no alias to be saved."""
        number = self.number[value]
        op = getattr(torch.ops.aten, self.makers[value].statement.name)
        asked = policies.Value(
            op=getattr(op, "default", None) or op.Tensor,
            names=tuple(sorted(self.names.get(number, ()))),
            shape=(),
            dtype=torch.float64,
            size_bytes=0,
            flops=0,
            source="",
            function="",
        )
        return isinstance(policies.decide(self.policy, asked), Save)

    def walk(self) -> tuple[dict[object, set[str]], Counter[str]]:
        """The names of what is saved, by class, and the operators that run again."""
        wanted: list[str] = []
        saved: dict[object, set[str]] = {}
        spared: Counter[str] = Counter()
        for step in map(self.makers.__getitem__, self.used & {*self.makers}):
            twin = self._computed(step)
            if twin is None:
                wanted += self._reads(step)
            else:
                saved[self.number[twin]] = self.names.get(self.number[twin], set())
                spared[self.makers[twin].statement.name] -= 1
        again: dict[str, str] = {}
        while wanted:
            value = wanted.pop()
            value = self.root.get(value, value)
            if value not in self.makers or value in again:
                continue
            if self.permits(value):
                saved[self.number[value]] = self.names.get(self.number[value], set())
            else:
                again[value] = self.makers[value].statement.name
                wanted += self.makers[value].operands
        spared.update(again.values())
        return saved, spared

    def _computed(self, step: Step) -> str | None:
        """A permitted value that equals what the derivative of a step computes."""
        kind = COMPUTES.get(step.statement.name)
        number = (kind, tuple(self.number.get(k, k) for k in step.operands))
        equal = (v for v, each in self.number.items() if each == number)
        return next(filter(self.permits, (v for v in equal if self.root[v] == v)), None)
