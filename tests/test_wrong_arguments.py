"""What is of a wrong type is refused by its name, wherever a public function takes it.

The errors are Python's own kinds, in four parts, and nothing is computed before.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from remat import (
    PolicyError,
    ScheduleError,
    chain,
    checklist,
    checkpoint_name,
    fit,
    modules,
    named_values,
    plan,
    policies,
    random,
    remat,
    report,
    saved_residuals,
    scan,
    schedules,
)
from remat.interop.torch import (
    apply_activation_checkpointing,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)
from remat.layers import tiled, tiled_cross_entropy
from remat.reporting import batch_figure, compare, frontier_figure, timeline_figure
from remat.storage import Chain, Keep, Sparse
from remat.testing import assert_equivalent, first_difference

KEY, X = random.key(3), torch.ones(5, 3)
ARRAY: Any = np.ones(2)
NONE: Any = None
THREE: Any = 3
LEAF = torch.ones(3, requires_grad=True)
LINEAR = torch.nn.Linear(2, 2)
POLICY: Any = policies.save_matmul_outputs
KEEP: Any = Keep


def square(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum()


PLAN: Any = plan(square, budget=0.5)(LEAF)


def loss(**options: Any) -> object:
    head, targets = torch.ones(4, 3), torch.arange(5) % 4
    return tiled_cross_entropy(X, head, targets, tiles=2, **options)


def drawn(name: str, **options: Any) -> Callable[[], object]:
    return lambda: getattr(random, name)(KEY, (2,), **options)


#: What the message names, and the call.
CALLS: list[tuple[str, Callable[[], object]]] = [
    (r"static_argnums=\.\.\.\): got None", lambda: remat(square, static_argnums=NONE)),
    (r"static_argnames=\.\.\.\): got 3", lambda: remat(square, static_argnames=THREE)),
    ("the function to measure: got None", lambda: report(NONE, X)),
    ("the function to measure: got None", lambda: named_values(NONE, X)),
    ("the function to measure: got None", lambda: checklist(NONE, X)),
    ("the functions to compare: got None", lambda: assert_equivalent(square, NONE)(X)),
    (r"cotangents=\.\.\.\): got 3", lambda: assert_equivalent(square, square, cotangents=THREE)),
    ("the functions to compare: got None", lambda: first_difference(NONE, square)(X)),
    (r"transforms=\.\.\.\): got 3", lambda: assert_equivalent(square, square, transforms=[THREE])),
    (r"transforms=\.\.\.\): got 3", lambda: assert_equivalent(square, square, transforms=THREE)),
    (r"fit\(step\): got None", lambda: fit(NONE, peak=0.5)),
    (r"scan\(f, \.\.\.\): got None", lambda: scan(NONE, X, X)),
    (r"scan\(length=\.\.\.\): got 1.5", lambda: scan(lambda c, _: (c, c), X, length=1.5)),  # pyright: ignore[reportArgumentType]
    (r"chain\(fs\): got None", lambda: chain(NONE)),
    (r"chain: got a tensor float32\[5, 3\], which cannot", lambda: chain([X])),  # pyright: ignore[reportArgumentType]
    (r"Run layers in a row by chain\(layers\)", lambda: scan(lambda c, _: (c, c), X, [LINEAR])),
    (r"Chain\(links=\.\.\.\): got None", lambda: Chain(NONE)),
    (r"modules.plan\(step=\.\.\.\): got 3", lambda: modules.plan(LINEAR, peak=0.5, step=THREE)),
    ("the function to look at: got 3", lambda: plan(THREE, budget=0.5)(X)),
    ("the function to look at: got 3", lambda: saved_residuals(THREE, X)),
    (r"tiled\(f\): got 3", lambda: tiled(THREE, "(tile n) d -> ", tiles=2)),
    (r"modules.Step\(loss\): got 3", lambda: modules.Step(THREE)),
    (r"Plan.diff\(other\): got 3", lambda: plan(square, budget=0.5)(X).diff(THREE)),
    (r"report.diff\(other\): got 3", lambda: report(square, X).diff(THREE)),
    (r"compare\(f\): got 3", lambda: compare(THREE, {"x": X})),
    (r"compare\(kwargs\): got \(", lambda: compare(square, (X,))),  # pyright: ignore[reportArgumentType]
    (r"compare\(peers=\.\.\.\): got \[", lambda: compare(square, {"x": X}, peers=[])),  # pyright: ignore[reportArgumentType]
    (r"report.figure\(plain\): got 3", lambda: report(square, X).figure(THREE)),
    (r"timeline_figure\(timeline\): got 3", lambda: timeline_figure(THREE)),
    (r"frontier_figure\(points\): got 3", lambda: frontier_figure([THREE])),
    (r"batch_figure\(curves\): got 3", lambda: batch_figure({"no remat": THREE})),
    ("a schedule's stages: got 3", lambda: schedules.Every(2).actions(THREE)),
    ("a schedule's stages: got 3", lambda: schedules.Sqrt().actions(THREE)),
    ("a schedule's stages: got 3", lambda: schedules.Revolve(2).actions([THREE])),
    ("a schedule's stages: got None", lambda: schedules.Budget(9).actions(NONE)),
    (r"replay\(actions\): got None", lambda: schedules.replay(NONE, [])),
    (r"checkpoint_sequential\(functions", lambda: checkpoint_sequential(THREE, 1, X)),
    (r"checkpoint_sequential\(segments", lambda: checkpoint_sequential([square], NONE, X)),
    (r"checkpointing\(model\): got 3", lambda: apply_activation_checkpointing(THREE)),
    (r"modules.remove\(model\): got None", lambda: modules.remove(NONE)),
    (r"with_optimizer\(optimizer\): got None", lambda: report(square, X).with_optimizer(NONE)),
    (r"z_loss=\.\.\.\): got None", lambda: loss(z_loss=None)),
    (r"label_smoothing=\.\.\.\): got '0'", lambda: loss(label_smoothing="0")),
    (r"softcap=\.\.\.\): got array", lambda: loss(softcap=ARRAY)),
    (r"uniform\(minval=\.\.\.\): got None", drawn("uniform", minval=None)),
    (r"normal\(mean=\.\.\.\): got 'a'", drawn("normal", mean="a")),
    (r"normal\(std=\.\.\.\): got array", drawn("normal", std=ARRAY)),
    (r"bernoulli\(p=\.\.\.\): got the class int", drawn("bernoulli", p=int)),
    (r"truncated_normal\(upper=\.\.\.\): got 1j", drawn("truncated_normal", upper=1j)),
    (r"random.randint\(maxval=\.\.\.\) takes an integer", drawn("randint", maxval=1.5)),
    ("random.bits draws .* not", drawn("bits", dtype=ARRAY)),
    (r"random.normal\(key, 'ab'\)", lambda: random.normal(KEY, "ab")),  # pyright: ignore[reportArgumentType]
    (r"random.dropout\(key, x\): got None", lambda: random.dropout(KEY, NONE, 0.5)),
    (r"dropout\(rate=\.\.\.\): got None", lambda: random.dropout(KEY, X, NONE)),
    (r"categorical\(logits=\.\.\.\): got 3", lambda: random.categorical(KEY, logits=THREE)),
    (r"permutation\(axis=\.\.\.\) takes an integer", lambda: random.permutation(KEY, 5, axis=NONE)),
    (r"permutation\(axis=\.\.\.\) takes an integer", lambda: random.permutation(KEY, X, axis=NONE)),
    (r"remat\(save_matmul_outputs\): got a policy .* @remat\(policy=", lambda: remat(POLICY)),
    (r"remat\(a tensor float32\[5, 3\]\): is no function", lambda: remat(X)),  # pyright: ignore[reportCallIssue, reportArgumentType]
    ("got the class Keep, .* Call it: `Keep", lambda: remat(square, saved_inputs=KEEP)),
    ("got Plan.*of a plan its `.policy`", lambda: remat(square, policy=PLAN)),
    (r"name, not a tensor float32\[5, 3\]\.", lambda: checkpoint_name("hidden", X)),  # pyright: ignore[reportArgumentType]
    (r"got \['sin'\]. .* Pass each by itself", lambda: policies.by_op(["sin"])),  # pyright: ignore[reportArgumentType]
    ("draws .*, not 'float32'", drawn("normal", dtype="float32")),
    ("transforms=.* got 'grad', of type str", lambda: assert_equivalent(square, square, transforms="grad")),
    ("two arguments, .*lambda name, module", lambda: modules.apply(LINEAR, lambda module: True)),  # pyright: ignore[reportArgumentType]
    ("not save_matmul_outputs. A policy of remat", lambda: create_selective_checkpoint_contexts(POLICY)),
    ("takes an integer, not", lambda: random.fold_in(KEY, ARRAY)),
    ("takes an integer, not", lambda: random.key(torch.tensor([1, 2]))),  # pyright: ignore[reportArgumentType]
]  # fmt: skip


@pytest.mark.parametrize(("named", "call"), CALLS, ids=[named for named, _ in CALLS])
def test_an_argument_of_a_wrong_type_is_named(
    named: str, call: Callable[[], object]
) -> None:
    with pytest.raises(TypeError, match=named):
        call()


@pytest.mark.parametrize(
    "name", ["rng", "engine", "backend", "verify", "dynamic_shapes"]
)
def test_an_array_is_no_option(name: str) -> None:
    options: dict[str, Any] = {name: ARRAY}

    with pytest.raises(ValueError, match="is not a value of this option"):
        remat(square, **options)


@pytest.mark.parametrize("name", ["size", "peak"])
def test_neither_a_policy_nor_an_array_is_a_size(name: str) -> None:
    """A function of a device is one; a policy is a function, too, but of a value."""
    for given in (POLICY, ARRAY):
        with pytest.raises(PolicyError, match="budget"):
            policies.budget(**{name: given})  # pyright: ignore[reportArgumentType]
    with pytest.raises(PolicyError, match="budget"):
        plan(square, peak=POLICY)


class Given(schedules.AbstractSchedule):
    """A schedule that answers what it was made of."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def actions(self, stages: Any) -> Any:
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [
        (),
        [3],
        [schedules.Snapshot(0)],
        (schedules.Advance(0, 9),),
        (schedules.Record(5),),
    ],
    ids=repr,
)
def test_a_schedule_that_answers_illegal_actions_is_refused(answer: Any) -> None:
    with pytest.raises(ScheduleError, match="Run the sweep to the last state"):
        scan(lambda c, _: (c.sin(), None), LEAF, length=3, schedule=Given(answer))


