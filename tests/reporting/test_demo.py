"""The demo trains alike under every policy, measures bytes, and says so in words."""

import dataclasses
import io
import json
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from remat import random
from remat.__main__ import main
from remat.reporting._demo.gpt import GPTShape, block, initial_parameters, make_loss
from remat.reporting._demo.run import (
    DemoRow,
    demo_json,
    demo_table,
    draw_batches,
    english_text,
    first_loss_difference,
    run_demo,
)
from remat.reporting._show.progress import progress
from tests.random.trackers import generator_state

SMALL = GPTShape(layers=3, width=64, heads=2, time=64, batch=4)
NAMES = [
    "no remat",
    "nothing_saveable",
    "save_matmul_outputs",
    "save_only_these_names('attn')",
]


@pytest.fixture(scope="module")
def rows() -> list[DemoRow]:
    """Four rows of a small model, three steps each."""
    return run_demo(3, seed=1, shape=SMALL)


def made_up_rows() -> list[DemoRow]:
    """Two rows with simple numbers."""
    plain = DemoRow("no remat", (3.0, 2.5), 4 * 2**20, 8 * 2**20, 0.010, 0.0004)
    saving = DemoRow("nothing_saveable", (3.0, 2.5), 2**20, 2 * 2**20, 0.013, 0.0002)
    return [plain, saving]


def test_one_row_for_each_policy(rows: list[DemoRow]):
    """No remat, then the policies."""
    assert [row.name for row in rows] == NAMES


@pytest.mark.contract
def test_losses_are_equal_to_the_last_bit(rows: list[DemoRow]):
    """Three optimizer steps under each policy compute the same numbers."""
    assert [row.losses for row in rows] == [rows[0].losses] * len(rows)
    assert first_loss_difference(rows) is None


def test_the_model_learns(rows: list[DemoRow]):
    """The gradients are gradients: the loss falls from that of a uniform guess."""
    losses = rows[0].losses

    assert losses[0] == pytest.approx(torch.tensor(256.0).log().item(), abs=0.2)
    assert losses[-1] < losses[0]


@pytest.mark.contract
def test_held_bytes_fall(rows: list[DemoRow]):
    """Nothing saves the least, and each policy saves less than no remat."""
    plain, nothing, matmuls, attention = (row.held_bytes for row in rows)

    assert nothing < attention < matmuls < plain


@pytest.mark.contract
def test_peak_bytes_fall(rows: list[DemoRow]):
    """Under torch.func.grad the peak falls too."""
    plain, *others = (row.peak_bytes for row in rows)

    assert all(peak < plain for peak in others)


def test_nothing_holds_at_most_a_quarter_at_full_size():
    """The promise of the demo, at the sizes that the command uses."""
    plain, nothing, *_ = run_demo(1)

    assert nothing.held_bytes <= 0.25 * plain.held_bytes


def test_parameters_number_about_a_million():
    """The default model has the size that the demo's description states."""
    parameters = initial_parameters(GPTShape(), torch.Generator())

    count = sum(t.numel() for group in parameters.values() for t in group.values())
    assert 0.9e6 < count < 1.1e6


def test_text_is_english_of_some_length():
    """Every CPython ships enough words to learn from."""
    text = english_text()

    assert len(text) > 300_000
    assert text.count(b" the ") > 2_000


def test_batches_follow_the_seed():
    """Equal seeds give equal batches, others give others."""
    first, second, other = (next(draw_batches(SMALL, 1, seed)) for seed in (1, 1, 2))

    assert first.shape == (SMALL.batch, SMALL.time + 1)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_block_attends_only_to_the_past():
    """A later byte changes no earlier prediction."""
    parameters = initial_parameters(SMALL, torch.Generator().manual_seed(0))
    x = torch.randn(1, SMALL.time, SMALL.width)
    changed = x.clone()
    changed[:, -1] += 1

    key = random.key(0)
    before, after = (
        block(parameters["block0"], t, key, SMALL.heads) for t in (x, changed)
    )

    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_each_layer_drops_out_by_its_own_key():
    """Another key gives another loss, the same key the same; layers draw unlike masks."""
    parameters = initial_parameters(SMALL, torch.Generator().manual_seed(0))
    batch = next(draw_batches(SMALL, 1, 0))
    keys: list[Tensor] = []

    def spied(p: Mapping[str, Tensor], x: Tensor, key: Tensor, heads: int) -> Tensor:
        keys.append(key)
        return block(p, x, key, heads)

    loss = make_loss(SMALL, spied)
    one, same, other = (loss(parameters, batch, random.key(s)) for s in (1, 1, 2))

    assert one == same != other
    assert len({tuple(key.view(torch.int64).tolist()) for key in keys}) == 6


def test_training_moves_no_generator():
    """All that is random comes from keys, and from generators of the demo's own."""
    before = generator_state()

    run_demo(1, seed=1, shape=SMALL)

    assert torch.equal(generator_state(), before)


