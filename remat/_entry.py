"""One trace that is kept: how to know that it still holds, and how to call it.

An entry belongs to a function's *code* and to a signature; it holds nothing of the user's
strongly. Each call checks what the trace rested on (`_captures`), fetches the captured
tensors anew, and binds the region.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
import types
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, final

from torch import Tensor

from remat import _captures, _compat, _hooked, _operators as operators, _streams
from remat._bind import Call, apply_straight, bind_all
from remat._errors import (
    ImplicitRandomnessError,
    MutationError,
    SideEffectError,
    explain,
)
from remat._graph import TensorMeta, label, layout_of
from remat._numerics import Numerics
from remat._region import Calls, Function, Region, Roots
from remat._signature import Layout, Signature
from remat._trace import (
    Flat,
    Joint,
    Request,
    Traced,
    is_taken_whole,
    substituting,
    trace,
)
from remat.policies import AbstractPolicy
from remat.storage import AbstractStorage, Keep


@final
@dataclasses.dataclass(frozen=True)
class Output:
    """How what the function returns is put together: the non-tensor leaves are fixed."""

    spec: Any
    statics: tuple[Any, ...]
    is_tensor: tuple[bool, ...]
    is_leaf: bool

    def tree(self, tensors: Sequence[Any]) -> Any:
        """The pytree with these tensors."""
        if self.is_leaf:
            return tensors[0]
        rest, fixed = iter(tensors), iter(self.statics)
        leaves = [next(rest) if each else next(fixed) for each in self.is_tensor]
        return _compat.unflatten(leaves, self.spec)


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
    """What decides what is traced, and what all traces of a function share.

    Attributes:
        policy: what may be saved.
        rng: "keys" or "preserve".
        verify: whether saved values are compared with recomputed ones.
        backend: what compiles the programs, if anything.
        inputs: how an input waits, by its path.
        calls: numbers the calls that store something. All traces of the function share it:
            what ranks do by it, they do together, although one traces and another not.
    """

    policy: AbstractPolicy
    rng: str
    verify: bool
    backend: str | None
    inputs: InputStorage
    calls: Calls


@final
@dataclasses.dataclass
class Entry:
    """A kept trace.

    Attributes:
        covered: what it rested on, and where its captured tensors are found.
        captured: their metadata.
        guard: whether tensors have this metadata, checked in C; None where it cannot be.
        region: what it traced.
        output: how the result is put together.
        labels: what messages call the operands.
        written: operands that the function changes: its buffers.
        unseen: those of them that a kernel writes without telling.
        streams: the streams of registered trackers that it draws from.
        hooked: modules with weights that torch's hooks make at each call.
        trace_s: how long the trace took, in seconds.
    """

    covered: _captures.Covered
    captured: tuple[TensorMeta, ...]
    guard: Callable[..., bool] | None
    region: Region
    output: Output
    labels: tuple[str, ...]
    written: tuple[int, ...]
    unseen: frozenset[int]
    streams: frozenset[str]
    hooked: tuple[_hooked.Hooked, ...]
    trace_s: float

    def gather(self, roots: Roots) -> tuple[Tensor, ...] | None:
        """The captured tensors of these roots, None if the trace does not hold there."""
        if not all(map(_streams.exists, self.streams)):
            return None
        tensors = self.covered.gather(roots)
        if not tensors or (self.guard is not None and self.guard(*tensors)):
            return tensors
        for tensor, meta in zip(tensors, self.captured, strict=True):
            if layout_of(tensor) != meta.layout:
                return None
        return tensors

    def call_quietly(
        self, roots: Roots, tensors: Sequence[Tensor], numerics: Numerics
    ) -> Any:
        """`call` where no transform and no mode is active, and a gradient is wanted."""
        is_more = self.written or self.hooked
        forward = None if is_more else self.region.straight(roots, numerics)
        if forward is None:
            return self.call(roots, tensors, numerics)
        call = Call(self.region, roots, numerics, self.labels)
        outputs = apply_straight(call, forward, tensors)
        return outputs[0] if self.output.is_leaf else self.output.tree(outputs)

    def call(self, roots: Roots, tensors: Sequence[Tensor], numerics: Numerics) -> Any:
        """Runs the region and writes changed buffers back, once."""
        result = self._call(roots, tensors, numerics)
        for each in self.hooked:
            each.refresh(roots)
        return result

    def _call(self, roots: Roots, tensors: Sequence[Tensor], numerics: Numerics) -> Any:
        call = Call(self.region, roots, numerics, self.labels)
        if not self.written:
            return self.output.tree(bind_all(call, tensors)[0])
        given = list(tensors)
        for index in self.written:
            # The backward must find what the forward found.
            given[index] = given[index].clone()
        returned, mutations = bind_all(call, given)
        for index, new in zip(self.written, mutations, strict=True):
            _compat.write_back(tensors[index], new, unseen=index in self.unseen)
        return self.output.tree(self._with_buffers(roots, returned, tensors))

    def _with_buffers(
        self, roots: Roots, returned: list[Tensor | None], tensors: Sequence[Tensor]
    ) -> list[Tensor | None]:
        views = self.region.every_view(roots)
        return [
            tensors[view.operand]
            if view.operand in self.written and view.path is None
            else tensor
            for view, tensor in zip(views, returned, strict=True)
        ]


@final
class _Flattened:
    """The user's function as tensors in, tensors out; remembers how it came apart."""

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
            with substituting(mapping), _left_alone(roots, fetch is not None):
                returned = self._apart(function(*args, **kwargs))
            # A captured tensor that no operator of the user has met is still the real one.
            return [mapping.get(id(each), each) for each in returned]

        return flat

    def _apart(self, result: Any) -> list[Tensor]:
        leaves, spec = _compat.flatten(result)
        is_tensor = tuple(isinstance(leaf, Tensor) for leaf in leaves)
        statics = tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor))
        if self.output is None:
            is_leaf = isinstance(result, Tensor)
            self.output = Output(spec, statics, is_tensor, is_leaf)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def _left_alone(roots: Roots, applies: bool) -> Generator[None]:
    """Puts back what the function assigns: a later trace must leave no stand-ins."""
    if not applies:
        # The first trace looks at the changes itself.
        yield
        return
    survey = _captures.survey(roots)
    try:
        yield
    finally:
        survey.restore()


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
    started = time.perf_counter()
    survey = _captures.survey(roots)
    flattened = _Flattened(signature.layout, len(signature.tensors))
    with _undone_on_error(survey):
        traced, reads = _trace_once(survey, flattened, roots, signature, numerics)
        hooked = _hooked.put_back(survey)
        _require_no_effects(survey, reads, traced, where)
    used = [id(tensor) for tensor in traced.captured]
    covered = _captures.cover(survey, reads, used)
    operands = (*signature.metas, *_captured_metas(traced))
    names = (*labels, *covered.labels)
    _require_random_by_keys(traced.joints[0], options.rng)
    is_buffer = [False] * len(signature.tensors) + list(map(survey.is_buffer, used))
    _require_only_buffers_change(traced.joints[0], operands, names, is_buffer)
    assert flattened.output is not None
    function = Function(
        lambda roots: flattened.build(roots, covered.fetch),
        covered.restored,
        numerics,
        options.backend,
    )
    graph = traced.joints[0].graph
    region = Region(
        function,
        operands,
        options.policy,
        joints=traced.joints,
        verify=options.verify,
        inputs=_input_storages(options, names, signature.tensors, traced.captured),
        calls=options.calls,
    )
    region.store_named_operands(roots)
    return Entry(
        covered=covered,
        captured=_captured_metas(traced),
        guard=_guard(traced.captured),
        region=region,
        output=flattened.output,
        labels=names,
        written=tuple(operand for operand, _ in traced.joints[0].mutations),
        unseen=_unseen(traced.joints[0]),
        streams=frozenset(value.stream for value in graph.values) - {""},
        hooked=hooked,
        trace_s=time.perf_counter() - started,
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
    """The operands that wait otherwise than as they are, and how."""
    tensors = [*arguments, *captured]
    found = {
        index: options.inputs(name, tensor, is_argument=index < len(arguments))
        for index, (name, tensor) in enumerate(zip(names, tensors, strict=True))
    }
    return {index: each for index, each in found.items() if type(each) is not Keep}


def _trace_once(
    survey: _captures.Survey,
    flattened: _Flattened,
    roots: Roots,
    signature: Signature,
    numerics: Numerics,
) -> tuple[Traced, _captures.Reads]:
    request = Request(
        flattened.build(roots, None),
        signature.metas,
        find=lambda tensor: id(tensor) in survey.tensors,
        is_in_parts=any(map(is_taken_whole, signature.tensors)),
    )
    with numerics.applied(), _captures.recording(survey) as reads:
        return trace(request), reads


def _guard(captured: Sequence[Tensor]) -> Callable[..., bool] | None:
    is_plain = bool(captured) and all(map(_compat.is_plain, captured))
    return _compat.tensor_guard(captured) if is_plain else None


def _captured_metas(traced: Traced) -> tuple[TensorMeta, ...]:
    return tuple(
        TensorMeta.of(tensor, requires_grad=_compat.requires_grad_anywhere(tensor))
        for tensor in traced.captured
    )


@contextlib.contextmanager
def _undone_on_error(survey: _captures.Survey) -> Generator[None]:
    try:
        yield
    except BaseException:
        survey.restore()
        raise


def _require_no_effects(
    survey: _captures.Survey, reads: _captures.Reads, traced: Traced, where: str
) -> None:
    # A buffer that was assigned to itself (out=...) is the buffer, not its stand-in.
    survey.put_back(traced.stand_ins, traced.captured)
    traced.stand_ins.clear()
    changed = survey.changes(reads=reads)
    if changed is not None:
        raise SideEffectError(
            explain(
                where=where,
                what=f"{changed} while it was traced.",
                why="A trace runs Python once: at the next call the change would not "
                "happen, and what depends on it would be stale.",
                do="Return the new value instead, keep it in a buffer, or use "
                'engine="rerun".',
            )
        )
    leaked = _survivor(traced.fakes)
    if leaked is not None:
        raise SideEffectError(
            explain(
                where=where,
                what=f"left a tensor of the trace, {TensorMeta.of(leaked)}, in "
                f"{_holder(leaked)}.",
                why="It has no data, and would fail wherever it is used next.",
                do="Return the tensor from the function instead.",
            )
        )


def _survivor(fakes: Sequence[weakref.ref[Tensor]]) -> Tensor | None:
    if all(fake() is None for fake in fakes):
        return None
    # What only a cycle holds was not left anywhere, nor was what only torch's own graph
    # holds: operators that save their output do (torch 2.15).
    gc.collect()
    alive = [found for fake in fakes if (found := fake()) is not None]
    holders = [each for each in _referrers(alive) if each is not alive]
    held = {id(thing) for holder in holders for thing in gc.get_referents(holder)}
    return next((each for each in alive if id(each) in held), None)


def _referrers(tensors: Sequence[Tensor]) -> list[Any]:
    found = gc.get_referrers(*tensors) if tensors else []
    return [each for each in found if not isinstance(each, types.FrameType)]


def _holder(tensor: Tensor) -> str:
    for referrer in _referrers([tensor]):
        if isinstance(referrer, dict):
            for key, value in referrer.items():  # pyright: ignore[reportUnknownVariableType]
                if value is tensor and isinstance(key, str):
                    return f"a name or attribute `{key}`"
        if isinstance(referrer, (list, set)):
            return f"a {type(referrer).__name__}"  # pyright: ignore[reportUnknownArgumentType]
    return "an object outside of the function"


def _require_random_by_keys(joint: Joint, rng: str) -> None:
    for index, value in enumerate(joint.graph.values):
        explicit = operators.draws_from(value)
        if explicit is not None and rng == "preserve":
            raise ImplicitRandomnessError(
                explain(
                    where=label(joint.graph, index),
                    what=f"the function draws from a generator of its own, {explicit!r}.",
                    why='rng="preserve" records the default generators; this one would '
                    "give other numbers when the value is recomputed.",
                    do='Draw from the default generator, or use engine="rerun".',
                )
            )
        if value.stream == _streams.UNKNOWN and rng == "preserve":
            raise _streams.unregistered(label(joint.graph, index))
        if operators.draws(value) and rng == "keys":
            raise _streams.implicit(label(joint.graph, index))


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
        raise MutationError(
            explain(
                where=f"`{names[operand]}` ({operands[operand]}) at {source}",
                what="is changed in place by the function.",
                why="The recomputation would start from the changed value, and the "
                "caller's tensor is not ours to change.",
                do="Write x = x + 1 instead of x += 1, or x = x.clone() first.",
            )
        )
