"""Shows what a function will hold for its backward, without running it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from remat._calls.decorated import is_region, plain_region
from remat._calls.residuals import Residual, residuals_of
from remat._errors import show_type
from remat._graph.meta import TensorMeta
from remat._partition.analysis import Analysis
from remat._partition.cut import Cut, cut
from remat.policies._sizes import show_size
from remat.reporting._show.text import aligned


def saved_residuals(f: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Residual]:
    """What a call holds between its forward and its backward.

    This only traces the function. It differentiates the tensors that require grad,
    captured ones included, or, if there are none, every floating tensor argument. A
    view of an argument counts as that argument. For arguments that only a second
    derivative needs, `reason` says so. Regions inside `f` save what their policies say, but
    their storages are not applied, and what they hold for a second derivative only is not
    listed: ask such a region itself, or `report`.

    Args:
        f: a region, or any function, with regions inside or without.
        *args: the call's arguments.
        **kwargs: likewise.

    Returns:
        What is saved, with the states of generators that draws are repeated from, in the
        order of the forward; then the arguments, and copies of those that the call changes.

    Raises:
        TraceError: if `f` cannot be traced.

    Example:
        >>> import torch
        >>> from remat import saved_residuals
        >>> [r.path for r in saved_residuals(lambda x: x.sin().sum(), torch.ones(3))]
        ['x']
    """
    if is_region(f):
        return f.saved_residuals(*args, **kwargs)
    entry, site, captured = plain_region(f).entry_of(args, kwargs)
    read = _read_across(entry.stages.analysis)
    return residuals_of(entry, (*site.tensors, *captured), read)


def _read_across(analysis: Analysis) -> Cut:
    """The forward values that backward steps read, by storage; nothing is recomputed."""
    joint = analysis.joint
    values = joint.graph.values
    whole = cut(analysis, frozenset(), joint.gradients)
    read = {
        analysis.roots[use]
        for index in whole.steps
        if values[index].is_backward
        for use in values[index].uses
        if not values[use].is_backward
    }
    # Constants that the function makes, too: no region makes them again.
    saved = tuple(
        index
        for index in sorted(read)
        if index >= joint.graph.num_inputs
        and isinstance(values[index].meta, TensorMeta)
    )
    operands = frozenset(index for index in read if index < joint.num_operands)
    return dataclasses.replace(whole, saved=saved, operands=operands)


_COLUMNS: dict[str, Callable[[Residual], str]] = {
    "argument": lambda each: each.path,
    "name": lambda each: each.name if each.name != each.path else "",
    "operator": lambda each: each.op,
    "value": lambda each: show_type(each.dtype, each.shape),
    "bytes": lambda each: show_size(each.size_bytes),
    "storage": lambda each: repr(each.storage),
    "source": lambda each: each.source,
    "reason": lambda each: each.reason,
}


def print_saved_residuals(f: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Prints `saved_residuals` as a table with a total.

    If some values are stored in another form, a column says how; the bytes are those that
    wait on the values' device.

    Args:
        f: as in `saved_residuals`.
        *args: the call's arguments.
        **kwargs: likewise.

    Example:
        >>> import torch
        >>> from remat import print_saved_residuals
        >>> print_saved_residuals(lambda x: x.sin().sum(), torch.ones(3))
        argument  name  operator  value       bytes  source  reason
        x               input     float32[3]   12 B          an argument that the backward reads
        total                                  12 B
    """
    residuals = saved_residuals(f, *args, **kwargs)
    columns = dict(_COLUMNS)
    if all(residual.storage.keeps for residual in residuals):
        del columns["storage"]
    total = sum(residual.size_bytes for residual in residuals)
    last = {"argument": "total", "bytes": show_size(total)}
    rows = [[show(each) for show in columns.values()] for each in residuals]
    rows = [[*columns], *rows, [last.get(column, "") for column in columns]]
    print("\n".join(aligned(rows)))
