"""The trace of a call: the first stage of a cache miss, and what it must not have done.

The walk over what the function reaches, the trace, and the checks of side effects come
together here. An error leaves the user's objects as they were.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor

from remat._calls.signature import CallSite, Layout
from remat._captures.places import Step
from remat._captures.reads import Reads, recording
from remat._captures.walk import Survey, put_back_hooked
from remat._errors import ImplicitRandomnessError
from remat._generators import python_and_numpy, streams
from remat._graph import operators
from remat._graph.joint import Joint
from remat._graph.meta import TensorMeta
from remat._graph.values import label
from remat._regions.functions import Roots
from remat._torch import fakes, guards, levels, modes, trees
from remat._tracing.arguments import Given
from remat._tracing.engines import require_no_engine
from remat._tracing.once_more import call_once_more
from remat._tracing.open_sizes import Fixed, Template, trace_open
from remat._tracing.refusals import require_answers
from remat._tracing.refused_writes import changes_operand, gains_gradient
from remat._tracing.side_effects import (
    on_error,
    require_no_effects,
    require_nothing_left,
    take_out,
    undone,
)
from remat._tracing.thread import is_taken_whole, substituting
from remat._tracing.trace import Flat, Request, Traced, trace


@final
@dataclasses.dataclass(eq=False)
class Flattened:
    """The user's function as tensors in, tensors out; remembers the structure of its result."""

    layout: Layout  # how the arguments are put together
    num_tensors: int  # how many tensors are among them
    #: The places of arguments that get a gradient by what is written to them. The function
    #: gets copies of these, and returns them after its results.
    changed: tuple[int, ...]
    #: Their places as the first trace finds them, when none is known yet.
    gained: tuple[int, ...] = ()
    output: trees.Frame | None = None  # None before the first trace
    #: The attributes that the first trace sets on arguments and results: on their stand-ins.
    marks: frozenset[str] = frozenset()

    def build(
        self, roots: Roots, fetch: Callable[[Roots], Sequence[Tensor]] | None
    ) -> Flat:
        """The flat function of these roots; captured tensors follow the arguments."""

        def flat(operands: Sequence[Tensor]) -> Sequence[Tensor | None]:
            function: Any = roots[0]
            given = list(operands[: self.num_tensors])
            for place in self.changed:
                given[place] = given[place].clone()
            passed = Given(*self.layout.arguments(given, roots[1:]))
            had = [*map(guards.requires_grad, given)]
            captured = () if fetch is None else fetch(roots)
            stand_ins = operands[self.num_tensors :]
            mapping = dict(zip(map(id, captured), stand_ins, strict=False))
            # The first trace looks at the changes itself.
            around = contextlib.nullcontext() if fetch is None else undone(roots)
            with substituting(mapping), around:
                if fetch is None:
                    result = function(*passed.args, **passed.kwargs)
                else:
                    result = call_once_more(function, passed.args, passed.kwargs)
                passed.require_unchanged(function)
                returned, output = trees.Frame.of(result)
            if self.output is None and not self.changed:
                self.gained = _gained(had, given)
            if self.output is None:
                self.marks = _marks([*returned, *given])
            self.output = self.output or output
            # A captured tensor that no operator of the user has met is still the real one.
            found = [mapping.get(id(each), each) for each in returned]
            return [*found, *(given[place] for place in self.changed)]

        return flat


def _marks(tensors: Sequence[Tensor | None]) -> frozenset[str]:
    """The attributes that are set on the stand-ins among some tensors."""
    stand_ins = [each for each in tensors if each is not None and fakes.is_fake(each)]
    return frozenset(name for each in stand_ins for name in fakes.set_on(each))


