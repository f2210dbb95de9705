"""`parallelize_module` over blocks with regions: DTensor parameters and activations."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard as Placed
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from remat import TraceError, checkpoint_name, modules, policies, remat
from tests.distributed.models import (
    ACTIVATION_BYTES,
    Block,
    Model,
    a_model,
    assert_equal,
    batches,
    gradients,
    held_bytes,
)
from tests.storage.parallel import assert_same
from tests.support import OperatorCounter


def tensor_parallel(mesh: Any, model: Model, *, by_sequence: bool) -> Model:
    """Heads and hidden units over the ranks, and between them the sequence, if asked for."""
    split: dict[str, Any] = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    if by_sequence:
        parts, whole = (Placed(1),), (Replicate(),)
        gathered = PrepareModuleInput(input_layouts=parts, desired_input_layouts=whole)
        scattered = RowwiseParallel(output_layouts=Placed(1), use_local_output=False)
        split |= {
            "norm_1": SequenceParallel(),
            "attention": gathered,
            "attention.out": scattered,
            "norm_2": SequenceParallel(),
            "mlp": gathered,
            "mlp.down": scattered,
        }
        parallelize_module(
            model,
            mesh,
            {
                "embed": PrepareModuleOutput(
                    output_layouts=whole,
                    desired_output_layouts=parts,
                    use_local_output=False,
                ),
                "head": PrepareModuleInput(
                    input_layouts=parts,
                    desired_input_layouts=whole,
                    use_local_output=True,
                ),
            },
        )
    for block in model.blocks:
        parallelize_module(block, mesh, split)
    return model


def step(model: nn.Module) -> dict[str, Any]:
    """Output and gradients; every rank of the mesh sees one batch."""
    model.zero_grad()
    (x,) = batches(0)
    y = model(x)
    y.square().sum().backward()
    return {"output": y.detach(), **gradients(model)}


def check_blocks_run_again(mesh: Any) -> None:
    for by_sequence in (False, True):
        plain = step(tensor_parallel(mesh, a_model(), by_sequence=by_sequence))
        first = modules.apply(a_model(), Block, engine="rerun")
        second = tensor_parallel(mesh, a_model(), by_sequence=by_sequence)
        for model in (
            tensor_parallel(mesh, first, by_sequence=by_sequence),
            modules.apply(second, Block, engine="rerun"),
        ):
            assert_equal(step(model), plain)
            share = mesh.size() if by_sequence else 1
            held = held_bytes(model(*batches(0)), model)
            assert held == 3 * ACTIVATION_BYTES // share


def check_the_recomputation_runs_the_forwards_collectives(mesh: Any) -> None:
    def counted(engine: str | None, by_sequence: bool) -> Counter[str]:
        model = tensor_parallel(mesh, a_model(), by_sequence=by_sequence)
        if engine is not None:
            modules.apply(model, Block, engine=engine)
        step(model)
        with OperatorCounter() as counter:
            step(model)
        return counter.counts

    # A block's forward sums twice; by parts it gathers twice, and scatters the sums.
    for by_sequence, forward in (
        (False, {"all_reduce": 2}),
        (True, {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}),
    ):
        plain, ours = counted(None, by_sequence), counted("rerun", by_sequence)
        for name, count in forward.items():
            name = f"_c10d_functional.{name}"
            assert ours[name] == plain[name] + 3 * count


def check_a_trace_says_what_to_do(mesh: Any) -> None:
    for by_sequence in (False, True):
        model = tensor_parallel(mesh, a_model(), by_sequence=by_sequence)
        plain = step(model)
        modules.apply(model, Block)
        with pytest.raises(TraceError, match=r"meets others.*Use engine=\"rerun\""):
            step(model)
        assert_equal(step(modules.remove(model)), plain)


def check_tensors_in_parts_made_inside(mesh: Any) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        part = DTensor.from_local(x.sin(), mesh, [Placed(0)], run_check=False)
        whole = part.redistribute(mesh, [Replicate()]).to_local()
        terms = (checkpoint_name(whole, "gathered") @ w).sin()
        found = DTensor.from_local(terms, mesh, [Partial()], run_check=False)
        return found.redistribute(mesh, [Placed(0)]).to_local().sin()

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(mesh.get_local_rank())
        x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
        y = function(x, w)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, w))]

    wait = policies.by_op(torch.ops._c10d_functional.wait_tensor)
    named = policies.save_only_these_names("gathered")
    for policy, num_gathers in (
        (policies.nothing_saveable, 3),
        (named, 2),
        (wait, 2),
        (policies.everything_saveable, 2),
    ):
        region = remat(function, policy=policy)
        assert_same(run(region), run(function))
        with OperatorCounter() as counter:
            run(region)
        assert counter.counts["_c10d_functional.all_gather_into_tensor"] == num_gathers


def check_tensors_in_parts_that_a_trace_refuses(mesh: Any) -> None:
    def made(x: Tensor) -> Tensor:
        return DTensor.from_local(x.sin(), mesh, [Placed(0)], run_check=False)

    def mixed(x: Tensor) -> Tensor:
        # In a trace it would look like a local tensor, and is none.
        local: Any = x if isinstance(x, DTensor) else made(x)
        return local.redistribute(mesh, [Replicate()]).to_local()

    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(TraceError, match=r"is made inside .*Return its `to_local\(\)`"):
        remat(made)(x)
    parts = made(x).detach().requires_grad_()
    with pytest.raises(TraceError, match="meets others in a region"):
        remat(mixed)(parts)
