"""`interop.torch`: the names beside `checkpoint` that torch's module exports.

The oracle is that module.
"""

import ast
import pathlib
import re
import warnings
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as peer

import remat
import remat.interop.torch as ours
from remat import RecomputationError, RematWarning
from tests.support import assert_bitwise, seeded

pytestmark = pytest.mark.contract

# What says nothing of how recomputation is done.
OF_TORCH = {
    "CheckpointPolicy",
    "DefaultDeviceType",
    "SelectiveCheckpointContext",
    "check_backward_validity",
    "detach_variable",
    "get_device_states",
    "noop_context_fn",
    "set_device_states",
}


def test_each_name_of_torch_is_here() -> None:
    """But for a set that torch's own contexts read."""
    missing = {*peer.__all__} - {*ours.__all__}

    assert missing == {"SAC_IGNORED_OPS"}


def test_nothing_else_of_torchs_module_is_used() -> None:
    """No module of the package imports its checkpointing."""
    folder = pathlib.Path(remat.__file__).parent
    found = {
        alias.name
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        if node.module == "torch.utils.checkpoint"
        for alias in node.names
    }

    assert found == OF_TORCH


def test_each_row_that_holds_has_a_test() -> None:
    """Of the table of torch's own tests, by name or as in `..._end_of_the_name`."""
    here = pathlib.Path(__file__).parent
    page = (here.parents[1] / "docs" / "interop_torch.md").read_text()
    rows = [line.split(" | ") for line in page.partition("one by one")[2].splitlines()]
    held = [row[0] for row in rows if row[1:2] in (["yes"], ["in part"])]
    names = {name for each in held for name in re.findall(r"`(\w+)`", each)}
    text = " ".join(path.read_text() for path in here.glob("test_torch*.py"))
    ends = tuple(re.findall(r"\.\.\.(_\w+)", text))

    assert len(names) > 80
    # Short names stand for parameters of a test, or for the end of a longer name.
    missing = {name for name in names if not re.search(rf'["_ ]{name}\b', text)}
    assert not {name for name in missing if not name.endswith(ends)}


def gradient(module: Any) -> torch.Tensor:
    x = seeded(3).requires_grad_()
    module.checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda m: m.set_checkpoint_early_stop(False), 'engine="rerun"'),
        (lambda m: m.set_checkpoint_debug_enabled(True), r"remat\(verify=True\)"),
        (lambda m: m.GraphExecGroup(), "one node of the graph"),
    ],
    ids=["early_stop", "debug", "group"],
)
def test_a_switch_without_effect_warns(make: Any, text: str) -> None:
    """And what is called inside it runs as it does without."""
    with make(peer):
        expected = gradient(peer)

    with pytest.warns(RematWarning, match=f"has no effect.*{text}") as seen:  # noqa: SIM117
        with make(ours):
            found = gradient(ours)

    assert_bitwise(found, expected)
    assert [each.filename for each in seen] == [__file__]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ours.set_checkpoint_early_stop(True),
        lambda: ours.set_checkpoint_debug_enabled(False),
        lambda: ours.set_checkpoint_debug_enabled(None),
    ],
    ids=["early_stop", "debug_off", "debug_left"],
)
def test_a_switch_for_what_happens_anyway_is_silent(make: Any) -> None:
    with warnings.catch_warnings(action="error"), make():
        gradient(ours)


def test_what_differs_is_caught_as_torchs_error() -> None:
    """Code that catches torch's error catches this package's."""
    assert ours.CheckpointError is RecomputationError
    assert issubclass(ours.CheckpointError, RuntimeError)


def test_the_function_of_the_reentrant_variant() -> None:
    """`apply` takes what torch's takes."""

    def through(module: Any) -> Any:
        x, y = seeded(3).requires_grad_(), seeded(3, seed=1).requires_grad_()
        out = module.CheckpointFunction.apply(lambda x, y: (x * y).sin(), True, x, y)
        return out.detach(), torch.autograd.grad(out.sum(), [x, y])

    def plain() -> Any:
        x, y = seeded(3).requires_grad_(), seeded(3, seed=1).requires_grad_()
        out = (x * y).sin()
        return out.detach(), torch.autograd.grad(out.sum(), [x, y])

    assert_bitwise(through(ours), plain())


@pytest.mark.parametrize("name", sorted(OF_TORCH))
def test_a_helper_is_torchs_own(name: str) -> None:
    """Nothing of it is about recomputation, so that code of torch's and ours shares it."""
    assert getattr(ours, name) is getattr(peer, name)
