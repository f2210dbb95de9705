"""Which redraws go on from where others ended: see `_redraws`.

Where a redraw follows the one before it as it is, nothing is to be decided: one state less
waits. Where it would run earlier, the one before is moved to before it, with what that one
needs; all that is drawn may then live at a time. It is done where the peak is no higher for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import torch

from remat import _rng
from remat._partition import Analysis, cut, late
from remat._peak import peak_bytes
from remat._redraws import Links, linked, pairs_of
from remat._trace import Joint

_STATE_BYTES = _rng.size_bytes(torch.device("cpu"))


def links_for(analysis: Analysis, members: frozenset[int]) -> Links:
    """The draws that start where another ended, and where those are.

    Args:
        analysis: the joint graph, all of whose draws start from states of their own.
        members: the forward values that may be saved.
    """
    joint = analysis.joint
    if len(joint.states) < 2:
        return (None,) * len(joint.states)
    steps = cut(analysis, members, joint.gradients).steps
    turns = {step: turn for turn, step in enumerate(late(joint.graph.values, steps))}
    in_turn, most = _links(joint, steps, turns), _links(joint, steps, None)
    if most == in_turn:
        return most
    # A state that waits does so for each call; one at which a redraw ends is gone soon.
    spare = 2 * _STATE_BYTES
    peaks = [_peak_bytes(analysis, members, links) for links in (most, in_turn)]
    return most if peaks[0] - spare <= peaks[1] else in_turn


def _links(
    joint: Joint, steps: Collection[int], turns: Mapping[int, int] | None
) -> Links:
    """The redraws that can go on, of a backward that runs no step more for it.

    Args:
        joint: the forward and its backward.
        steps: what the backward runs.
        turns: when it runs each, if none is to run earlier than that; None: any may.
    """
    found: list[int | None] = []
    latest: int | None = None
    for place, state in enumerate(joint.states):
        found.append(None)
        value = joint.graph.values[state.index]
        if value.op is not _rng.STATE or value.args[0].type != "cpu":
            continue
        if latest is not None and all(
            before in steps and (turns is None or turns[before] < turns[index])
            for before, index in pairs_of(joint.graph, state, joint.states[latest])
            if index in steps
        ):
            found[-1] = latest
        latest = place
    return tuple(found)


def _peak_bytes(analysis: Analysis, members: frozenset[int], links: Links) -> int:
    """The peak of a call in which redraws go on so, with the states that wait."""
    joint = linked(analysis.joint, analysis.joint.states, links)
    found = cut(dataclasses.replace(analysis, joint=joint), members, joint.gradients)
    return peak_bytes(joint, found, links.count(None) * _STATE_BYTES, frees=True)