def test_a_schedule_that_answers_no_actions_is_refused() -> None:
    with pytest.raises(TypeError, match="`actions` returned: got None"):
        scan(lambda c, _: (c.sin(), None), LEAF, length=3, schedule=Given(None))


def test_numbers_of_numpy_and_of_tensors_are_numbers() -> None:
    half, two = np.float32(0.5), np.int64(2)

    assert random.uniform(KEY, (2,), minval=half).min() >= 0.5  # pyright: ignore[reportArgumentType]
    assert random.randint(KEY, (2,), maxval=two).max() < 2  # pyright: ignore[reportArgumentType]
    assert random.dropout(KEY, X, torch.tensor(0.5)).shape == X.shape  # pyright: ignore[reportArgumentType]
    assert torch.equal(
        torch.as_tensor(loss(z_loss=half)), torch.as_tensor(loss(z_loss=0.5))
    )
    assert random.permutation(KEY, X, axis=-1).shape == X.shape
    for one in (np.int64(1), torch.tensor(1)):
        assert random.permutation(KEY, X, axis=one).shape == X.shape  # pyright: ignore[reportArgumentType]
    assert checkpoint_sequential([square, torch.sin], two, X).shape == ()  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("given", [float("inf"), float("nan"), np.float32("inf")])
def test_options_of_a_loss_are_finite(given: Any) -> None:
    for name in ("softcap", "z_loss", "label_smoothing"):
        with pytest.raises(ValueError, match=rf"{name}=.*got .*{given}"):
            loss(**{name: given})


def test_an_axis_that_a_shape_has_not_is_refused() -> None:
    with pytest.raises(IndexError, match="has no such axis"):
        random.permutation(KEY, (2, 3), axis=2)


@pytest.mark.parametrize(
    "links",
    [(), (Keep(),), (Sparse() >> Keep(), Keep())],
    ids=["none", "one", "nested"],
)
def test_a_chain_that_is_not_made_by_an_operator_prints_as_itself(links: Any) -> None:
    made = Chain(links)

    assert eval(repr(made), {"Chain": Chain, "Keep": Keep, "Sparse": Sparse}) == made
