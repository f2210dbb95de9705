"""The strategies: values that print as Python, run, and shrink to what matters."""

import subprocess
import sys

import pytest
import torch
from hypothesis import Phase, find, given, settings, strategies as st

from remat import policies as remat_policies, remat
from remat.testing import COMPOSITIONS, TRANSFORMS, strategies
from remat.testing.strategies import Cotangents, Program, TensorSpec
from remat.testing.strategies._draw_programs import _Writer
from tests.support import swept

FEW = settings(max_examples=60)
EVERYTHING = ("plain", "in place", "capture", "draw", "state")


@FEW
@given(strategies.programs(kinds=EVERYTHING))
def test_a_program_runs_and_is_a_value(program):
    """It can be called, compared and hashed, and gives the same numbers again."""
    again = Program(program.arguments, program.steps, program.outputs, program.inner)
    torch.manual_seed(0)
    found = program(*program.make_arguments())

    torch.manual_seed(0)
    expected = again(*again.make_arguments())

    assert again == program
    assert hash(again) == hash(program)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)


def drawn(seed):
    """Twenty programs, each with a number drawn after it, from one sequence of choices."""
    found = []

    @settings(max_examples=20, derandomize=True, phases=[Phase.generate])
    @given(strategies.programs(kinds=EVERYTHING), st.integers(0, 10**9))
    def collect(program, number):
        torch.manual_seed(seed + len(found))
        found.append((program, number))

    torch.manual_seed(seed)
    collect()
    return found


def test_the_same_choices_make_the_same_program():
    """Whatever state the default generator is in."""
    assert drawn(1) == drawn(2)


def test_what_is_drawn_does_not_depend_on_what_runs(monkeypatch):
    """Where torch takes no statement any more, the choices after it are the same."""
    expected = [number for _, number in drawn(1)]
    monkeypatch.setattr(_Writer, "_runs", lambda self, step: False)

    found = drawn(1)

    assert [number for _, number in found] == expected
    assert not any(program.steps for program, _ in found)


@FEW
@given(strategies.programs())
def test_a_program_prints_as_what_it_runs(program):
    """The repr, run as Python, is the function with its captures and arguments."""
    namespace = {
        "torch": torch,
        "F": torch.nn.functional,
        "normal": strategies.normal,
        "remat": lambda policy: lambda fun: fun,
        "checkpoint_name": lambda value, name: value,
        **{name: getattr(remat_policies, name) for name in remat_policies.__all__},
    }

    exec(repr(program), namespace)

    found = namespace["fun"](*namespace["arguments"])
    expected = program(*program.make_arguments())
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def test_a_program_with_everything_prints_well():
    """Globals, a cell, a region inside, a name and two outputs, as a reader would write."""
    program = find(
        strategies.programs(kinds=()),
        lambda p: bool(p.inner) and "shift" in p.captures,
        settings=settings(max_examples=3000, phases=[Phase.generate, Phase.shrink]),
    )

    text = repr(program)

    assert text.startswith("def make(shift):\n    @remat(policy=nothing_saveable)\n")
    assert "fun = make(shift=normal(1, 1, seed=103).requires_grad_())" in text


@pytest.mark.parametrize(
    "word",
    ["softmax", *swept([" @ ", "chunk", "masked_fill_", "checkpoint_name", "no_grad"])],
)
def test_programs_shrink(word):
    """The smallest function with a statement has hardly another."""
    program = find(
        strategies.programs(),
        lambda program: word in repr(program),
        settings=settings(max_examples=3000, phases=[Phase.generate, Phase.shrink]),
    )

    assert len(program.steps) <= 1
    assert not program.inner


@given(strategies.tensors())
def test_tensors_have_their_shape_and_seed(spec):
    """Every layout gives the shape that was asked for, and the same numbers again."""
    assert spec.make().shape == spec.shape
    assert torch.equal(spec.make(), spec.make())


@pytest.mark.parametrize(
    ("spec", "text", "stride"),
    [
        (TensorSpec((2, 3)), "normal(2, 3)", (3, 1)),
        (TensorSpec((2, 3), "transposed", seed=1), "normal(3, 2, seed=1).mT", (1, 2)),
        (TensorSpec((2, 3), "expanded"), "normal(1, 3).expand(2, 3)", (0, 1)),
        (TensorSpec((2, 3), "sliced"), "normal(2, 6)[..., ::2]", (6, 2)),
        (TensorSpec((2,), "offset", torch.half), None, (1,)),
    ],
    ids=lambda value: getattr(value, "layout", None),
)
def test_layouts(spec, text, stride):
    """Each layout has the strides that it is named for, and prints as its code."""
    assert text is None or repr(spec) == text
    assert spec.make().stride() == stride


@pytest.mark.parametrize(
    ("kind", "stride"),
    [("contiguous", (3, 1)), ("expanded", (0, 0)), ("transposed", (1, 2))],
)
def test_cotangents(kind, stride):
    """A cotangent has its output's shape and dtype; the last kind serves the rest."""
    rule = Cotangents((kind,))

    found = rule(4, torch.ones(2, 3, dtype=torch.float32))

    assert found is not None
    assert found.stride() == stride
    assert (found.shape, found.dtype) == ((2, 3), torch.float32)


def test_an_output_may_have_no_cotangent():
    """None where the rule says none."""
    assert Cotangents(("none",))(0, torch.ones(2)) is None


@given(strategies.policies(), strategies.transforms(), strategies.dtypes())
def test_policies_transforms_and_dtypes(policy, transform, dtype):
    """Policies rebuild from their repr; transforms are known; dtypes float."""
    assert eval(repr(policy), {**vars(remat_policies)}) == policy
    assert transform in (*TRANSFORMS, *COMPOSITIONS)
    assert dtype.is_floating_point


@FEW
@given(strategies.programs(kinds=("capture",)))
def test_changed_globals_are_seen(program):
    """After `change_globals` a function that reads one gives other numbers."""
    before = program(*program.make_arguments())

    program.change_globals()

    after = program(*program.make_arguments())
    if not {"ALPHA", "SCALE"}.intersection(program.captures):
        assert repr(after) == repr(before)


def test_errors_name_the_printed_line():
    """The line of a value is that of the repr."""
    program = find(strategies.programs(kinds=()), lambda p: "torch.sin" in repr(p))

    rows = remat(program.fun, policy=remat_policies.everything_saveable).programs(
        *program.make_arguments()
    )

    line = 1 + repr(program).splitlines().index("    v0 = torch.sin(x0)")
    assert f"program.py:{line}" in str(rows[0])


def test_strategies_without_hypothesis_say_what_to_install():
    """The rest of the package does not need hypothesis, and the error says what does."""
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import remat, remat.testing\n"
        "try:\n    import remat.testing.strategies\n"
        "except ImportError as error:\n    print(error)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == (
        "remat.testing.strategies needs hypothesis, which is not installed. In a clone, "
        "python -m pip install '.[testing]'. The rest of remat.testing works without."
    )


def test_a_kind_of_statements_that_does_not_exist_is_refused():
    """The error lists those that do."""
    with pytest.raises(
        ValueError, match=r"kinds='loops'.* It can be 'plain', 'in place'"
    ):
        find(strategies.programs(kinds=("loops",)), lambda _: True)
