"""`parallelize_module` over blocks with regions: DTensor parameters and activations."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard as Placed,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from remat import (
    RematWarning,
    SavedTensorModifiedError,
    TraceError,
    chain,
    checkpoint_name,
    modules,
    policies,
    remat,
    schedules,
    storage,
)
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
    def counted(engine: Any, by_sequence: bool) -> Counter[str]:
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


def placements(model: nn.Module) -> dict[str, Any]:
    """How each gradient is spread; those of replicated parameters may be partial sums."""
    return {
        name: getattr(parameter.grad, "placements", None)
        for name, parameter in model.named_parameters()
    }


SUMS = policies.by_op(torch.ops._c10d_functional.wait_tensor)


def check_blocks_are_traced(mesh: Any) -> None:
    # Beside its input, in parts of `share`: a sum, or two gathered and a scattered one. No
    # gradient reads the block's own sum.
    for by_sequence, share, sums in ((False, 1, 1), (True, 2, 2 * 2 + 1)):
        plain = tensor_parallel(mesh, a_model(1), by_sequence=by_sequence)
        expected = step(plain)
        first = modules.apply(a_model(1), Block, policy=SUMS)
        second = tensor_parallel(mesh, a_model(1), by_sequence=by_sequence)
        for model, held in (
            (tensor_parallel(mesh, first, by_sequence=by_sequence), 1 + sums),
            (modules.apply(second, Block), 1),
        ):
            for _ in range(2):
                assert_equal(step(model), expected)
                assert placements(model) == placements(plain)
            found = held_bytes(model(*batches(0)), model)
            assert found == held * ACTIVATION_BYTES // share


def check_a_trace_sends_no_more_than_it_must(mesh: Any) -> None:
    def counted(by_sequence: bool, **options: Any) -> Counter[str]:
        model = tensor_parallel(mesh, a_model(1), by_sequence=by_sequence)
        if options:
            modules.apply(model, Block, **options)
            model(*batches(0))
        with OperatorCounter() as counter:
            step(model)
        kinds = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
        return Counter({k: counter.counts[f"_c10d_functional.{k}"] for k in kinds})

    # No gradient reads the block's own sum: it is not made again.
    for by_sequence, again in (
        (False, {"all_reduce": 1}),
        (True, {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 1}),
    ):
        plain = counted(by_sequence)
        more = Counter(again)
        assert counted(by_sequence, policy=policies.nothing_saveable) == plain + more
        assert counted(by_sequence, policy=SUMS) == plain


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


def spread(mesh: Any, size: int = 6) -> tuple[Any, ...]:
    """A replicated input, two weights, cut by rows and by columns, and a scale."""
    torch.manual_seed(0)
    shapes = ((3, size), (size, size), (size, size), (size,))
    cuts = (Replicate(), Placed(0), Placed(1), Replicate())
    return tuple(
        distribute_tensor(torch.randn(shape), mesh, [cut]).requires_grad_()
        for shape, cut in zip(shapes, cuts, strict=True)
    )


def two_layers(x: Any, w: Any, v: Any, scale: Any) -> Any:
    """DTensors in, a DTensor out, which is one term of a sum on each rank."""
    hidden = checkpoint_name(torch.tanh(x @ w.t()), "hidden")
    return (hidden @ v.t()) * scale


def described(tensors: Iterable[Any]) -> list[tuple[Any, Tensor]]:
    """How each is spread, and what this rank holds of it."""
    return [
        (each.placements, each.to_local().detach())
        if isinstance(each, DTensor)
        else (None, each.detach())
        for each in tensors
    ]


def assert_alike(
    ours: Iterable[Any], theirs: Iterable[Any], tolerance: float = 0.0
) -> None:
    """Spread alike, and equal to the bit where no tolerance is given."""
    for one, other in zip(described(ours), described(theirs), strict=True):
        assert one[0] == other[0]
        torch.testing.assert_close(one[1], other[1], rtol=tolerance, atol=tolerance)


def with_gradients(function: Any, leaves: Any, loss: Any) -> list[Any]:
    found = function(*leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    total: Any = sum(loss(each) for each in outputs if each.requires_grad)
    return [*outputs, *torch.autograd.grad(total, leaves)]


def check_tensors_in_parts_go_in_and_out(mesh: Any) -> None:
    whole = [Replicate()]
    functions: tuple[Callable[..., Any], ...] = (
        two_layers,
        lambda *given: two_layers(*given).redistribute(placements=[Placed(0)]),
        lambda *given: two_layers(*given).to_local(),
        lambda x, w, v, s: (h := torch.tanh(x @ w.t()), h * v.sum() * s.sum(), h),
        lambda x, w, v, s: (
            DTensor.from_local(x.to_local() * 2, mesh, [Placed(0)], run_check=False)
            * (w.sum() + v.sum())
            * s
        ),
    )
    losses: tuple[Callable[[Any], Any], ...] = (
        lambda y: y.square().sum(),
        lambda y: y.sum(),
        lambda y: (
            y.redistribute(placements=whole).to_local().square().sum()
            if isinstance(y, DTensor)
            else y.square().sum()
        ),
    )
    for index, function in enumerate(functions):
        region = remat(function)
        # Contributions that meet outside of a call agree to rounding.
        tolerance = 1e-5 if index == 3 else 0.0
        # An odd size: the ranks' parts differ.
        for size, loss in zip((6, 5, 6), losses, strict=True):
            leaves = spread(mesh, size)
            plain = with_gradients(function, leaves, loss)
            for _ in range(2):
                assert_alike(with_gradients(region, leaves, loss), plain, tolerance)


def check_policies_over_tensors_in_parts(mesh: Any) -> None:
    leaves = spread(mesh)
    plain = with_gradients(two_layers, leaves, torch.sum)
    named = policies.save_only_these_names("hidden")
    options: dict[str, Any]
    for options in (
        {"policy": named},
        {"policy": named, "verify": True},
        {"policy": policies.everything_saveable},
        {"saved_inputs": {"x": storage.Shard(mesh)}},
    ):
        region = remat(two_layers, **options)
        assert_alike(with_gradients(region, leaves, torch.sum), plain)
    held = remat(two_layers, policy=named).saved_residuals(*leaves)
    assert ("hidden", 4 * 3 * 3) in [(each.name, each.size_bytes) for each in held]


def check_a_signature_knows_how_tensors_are_spread(mesh: Any) -> None:
    x, w, v, scale = spread(mesh)
    region = remat(lambda x: two_layers(x, w, v, scale))
    captured = remat(two_layers)
    captured.cache_clear()
    for count, cut in enumerate((Replicate(), Placed(0), Placed(1)), 1):
        given = x.detach().redistribute(placements=[cut]).requires_grad_()
        for _ in range(2):
            leaves = (given, w, v, scale)
            plain = with_gradients(two_layers, leaves, torch.sum)
            assert_alike(with_gradients(captured, leaves, torch.sum), plain)
            ours = region(given)
            found = torch.autograd.grad(ours.sum(), leaves)
            assert_alike([ours, *found], plain)
        assert captured.cache_info().misses == count


def check_open_sizes_are_not_for_tensors_in_parts(mesh: Any) -> None:
    region = remat(two_layers, dynamic_shapes=True)
    with pytest.warns(RematWarning, match="a DTensor has two sizes"):
        region(*spread(mesh))
    for size in (6, 4):
        leaves = spread(mesh, size)
        plain = with_gradients(two_layers, leaves, torch.sum)
        assert_alike(with_gradients(region, leaves, torch.sum), plain)


def check_regions_in_regions_and_stacks_of_tensors_in_parts(mesh: Any) -> None:
    x, *rest = leaves = spread(mesh)

    def stage(x: Any) -> Any:
        return two_layers(x, *rest).redistribute(placements=[Replicate()])

    inner = remat(stage)
    y = stage(stage(stage(x)))
    plain = [y, *torch.autograd.grad(y.sum(), leaves)]
    for function in (
        remat(lambda x: inner(inner(inner(x)))),
        chain([stage, stage, stage], schedule=schedules.Revolve(1)),
    ):
        y = function(x)
        assert_alike([y, *torch.autograd.grad(y.sum(), leaves)], plain)


def check_transforms_of_tensors_in_parts(mesh: Any) -> None:
    leaves, region = spread(mesh), remat(two_layers)
    x, *rest = leaves
    every = (0, 1, 2, 3)
    grad, vmap = torch.func.grad, torch.func.vmap

    def loss(function: Any) -> Any:
        return lambda *given: function(*given).square().sum()

    def twice(function: Any) -> Any:
        found = torch.autograd.grad(loss(function)(*leaves), leaves, create_graph=True)
        total: Any = sum(each.square().sum() for each in found)
        return torch.autograd.grad(total, leaves)

    transforms: tuple[Callable[[Any], Any], ...] = (
        lambda f: grad(loss(f), every)(*leaves),
        lambda f: torch.func.vjp(f, *leaves)[1](torch.ones_like(two_layers(*leaves))),
        lambda f: grad(lambda *each: grad(loss(f))(*each).square().sum(), every)(
            *leaves
        ),
        twice,
        lambda f: [vmap(lambda x: f(x, *rest))(x)],
    )
    for transform in transforms:
        ours, plain = transform(region), transform(two_layers)
        assert_alike(ours, plain, 1e-5)
    with pytest.raises(TraceError, match="is mapped by vmap, or its backward is"):
        torch.func.jacrev(lambda x: region(x, *rest).sum(0))(x)


def check_what_is_changed_in_place_is_found(mesh: Any) -> None:
    x, w, v, scale = spread(mesh)
    y = remat(two_layers)(x, w, v, scale)
    with torch.no_grad():
        v.mul_(2)
    with pytest.raises(SavedTensorModifiedError):
        y.sum().backward()
