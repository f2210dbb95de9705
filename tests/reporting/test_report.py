"""The report of a step: its rows, its values, and how it is shown."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import (
    RematError,
    Report,
    checkpoint_name,
    policies,
    remat,
    report,
    scan,
    schedules,
)
from tests.random.trackers import generator_state
from tests.reporting.models import Normed, batch, block, loss_of, parameters

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:remat.RematWarning"),
]


@pytest.fixture(scope="module")
def attention() -> Report:
    """Four layers that save their attention."""
    layer = remat(block, policy=policies.save_only_these_names("attn"))
    return report(loss_of(layer), parameters(), batch())


def test_equal_layers_are_folded(attention: Report) -> None:
    """The first layer's input is an argument; the three others are alike."""
    (region,) = attention.regions

    assert (region.name, region.calls) == ("block", 4)
    assert [(layer.first, layer.count) for layer in region.layers] == [(0, 1), (1, 3)]
    first, other = region.layers
    assert other.held_bytes - first.held_bytes == batch().nbytes
    assert region.held_bytes == first.held_bytes + 3 * other.held_bytes
    assert region.recompute_flops == 4 * (first.recompute_flops or 0)
    assert "each, x 3" in str(attention)


def test_parameters_and_gradients_count_apart(attention: Report) -> None:
    """Their bytes are those of the tensors; none is an activation."""
    size = sum(each.nbytes for p in parameters() for each in p.values())

    assert attention.parameter_bytes == size + batch().nbytes  # x is differentiated too
    assert attention.gradient_bytes == attention.parameter_bytes
    assert attention.optimizer_bytes is None
    held = [batch().nbytes] * 4 + [2 * 2 * 16 * 4] * 4 + [batch().nbytes] * 3
    assert sum(each.held_bytes for each in attention.regions) <= sum(held)


def test_the_optimizers_state_is_added_on_request(attention: Report) -> None:
    """Adam keeps two tensors like each parameter, and a step count."""
    weight = nn.Parameter(torch.ones(10, 10))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(10, 10)
    optimizer.step()

    found = attention.with_optimizer(optimizer)

    assert found.optimizer_bytes == 2 * 400 + 4
    assert dataclasses.replace(found, optimizer_bytes=None) == attention


def test_the_peak_says_what_made_it(attention: Report) -> None:
    """In the backward of the first layer, where all gradients are there but its own."""
    peak = attention.peak

    assert (peak.phase, peak.region, peak.call) == ("backward", "block", 0)
    assert sum(size for _, size in peak.groups) == peak.size_bytes
    assert dict(peak.groups).keys() >= {"block", "gradients"}
    assert max(attention.timeline.total_bytes) == peak.size_bytes


def test_a_peak_in_a_forward() -> None:
    """A large temporary of the forward is named with its line."""

    def wasteful(x: Tensor) -> Tensor:
        big = x.detach().repeat(100).cos()
        return x * big.sum()

    peak = report(wasteful, torch.ones(64)).peak

    assert (peak.phase, peak.region, peak.op) == ("forward", "", "aten.cos")
    assert peak.source.startswith("test_report.py:")
    assert peak.size_bytes == 2 * 64 * 100 * 4


def test_the_largest_values(attention: Report) -> None:
    """Each with its line, its region and what reads it in the backward; folded."""
    value = next(each for each in attention.values if each.name == "attn")

    assert value.count == 4
    assert value.size_bytes == 4 * batch().nbytes
    assert value.region == "block"
    assert value.storage == "Keep()"
    assert value.source.startswith("models.py:")
    assert any("attention" in each for each in value.consumers)
    sizes = [each.size_bytes for each in attention.values]
    assert sizes == sorted(sizes, reverse=True)


def test_all_values_are_there_and_the_text_has_ten() -> None:
    """Held and recomputed ones are in the record; the text says how many it leaves out."""

    def many(x: Tensor) -> Tensor:
        for scale in range(1, 15):
            x = (x * scale).sin()  # each `x * scale` waits, of its own shape
            x = torch.cat([x, x[:1]])
        return x.sum()

    found = report(many, torch.ones(8))

    assert len(found.values) == 14
    assert sum(each.size_bytes for each in found.values) == found.outside_bytes
    assert str(found).count("aten.mul test_report.py") == 10
    assert "and 4 smaller ones" in str(found)


