"""Finds where two computations differ first, by recording and matching their operators.

Both run forward and plain backward, and every result of an ATen operator is kept.
Operators are matched by name, shape and bits, not by position, because a region drops
views and dead work, recomputes, and replaces in-place operators by pure ones. The first
value without a match under the same operator and shape is where they differ. This is
like `diff`, with values instead of lines, and regardless of order.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, final

import torch
from torch import Tensor

from remat._graph import operators
from remat._torch import fakes, levels, modes, trees
from remat._torch.tensors import storage_key
from remat._tracing import naming
from remat._user_lines import user_line
from remat.testing._compare import (
    Gap,
    gap_between,
    require_numbers,
    same_bits,
    same_rest,
)
from remat.testing._named_transforms import (
    contiguous_cotangents,
    gradients,
    is_differentiable,
)
from remat.testing._repeated_call import AFTER, RepeatedCall


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """The first value that differs.

    Attributes:
        phase: "forward" or "backward"; state is compared after the backward.
        op: the operator that makes it, "aten.sin"; "" if all operators agree, and only
            the results of the call differ.
        name: what `checkpoint_name` calls it, or which result it is; "" if nothing does.
        source: the line "file.py:7" of the first function that makes it; "" in the
            backward, whose operators have no line.
        gap: how the two values differ; None where they cannot be compared by element.
        mismatch: why they cannot: their dtypes and shapes, or that one is missing; else "".
    """

    phase: str
    op: str
    name: str
    source: str
    gap: Gap | None
    mismatch: str = ""

    def __str__(self) -> str:
        name = f' "{self.name}"' if self.name and self.op else self.name
        line = f" at {self.source}" if self.source else ""
        where = f"the {self.phase}: {self.op}{name}{line}"
        if name.endswith(AFTER):
            where = name
        return f"the first difference is in {where}: {self.gap or self.mismatch}"


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _ComputedTensor:
    phase: str
    op: str
    source: str
    value: Tensor
    names: list[str]

    @property
    def key(self) -> Hashable:
        """What two steps must share to be compared."""
        return self.phase, self.op, self.value.shape, self.value.dtype


@final
class _Recorder(modes.DispatchMode):
    """Keeps a copy of what each operator on real tensors returns, views left out.

    Memory that a function does not set holds the same numbers in each run.
    """

    hears_names = True

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_ComputedTensor] = []
        self.phase = "forward"
        self._latest: dict[int, _ComputedTensor] = {}

    def _hear(self, op: Any, args: Any, kwargs: Any) -> Any:
        result = modes.run_in_mode(op, args, kwargs)
        if op is naming.MARK:
            step = self._latest.get(storage_key(args[0]))
            if step is not None and args[1] not in step.names:
                step.names.append(args[1])
        elif not operators.returns_view(op) and op not in operators.TRANSPARENT:
            source = user_line() if self.phase == "forward" else ""
            # An in-place operator is compared with the pure one that stands for it.
            name = operators.short_name(op).rstrip("_")
            for tensor in trees.tensor_leaves(result):
                self._keep(name, source, tensor)
        return result

    def _keep(self, op: str, source: str, tensor: Tensor) -> None:
        if fakes.is_fake(tensor) or tensor.layout != torch.strided:
            return
        value = levels.unwrapped(tensor).detach()
        if op in operators.UNINITIALIZED:
            value.fill_(torch.nan if is_differentiable(value) else 1)
        value = value.clone()
        step = _ComputedTensor(self.phase, op, source, value, [])
        self.steps.append(step)
        self._latest[storage_key(tensor)] = step


def first_difference(
    f: Callable[..., Any], g: Callable[..., Any]
) -> Callable[..., Difference | None]:
    """Finds the first operator whose result differs, bit by bit, in two functions.

    Both run once, forward and `.backward()` with fixed cotangents, on copies of the
    arguments and from one state of the generators and captured tensors, which is restored.

    It sees operators on real tensors below autograd, but not inside of an operator. To
    look under a transform, pass both functions transformed:
    `first_difference(torch.func.vmap(f), torch.func.vmap(g))`. Operators that only one
    of the functions runs are skipped: if they differ in one of these, the first
    operator after it that both run is reported. It holds a copy of every value that
    either computes.

    Args:
        f: the function to agree with; the names and lines in the answer are its own.
        g: the function to check, for example a region of `f`.

    Returns:
        A function of the arguments of a call, which returns a `Difference`, or None if
        all outputs and gradients agree to the last bit, and so do the arguments,
        captured tensors and the generators after the call.

    Raises:
        RematError: by the returned function, if a result is on the meta device.

    Example:
        >>> import torch
        >>> from remat import checkpoint_name
        >>> from remat.testing import first_difference
        >>> f = lambda x: checkpoint_name(x.sin() * 2.0, "doubled").exp()
        >>> g = lambda x: checkpoint_name(x.sin() * 2.5, "doubled").exp()
        >>> difference = first_difference(f, g)(torch.ones(3))
        >>> difference.op, difference.name
        ('aten.mul', 'doubled')
    """

    def compare(*args: Any, **kwargs: Any) -> Difference | None:
        call = RepeatedCall((f, g), args, kwargs)
        one, results, rest = _record_operators(f, call)
        other, found, other_rest = _record_operators(g, call)
        result = _first_result(results, found)
        if result is None and not same_rest(rest, other_rest):
            name, mismatch = "the structure of the outputs", f"{rest} and {other_rest}"
            return Difference("forward", "", name, "", None, mismatch)
        if result is None:
            return None
        step = _first_unmatched(one, other)
        # An output that differs where no operator does is what the backward parts by.
        is_output = result.phase == "forward" and (
            step is None or step.phase == "backward"
        )
        return result if is_output or step is None else step

    return compare


_Results = dict[str, Tensor | None]


def _record_operators(
    function: Callable[..., Any], call: RepeatedCall
) -> tuple[list[_ComputedTensor], _Results, tuple[Any, ...]]:
    with call.run(function) as flat:
        operands = call.operands(flat)
        with _Recorder() as recorder:
            outputs = flat(*flat.wanted)
            recorder.phase = "backward"
            found = gradients(outputs, [*operands.values()], contiguous_cotangents)
    results: _Results = dict(zip(flat.labels, outputs, strict=True))
    results |= dict(zip(operands, found, strict=True)) | flat.after
    return recorder.steps, results, flat.rest


def _first_unmatched(
    one: list[_ComputedTensor], other: list[_ComputedTensor]
) -> Difference | None:
    """The first step of one whose bits no step of the other has, and that step's rival."""
    pool: dict[Hashable, list[_ComputedTensor]] = {}
    for step in other:
        pool.setdefault(step.key, []).append(step)
    unmatched: list[_ComputedTensor] = []
    for step in one:
        rivals = pool.get(step.key, [])
        equal = next((k for k in rivals if same_bits(k.value, step.value)), None)
        if equal is None:
            unmatched.append(step)
        else:
            rivals.remove(equal)
    for step in unmatched:
        for rival in pool.get(step.key, []):
            gap, name = Gap.between(step.value, rival.value), ", ".join(step.names)
            return Difference(step.phase, step.op, name, step.source, gap)
    return None


def _first_result(results: _Results, found: _Results) -> Difference | None:
    for label in results | found:
        is_state = label.endswith(AFTER)
        if is_state and (label not in results or label not in found):
            continue  # only one of the functions reaches it
        one, other = results.get(label), found.get(label)
        if not is_state:
            require_numbers(f"first_difference, {label}", one, other)
        is_backward = is_state or label.startswith("the gradient")
        phase = "backward" if is_backward else "forward"
        if not same_bits(one, other):
            gap = gap_between(one, other)
            how = (gap, "") if isinstance(gap, Gap) else (None, gap)
            return Difference(phase, "", label, "", *how)
    return None
