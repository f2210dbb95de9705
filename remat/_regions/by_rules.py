"""The map of a region in which an `autograd.Function` of the user's has a rule of its own for vmap.

Such a rule shows in the function, and in no program: the function is mapped anew.
"""

import dataclasses
from typing import Any

from remat._regions.derived_forwards import are_identity_views, identity_views
from remat._regions.forwards import Forward
from remat._regions.functions import Batch, Function, Roots
from remat._regions.opening import unmapped_outputs
from remat._regions.protocol import Batched
from remat.policies import nothing_saveable


def needs_rules(forward: Forward, batch: Batch) -> bool:
    """Whether a user's rules say how this map is done: a program does not show them."""
    program = forward.program
    # Only cotangents are mapped, as in `jacrev`: what is computed again is not.
    last = len(batch.dims) - program.num_cotangents
    is_mapped = any(dim is not None for dim in batch.dims[:last])
    return "backward" in program.rules or ("forward" in program.rules and is_mapped)


def batched_by_rules(
    region: Any, roots: Roots, batch: Batch, forward: Forward
) -> Batched:
    """The map of a `TracedRegion`, in which what was saved example by example is not read."""
    skip, (count, *_, num_states) = forward.num_leading, forward.shape
    assert not forward.shape[2], "what is saved would be mapped by no rule"
    unmapped = unmapped_outputs(forward.program.graph, count, batch.dims)
    states = tuple(skip + k for k in region.states)
    for are_apart in (False, True):
        function: Function = region.mapped_function(
            *(roots, region.chosen, batch, skip),
            are_apart=are_apart,
            unmapped=unmapped,
        )
        behind = function.derive(
            lambda f: lambda tensors: f(tensors[skip:]), "behind", skip
        )
        joints = behind.outline(roots, batch.metas, states)
        if are_identity_views(joints[0].views):
            break
    whole = dataclasses.replace(
        region.derive(behind, batch.metas, joints), policy=nothing_saveable
    )
    given = dataclasses.replace(
        whole.forward(roots, save=num_states > 0),
        num_leading=skip,
        flows=forward.flows,
        views=identity_views(count),
    )
    dims = [None if k in unmapped else 0 for k in range(count)]
    dims += [batch.dims[k] for k in joints[0].mutated]
    dims += [None] * given.shape[3]
    return Batched(region.derive(function, batch.metas[skip:], given), dims)
