"""The in-place collectives of `torch.distributed` as pure operators, for a trace.

`dist.all_reduce(x)` overwrites x, which its schema does not say, and is waited for in Python,
which a trace does not see. So a program would read sums that are not there yet, save what is
overwritten later, and sum twice what its backward recomputes. In a trace each becomes its
functional twin, which returns a new tensor, a wait, and a copy into the tensor that it overwrites,
which all else here knows how to handle. What goes over the wire is the same.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from remat._errors import TraceError
from remat._torch import distributed
from remat._torch.distributed import group_of

_functional: Any = torch.ops._c10d_functional


def functional_twins() -> Mapping[Any, Callable[..., Any]]:
    """For each operator behind a collective of `torch.distributed` what a trace runs."""
    return {
        op: _TWINS.get(name, functools.partial(_refuse, op))
        for name, op in distributed.collective_operators().items()
    }


def _all_reduce(tensors: Sequence[Tensor], group: Any, op: Any, *_: Any) -> Any:
    name, reduction = group_of(group).group_name, distributed.reduction(op)
    for tensor in tensors:
        _write(tensor, _functional.all_reduce(tensor, reduction, name))
    return tensors, distributed.finished_work()


def _broadcast(tensors: Sequence[Tensor], group: Any, root: int, *_: Any) -> Any:
    name = group_of(group).group_name
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
            raise TraceError.of(
                where="a call of torch.distributed.all_gather",
                what=f"gathers parts of unlike shapes, {shapes}.",
                why="A trace gathers all parts as one tensor, to which each rank adds as much.",
                do='Pad the parts to one shape, or use engine="rerun".',
            )
        found = _gathered(part, group).view(len(row), *part.shape)
        for out, each in zip(row, found.unbind(), strict=True):
            out.copy_(each)
    return outs, distributed.finished_work()


def _gathered(part: Tensor, group: Any) -> Tensor:
    size, name = group_of(group).size(), group_of(group).group_name
    found = _functional.all_gather_into_tensor(part.reshape(-1), size, name)
    return _functional.wait_tensor(found)


def _reduce_scatter(out: Tensor, whole: Tensor, group: Any, op: Any, *_: Any) -> Any:
    size, name = group_of(group).size(), group_of(group).group_name
    how = (distributed.reduction(op), size, name)
    _write(out, _functional.reduce_scatter_tensor(whole.reshape(-1), *how))
    return out, distributed.finished_work()


def _exchange(
    out: Tensor, whole: Tensor, group: Any, out_sizes: Any, sizes: Any, *_: Any
) -> Any:
    """An all-to-all: rows by the ranks they go to, no sizes meaning equal parts."""
    count, name = group_of(group).size(), group_of(group).group_name
    out_sizes = out_sizes or [out.shape[0] // count] * count
    sizes = sizes or [whole.shape[0] // count] * count
    given = (whole.contiguous(), out_sizes, sizes, name)
    _write(out, _functional.all_to_all_single(*given))
    return distributed.finished_work()


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
    raise TraceError.of(
        where=f"a call of torch.distributed that runs {op}",
        what="cannot be traced.",
        why="It overwrites or sends tensors in a way that a graph cannot show.",
        do="Use all_reduce, broadcast, all_gather, all_gather_single, "
        'reduce_scatter_single or all_to_all_single, or engine="rerun".',
    )
