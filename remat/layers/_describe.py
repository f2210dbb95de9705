"""Describes a traced stage to a schedule."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from remat._graph.values import TensorMeta
from remat._partition.analysis import forward_flops
from remat._regions.traced import Region
from remat.layers._links import Link
from remat.schedules import Stage

_known: weakref.WeakKeyDictionary[Region, tuple[int, int]] = weakref.WeakKeyDictionary()
#: A heuristic: the FLOPs that a processor computes while it moves one byte.
FLOPS_A_BYTE = 8


def stage_of(link: Link, after: Sequence[TensorMeta]) -> Stage:
    """A stage's cost and bytes.

    Its cost is the floating point operations of torch's own formulas, and `FLOPS_A_BYTE`
    for each byte that its operators write.

    Args:
        link: the stage.
        after: the metadata of the state that it makes.
    """
    known = _known.get(link.region)
    if known is None:
        known = _known[link.region] = _costs(link)
    cost, record_bytes = known
    state_bytes = sum(meta.size_bytes for meta in link.state)
    return Stage(
        cost, state_bytes, sum(each.size_bytes for each in after), record_bytes
    )


def _costs(link: Link) -> tuple[int, int]:
    region, roots = link.region, link.roots
    analysis, saved = region.analysis(roots), region.cut(roots).saved
    values = analysis.joint.graph.values
    own = {analysis.roots[ref.index] for ref in analysis.joint.outputs}
    written = sum(
        meta.size_bytes
        for index in analysis.forward
        if analysis.roots[index] == index
        and isinstance(meta := values[index].meta, TensorMeta)
    )
    record = sum(
        meta.size_bytes
        for index in saved
        if analysis.roots[index] not in own
        and isinstance(meta := values[index].meta, TensorMeta)
    )
    return forward_flops(analysis) + FLOPS_A_BYTE * written, record
