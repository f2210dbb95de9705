"""Which leaves the outputs of a run depend on, by the graph that autograd recorded.

A run is given stand-ins, the leaves. If an output depended on any other tensor, a gradient
would be lost; and also if a backward reached the leaves other than through an output.

If nothing that a region sees wants a gradient, its function runs as it is. Outputs that still
require grad then depend on a leaf that the function made for itself, which is harmless, or on
a tensor that it reached in a way that cannot be followed, such as an iterator. The plain run
would hold everything for its backward without saying so: that is refused.
"""

import functools
import gc
import itertools
import sys
import types
from collections.abc import Generator, Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from remat._captures.walk import Survey
from remat._errors import CapturedTensorError
from remat._graph.meta import TensorMeta
from remat._rerun import fully_shard
from remat._torch import autograd, isolation, levels, trees
from remat._tracing.refusals import out_of_reach

ALL = -1  # the bits of all outputs


def dependent_outputs(
    outputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    engine: fully_shard.Engine | None = None,
    made: Set[int] = frozenset(),
) -> tuple[int, ...]:
    """For each leaf the outputs that depend on it, as bits; `ALL` if it wants no gradient.

    The last leaf stands for the parameters that an engine has gathered. What the run has
    `made` (by their ids) is its own, although it requires grad and is returned. Refuses an
    output that depends on any other tensor.
    """
    found: dict[int, int] = {}
    known = set(map(id, leaves))
    for variable, bits in held_leaves(outputs):
        if engine and engine.stands_for(variable):
            variable = leaves[-1]
        if id(variable) in made:
            continue
        if id(variable) not in known:
            raise out_of_reach(
                f"a tensor {TensorMeta.of(variable)} that requires grad",
                "Its gradient would be lost.",
            )
        found[id(variable)] = found.get(id(variable), 0) | bits
    return tuple(
        found.get(id(leaf), 0) if leaf.requires_grad else ALL for leaf in leaves
    )


def held_leaves(outputs: Sequence[Tensor]) -> Generator[tuple[Tensor, int]]:
    """The held leaves of autograd's graph, with the bits of the outputs that depend on each."""
    bits: dict[Any, int] = {}
    for index, each in enumerate(outputs):
        if each.grad_fn is not None:
            bits[each.grad_fn] = bits.get(each.grad_fn, 0) | 1 << index
        elif each.requires_grad:
            yield each, 1 << index
    for node in autograd.nodes_behind([*bits]):
        own = bits[node]
        for edge in autograd.next_nodes(node):
            bits[edge] = bits.get(edge, 0) | own
        if _is_held_leaf(node) or _is_guarded_leaf(node):
            yield node.variable, own


def _is_held_leaf(node: Any) -> bool:
    """Whether the node is that of a leaf, and something in Python holds the leaf.

    Nobody can ask for the gradient of a leaf that a function made for itself and forgot, or of
    one that no longer requires grad.
    """
    if not hasattr(node, "variable") or not node.variable.requires_grad:
        return False
    return sys.getrefcount(node.variable) > _unheld_refs()


@functools.cache
def _unheld_refs() -> int:
    """The references to a leaf that only autograd's graph holds."""
    with isolation.without_inference_mode(), torch.enable_grad():
        made = torch.ones((), requires_grad=True).exp()
    leaf: Any = autograd.next_nodes(made.grad_fn)[0]
    return sys.getrefcount(leaf.variable)


def guard_against_others(leaves: Sequence[Tensor], *, accumulates: bool) -> None:
    """Has a backward fail if it reaches the leaves other than through the outputs.

    A tensor that the function left somewhere (in a list, by a hook) holds the graph of the
    run, which ends in leaves whose gradients nobody reads. Fails, too, if a hook has called
    `backward` on the run's own graph, unless an engine `accumulates` gradients there.
    """
    for leaf in leaves:
        if leaf.requires_grad:
            leaf.register_hook(_refuse_lost_gradient)  # pyright: ignore[reportUnknownMemberType]
        if leaf.is_leaf and leaf.grad is not None and not accumulates:
            _refuse_lost_gradient(leaf.grad)


def _is_guarded_leaf(node: Any) -> bool:
    variable: Any = getattr(node, "variable", None)
    hooks: dict[Any, Any] = getattr(variable, "_backward_hooks", None) or {}
    return _refuse_lost_gradient in hooks.values()


def _refuse_lost_gradient(gradient: Tensor) -> Tensor:
    raise CapturedTensorError.of(
        where=f"a gradient {TensorMeta.of(gradient)}",
        what="reaches a region through a tensor that the function stored somewhere "
        "instead of returning it, or by `backward` in a hook or in that of an "
        "autograd.Function.",
        why="The gradient cannot get from there to the region's inputs, and "
        "would be lost.",
        do="Return the tensor from the function; where a backward calls `backward`, as that "
        "of reversible layers does, put regions on what it calls.",
    )


def read_by_a_backward(tensor: Tensor) -> CapturedTensorError:
    """The error for a tensor on which no output depends, but a gradient that is differentiated."""
    return CapturedTensorError.of(
        where=f"a tensor {TensorMeta.of(tensor)}",
        what="is read by a hook or by the backward of an autograd.Function, and by nothing "
        "that the function returns.",
        why="Its gradient would be lost in a second derivative.",
        do="Give it to the autograd.Function, or return something that depends on it, too.",
    )


def require_nothing_hidden(
    result: Any, roots: tuple[object, ...], arguments: Sequence[Tensor] = ()
) -> None:
    """Refuses the result of a plain run that depends on a hidden tensor.

    That is a leaf that something holds, but which is reached neither from the result nor from
    the roots: the function, and the objects among its arguments. An argument is one where the
    function has had it require grad.
    """
    # At each level, some reverse mode may want a gradient.
    layers = itertools.chain(*map(levels.layers, trees.tensor_leaves(result)))
    nodes = autograd.nodes_behind(
        [each.grad_fn for each in layers if each.requires_grad]
    )
    held = [node for node in nodes if _is_held_leaf(node)]
    if not held:
        return
    seen = Survey((result, *roots)).tensors.keys() | _hidden_in(nodes)
    unseen = [node for node in held if id(node.variable) not in seen]
    if unseen:
        gc.collect()  # a leaf that only a cycle holds is not held
    why = (
        "No other tensor that the region sees requires grad, so it would run without "
        "recomputation and hold all that its backward needs."
    )
    for node in filter(_is_held_leaf, unseen):
        if any(node.variable is each for each in arguments):
            raise CapturedTensorError.of(
                where=f"an argument {TensorMeta.of(node.variable)}",
                what="requires grad since the function wrote `requires_grad_()`.",
                why=why,
                do="Write it before the region is called.",
            )
        where = f"a tensor {TensorMeta.of(node.variable)} that requires grad"
        raise out_of_reach(where, why)


def _hidden_in(nodes: Iterable[Any]) -> set[int]:
    """The ids of all that nodes written in Python keep for their backward."""
    seen: set[int] = set()
    pending: list[object] = [
        vars(node) for node in nodes if isinstance(node, FunctionCtx)
    ]
    while pending:
        each = pending.pop()
        if isinstance(each, types.FunctionType):
            each = each.__closure__  # its globals are not kept
        if not isinstance(each, (type, types.ModuleType)) and id(each) not in seen:
            seen.add(id(each))
            pending += gc.get_referents(each)
    return seen
