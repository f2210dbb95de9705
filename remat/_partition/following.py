"""Decides which redraws continue from where others ended: see `_partition.redraws`.

If a redraw follows the redraw before it anyway, it always continues: one state less is
saved. If it would run before that one, the other redraw must be moved to before it, with
all that it needs. The values that both draw may then live at the same time. This is done
only if the peak does not rise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import torch

from remat._generators import recorded
from remat._partition.partition import Analysis, cut, late
from remat._partition.peak import peak_bytes
from remat._partition.redraws import Links, linked, pairs_of
from remat._tracing.trace import Joint

_STATE_BYTES = recorded.size_bytes(torch.device("cpu"))


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
    # A saved state is held once a call; the state at which a redraw ends is freed soon.
    spare = 2 * _STATE_BYTES
    peaks = [_peak_bytes(analysis, members, links) for links in (most, in_turn)]
    return most if peaks[0] - spare <= peaks[1] else in_turn


def _links(
    joint: Joint, steps: Collection[int], turns: Mapping[int, int] | None
) -> Links:
    """The redraws that can continue without adding a step to the backward.

    Args:
        joint: the forward and its backward.
        steps: what the backward runs.
        turns: the position of each step, if no step may be moved; None if steps may be.
    """
    found: list[int | None] = []
    latest: int | None = None
    for place, state in enumerate(joint.states):
        found.append(None)
        value = joint.graph.values[state.index]
        if value.op is not recorded.STATE or value.args[0].type != "cpu":
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
    """The peak of a call with these links, saved states included."""
    joint = linked(analysis.joint, analysis.joint.states, links)
    found = cut(dataclasses.replace(analysis, joint=joint), members, joint.gradients)
    return peak_bytes(joint, found, links.count(None) * _STATE_BYTES, frees=True)
