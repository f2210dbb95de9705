"""The zoo's own parts, on three small models: what differs is found, and the table prints.

The whole of it is `python -m tests.zoo`, and its table `docs/zoo.md`.
"""

import dataclasses
import sys

import pytest
import torch
from torch import nn

from tests.zoo import __main__ as command, rows
from tests.zoo.blocks import checkpoint_by_torch, make_regions, repeated
from tests.zoo.catalog import members
from tests.zoo.judging import gap, gaps_of, judge
from tests.zoo.members import imported
from tests.zoo.rows import PEER, PLAIN, POLICIES, Outcome, Row
from tests.zoo.table import page, summary

pytest.importorskip("transformers")

pytestmark = [
    # Of what transformers and torch do among themselves.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

NAMED = {member.name: member for member in members()}
#: By a hook of its own; without one; with experts that are chosen by value.
CHOSEN = {
    "transformers/bert": "traced",
    "transformers/openai-gpt": "traced",
    "transformers/jetmoe": "rerun",
}


@pytest.mark.parametrize(("name", "way"), CHOSEN.items())
def test_a_model(name, way):
    """Its layers are regions, give the plain model's numbers, and hold less."""
    row = judge(NAMED[name])

    assert row.way == way, row.why
    assert not row.is_wrong
    held = {way: outcome.held_bytes for way, outcome in row.outcomes.items()}
    nothing, matmuls = (held[name] for name in POLICIES)
    assert nothing < held[PLAIN]
    assert (nothing < matmuls < held[PLAIN]) == (way == "traced")
    assert held[PEER] < held[PLAIN]


def changed(model, options):
    """Regions of a model whose numbers are a little different."""
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)


def undrawn(model, options):
    """A model that leaves a generator elsewhere."""
    model.register_forward_hook(lambda *_: torch.rand(1) and None)


def raising(model, options):
    """A model that cannot be called."""
    model.forward = None


@pytest.mark.parametrize(
    ("recompute", "differs", "is_wrong"),
    [(changed, True, True), (undrawn, True, True), (raising, False, True)],
)
def test_what_is_planted_is_found(recompute, differs, is_wrong):
    """Other numbers, another state of a generator, and an error where the peer runs."""
    planted = dataclasses.replace(NAMED["transformers/bert"], recompute=recompute)

    row = judge(planted)

    assert (row.differs, row.is_wrong) == (differs, is_wrong)


def test_a_model_that_does_not_run():
    """It is told, and nothing is held against regions."""

    def build():
        raise ValueError("no such size")

    row = judge(dataclasses.replace(NAMED["transformers/bert"], build=build))

    assert (row.way, row.why) == ("not run", "ValueError: no such size")
    assert not row.is_wrong
    assert summary([row]).endswith("0 failed, 1 not run, 0 different.")


def test_gaps():
    """The largest difference counts over the largest number; what is missing is infinite."""
    one = torch.tensor([1.0, 4.0])

    assert gap(one, one.clone()) == 0
    assert gap(torch.tensor([1.0, 3.0]), one) == 0.25
    assert gap(one, torch.zeros(2)) == float("inf")
    assert gap(one, None) == gap(None, one) == gap(one, one.double()) == float("inf")
    assert gap(one * float("nan"), one) == float("inf")
    assert gap(torch.tensor([True]), torch.tensor([False])) == float("inf")


def test_gradients_that_are_zero_but_for_rounding():
    """They are compared with a part of the largest one."""
    large, noise = torch.tensor([1.0]), torch.tensor([1e-9])
    plain = {"gradient of a": large, "gradient of b": noise}

    assert max(gaps_of(plain | {"gradient of b": -noise}, plain).values()) < 1e-5
    assert max(gaps_of(plain | {"gradient of a": -large}, plain).values()) == 2


def test_every_name_is_that_of_one_model():
    """The zoo is as wide as its page says."""
    libraries = [member.name.partition("/")[0] for member in members()]

    assert len(NAMED) == len(members())
    least = {"transformers": 60, "timm": 40, "diffusers": 10, "torchvision": 10}
    assert all(libraries.count(name) >= count for name, count in least.items())


def test_the_layers_of_a_model():
    """They are the classes of the longest list; a model without one must name them."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    assert repeated(model) == (nn.TransformerEncoderLayer,)
    with pytest.raises(LookupError, match="Linear has no list of layers"):
        repeated(nn.Linear(2, 2))
    for put in (lambda m: make_regions(m, {}), checkpoint_by_torch):
        put(model)
        assert all("forward" in vars(each) for each in model.layers)


ROW = Row(
    "timm/some",
    {
        PLAIN: Outcome(held_bytes=4096),
        "nothing_saveable": Outcome(held_bytes=1024, refusals=("a | b",)),
        "save_matmul_outputs": Outcome(difference=1e-6, worst="output 0"),
        PEER: Outcome(error="ValueError: no"),
    },
)


def test_rows_are_kept(tmp_path):
    """A file gives back what was written to it."""
    file = tmp_path / "rows"
    assert rows.read(file) == []
    rows.append(file, [ROW])
    rows.append(file, [ROW])
    assert rows.read(file) == [ROW, ROW]


def test_the_page():
    """It has a line for each model, the reasons, and the count."""
    wrong = dataclasses.replace(
        ROW,
        name="timm/wrong",
        outcomes={**ROW.outcomes, POLICIES[0]: Outcome("", 0.5, "output 0, step 1")},
    )

    text = page([ROW, wrong, dataclasses.replace(ROW, name="timm/same")])

    assert "| some | rerun | 1e-06 | 4 | 1 | 0 |  | ValueError |" in text
    assert "| wrong | traced | DIFFERENT: outputs | 4 | 0 | 0 |" in text
    assert "| rerun | a \\| b | timm/some, timm/same |" in text
    assert text.endswith("\n3 models, 1 traced, 2 by rerun, 0 failed, 1 different.\n")
    assert wrong.is_wrong
    assert not ROW.is_wrong


def test_the_command(tmp_path, monkeypatch, capsys):
    """It prints the page of the models that are asked for, and judges no model twice."""
    kept, page_file = tmp_path / "rows", tmp_path / "page.md"
    rows.append(kept, [dataclasses.replace(ROW, name="transformers/bert")])
    arguments = ["--match", "transformers/bert", "--rows", str(kept)]
    monkeypatch.setattr(sys, "argv", ["zoo", *arguments, "--markdown", str(page_file)])

    assert command.main() == 0

    printed = capsys.readouterr()
    assert printed.out == page_file.read_text()
    assert printed.out.endswith(
        "1 models, 0 traced, 1 by rerun, 0 failed, 0 different.\n"
    )
    assert printed.err == "1/1 transformers/bert rerun a | b\n"


def test_a_library_that_is_missing(monkeypatch):
    """The error names the extra."""
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(
        ImportError, match=r"needs timm.*pip install -e '\.\[dev,zoo\]'"
    ):
        imported("timm")
