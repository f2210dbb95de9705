"""The in-place collectives of `torch.distributed` as pure operators, for a trace.

`dist.all_reduce(x)` overwrites x, which its schema does not say, and is waited for in Python,
which a trace does not see. So a program would read sums that are not there yet, save what is
overwritten later, and sum twice what its backward recomputes. In a trace each becomes its
functional twin, which returns a new tensor, a wait, and a copy into the tensor that it overwrites,
which all else here knows how to handle. What goes over the wire is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from remat._errors import TraceError, refusal
from remat._torch import distributed

_functional: Any = torch.ops._c10d_functional


def functional_twins() -> Mapping[Any, Callable[..., Any]]:
    """For each operator behind a collective of `torch.distributed` what a trace runs."""
    namespace = distributed.collective_operators()
    found = {
        namespace[name]: twin for name, twin in _TWINS.items() if name in namespace
    }
    others = set(namespace.values()) - set(found)
    return {**found, **{op: functools.partial(_refuse, op) for op in others}}


def _all_reduce(tensors: Sequence[Tensor], group: Any, op: Any, *_: Any) -> Any:
    name = distributed.group_of(group).group_name
    for tensor in tensors:
        _write(tensor, _functional.all_reduce(tensor, distributed.reduction(op), name))
    return tensors, distributed.finished_work()


def _broadcast(tensors: Sequence[Tensor], group: Any, root: int, *_: Any) -> Any:
    name = distributed.group_of(group).group_name
    for tensor in tensors:
        _write(tensor, _functional.broadcast(tensor, root, name))
    return tensors, distributed.finished_work()


def _gather(out: Tensor, part: Tensor, group: Any, *_: Any) -> Any:
    _write(out, _gathered(part, group))
    return out, distributed.finished_work()


def _gather_list(
    outs: Sequence[Sequence[Tensor]], parts: Sequence[Tensor], group: Any, *_: Any
) -> Any:
    for row, part in zip(outs, parts, strict=True):
        if any(out.shape != part.shape for out in row):
            # On each rank: one that went on would wait for the others.
            shapes = ", ".join(str([*out.shape]) for out in row)
            raise refusal(
                TraceError,
                where="a call of torch.distributed.all_gather",
                what=f"gathers parts of unlike shapes, {shapes}.",
                why="A trace gathers all parts as one tensor, to which each rank adds as "
                "much.",
                do='Pad the parts to one shape, or use engine="rerun".',
            )
        found = _gathered(part, group).view(len(row), *part.shape)
        for out, each in zip(row, found.unbind(), strict=True):
            out.copy_(each)
    return outs, distributed.finished_work()


def _gathered(part: Tensor, group: Any) -> Tensor:
    group = distributed.group_of(group)
    flat = part.reshape(-1)
    found = _functional.all_gather_into_tensor(flat, group.size(), group.group_name)
    return _functional.wait_tensor(found)


def _reduce_scatter(out: Tensor, whole: Tensor, group: Any, op: Any, *_: Any) -> Any:
    group, name = distributed.group_of(group), distributed.reduction(op)
    flat = whole.reshape(-1)
    size = group.size()
    _write(out, _functional.reduce_scatter_tensor(flat, name, size, group.group_name))
    return out, distributed.finished_work()


def _exchange(
    out: Tensor, whole: Tensor, group: Any, out_sizes: Any, sizes: Any, *_: Any
) -> Any:
    """An all-to-all: rows by the ranks they go to, no sizes meaning equal parts."""
    group = distributed.group_of(group)
    found = _functional.all_to_all_single(
        whole.contiguous(),
        _sizes_sent(out, out_sizes, group.size()),
        _sizes_sent(whole, sizes, group.size()),
        group.group_name,
    )
    _write(out, found)
    return distributed.finished_work()


def _sizes_sent(tensor: Tensor, sizes: Sequence[int], num_ranks: int) -> Sequence[int]:
    return sizes or [tensor.shape[0] // num_ranks] * num_ranks


def _write(out: Tensor, found: Tensor) -> None:
    """Overwrites a tensor by what a functional collective began to make."""
    out.copy_(_functional.wait_tensor(found).view(out.shape))


_TWINS: dict[str, Callable[..., Any]] = {
    "allreduce_": _all_reduce,
    "broadcast_": _broadcast,
    "_allgather_base_": _gather,
    "allgather_": _gather_list,
    "_reduce_scatter_base_": _reduce_scatter,
    "alltoall_base_": _exchange,
}


def _refuse(op: Any, *_: Any, **__: Any) -> Any:
    raise refusal(
        TraceError,
        where=f"a call of torch.distributed that runs {op}",
        what="cannot be traced.",
        why="It overwrites or sends tensors in a way that a graph cannot show.",
        do="Use all_reduce, broadcast, all_gather, all_gather_single, "
        'reduce_scatter_single or all_to_all_single, or engine="rerun".',
    )