def test_recomputed_values_are_listed(attention: Report) -> None:
    """Each with its name, its line, its bytes and its work, equal layers folded."""
    value = next(each for each in attention.recomputed if each.name == "mlp_up")

    tokens = batch().numel() // 32
    assert (value.op, value.shape, value.count) == ("aten.mm", (32, 128), 4)
    assert value.size_bytes == 4 * tokens * 128 * 4
    assert value.flops == 4 * 2 * tokens * 32 * 128
    assert (value.region, value.dtype) == ("block", torch.float32)
    assert value.source.startswith("models.py:")
    assert "attn" not in {each.name for each in attention.recomputed}
    assert sum(each.flops for each in attention.recomputed) == attention.recompute_flops


@pytest.mark.contract
def test_values_outside_of_regions() -> None:
    """What plain autograd holds has no region, and the node that reads it."""
    region = remat(torch.sin)

    def loss(x: Tensor) -> Tensor:
        return torch.exp(region(x)).sum()

    found = report(loss, torch.ones(1000))

    (value,) = [each for each in found.values if not each.region]
    assert (value.op, value.consumers) == ("aten.exp", ("ExpBackward0",))
    assert value.source.startswith("test_report.py:")
    assert found.outside_bytes == 4000
    assert found.suggestion.kind == "wrap"
    assert found.suggestion.source == value.source


@pytest.mark.contract
def test_one_storage_counts_once() -> None:
    """Views of one tensor, held by several regions and by autograd, are its bytes once."""
    region = remat(lambda t: torch.sin(torch.sin(t)))

    def loss(x: Tensor) -> Tensor:
        y = x * 2.0
        return (
            region(y) + region(y.view(10, 10).t()).reshape(-1) + y.exp().sin()
        ).sum()

    found = report(loss, torch.ones(100))

    held = found.held_bytes - found.output_bytes
    assert held == 400 + 400  # y, and exp(y), which the nodes of exp and sin hold


def test_a_name_that_matches_nothing() -> None:
    """It is listed with its policy, and stands in the text."""
    policy = policies.save_only_these_names("attn", "atn")

    found = report(loss_of(remat(block, policy=policy)), parameters(2), batch())

    assert found.unmatched == ((repr(policy), "atn"),)
    assert 'no value has the name "atn"' in str(found)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_on_inside(mode: Any) -> None:
    """A report can be asked for where no gradients are recorded."""
    with mode():
        found = report(remat(lambda x: x.sin().sin()), torch.ones(4))

    assert found.gradient_bytes == 16


@pytest.mark.contract
def test_a_function_that_differentiates_inside() -> None:
    """Regions under its own transform are listed; what they repeat is not known."""
    region = remat(lambda w, x: torch.tanh(w @ x).sin())

    def penalty(w: Tensor, x: Tensor) -> Tensor:
        return torch.func.grad(lambda v: region(v, x).sum())(w).square().sum()

    found = report(penalty, torch.eye(8), torch.ones(8, 8))

    assert any("differentiated" in row.name for row in found.regions)
    assert found.recompute_flops is None
    assert found.parameter_bytes == 2 * 256


@pytest.mark.contract
def test_a_module_of_regions() -> None:
    """Modules are reported by their parameters, and their buffers stay what they were."""
    blocks: list[Any] = [remat(Normed()), remat(Normed())]
    model = nn.Sequential(*blocks)
    before = {name: each.clone() for name, each in model.state_dict().items()}

    found = report(model, torch.randn(4, 8))

    assert [region.name for region in found.regions] == ["Normed"]
    assert found.parameter_bytes == sum(each.nbytes for each in model.parameters())
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name])
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.contract
def test_nothing_of_the_callers_is_changed() -> None:
    """Not the arguments, not `.grad`, not the generator; `f` may even write in place."""
    weight = torch.ones(8, requires_grad=True)
    weight.grad = torch.full((8,), 7.0)
    counts = torch.zeros(8)
    x = torch.randn(4, 8)
    state = generator_state()
    copies = [each.detach().clone() for each in (weight, counts, x)]

    def loss(x: Tensor, counts: Tensor) -> Tensor:
        counts.add_(1)
        x.mul_(2)
        return (torch.nn.functional.dropout(x, 0.5) * weight).sin().sum()

    found = report(loss, x, counts)

    assert found.parameter_bytes == 32
    for each, copy in zip((weight, counts, x), copies, strict=True):
        assert torch.equal(each, copy)
    assert torch.equal(weight.grad, torch.full((8,), 7.0))
    assert torch.equal(generator_state(), state)
    assert not x.requires_grad


