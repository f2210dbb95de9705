"""The pipeline of a cache miss: from a call to the entry that serves all calls like it.

Each stage takes values that the stages before it gave, and gives a value that nothing
changes afterwards: `trace_call`, `cover`, then `analyze`, `decide` and `cut` of `Stages`.
`advise` only reads. With open sizes one trace makes an entry for each size that it serves.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import final

from torch import Tensor

from remat._calls.advice import advise, advise_of_untold
from remat._calls.entry import Entry
from remat._calls.options import Settings
from remat._calls.routes import PLAINLY, tensor_guard_here
from remat._calls.signature import CallSite
from remat._calls.traced_call import TracedCall, require_lawful, trace_call
from remat._captures.bake_spots import cover
from remat._captures.contents import code_key
from remat._captures.covered import Covered
from remat._captures.iterators import advanced_since, positions
from remat._captures.walk import Survey
from remat._errors import RematError
from remat._graph import operators, statistics
from remat._graph.meta import TensorMeta
from remat._partition.decide import decide_of_operands
from remat._partition.stages import Stages
from remat._regions.forwards import Calls
from remat._regions.functions import Function, Roots
from remat._regions.traced import TracedRegion
from remat._tracing.once_more import advances
from remat._tracing.open_sizes import Fixed, Templates
from remat._tracing.refusals import advises_rerun, raises_in_its_trace
from remat._tracing.side_effects import tell_of_marks


@final
@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a function's traces, and what these traces share."""

    settings: Settings  # those that the user gave, and `rng`
    #: Numbers the calls that store something. All traces of the function share it, so that
    #: ranks count alike, although one traces and another does not.
    calls: Calls
    where: str  # what messages call the region


def compile_call(site: CallSite, options: Options, fixed: Fixed | None = None) -> Entry:
    """Handles a cache miss: traces the function and builds the cache entry.

    `fixed`: which dimensions of each argument stay numbers in a trace with open sizes; None
    for a trace that holds for the sizes of the call alone. If this raises, the user's objects
    are as they were.
    """
    settings = options.settings
    like_outputs = fixed is None and options.calls.are_like_outputs is True
    with _refusals_of(settings.engine, site.roots):
        traced = trace_call(site, fixed, options.where, like_outputs=like_outputs)
    covered = cover(traced.survey, traced.reads, [*map(id, traced.captured)])
    names = (*site.tensor_names, *covered.labels)
    require_lawful(site, settings.rng, traced, names)
    stages = Stages.of(traced.joints, settings.policy)
    flattened = traced.flattened
    # What is traced again for derivatives: it must not hold the survey, and so the user's objects.
    function = Function(
        lambda roots: flattened.build(roots, covered.fetch),
        covered.restored,
        site.numerics,
        settings.backend,
        None if traced.fixed is None else Templates(traced.fixed),
    )
    captured = traced.captured
    region = _compiled_region(function, site, options, stages, names, captured)
    program = region.forward(site.roots, save=True).program
    code, where = code_key(site.function), options.where
    advise(code, settings, stages, region, program, where)
    advise_of_untold(site, traced.survey, covered, options.where)
    tell_of_marks(traced.survey, flattened.marks, options.where)
    return _compiled_entry(traced, covered, stages, region, names, site.roots)


@contextlib.contextmanager
def _refusals_of(engine: str, roots: Roots) -> Generator[None]:
    """Inside, with engine="auto", whatever the function raises is a refusal of its trace.

    None after which it could run again, where its trace has advanced an iterator.
    """
    if engine != "auto":
        yield
        return
    known = positions(Survey(roots))
    try:
        yield
    except Warning:
        raise
    except Exception as error:
        refused = error if isinstance(error, RematError) else raises_in_its_trace(error)
        advanced = advanced_since(known)
        if advanced is not None and advises_rerun(refused):
            raise advances(advanced, "a trace that is refused") from refused
        if refused is error:
            raise
        raise refused from error


def entry_for_sizes(known: Entry, site: CallSite, options: Options) -> Entry | None:
    """The entry that a trace with open sizes makes for those of a call; None if it holds not."""
    captured, template = known.gather(site.roots), known.template
    assert template is not None, "its sizes are open"
    filled = None if captured is None else template.at(site.metas)
    if captured is None or filled is None:
        return None
    joints, statics = filled
    stages = Stages.of(joints, options.settings.policy)
    function, labels = known.region.function, known.labels
    region = _compiled_region(function, site, options, stages, labels, captured)
    output = dataclasses.replace(known.output, statics=statics)
    return dataclasses.replace(
        known, stages=stages, region=region, output=output, trace_s=None
    )


def _compiled_region(
    function: Function,
    site: CallSite,
    options: Options,
    stages: Stages,
    labels: Sequence[str],
    captured: Sequence[Tensor],
) -> TracedRegion:
    """The region of a missed call; `labels` are those of its arguments, then of what it captures."""
    tensors = (*site.tensors, *captured)
    settings, aliases = options.settings, site.aliases
    by_policy = decide_of_operands(stages.analysis, settings.policy)
    inputs = {index: save.storage for index, save in by_policy.items()}
    for index, (label, tensor) in enumerate(zip(labels, tensors, strict=True)):
        paths, is_argument = (label, *aliases.get(label, ())), index < len(site.tensors)
        storage = settings.inputs.of(paths, tensor, is_argument=is_argument)
        # Where both name a storage for an operand, that of `saved_inputs` is used.
        if not storage.keeps:
            inputs[index] = storage
    return TracedRegion(
        function,
        (*site.metas, *map(TensorMeta.of_operand, captured)),
        settings.policy,
        stages,
        verify=settings.verify,
        inputs={k: storage for k, storage in inputs.items() if not storage.keeps},
        calls=options.calls,
    )


def _guard_of(captured: Sequence[Tensor]) -> Callable[..., bool] | None:
    """The check of an entry's captured tensors; `functional_call` puts wrapped ones in place."""
    for how in (PLAINLY, tensor_guard_here()):
        if how is not None and all(map(how.is_told, captured)):
            return how.guard(captured)
    return None


def _compiled_entry(
    traced: TracedCall,
    covered: Covered,
    stages: Stages,
    region: TracedRegion,
    names: tuple[str, ...],
    roots: Roots,
) -> Entry:
    joint, captured = stages.joint, traced.captured
    place_of = {id(root): place for place, root in enumerate(roots)}
    values = joint.graph.values
    return Entry(
        covered=covered,
        stages=stages,
        guard=_guard_of(captured),
        region=region,
        output=traced.output,
        labels=names,
        written=joint.written,
        # Statistics, which torch's kernels write without telling.
        unseen=frozenset(
            operand
            for operand, new in joint.mutations
            if operators.maker(values[new.index], values) in statistics.FUNCTIONAL
        ),
        streams=frozenset(value.stream for value in values) - {""},
        hooked=traced.hooked,
        passed=tuple(
            (place, place_of[id(each)])
            for place, each in enumerate(traced.output.statics)
            if id(each) in place_of
        ),
        template=traced.template,
        trace_s=traced.seconds,
    )
