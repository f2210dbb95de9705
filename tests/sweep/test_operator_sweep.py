"""A small part of the operator sweep: one call of operators of every kind.

The whole of it is `python -m tests.sweep`, and its table `docs/operators.md`.
"""

import pytest

from tests.sweep.catalog import Call, cases, full_name, operators
from tests.sweep.judging import TRANSFORMS, Cell, expected, judge
from tests.sweep.rows import Judged, Row, judge_operator
from tests.sweep.table import page

#: Kinds: elementwise, constant derivative, reduction, view, copy, indexing, scatter, sort,
#: product, factorization, complex, convolution, norm, loss, draw, branch, two outputs.
CONTRACT = ("mul", "ceil", "sum", "max/reduction_no_dim", "index_fill")
CHOSEN = (
    *CONTRACT,
    "linalg.svd",
    "as_strided",
    "bernoulli",
    "complex",
    "cumprod",
    "gather",
    "linalg.solve",
    "masked_select",
    "matmul",
    "nn.functional.batch_norm",
    "nn.functional.binary_cross_entropy_with_logits",
    "nn.functional.conv2d",
    "nn.functional.embedding",
    "nn.functional.layer_norm",
    "nn.functional.rrelu",
    "quantile",
    "scatter_add",
    "sort",
    "to_sparse",
    "trace",
    "unsafe_split",
)


def named(name: str):
    """The entry of torch's list with this name and variant."""
    return next(op for op in operators() if full_name(op) == name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            n, marks=pytest.mark.contract if n in CONTRACT else pytest.mark.sweep
        )
        for n in CHOSEN
    ],
)
def test_an_operator_as_a_region(name: str) -> None:
    """Every cell is equal, or the plain function raises too."""
    row = judge_operator(named(name), samples=1)

    wrong = [
        each for each in row.cells if each.cell.outcome not in {"equal", "excused"}
    ]
    assert row.cells
    assert not wrong


def test_a_wrong_region_fails() -> None:
    """The judge sees a gradient that is another one, and an exception."""
    (case,) = cases(named("mul"), 1)

    def wrong(*tensors):
        return [each * 1.001 for each in case.call(*tensors)]

    def broken(*tensors):
        raise ValueError("broken")

    for region in (wrong, broken):
        for transform in TRANSFORMS:
            plain = expected(case, transform)
            assert judge(region, case, transform, plain).outcome == "FAILED"


def test_a_plain_function_that_raises_is_an_excuse() -> None:
    """What torch itself cannot do is not held against a region."""
    (case,) = cases(named("mul"), 1)

    cell = judge(case.call, case, "jvp", NotImplementedError("torch says so"))

    assert cell == ("excused", "NotImplementedError: torch says so")


def test_the_sweep_is_wide() -> None:
    """The list is torch's own: its differentiable entries, each once."""
    names = [full_name(op) for op in operators()]

    assert len(names) == len(set(names)) > 500
    assert isinstance(cases(named("add"), 2)[1].call, Call)


def test_the_page_counts_every_row() -> None:
    """The page names what is not plainly traced, and why."""
    rows = [judge_operator(named(name), 1) for name in ("sin", "bernoulli")]

    text = page(rows, samples=1, minutes=2.2)

    assert "| traced | 1 |\n| preserve | 1 |" in text
    assert "| `bernoulli` | preserve | ImplicitRandomnessError: " in text
    assert "in about 2 minutes" in text


def test_the_page_explains_a_difference() -> None:
    """A cell that is close stands on the page with the reason, in words."""
    cell = Judged("backward", "traced", Cell("close", "differs by a bit"))
    row = Row("prod", "traced", "", (cell,))

    text = page([row], samples=1, minutes=1)

    assert "| `prod` | close | `backward` | differs by a bit |" in text
    assert "\n`prod`: for a plain tensor" in text
