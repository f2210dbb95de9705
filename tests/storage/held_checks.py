"""What is stated of `Shard`, on each rank of a world; `test_shard.py` runs it."""

import math
from typing import Any

import torch
from torch import Tensor

from remat import checkpoint_name, plan, policies, remat, report
from remat._graph.meta import TensorMeta
from remat._regions.waiting import parts_of, wait
from remat.policies import Recompute, Save, Value
from remat.storage import Cast, Keep, Place, Quantize, Shard
from tests.storage.parallel import parts_in


def hidden(x: Tensor, w: Tensor) -> Tensor:
    """h: (2, 7, 9), an odd number of numbers on each axis but one."""
    h = checkpoint_name(x @ w, "h")
    return h.sin().exp().sin()


def operands() -> tuple[Tensor, Tensor]:
    """(2, 7, 5) and (5, 9), the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, 5, generator=generator)
    return x, torch.randn(5, 9, generator=generator)


def sharded(mesh: Any) -> dict[Any, int]:
    """Ways to shard h, and the bytes of a part."""
    t = mesh.size()
    flat, rows, columns = (
        math.ceil(126 / t),
        2 * math.ceil(7 / t) * 9,
        14 * math.ceil(9 / t),
    )
    return {
        Shard(mesh): 4 * flat,
        Shard(mesh, "batch (tp seq) d"): 4 * rows,
        Shard(mesh, "batch seq (d tp)"): 4 * columns,
        Cast(torch.bfloat16) >> Shard(mesh, "batch (tp seq) d"): 2 * rows,
        Shard(mesh, "batch seq (tp d)") >> Cast(torch.bfloat16): 2 * columns,
        # A byte a number, and a step and a minimum of two bytes each a group.
        Shard(mesh) >> Quantize(8, group_size=32): flat + 4 * math.ceil(flat / 32),
    }


def check_everything_states_the_bytes_of_a_part(mesh: Any) -> None:
    """`saved_residuals`, a report and a plan, of a value that a policy saves."""
    for how, size_bytes in sharded(mesh).items():
        args = operands()

        def allow(value: Value, how: Any = how) -> Save | Recompute:
            return Save(how) if "h" in value.names else Recompute()

        region: Any = remat(
            hidden, policy=policies.save_only_these_names("h").stored(how)
        )
        residuals = region.saved_residuals(*args)
        (row,) = report(lambda x, w, region=region: region(x, w).sum(), *args).regions
        ((option,),) = plan(hidden, budget=policies.budget(10**6, allow=allow))(
            *args
        ).problem.items

        assert [each.size_bytes for each in residuals if each.op != "input"] == [
            size_bytes
        ]
        assert option.size_bytes == size_bytes
        assert row.held_bytes == row.predicted_held_bytes == size_bytes
        parts = parts_in(region(args[0].requires_grad_(), args[1]))
        assert sum(part.untyped_storage().nbytes() for part in parts) == size_bytes


def check_an_input_of_any_layout_holds_what_is_stated(mesh: Any) -> None:
    """A pattern is of the user's axes, whatever their order in memory."""
    x, _ = operands()
    for value in (
        x,
        x.transpose(0, 1).contiguous().transpose(0, 1),
        x[:, ::2],
        x[:1].expand(2, 7, 5),
    ):
        for how in sharded(mesh):
            waiting = wait(value, how, Place())
            held = sum(part.untyped_storage().nbytes() for part in parts_of(waiting))
            assert held == how.held(TensorMeta.of(value)).size_bytes


def check_a_budget_is_met_by_a_part(mesh: Any) -> None:
    """It is too small for the value, and for one byte less nothing fits but recomputation."""
    args = operands()
    args[0].requires_grad_()
    ways = Keep(), Shard(mesh)
    size_bytes = ways[1].held(TensorMeta.of(hidden(*args))).size_bytes

    def allow(value: Value) -> Any:
        return ways if "h" in value.names else False

    def decisions(size: int) -> tuple[str, ...]:
        found = plan(hidden, budget=policies.budget(size, allow=allow))(*args)
        return tuple(row.decision for row in found.rows)

    whole = hidden(*args).nbytes
    assert size_bytes == 4 * math.ceil(126 / mesh.size()) < whole
    assert decisions(whole) == (repr(Keep()),)
    assert decisions(size_bytes) == (repr(Shard(mesh)),)
    assert decisions(size_bytes - 1) == ("recompute",)

    region = remat(hidden, policy=policies.budget(size_bytes, allow=allow))
    output = region(*args)
    assert [part.nbytes for part in parts_in(output)] == [size_bytes]
    (grad,) = torch.autograd.grad(output.sum(), args[:1])
    (plain,) = torch.autograd.grad(hidden(*args).sum(), args[:1])
    assert torch.equal(grad, plain)
