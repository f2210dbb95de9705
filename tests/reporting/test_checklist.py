"""The checklist: each row passes where it should, and has a case that makes it fail."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from remat import Checklist, RematError, checklist, policies, remat, storage
from remat.reporting._measure.step import MeasuredStep
from tests.random.trackers import generator_state
from tests.reporting.models import batch, block, loss_of, parameters

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:.*:remat.RematWarning"),
]

LAYERS = "activation bytes by layer"
APART = "parameters apart"
OVERHEAD = "recompute overhead"
DETERMINISM = "determinism"
ATTENTION = "attention not run twice"
THROUGHPUT = "throughput, and largest batch"
GRADIENTS = "gradients equal to undecorated"


def verdict(found: Checklist, question: str) -> tuple[str, str]:
    """The verdict of a row, and its figure."""
    (check,) = [each for each in found.checks if each.question == question]
    return check.verdict, check.figure


def test_a_good_model_passes() -> None:
    """A stack of layers that save their attention passes every row."""
    layer = remat(block, policy=policies.save_attention_outputs)

    found = checklist(loss_of(layer), parameters(3, requires_grad=True), batch(4))

    assert [check.question for check in found.checks] == [
        LAYERS,
        APART,
        OVERHEAD,
        DETERMINISM,
        ATTENTION,
        THROUGHPUT,
        GRADIENTS,
    ]
    assert found.is_passed, str(found)
    assert {check.verdict for check in found.checks} == {"pass"}
    assert "block: 1 x" in verdict(found, LAYERS)[1]
    assert "examples/s" in verdict(found, THROUGHPUT)[1]
    assert verdict(found, GRADIENTS)[1] == "all 12 to the last bit"


def test_without_regions_most_does_not_apply() -> None:
    """A plain function has nothing to check but its parameters."""
    found = checklist(loss_of(block), parameters(1), batch())

    verdicts = {check.question: check.verdict for check in found.checks}
    assert verdicts.pop(APART) == "pass"
    assert verdicts.pop(ATTENTION) == "pass"
    assert set(verdicts.values()) == {"not applicable"}
    assert found.is_passed


def sines(x: Tensor) -> Tensor:
    """Three sines in a row."""
    return x.sin().sin().sin()


def casts(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """A matmul in half precision, whose cast weight waits outside of the region."""
    weight = p["w"].to(torch.bfloat16)
    return remat(sines)((x * p["scale"]).to(torch.bfloat16) @ weight).float().sum()


def nested(x: Tensor) -> Tensor:
    """Regions in regions: the innermost matmuls run again three times."""
    inner = remat(lambda t: torch.tanh(torch.tanh(t @ t) @ t) @ t)
    middle = remat(lambda t: inner(torch.tanh(inner(t))))
    return remat(lambda t: middle(torch.tanh(middle(t))))(x)


def impure() -> Callable[[Tensor], Tensor]:
    """A function that computes other numbers each time."""
    counter = itertools.count(1)
    region: Any = remat(lambda x: (x * float(next(counter))).sin(), engine="rerun")
    return region


def lossy() -> Callable[[Tensor], Tensor]:
    """A region whose saved values lose bits."""
    policy = policies.everything_saveable.stored(storage.Cast(torch.bfloat16))
    return remat(sines, policy=policy)


FAILING: dict[str, tuple[Callable[[], Any], tuple[Any, ...], str]] = {
    LAYERS: (
        lambda: remat(sines, policy=policies.everything_saveable),
        (torch.linspace(0, 1, 64),),
        "without remat",
    ),
    APART: (
        lambda: casts,
        (
            {
                "w": torch.eye(16, requires_grad=True),
                "scale": torch.ones(16, requires_grad=True),
            },
            torch.ones(4, 16),
        ),
        "copies of them among the activations 512 B",
    ),
    OVERHEAD: (lambda: nested, (torch.eye(8),), "of a forward"),
    DETERMINISM: (impure, (torch.ones(4),), "1 of 1 gradients differ"),
    ATTENTION: (
        lambda: loss_of(remat(block)),
        (parameters(2), batch()),
        "2 in the forward, 2 again in the backward",
    ),
    THROUGHPUT: (
        lambda: remat(torch.sin, policy=policies.everything_saveable),
        (torch.linspace(0, 1, 64),),
        "largest batch",
    ),
    GRADIENTS: (lossy, (torch.linspace(0, 1, 64),), "1 of 1 differ, relatively by"),
}


@pytest.mark.parametrize("question", FAILING)
def test_each_row_can_fail(question: str) -> None:
    """What the row asks is broken, the row fails, and its figure says by how much."""
    make, args, figure = FAILING[question]

    found = checklist(make(), *args)

    assert verdict(found, question)[0] == "fail", str(found)
    assert figure in verdict(found, question)[1]
    assert not found.is_passed


def shared(autocast: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Several calls of one region that share a weight."""
    region = remat(lambda x, w: torch.tanh(x @ w) @ w)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for _ in range(4):
                x = x + region(x, w)
        return x.float().square().mean()

    return loss


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_sums_in_another_order_are_no_fault(autocast: bool) -> None:
    """A shared weight's gradient is a sum, which may be rounded otherwise."""
    x, w = torch.linspace(-1, 1, 512).view(32, 16), torch.linspace(-1, 1, 256)

    found = checklist(shared(autocast), x, w.cos().view(16, 16).requires_grad_())

    assert verdict(found, GRADIENTS)[0] == "pass", str(found)
    assert "differ, relatively by" in verdict(found, GRADIENTS)[1]


