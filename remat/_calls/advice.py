"""Law 5: warns of what has no effect, once per function and policy, when it is traced."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from remat._graph.values import TensorMeta
from remat._messages import warn
from remat._partition.analysis import Analysis
from remat._partition.cut import cut, permitted_members
from remat._regions.function import Roots
from remat._regions.traced import TracedRegion
from remat.policies import (
    AbstractPolicy,
    Save,
    everything_saveable,
    nothing_saveable,
)
from remat.policies._everything_or_nothing import idle_storage

_said: set[Hashable] = set()
_matched: set[tuple[AbstractPolicy, str]] = set()


def advise(
    region: TracedRegion, roots: Roots, function: Hashable, where: str, verify: bool
) -> None:
    """Warns of a policy that does less than its author may expect.

    Args:
        region: the region, traced.
        roots: the call's roots.
        function: what stands for the function; with the policy it warns once.
        where: the function's name and line, for the text.
        verify: whether the saved values will be compared with recomputed ones.
    """
    analysis, policy = region.analysis(roots), region.policy
    found = [
        *_unmatched(analysis, policy),
        *_bypassed(region, roots),
        *_useless(region, roots),
        *_unstored(policy),
        *(_unverified(region, roots) if verify else ()),
        *_uncompiled(region, roots),
    ]
    for topic, what, why, do in found:
        advise_once((function, policy, topic), where=where, what=what, why=why, do=do)


def advise_once(key: Hashable, *, where: str, what: str, why: str, do: str) -> None:
    """Warns, unless it has done so for an equal key.

    Args:
        key: what stands for the function, its policy, and the matter.
        where: the function's name and line.
        what: what has no effect.
        why: the reason.
        do: what to do.
    """
    if key not in _said:
        _said.add(key)
        warn(where=where, what=what, why=why, do=do)


_Advice = Iterator[tuple[Hashable, str, str, str]]


def _names(analysis: Analysis) -> tuple[str, ...]:
    values = analysis.joint.graph.values
    return tuple(dict.fromkeys(name for value in values for name in value.names))


def _unmatched(analysis: Analysis, policy: AbstractPolicy) -> _Advice:
    names = _names(analysis)
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


def _bypassed(region: TracedRegion, roots: Roots) -> _Advice:
    """Named values that the policy saves and that no backward step reads."""
    analysis, found = region.analysis(roots), region.cut(roots)
    joint, policy = analysis.joint, region.policy
    numbers = analysis.numbers
    read = {numbers[index] for index in found.saved}
    read |= {numbers[analysis.roots[index]] for index in found.saved}
    handed_out = {numbers[analysis.roots[ref.index]] for ref in joint.outputs}
    for number, value in analysis.views.items():
        globs = [
            (glob, name)
            for glob in policy.globs
            for name in value.names
            if policy.glob_matches(glob, name)
        ]
        is_read = (
            number in read
            or number in handed_out
            or _has_read_sibling(analysis, number, read)
        )
        if globs and number in region.decisions(roots) and not is_read:
            yield (
                ("bypassed", value.names),
                f"{value} is saved by {policy!r}, and no step of the backward reads it.",
                "What follows is linear in it, or uses another tensor instead, so "
                "saving it avoids no recomputation.",
                "Name the value that the next nonlinear operator or matmul reads.",
            )


def _has_read_sibling(analysis: Analysis, number: int, read: set[int]) -> bool:
    """Whether another output of the same operator is saved, or named for its sake."""
    values = analysis.joint.graph.values
    member = analysis.members[number]
    maker = values[member].args[0] if len(values[member].args) == 2 else None
    for other in read:
        sibling = values[analysis.members[other]] if other in analysis.members else None
        if sibling and maker is not None and sibling.args[:1] == (maker,):
            return values[member].op is sibling.op
    return False


def _held(region: TracedRegion, roots: Roots, policy: AbstractPolicy) -> int:
    """Bytes of intermediate values that a policy would save."""
    analysis = region.analysis(roots)
    permitted = {
        number: Save() for number in analysis.views if policy is everything_saveable
    }
    members = permitted_members(analysis, permitted)
    found = cut(analysis, members, analysis.joint.gradients)
    return _bytes(analysis, found.saved)


def _bytes(analysis: Analysis, saved: tuple[int, ...]) -> int:
    metas = [analysis.joint.graph.values[index].meta for index in saved]
    return sum(meta.size_bytes for meta in metas if isinstance(meta, TensorMeta))


def _useless(region: TracedRegion, roots: Roots) -> _Advice:
    if region.policy in (everything_saveable, nothing_saveable):
        return
    if region.policy.is_whole:
        # A budget that everything fits is met by saving everything.
        return
    if region.forward(roots, save=True).storages:
        # What waits in another form is smaller, or elsewhere.
        return
    analysis = region.analysis(roots)
    saved = _bytes(analysis, region.cut(roots).saved)
    plain = _held(region, roots, everything_saveable)
    if plain > 0 and saved >= plain:
        yield (
            "useless",
            f"the region saves no memory: the policy {region.policy!r} keeps {saved} "
            f"bytes of intermediate values; without remat, {plain} bytes are kept.",
            "Every value that the backward reads is permitted.",
            "Save less, with nothing_saveable for example, or drop @remat here.",
        )


def _unstored(policy: AbstractPolicy) -> _Advice:
    """Warns of a storage on a policy that saves nothing."""
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


def _unverified(region: TracedRegion, roots: Roots) -> _Advice:
    if not region.cut(roots).saved:
        yield (
            "verify",
            "verify=True has nothing to compare.",
            f"The policy {region.policy!r} saves no value that could be recomputed "
            "and compared.",
            "Verify with policies.everything_saveable, then return to this policy.",
        )


def _uncompiled(region: TracedRegion, roots: Roots) -> _Advice:
    program = region.forward(roots, save=True).program
    if program.backend is not None and not program.is_compiled:
        yield (
            "backend",
            f"backend={program.backend!r} has no effect.",
            "The region draws random numbers from a generator, checks its values, or has "
            "no data (device meta); such programs run operator by operator.",
            "Draw from keys (remat.random), or leave `backend` out.",
        )
