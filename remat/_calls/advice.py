"""Laws 5 and 15: warns, once, of what has no effect, and of what a trace alone has read."""

import fnmatch
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence

from torch import nn

from remat._calls.options import Settings
from remat._calls.signature import CallSite
from remat._captures.contents import code_key
from remat._captures.covered import Covered
from remat._captures.library import users_hooks
from remat._captures.walk import Survey
from remat._graph.meta import TensorMeta
from remat._partition.analysis import Analysis
from remat._partition.budgets import no_remat_bytes
from remat._partition.stages import Stages
from remat._programs.program import Program
from remat._regions.traced import TracedRegion
from remat._torch import levels
from remat._user_lines import warn_once
from remat.policies import AbstractPolicy, everything_saveable, nothing_saveable
from remat.policies._as_policy import is_of_users
from remat.policies._by_kind import idle_storage, saves_nothing
from remat.policies._by_op import bare_name
from remat.storage import AbstractStorage
from remat.storage._contract import held_in

_ATTENTION_BY_HAND = frozenset({"softmax", "multi_head_attention_forward"})
_RERUN = 'use engine="rerun", which reads it at each call'
_OUTSIDE = f"Read it outside, and pass what it says as an argument; or {_RERUN}."

_matched: set[tuple[AbstractPolicy, str]] = set()


def advise(
    function: Hashable,
    settings: Settings,
    stages: Stages,
    region: TracedRegion,
    program: Program,
    where: str,
) -> None:
    """Warns, once for each policy and `function`, of one that does less than expected."""
    policy = settings.policy
    # Where examples are mapped the storages get all of them at once.
    is_known = not (policy.is_whole or levels.is_mapped())
    idle = _idle_storages(stages, region) if is_known else []
    advice = [
        *_unmatched_globs(stages.analysis, policy),
        *_permits_nothing(stages, policy),
        *_saved_unread(stages, policy),
        *_saves_no_memory(stages, policy, idle),
        *_leaves_all_alone(idle),
        *_without_effect(stages, policy, program, verify=settings.verify),
        *_beside_a_peak(policy, region),
    ]
    for topic, what, why, do in advice:
        warn_once((function, policy, topic), where=where, what=what, why=why, do=do)


def advise_of_inputs(
    site: CallSite, names: Sequence[str], paths: Iterable[str], where: str
) -> None:
    """Warns of a path in `saved_inputs` that no input has."""
    every = [*names, *itertools.chain(*site.aliases.values())]
    for path in paths:
        if not any(fnmatch.fnmatchcase(name, path) for name in every):
            warn_once(
                (code_key(site.function), "input", path),
                where=where,
                what=f'has no input "{path}", which saved_inputs names.',
                why=f"Its inputs are {', '.join(names)}.",
                do="Correct the path, or leave it out.",
            )


def advise_of_untold(
    site: CallSite,
    survey: Survey,
    covered: Covered,
    where: str,
) -> None:
    """Warns of what a trace has read and no later call compares: it becomes a constant."""
    whole = [
        (
            f"{label} is read, and what it holds is not compared from call to call.",
            f"Pass what changes as an argument, a tensor or a number; or {_RERUN}.",
        )
        for label in covered.untold
    ]
    others = [*_of_arguments(site, survey), *_of_hooks(), *_of_modes(site)]
    for what, do in [*whole, *others]:
        warn_once(
            (code_key(site.function), what),
            where=where,
            what=what,
            why="A trace runs the code once, and keeps what it has read as constants.",
            do=do,
        )


_Advice = Iterator[tuple[Hashable, str, str, str]]


def _unmatched_globs(analysis: Analysis, policy: AbstractPolicy) -> _Advice:
    values = analysis.joint.graph.values
    names = tuple(dict.fromkeys(name for value in values for name in value.names))
    for glob in policy.globs:
        if any(policy.glob_matches(glob, name) for name in names):
            _matched.add((policy, glob))
        elif (policy, glob) not in _matched:
            there = ", ".join(f'"{name}"' for name in names)
            yield (
                ("glob", glob),
                f'the policy {policy!r} names "{glob}", but no value has that name.',
                f"The names here are {there}."
                if names
                else "No value has a name here.",
                f'Correct the name, or name the value: checkpoint_name(x, "{glob}").',
            )


