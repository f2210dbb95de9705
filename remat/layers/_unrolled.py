"""Stacks as torch.compile traces them: a loop of regions, which the graph holds unrolled.

Dynamo cannot follow a schedule, whose actions are computed at run time, nor make a region with a
policy that it has not seen before. Such a stack breaks the graph, and so does one that is called
wrongly. Outside the graph the stack runs, or raises its own error.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat._calls import torch_compile
from remat._calls.decorated import DecoratedFunction, RematModule, is_of_module, kind_of
from remat._calls.options import Settings
from remat._errors import explain
from remat._torch import dynamo, trees

# The kinds of regions that they are made of: around modules, and around functions.
_OF_MODULES, _OF_FUNCTIONS = (
    kind_of(Settings(rng=rng), "a step of a stack") for rng in ("preserve", "keys")
)


def scan(
    f: Callable[..., Any],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int = 1,
    *,
    policy: object = None,
    schedule: object = None,
) -> Any:
    """`remat.scan` without a policy and a schedule, in a graph."""
    _require_plain_stack("scan", policy, schedule)
    leaves, tree = trees.flatten(xs)
    sizes = [len(x) for x in leaves if isinstance(x, Tensor) and x.dim() > 0]
    count = _scan_length(sizes, len(leaves), length)
    if count == 0 or unroll != 1 or not _is_unrollable(init):
        dynamo.end_graph(_OTHERWISE)
    carry: Any = init
    rows: list[Any] = []
    for place in reversed(range(count)) if reverse else range(count):
        parts = [leaf[place] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        x = trees.unflatten(parts, tree)
        new, y = call(f, carry, x)
        if not _are_carries_alike(carry, new) or not _is_unrollable(y):
            dynamo.end_graph(_OTHERWISE)
        carry = new
        rows.append(y)
    if reverse:
        rows = rows[::-1]
    columns = zip(*[trees.flatten(row)[0] for row in rows], strict=True)
    stacked = [None if each[0] is None else torch.stack(each) for each in columns]
    return carry, trees.unflatten(stacked, trees.flatten(rows[0])[1])


def chain(stack: Any, x: Any) -> Any:
    """A `remat.chain`, the first argument, without a schedule, in a graph."""
    _require_plain_stack("chain", None, stack.schedule)
    for f in stack.fs:
        x = f(x) if is_region(f) else call(f, x)
    return x


def is_region(f: object) -> bool:
    """Whether a function is decorated already."""
    return isinstance(f, (DecoratedFunction, RematModule))


def call(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a layer or a step, as a region, where torch.compile traces a stack."""
    kind = _OF_MODULES if is_of_module(f) else _OF_FUNCTIONS
    name = f.__name__ if isinstance(f, types.FunctionType) else type(f).__name__
    return torch_compile.call(kind, f, args, kwargs, name)


def _require_plain_stack(what: str, policy: object, schedule: object) -> None:
    if policy is not None or schedule is not None:
        dynamo.end_graph(_WITH_OPTIONS[what])


_WITH_OPTIONS = {
    what: explain(
        where=f"remat.{what}",
        what="has a policy or a schedule, and is called under torch.compile.",
        why="It decides what to keep from its own trace, which cannot be part of a "
        "graph.",
        do="Leave both out; or decorate the steps with remat(policy=...) and call them "
        "in a loop; or compile without fullgraph=True: the stack then runs between two "
        "graphs.",
    )
    for what in ("scan", "chain")
}
_OTHERWISE = explain(
    where="remat.scan",
    what="is called under torch.compile with no step to run, with `unroll`, or with "
    "something that is not a tensor; or its function does not return what it takes.",
    why="A graph can contain only the plain loop.",
    do="Call it outside torch.compile, where it runs or says what is wrong.",
)


def _scan_length(sizes: Sequence[int], num_leaves: int, length: int | None) -> int:
    """How many steps are unrolled; none where the arguments do not agree."""
    wanted = sizes[:1] if length is None else [length]
    is_known = len(wanted) == 1 and all(size == wanted[0] for size in sizes)
    return wanted[0] if is_known and len(sizes) in (0, num_leaves) else 0


def _is_unrollable(tree: Any) -> bool:
    leaves = trees.flatten(tree)[0]
    return all(each is None or isinstance(each, Tensor) for each in leaves)


def _are_carries_alike(one: Any, other: Any) -> bool:
    leaves, tree = trees.flatten(one)
    others, other_tree = trees.flatten(other)
    if tree != other_tree or not _is_unrollable(other):
        return False
    return all(carried(a) == carried(b) for a, b in zip(leaves, others, strict=True))


def carried(leaf: Tensor | None) -> Any:
    """What a leaf of a carry keeps from step to step."""
    return None if leaf is None else (leaf.shape, leaf.dtype, leaf.device)
