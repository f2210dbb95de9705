"""`engine="rerun"`: what hooks count, on modules and on parameters, is counted once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import modules
from tests.support import assert_bitwise, installed, seeded

# Gradients of each example, as opacus takes them: kept when all calls have had their backward.
SOURCE = """
def watch(layer):
    layer.is_watched, layer.inputs, layer.weight.open_calls = True, [], 0
    layer.register_forward_hook(note)

def note(layer, args, out):
    if not layer.is_watched:
        return
    layer.inputs.append(args[0].detach())
    layer.weight.open_calls += 1

    def keep(gradient):
        if layer.is_watched:
            each = gradient.unsqueeze(-1) * layer.inputs.pop().unsqueeze(-2)
            layer.weight.open_calls -= 1
            if layer.weight.open_calls == 0:
                layer.weight.of_examples = each

    out.register_hook(keep)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package where packages are installed: the walk does not read its code."""
    with installed("counts_calls", SOURCE, tmp_path, monkeypatch) as module:
        yield module


def watched(library: Any, engine: Any) -> tuple[nn.Module, Any]:
    """A block of a layer that the library watches; a region, where there is an engine."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Tanh(), nn.Linear(4, 4, dtype=torch.float64), nn.Tanh())
    library.watch(block[1])
    if engine:
        modules.apply(block, lambda name, _: not name, engine=engine)
    return block, block[1]


@pytest.mark.contract
def test_a_count_that_a_librarys_hooks_keep_on_a_parameter_is_kept_once(
    library: Any,
) -> None:
    """The run of the backward begins at the forward's count, by a name that no user's code has."""

    def of(engine: Any) -> list[Tensor]:
        block, layer = watched(library, engine)
        block(seeded(3, 4)).sum().backward()
        return [layer.weight.of_examples, layer.weight.grad]

    assert_bitwise(of("rerun"), of(None))


@pytest.mark.contract
def test_a_second_backward_takes_back_what_it_counts(library: Any) -> None:
    """It begins at the forward's state, which the first backward has brought about again."""

    def of(engine: Any) -> list[Any]:
        block, layer = watched(library, engine)
        loss = block(seeded(3, 4)).sum()
        loss.backward(retain_graph=True)
        layer.is_watched = False
        loss.backward()
        return [layer.weight.of_examples, layer.weight.open_calls, len(layer.inputs)]

    found, plain = of("rerun"), of(None)

    assert_bitwise(found[0], plain[0])
    assert found[1:] == plain[1:] == [0, 0]