def _permits_nothing(stages: Stages, policy: AbstractPolicy) -> _Advice:
    """A policy that permits none of the values; of globs `_unmatched_globs` says it."""
    is_meant = policy.is_whole or saves_nothing(policy) or is_of_users(policy)
    values = stages.analysis.views
    if values and not (stages.decisions or policy.globs or is_meant):
        made = dict.fromkeys(
            value.function or bare_name(value.op) for value in values.values()
        )
        do = "Use nothing_saveable to mean that, or name what is to be saved (checkpoint_name)."
        if not _ATTENTION_BY_HAND.isdisjoint(made):
            do += (
                " Attention is known by its call of scaled_dot_product_attention "
                '(attn_implementation="sdpa").'
            )
        yield (
            "unmet",
            f"the policy {policy!r} permits no value here: all is recomputed.",
            f"The values are made by {', '.join(list(made)[:12])}.",
            do,
        )


def _saved_unread(stages: Stages, policy: AbstractPolicy) -> _Advice:
    """Named values that the policy saves and that no backward step reads."""
    analysis, saved = stages.analysis, stages.cut.saved
    joint, numbers, owners = analysis.joint, analysis.numbers, analysis.roots
    read = {numbers[each] for index in saved for each in (index, owners[index])}
    handed_out = {numbers[owners[ref.index]] for ref in joint.outputs}
    for number, value in analysis.views.items():
        is_meant = any(
            policy.glob_matches(glob, name)
            for glob in policy.globs
            for name in value.names
        )
        is_read = number in read or number in handed_out
        is_read = is_read or _has_read_sibling(analysis, number, read)
        if is_meant and number in stages.decisions and not is_read:
            yield (
                ("bypassed", value.names),
                f"{value} is saved by {policy!r}, and no step of the backward reads it.",
                "What follows is linear in it, or uses another tensor instead, so "
                "saving it avoids no recomputation.",
                "Name the value that the next nonlinear operator or matmul reads.",
            )


def _has_read_sibling(analysis: Analysis, number: int, read: set[int]) -> bool:
    """Whether no advice is due: a sibling of the value is saved, or named for its sake."""
    values, members = analysis.joint.graph.values, analysis.members
    value = values[members[number]]
    for sibling in (values[members[other]] for other in read if other in members):
        if len(value.args) == 2 and sibling.args[:1] == value.args[:1]:
            return value.op is sibling.op
    return False


def _idle_storages(stages: Stages, region: TracedRegion) -> list[AbstractStorage]:
    """The storages that leave each of their values as it is."""
    values = stages.joint.graph.values
    saved = [values[index].meta for index in stages.cut.saved]
    given = [*zip(stages.storages, saved, strict=False)]
    given += [(how, region.operands[index]) for index, how in region.inputs.items()]
    found: dict[AbstractStorage, bool] = {}
    for storage, meta in given:
        if not storage.keeps and isinstance(meta, TensorMeta) and meta.size_bytes:
            found[storage] = found.get(storage, True) and storage.leaves(meta)
    return [storage for storage, is_idle in found.items() if is_idle]


def _leaves_all_alone(idle: Sequence[AbstractStorage]) -> _Advice:
    for storage in idle:
        yield (
            ("idle", storage),
            f"the storage {storage!r} has no effect.",
            "It leaves each value that it is given here as it is: of a dtype, of a size or "
            "in a place with which it would save nothing.",
            "Choose one that makes these values smaller or moves them, or leave it out.",
        )


