"""A call that no kept trace holds for: traces the function, and makes the entry to keep.

The trace, the walk over what the function reaches, and the checks of what it must not do
come together here. With open sizes one trace makes an entry for each size that it serves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

from torch import Tensor

from remat import _captures
from remat._calls.entry import Entry, Output
from remat._calls.signature import Layout, Signature
from remat._captures.hooked import put_back
from remat._errors import ImplicitRandomnessError, MutationError, refusal
from remat._generators import host, streams
from remat._graph import operators
from remat._graph.values import TensorMeta, label
from remat._regions.forwards import Calls
from remat._regions.function import Function, Roots
from remat._regions.traced import TracedRegion
from remat._switches.numerics import Numerics
from remat._torch import guards, trees
from remat._tracing import engines
from remat._tracing.open_sizes import Fixed, Template, Templates, trace_open
from remat._tracing.side_effects import (
    require_no_effects,
    require_nothing_left,
    undone,
    undone_on_error,
)
from remat._tracing.thread import is_taken_whole, substituting
from remat._tracing.trace import Flat, Joint, Request, Traced, trace
from remat.policies import AbstractPolicy
from remat.storage import AbstractStorage


class InputStorage(Protocol):
    """How an input waits."""

    def __call__(
        self, path: str, tensor: Tensor, *, is_argument: bool
    ) -> AbstractStorage:
        """The storage of one input, an argument or a captured tensor."""
        ...


@final
@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a function's traces, and what these traces share.

    Attributes:
        policy: what may be saved.
        rng: "keys" or "preserve".
        verify: whether saved values are compared with recomputed ones.
        backend: what compiles the programs, if anything.
        inputs: how an input waits, by its path.
        calls: numbers the calls that store something. All traces of the function share it,
            so that ranks count alike, although one traces and another does not.
    """

    policy: AbstractPolicy
    rng: str
    verify: bool
    backend: str | None
    inputs: InputStorage
    calls: Calls


@final
class _Flattened:
    """The user's function as tensors in, tensors out; remembers the structure of its result."""

    def __init__(self, layout: Layout, num_tensors: int) -> None:
        self.layout = layout
        self.num_tensors = num_tensors
        self.output: Output | None = None

    def build(
        self, roots: Roots, fetch: Callable[[Roots], Sequence[Tensor]] | None
    ) -> Flat:
        """The flat function of these roots; captured tensors follow the arguments."""

        def flat(operands: Sequence[Tensor]) -> Sequence[Tensor | None]:
            function: Any = roots[0]
            args, kwargs = self.layout.arguments(
                operands[: self.num_tensors], roots[1:]
            )
            captured = () if fetch is None else fetch(roots)
            mapping = {
                id(real): stands
                for real, stands in zip(
                    captured, operands[self.num_tensors :], strict=False
                )
            }
            # The first trace looks at the changes itself.
            around = contextlib.nullcontext() if fetch is None else undone(roots)
            with substituting(mapping), around:
                returned = self._apart(function(*args, **kwargs))
            # A captured tensor that no operator of the user has met is still the real one.
            return [mapping.get(id(each), each) for each in returned]

        return flat

    def _apart(self, result: Any) -> list[Tensor]:
        leaves, spec = trees.flatten(result)
        is_tensor = tuple(isinstance(leaf, Tensor) for leaf in leaves)
        statics = tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor))
        if self.output is None:
            is_leaf = isinstance(result, Tensor)
            self.output = Output(spec, statics, is_tensor, is_leaf)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def make_entry(
    roots: Roots,
    signature: Signature,
    numerics: Numerics,
    options: Options,
    labels: Sequence[str],
    where: str,
) -> Entry:
    """Traces a function at a signature.

    Raises:
        TraceError, CapturedTensorError, ImplicitRandomnessError, MutationError,
        SideEffectError: as their texts say; the user's objects are as they were.
    """
    call = _FirstCall(roots, signature, numerics, options, tuple(labels), where)
    return call.entry(call.search(None))


def make_open_entry(
    roots: Roots,
    signature: Signature,
    numerics: Numerics,
    options: Options,
    labels: Sequence[str],
    where: str,
    *,
    fixed: Fixed,
) -> OpenEntry:
    """Traces a function with open sizes, except for `fixed` dimensions.

    Raises:
        As `make_entry`, and what torch raises where it cannot go on with a symbol.
    """
    call = _FirstCall(roots, signature, numerics, options, tuple(labels), where)
    found = call.search(fixed)
    assert found.template is not None, "a trace with open sizes is a template"
    return OpenEntry(call.entry(found), found.template, options)


