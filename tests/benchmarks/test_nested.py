"""The nested rows at small sizes; their figures are no tests."""

import pytest
import torch

from tests.benchmarks import __main__ as command, nested, orders, recorded
from tests.benchmarks.contenders import PLAIN
from tests.support import swept

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*saves no memory:remat.RematWarning"),
    # Forward mode's first use compiles torch's own formulas with it.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]


def test_the_command_knows_every_row() -> None:
    """By its name, and all of them together."""
    assert {"nested": (*nested.ROWS,), "orders": (*orders.ROWS,)} == command.ROWS_OF


def test_a_nest_is_timed_against_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """What a policy adds is run by itself."""
    assert command.main(["grad(grad)", "--quick"]) == 0

    rows = [each for each in capsys.readouterr().out.splitlines() if " to " in each]
    kinds = [row.split(" | ")[1] for row in rows]
    own = [f"remat, {kept}" for kept in orders.KEPT]
    assert kinds == [PLAIN, *own, *(f"{name}, its limit" for name in own[:2])]


def test_recorded_gradients_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """By plain autograd, beside torch's checkpoint."""
    assert command.main(["recorded", "--quick"]) == 0

    printed = capsys.readouterr().out
    rows = [each.split(" | ") for each in printed.splitlines() if " to " in each]
    assert len(rows) == len(recorded.STEPS) * (2 + len(recorded.KEPT))
    products = [int(row[-2]) for row in rows]
    assert products[0] == products[3] == products[4] < products[1] <= products[2]


@pytest.mark.parametrize("name", swept(nested.ROWS))
def test_a_nested_row_is_measured_under_every_policy(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers agree; time, bytes and operators are counted."""
    assert command.main([name, "--quick"]) == 0

    printed = capsys.readouterr().out
    assert printed.startswith(f"torch {torch.__version__}")
    assert f"### {name}: {nested.ROWS[name].title}; 3 layers of 4" in printed
    rows = [line.split(" | ") for line in printed.splitlines() if " to " in line]
    names = [row[0].removeprefix("| ") for row in rows]
    assert names == [PLAIN, *(f"remat, {kept}" for kept in nested.KEPT)]
    products, operators = ([int(row[k].strip(" |")) for row in rows] for k in (-2, -1))
    assert 0 < min(products) < min(operators)
    assert products[-1] <= products[0]