def test_loss_is_the_mean_cross_entropy_of_the_next_byte():
    """With blocks that do nothing, the loss is that of a table of logits."""
    parameters = initial_parameters(SMALL, torch.Generator().manual_seed(0))
    batch = next(draw_batches(SMALL, 1, 0))

    loss = make_loss(SMALL, lambda _, x, key, heads: x)(
        parameters, batch, random.key(0)
    )

    table = parameters["embedding"]
    x = table["token"][batch[:, :-1]] + table["time"]
    normed = F.layer_norm(x, (SMALL.width,)) * parameters["head"]["norm"]
    logits = normed @ parameters["head"]["unembed"]
    chosen = logits.log_softmax(-1).gather(-1, batch[:, 1:, None])
    torch.testing.assert_close(loss, -chosen.mean())


def test_table():
    """The table aligns its columns and ends with the verdict."""
    assert demo_table(made_up_rows()) == (
        "policy            final loss     held             peak          step time\n"
        f"{'-' * 92}\n"
        "no remat                 2.5  4.0 MiB  1.00 x  8.0 MiB  1.00 x    10.0 ms  1.00 x  +- 0.4 ms\n"
        "nothing_saveable         2.5  1.0 MiB  0.25 x  2.0 MiB  0.25 x    13.0 ms  1.30 x  +- 0.2 ms\n"
        "\n"
        "held: bytes that live between forward and backward; peak: the most in one step;\n"
        "both measured, beyond parameters and batch. Ratios are to no remat; +- is half of\n"
        "what the quartiles of the times are apart.\n"
        "All 2 losses are equal in every row to the last bit; the final one is "
        "0x1.4000000000000p+1."
    )


def test_a_different_loss_is_named():
    """The first row and step that part from no remat, with both bits."""
    plain, saving = made_up_rows()
    wrong = dataclasses.replace(saving, losses=(3.0, 2.5000000000000004))

    assert str(first_loss_difference([plain, wrong])) == (
        "the loss under nothing_saveable differs from the one without remat at step 2: "
        "0x1.4000000000001p+1 in place of 0x1.4000000000000p+1"
    )
    assert "NOT EQUAL: the loss under nothing_saveable" in demo_table([plain, wrong])
    assert json.loads(demo_json([plain, wrong]))["losses_equal"] is False


def test_a_loss_that_is_not_a_number_equals_itself():
    """Equality is of bits, so that a NaN in every row is no difference."""
    plain, saving = made_up_rows()
    nan = (float("nan"), 1.0)
    both = [dataclasses.replace(row, losses=nan) for row in (plain, saving)]

    assert first_loss_difference(both) is None


def test_command_prints_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Standard output holds the JSON alone; progress goes to standard error."""
    asked: list[tuple[int, int]] = []

    def run(num_steps: int, seed: int) -> list[DemoRow]:
        asked.append((num_steps, seed))
        return made_up_rows()

    monkeypatch.setattr("remat.__main__.run_demo", run)

    assert main(["demo", "--steps", "2", "--seed", "7", "--json"]) == 0

    assert asked == [(2, 7)]
    assert json.loads(capsys.readouterr().out)["rows"][1] == {
        "policy": "nothing_saveable",
        "final_loss": 2.5,
        "loss_bits": "0x1.4000000000000p+1",
        "held_bytes": 2**20,
        "peak_bytes": 2**21,
        "step_time_s": 0.013,
        "spread_s": 0.0002,
    }


def test_command_fails_where_losses_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The exit code tells a script that the claim did not hold."""
    plain, saving = made_up_rows()
    wrong = dataclasses.replace(saving, losses=(3.0, 2.0))
    monkeypatch.setattr("remat.__main__.run_demo", lambda *_: [plain, wrong])

    assert main(["demo"]) == 1
    assert capsys.readouterr().err.startswith("remat: the loss under nothing_saveable")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "--steps", "0"], "argument --steps: must be at least 1"),
        (
            ["demo", "--seed", "-1"],
            "argument --seed: not a whole number from 0 on: '-1'",
        ),
        ([], "the following arguments are required: command"),
        (["dmeo"], "invalid choice: 'dmeo'"),
    ],
    ids=["no steps", "negative seed", "no command", "unknown command"],
)
def test_a_wrong_call_ends_with_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    """The last line says which word was wrong."""
    with pytest.raises(SystemExit) as stop:
        main(words)

    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_progress_prints_lines_where_there_is_no_terminal():
    """Ten lines at most, the last at the end."""
    stream = io.StringIO()

    with progress("training", 40, stream) as advance:
        for step in range(40):
            advance(f"loss {step}")

    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "training 4/40 loss 3"
    assert lines[-1] == "training 40/40 loss 39"


def test_progress_draws_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    """The bar shows the title, the count and the words about the last step."""
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)

    with progress("training", 2, stream) as advance:
        advance("loss 3")
        advance("loss 2")

    assert "training" in stream.getvalue()
    assert "2/2" in stream.getvalue()
    assert "loss 2" in stream.getvalue()