@final
@dataclasses.dataclass(frozen=True)
class OpenEntry:
    """A kept trace for many sizes.

    Attributes:
        first: the entry for the sizes of the call that was traced.
        template: the trace.
        options: of the function.
    """

    first: Entry
    template: Template
    options: Options

    def at(self, signature: Signature, roots: Roots) -> Entry | None:
        """The entry for the sizes of a call, None if the trace does not hold for it."""
        first = self.first
        captured = first.gather(roots)
        filled = None if captured is None else self.template.at(signature.metas)
        if captured is None or filled is None:
            return None
        joints, statics = filled
        region = _region(
            first.region.function,
            (*signature.metas, *first.captured),
            self.options,
            joints,
            _input_storages(self.options, first.labels, signature.tensors, captured),
        )
        region.store_named_operands(roots)
        output = dataclasses.replace(first.output, statics=statics)
        return dataclasses.replace(first, region=region, output=output, trace_s=None)

    def fixed_for(self, signature: Signature, roots: Roots) -> list[tuple[int, int]]:
        """(tensor, dimension) whose size the trace has fixed, and which differs in this call."""
        if self.first.gather(roots) is None:
            return []
        was, given = self.first.region.operands, signature.metas
        return [
            (place, dim)
            for place, dim in self.template.fixed
            if was[place].shape[dim] != given[place].shape[dim]
        ]


@final
@dataclasses.dataclass(frozen=True)
class _Search:
    """What a trace and the walk over the function's state have found.

    Attributes:
        joints: at the sizes of the call.
        captured: the tensors that the function reaches by itself.
        covered: what the trace rested on.
        is_buffer: for each captured tensor whether it is a buffer of a module.
        output: how the result is put together.
        function: what can be traced again.
        hooked: the steps to each module with weights that torch's hooks make at each call.
        template: the trace with its sizes open, if they were.
        seconds: how long it took.
    """

    joints: tuple[Joint, ...]
    captured: tuple[Tensor, ...]
    covered: _captures.Covered
    is_buffer: tuple[bool, ...]
    output: Output
    function: Function
    hooked: tuple[tuple[_captures.Step, ...], ...]
    template: Template | None
    seconds: float


@final
@dataclasses.dataclass(frozen=True)
class _FirstCall:
    """A call that no kept trace holds for; see `make_entry`."""

    roots: Roots
    signature: Signature
    numerics: Numerics
    options: Options
    labels: tuple[str, ...]
    where: str

    def search(self, fixed: Fixed | None) -> _Search:
        """Traces the function, with open sizes unless `fixed` is None."""
        started = time.perf_counter()
        signature, roots = self.signature, self.roots
        engines.require_no_engine(roots[0])
        survey = _captures.survey(roots)
        flattened = _Flattened(signature.layout, len(signature.tensors))
        with undone_on_error(survey), host.told(self.where):
            traced, reads, template = self._trace(survey, flattened, fixed)
            output = flattened.output
            assert output is not None, "a trace calls the function"
            hooked = put_back(survey)
            require_no_effects(survey, reads, traced, self.where)
            require_nothing_left(traced.fakes, output.statics, self.where)
        used = [id(tensor) for tensor in traced.captured]
        covered = _captures.cover(survey, reads, used)
        joints = traced.joints
        if template is not None:
            filled = template.at(signature.metas)
            assert filled is not None, "the trace does not hold for its own call"
            joints = filled[0]
            output = dataclasses.replace(output, statics=filled[1])
        function = Function(
            lambda roots: flattened.build(roots, covered.fetch),
            covered.restored,
            self.numerics,
            self.options.backend,
            None if fixed is None else Templates(_with_captured(fixed, traced)),
        )
        return _Search(
            joints, traced.captured, covered, tuple(map(survey.is_buffer, used)),
            output, function, hooked, template, time.perf_counter() - started,
        )  # fmt: skip

    def _trace(
        self, survey: _captures.Survey, flattened: _Flattened, fixed: Fixed | None
    ) -> tuple[Traced, _captures.Reads, Template | None]:
        request = Request(
            flattened.build(self.roots, None),
            self.signature.metas,
            find=lambda tensor: id(tensor) in survey.tensors,
            is_in_parts=any(map(is_taken_whole, self.signature.tensors)),
        )
        with self.numerics.applied(), _captures.recording(survey) as reads:
            if fixed is None:
                return trace(request), reads, None
            traced, sizes = trace_open(request, fixed)
        assert flattened.output is not None
        template = Template(traced.joints, flattened.output.statics, sizes)
        return traced, reads, template

    def entry(self, found: _Search) -> Entry:
        """The entry for what was found; raises if the function does what it must not."""
        signature, joint = self.signature, found.joints[0]
        captured = tuple(map(TensorMeta.of_operand, found.captured))
        operands = (*signature.metas, *captured)
        names = (*self.labels, *found.covered.labels)
        _require_random_by_keys(joint, self.options.rng)
        is_buffer = [False] * len(signature.tensors) + list(found.is_buffer)
        _require_only_buffers_change(joint, operands, names, is_buffer)
        region = _region(
            found.function,
            operands,
            self.options,
            found.joints,
            _input_storages(self.options, names, signature.tensors, found.captured),
        )
        region.store_named_operands(self.roots)
        return Entry(
            covered=found.covered,
            captured=captured,
            guard=_guard(found.captured),
            region=region,
            output=found.output,
            labels=names,
            written=tuple(operand for operand, _ in joint.mutations),
            unseen=_unseen(joint),
            streams=frozenset(value.stream for value in joint.graph.values) - {""},
            hooked=found.hooked,
            trace_s=found.seconds,
        )