def test_an_error_in_the_step_changes_nothing() -> None:
    """A function that raises has its arguments put back too."""
    x = torch.ones(3)

    def fails(x: Tensor) -> Tensor:
        x.add_(1)
        raise KeyError("of the user's")

    with pytest.raises((KeyError, RuntimeError)):
        report(fails, x)

    assert torch.equal(x, torch.ones(3))


def test_no_gradient_is_an_error() -> None:
    """A function whose outputs need no grad has no step to report."""
    with pytest.raises(RematError, match="returned no tensor that requires grad"):
        report(lambda x: x.detach(), torch.ones(3))


@pytest.mark.parametrize("around", [remat, torch.func.grad, torch.func.vmap])
def test_a_step_inside_a_trace_or_a_transform_is_refused(around: Any) -> None:
    """What is around has stand-ins for the numbers; the error names the function."""

    def inside(x: Tensor) -> Tensor:
        report(block, x)
        return x.sin().sum()

    with pytest.raises(RematError, match=r"^block: cannot be measured inside a trace"):
        around(inside)(torch.ones(3, requires_grad=True))


def test_an_object_that_the_pytree_does_not_know_is_named() -> None:
    """A dataclass of one's own hides its tensors: the error says so, and what to do."""

    @dataclasses.dataclass
    class Output:
        loss: Tensor

    with pytest.raises(RematError, match=r"\(it returned Output\).*f\(\*a\)\.loss"):
        report(lambda x: Output(x.sin().sum()), torch.ones(3))


@pytest.mark.parametrize("schedule", [schedules.Every(2), schedules.Sqrt()])
def test_a_scheduled_stack_is_a_row(schedule: Any) -> None:
    """It is called after its stage, and holds what waits; what runs again it does not tell."""

    def stage(c: Tensor, w: Tensor) -> tuple[Tensor, None]:
        return torch.tanh(c @ w), None

    def loss(x: Tensor, ws: Tensor) -> Tensor:
        return scan(stage, x, ws, schedule=schedule)[0].sum()

    found = report(loss, torch.ones(4, 8), torch.ones(4, 8, 8) / 8)

    rows = {row.name.rpartition(".")[2]: row for row in found.regions}
    assert rows["stage"].policy == "a schedule"
    assert rows["stage"].held_bytes == found.held_bytes - found.output_bytes
    states = [value for value in found.values if value.shape == (4, 8)]
    assert sum(value.size_bytes for value in states) >= 2 * 4 * 8 * 4
    assert all(value.region == rows["stage"].name for value in states)
    assert sum(value.size_bytes for value in found.values) == rows["stage"].held_bytes
    assert found.recompute_flops is None
    assert found.gradient_bytes == (32 + 256) * 4


def test_several_outputs_are_summed() -> None:
    """Any pytree of outputs: the backward is that of their sum."""
    region = remat(lambda x: {"a": x.sin().sin(), "b": (x.exp().sin(), 3)})

    found = report(region, torch.ones(16))

    assert found.gradient_bytes == 64
    assert found.regions[0].calls == 1


def test_what_runs_again_in_python_is_unknown() -> None:
    """engine="rerun" does not tell what of its backward is recomputation."""
    region = remat(lambda x: x.sin().sin(), engine="rerun")

    found = report(lambda x: region(region(x)).sum(), torch.ones(64))

    (row,) = found.regions
    assert (row.calls, row.recompute_flops, row.predicted_held_bytes) == (2, None, None)
    assert row.name.endswith("<lambda>")  # nobody differentiates it inside
    assert row.held_bytes == 256
    assert "unknown" in str(found)
    assert (found.peak.phase, found.peak.region) == ("backward", row.name)