def _saves_no_memory(
    stages: Stages, policy: AbstractPolicy, idle: Sequence[AbstractStorage]
) -> _Advice:
    # A budget that everything fits is met by saving everything; what waits in another form
    # is smaller, or elsewhere.
    is_meant = policy in (everything_saveable, nothing_saveable) or policy.is_whole
    if is_meant or not all(how.keeps or how in idle for how in stages.storages):
        return
    saved, plain = stages.saved_bytes, no_remat_bytes(stages.analysis)
    if plain > 0 and saved >= plain:
        yield (
            "useless",
            f"the region saves no memory: the policy {policy!r} keeps {saved} "
            f"bytes of intermediate values; without remat, {plain} bytes are kept.",
            "Every value that the backward reads is permitted.",
            "Save less, with nothing_saveable for example, or drop @remat here.",
        )


def _without_effect(
    stages: Stages, policy: AbstractPolicy, program: Program, *, verify: bool
) -> _Advice:
    """Options without effect: a storage of what is not saved, `verify`, `backend`."""
    storage = idle_storage(policy)
    if storage is not None:
        yield (
            "stored",
            f"the storage in {policy!r} has no effect.",
            "The policy saves no value to store; inputs are stored as `saved_inputs` "
            "says.",
            f"Write @remat(saved_inputs={storage!r}), or store what another policy "
            "saves.",
        )
    if verify and not stages.cut.saved:
        yield (
            "verify",
            "verify=True has nothing to compare.",
            f"The policy {policy!r} saves no value that could be recomputed "
            "and compared.",
            "Verify with policies.everything_saveable, then return to this policy.",
        )
    if program.backend is not None and not program.is_compiled:
        yield (
            "backend",
            f"backend={program.backend!r} has no effect.",
            "The region draws random numbers from a generator, checks its values, or has "
            "no data (device meta); such programs run operator by operator.",
            "Draw from keys (remat.random), or leave `backend` out.",
        )


def _beside_a_peak(policy: AbstractPolicy, region: TracedRegion) -> _Advice:
    """Inputs that wait in another form, which no plan of one call has in its peak."""
    if getattr(policy, "peak", None) is None:
        return
    pairs = [(region.operands[k], how) for k, how in region.inputs.items()]
    rows = [(meta, held_in(storage, meta)) for meta, storage in pairs]
    moved = [(meta, held.here) for meta, held in rows if held.moved_bytes]
    if moved:
        waiting = sum(each.size_bytes for _, here in moved for each in here)
        back = sum(meta.size_bytes for meta, _ in moved)
        yield (
            "peak",
            f"the bound of {policy!r} does not count inputs that wait in a storage: {waiting} "
            f"bytes, and {back} when they come back.",
            "It is met by what the function itself makes and saves.",
            "Take both off the bound, or plan the step: fit(step, peak=...) counts them.",
        )


def _of_arguments(site: CallSite, survey: Survey) -> Iterator[tuple[str, str]]:
    """What the code asks of arguments and their stand-ins in a trace do not have."""
    for name, tensor in zip(site.tensor_names, site.tensors, strict=True):
        for attribute in vars(tensor):
            line = survey.line_of(attribute)
            if line:
                yield (
                    f"{line} asks for `{attribute}`, which is set on `{name}`.",
                    _OUTSIDE,
                )
        line = survey.line_of("Parameter") if isinstance(tensor, nn.Parameter) else ""
        if line:
            what = f"{line} may ask whether `{name}` is a Parameter, and is told that it is not."
            yield what, _OUTSIDE


def _of_hooks() -> Iterator[tuple[str, str]]:
    for hook in users_hooks().values():
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        yield (
            f"`{name}`, a hook for all modules, runs in the trace alone.",
            "Register it on the modules that it is for: those are watched.",
        )


def _of_modes(site: CallSite) -> Iterator[tuple[str, str]]:
    for enter in site.numerics.functions.entries:
        name = type(enter.__self__).__qualname__
        yield (
            f"a torch-function mode, {name}, hears the calls of the trace alone.",
            "Make a new one when its effect is to change: another mode makes another trace.",
        )