def test_on_meta_tensors_nothing_is_computed() -> None:
    """Bytes are checked there; bits and seconds are not known."""
    found = checklist(remat(sines), torch.empty(64, 8, device="meta"))

    assert verdict(found, LAYERS)[0] == "pass"
    for question in (DETERMINISM, THROUGHPUT, GRADIENTS):
        assert verdict(found, question)[0] == "not measured"


def test_operators_without_a_formula_have_no_overhead() -> None:
    """Not one of 0 % either."""
    found = checklist(remat(sines), torch.linspace(0, 1, 64))

    assert verdict(found, OVERHEAD)[0] == "not measured"


@pytest.mark.parametrize(("shape", "count"), [((4, 16), 64), ((4, 16, 8), 64)])
def test_tokens_are_counted_in_what_is_named(
    shape: tuple[int, ...], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole numbers are one each, vectors too; a label is an example's."""
    monkeypatch.setattr(MeasuredStep, "seconds", lambda _: 0.5)
    is_embedded = len(shape) > 2
    ids = torch.ones(shape) if is_embedded else torch.ones(shape, dtype=torch.int64)
    labels = torch.zeros(4, dtype=torch.int64)

    def loss(w: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        return remat(sines)(w).sum() * ids.sum() + labels.sum()

    arguments: dict[str, Any] = {"w": torch.ones(4, requires_grad=True), "ids": ids}
    found = checklist(loss, **arguments, labels=labels, tokens_of="ids")
    unnamed = checklist(loss, **arguments, labels=labels)

    assert f"{2 * count} tokens/s" in verdict(found, THROUGHPUT)[1]
    assert "8 examples/s" in verdict(unnamed, THROUGHPUT)[1]


def test_tokens_of_no_argument_are_refused() -> None:
    """The error lists what there is."""
    with pytest.raises(RematError, match=r"no tensor of this name, but x\."):
        checklist(remat(sines), torch.ones(3), tokens_of="ids")


def test_an_empty_batch_has_no_tokens() -> None:
    """There is nothing to time."""
    found = checklist(remat(sines), torch.ones(0))

    assert verdict(found, THROUGHPUT) == ("not applicable", "the batch is empty")


def test_nothing_of_the_callers_is_changed() -> None:
    """Parameters get no gradients, and no generator moves."""
    given = parameters(1, requires_grad=True)
    state = generator_state()

    checklist(loss_of(remat(block)), given, batch())

    assert all(each.grad is None for each in given[0].values())
    assert torch.equal(generator_state(), state)


def test_text_and_json() -> None:
    """A table with the function's name, and the same rows under a schema."""
    found = checklist(remat(sines), torch.linspace(0, 1, 64))

    assert str(found).splitlines()[0].split()[:2] == ["verdict", "sines"]
    plain = json.loads(found.to_json())
    assert plain["schema"] == "remat.checklist/2"
    assert plain["checks"][0]["question"] == LAYERS