def test_signatures_of_one_function_are_layers() -> None:
    """Two shapes are two layers of one row."""
    region = remat(lambda x: x.sin().sin())

    found = report(
        lambda x: region(x * 2.0).sum() + region(x[:2] * 1.0).sum(), torch.ones(64)
    )

    (row,) = found.regions
    assert sorted(layer.held_bytes for layer in row.layers) == [8, 256]
    assert row.predicted_held_bytes == row.held_bytes == 264


def test_one_function_under_two_policies_is_two_rows() -> None:
    """They have one name, and a number."""
    layers = [remat(block), remat(block, policy=policies.save_matmul_outputs)]

    found = report(
        lambda p, x: layers[1](p, layers[0](p, x)).sum(), parameters(1)[0], batch()
    )

    assert [row.name for row in found.regions] == ["block #1", "block #2"]
    assert [row.policy for row in found.regions] == [
        "nothing_saveable",
        "save_matmul_outputs",
    ]


def test_the_allocators_peak_is_shown(attention: Report) -> None:
    """Only where there is one."""
    shown = dataclasses.replace(attention, allocator_peak_bytes=2**20)

    has_one = torch.get_default_device().type != "cpu"
    assert (attention.allocator_peak_bytes is not None) is has_one
    assert "1.0 MiB by the device's allocator" in str(shown)
    assert ("allocator" in str(attention)) is has_one


def test_json_has_every_figure(attention: Report) -> None:
    """The schema's name first, then the fields of the record; dtypes by name."""
    found = json.loads(attention.to_json())

    fields = [field.name for field in dataclasses.fields(attention)]
    assert list(found) == ["schema", *fields]
    assert found["schema"] == "remat.report/1"
    assert found["held_bytes"] == attention.held_bytes
    assert found["values"][0]["dtype"] == "float32"
    assert found["regions"][0]["layers"][1]["count"] == 3


def test_diff(attention: Report) -> None:
    """Figures of two reports side by side, regions by name, as a table."""
    plain = report(loss_of(block), parameters(), batch())

    found = plain.diff(attention)

    rows = {row.figure: (row.before, row.after) for row in found.rows}
    assert rows["held_bytes"] == (plain.held_bytes, attention.held_bytes)
    assert rows["held by block"] == (None, attention.regions[0].held_bytes)
    assert "held by block" in str(found)
    assert " x" in str(found)


def test_text_has_the_figures(attention: Report) -> None:
    """The text names what the issue asks for."""
    text = str(attention)

    for part in (
        "wait for the backward",
        "in the backward of block, call 0",
        "parameters",
        "gradients",
        "models.py:",
        "attn",
        "next: Saving `mlp_up` in block costs",
        "of the recomputation",
    ):
        assert part in text


def test_rich_shows_the_same(attention: Report) -> None:
    """With rich a report prints as tables."""
    console = pytest.importorskip("rich.console").Console(width=200, record=True)
    with console.capture() as capture:
        console.print(attention)

    assert "mlp_up" in capture.get()
    assert "each, x 3" in capture.get()


def test_names_that_look_like_markup_are_shown_whole() -> None:
    """A name is no instruction to rich, and a narrow table cuts no figure short."""
    console = pytest.importorskip("rich.console").Console(width=40, record=True)
    save = remat(
        lambda x: checkpoint_name(checkpoint_name(x.sin(), "h[i]"), "[/x]").exp().sin(),
        policy=policies.save_only_these_names("*"),
    )
    with console.capture() as capture:
        console.print(report(lambda x: save(x).sum(), torch.ones(16)))

    text = "".join(capture.get().split())
    assert "h[i]" in text
    assert "[/x]" in text
    assert "…" not in text


def test_repr_is_code(attention: Report) -> None:
    """The record is frozen, and compares by value."""
    assert dataclasses.replace(attention) == attention
    assert repr(attention).startswith("Report(function='loss_of.<locals>.loss'")
    with pytest.raises(dataclasses.FrozenInstanceError):
        attention.function = "other"  # pyright: ignore[reportAttributeAccessIssue]


def test_named_arguments_belong_to_the_function() -> None:
    """Every keyword is `f`'s own, whatever it is called."""

    def loss(x: Tensor, *, optimizer: float) -> Tensor:
        return (checkpoint_name(x, "x") * optimizer).sin().sum()

    assert report(loss, torch.ones(4), optimizer=2.0).function.endswith("loss")