def _with_captured(fixed: Fixed, traced: Traced) -> Fixed:
    """Captured tensors are the function's own: their sizes do not vary."""
    return (*fixed, *((True,) * tensor.dim() for tensor in traced.captured))


def _region(
    function: Function,
    operands: tuple[TensorMeta, ...],
    options: Options,
    joints: tuple[Joint, ...],
    inputs: dict[int, AbstractStorage],
) -> TracedRegion:
    return TracedRegion(
        function,
        operands,
        options.policy,
        joints=joints,
        verify=options.verify,
        inputs=inputs,
        calls=options.calls,
    )


def _unseen(joint: Joint) -> frozenset[int]:
    """The operands whose new values are statistics of a batch_norm."""
    values = joint.graph.values
    return frozenset(
        operand
        for operand, new in joint.mutations
        if operators.makes_statistics(operators.made_by(values[new.index], values))
    )


def _input_storages(
    options: Options,
    names: Sequence[str],
    arguments: Sequence[Tensor],
    captured: Sequence[Tensor],
) -> dict[int, AbstractStorage]:
    """The operands that do not wait as they are, and their storages."""
    tensors = [*arguments, *captured]
    found = {
        index: options.inputs(name, tensor, is_argument=index < len(arguments))
        for index, (name, tensor) in enumerate(zip(names, tensors, strict=True))
    }
    return {index: each for index, each in found.items() if not each.keeps}


def _guard(captured: Sequence[Tensor]) -> Callable[..., bool] | None:
    is_plain = bool(captured) and all(map(guards.is_plain, captured))
    return guards.tensor_guard(captured) if is_plain else None


def _require_random_by_keys(joint: Joint, rng: str) -> None:
    for index, value in enumerate(joint.graph.values):
        explicit = operators.draws_from(value)
        if explicit is not None and rng == "preserve":
            raise refusal(
                ImplicitRandomnessError,
                where=label(joint.graph, index),
                what=f"the function draws from a generator of its own, {explicit!r}.",
                why='rng="preserve" records the default generators; this one '
                "would draw other numbers in the recomputation.",
                do='Draw from the default generator, or use engine="rerun".',
            )
        if value.stream == streams.UNKNOWN and rng == "preserve":
            raise streams.unregistered(label(joint.graph, index))
        if operators.draws(value) and rng == "keys":
            raise streams.implicit(label(joint.graph, index))


def _require_only_buffers_change(
    joint: Joint,
    operands: Sequence[TensorMeta],
    names: Sequence[str],
    is_buffer: Sequence[bool],
) -> None:
    for operand, new in joint.mutations:
        if not operands[operand].requires_grad or is_buffer[operand]:
            continue
        source = joint.graph.values[new.index].source
        raise refusal(
            MutationError,
            where=f"`{names[operand]}` ({operands[operand]}) at {source}",
            what="is changed in place by the function.",
            why="The recomputation would start from the changed value, and the "
            "tensor belongs to the caller.",
            do="Write x = x + 1 instead of x += 1, or x = x.clone() first.",
        )