def _gained(had: Sequence[bool], tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The places of tensors that require grad now, and did not."""
    now = map(guards.requires_grad, tensors)
    pairs = enumerate(zip(had, now, strict=True))
    return tuple(place for place, (before, after) in pairs if after and not before)


def _set_requires_grad(tensors: Sequence[Tensor], wanted: bool) -> None:
    with modes.unseen_by_traces():
        for tensor in tensors:
            tensor.requires_grad_(wanted)


def _wanted(tensors: Sequence[Tensor]) -> set[int]:
    """The ids of those that require grad at some level."""
    with modes.unseen_by_traces():
        return {id(each) for each in tensors if levels.requires_grad_anywhere(each)}


def _told_of(traced: Traced, before: set[int]) -> list[Tensor]:
    """The captured tensors that the function has autograd follow, as it did not `before`.

    A region inside has told it of the tensor itself, not of the stand-in.
    """
    now, found = _wanted(traced.captured), list[Tensor]()
    for each, stand_in in zip(traced.captured, traced.stand_ins, strict=True):
        is_told = stand_in.requires_grad != (id(each) in now)
        if stand_in.is_leaf and is_told and id(each) not in before:
            found.append(each)
    return found


@final
@dataclasses.dataclass(frozen=True)
class TracedCall:
    """What a trace and the walk over the function's state have met."""

    joints: tuple[Joint, ...]  # the joint graphs at the sizes of the call
    captured: tuple[Tensor, ...]  # the tensors that the function reaches by itself
    #: Which of these get a gradient by what the function writes to them.
    gained: tuple[int, ...]
    #: What the function reaches.
    survey: Survey = dataclasses.field(repr=False)
    reads: Reads = dataclasses.field(repr=False)  # what of it the trace read
    #: The function as tensors in, tensors out.
    flattened: Flattened = dataclasses.field(repr=False)
    output: trees.Frame  # how the result is put together
    #: The steps to each module with weights that torch's hooks make at each call.
    hooked: tuple[tuple[Step, ...], ...]
    template: Template | None  # the trace with its sizes open, if they were
    #: Which dimensions of each operand are not open; None where none is.
    fixed: Fixed | None
    seconds: float  # how long it took


def trace_call(
    site: CallSite,
    fixed: Fixed | None,
    where: str,
    *,
    like_outputs: bool = False,
    changed: tuple[int, ...] = (),
) -> TracedCall:
    """Traces the function of a call, with open sizes unless `fixed` is None.

    If an argument without a gradient gets one, by what the function writes to it, the function is
    traced again, with its place in `changed`: what is written then is a result like any other. So
    it is if it has autograd follow a captured tensor (`requires_grad_()`), which then is followed.
    Where torch cannot go on with a symbol for a size, this raises what torch does. `like_outputs`:
    whether its cotangents are laid out as its outputs, as far as is known.
    """
    started = time.perf_counter()
    require_no_engine(site.function)
    survey = Survey(site.roots)
    require_answers(survey.reached)
    before = _wanted(survey.reached)
    flattened = Flattened(site.layout, len(site.tensors), changed)
    with on_error(survey.restore), python_and_numpy.warned_of_draws(where) as take_back:
        traced, reads, template = _run_trace(
            site, survey, flattened, fixed, like_outputs
        )
        output = flattened.output
        assert output is not None, "a trace calls the function"
        with modes.unseen_by_traces():
            # Its stand-in does where some level wants it: vmap's wrapper does not say so.
            had = [*map(levels.requires_grad_anywhere, traced.captured)]
            gained = _gained(had, traced.stand_ins)
            asked = _told_of(traced, before)
        if flattened.gained or asked:
            take_out(traced.fakes)
            survey.restore()
            take_back()
            changed = flattened.gained or changed
            with on_error(lambda: _set_requires_grad(asked, False)):
                _set_requires_grad(asked, True)
                return trace_call(
                    site, fixed, where, like_outputs=like_outputs, changed=changed
                )
        with on_error(lambda: take_out(traced.fakes)):
            hooked = put_back_hooked(survey)
            # A buffer that was assigned to itself (out=...) is the buffer, not its stand-in.
            survey.put_back(traced.stand_ins, traced.captured)
            traced.stand_ins.clear()
            require_no_effects(survey, reads, where)
            require_nothing_left(traced.fakes, output.statics, where)
    joints = traced.joints
    if template is not None:
        filled = template.at(site.metas)
        assert filled is not None, "the trace does not hold for its own call"
        joints, statics = filled
        output = dataclasses.replace(output, statics=statics)
    if fixed is not None:
        # Captured tensors are the function's own: their sizes do not vary.
        fixed = (*fixed, *((True,) * tensor.dim() for tensor in traced.captured))
    seconds = time.perf_counter() - started
    return TracedCall(
        joints, traced.captured, gained, survey, reads, flattened, output, hooked, template,
        fixed, seconds,
    )  # fmt: skip


def _run_trace(
    site: CallSite,
    survey: Survey,
    flattened: Flattened,
    fixed: Fixed | None,
    like_outputs: bool,
) -> tuple[Traced, Reads, Template | None]:
    request = Request(
        flattened.build(site.roots, None),
        site.metas,
        changed=flattened.changed,
        find=lambda tensor: id(tensor) in survey.tensors,
        is_in_parts=any(map(is_taken_whole, site.tensors)),
        like_outputs=like_outputs,
    )
    with site.numerics.applied(), recording(survey) as reads:
        if fixed is None:
            return trace(request), reads, None
        traced, sizes = trace_open(request, fixed)
    assert flattened.output is not None
    return traced, reads, Template(traced.joints, flattened.output.statics, sizes)


def require_lawful(
    site: CallSite, rng: str | None, traced: TracedCall, names: Sequence[str]
) -> None:
    """Refuses a function that draws, or writes, what a recomputation cannot repeat."""
    joint, count = traced.joints[0], len(site.tensors)
    _require_random_by_keys(joint, rng)
    tensors = (*site.tensors, *traced.captured)
    for operand, new in joint.mutations:
        tensor = tensors[operand]
        meta = TensorMeta.of_operand(tensor)
        is_buffer = operand >= count and traced.survey.is_buffer(id(tensor))
        if meta.requires_grad and not is_buffer:
            value = joint.graph.values[new.index]
            where = f"{names[operand]} ({meta}) at {value.source}"
            raise changes_operand(where, is_settled=operators.is_settled_by(value.op))
    if traced.gained:
        place = traced.gained[0]
        meta = TensorMeta.of(traced.captured[place])
        raise gains_gradient(f"{names[count + place]} ({meta})")


def _require_random_by_keys(joint: Joint, rng: str | None) -> None:
    for index, value in enumerate(joint.graph.values):
        explicit = operators.draws_from(value)
        if explicit is not None and rng == "preserve":
            raise ImplicitRandomnessError.of(
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
