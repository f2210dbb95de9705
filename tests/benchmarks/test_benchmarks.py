"""The benchmarks' own arithmetic; their figures are no tests."""

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from remat import policies, remat
from remat.reporting._demo.gpt import GPTShape
from tests.benchmarks import (
    __main__ as command,
    bounds,
    growth,
    integration,
    jax_peer,
    limit,
    memory,
    random as draws,
    reports,
    rows,
    suite,
    tiles,
    timing,
    transformers as models,
    work,
)
from tests.benchmarks.bounds import Bound, judged, verdicts
from tests.benchmarks.contenders import PLAIN, contenders
from tests.support import swept

# Forward mode's first use compiles torch's own formulas with it.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")


def test_ratios_are_paired_by_round():
    """A slow round slows both, and drops out of their ratio."""
    found = timing.paired({"twice": [2.0, 20.0, 4.0]}, base=[1.0, 10.0, 2.0])

    assert found == {"twice": timing.Ratio(4.0, 2.0, 2.0, 2.0)}


def test_steps_are_interleaved():
    """In each round every step has its turn, of which the first run is not counted."""
    ran = []
    steps = {name: lambda name=name: ran.append(name) for name in "ab"}

    times = timing.interleaved(steps, rounds=2, turns=2)

    assert "".join(ran[-16:]) == "aabb" * 4
    assert {name: len(each) for name, each in times.items()} == {"a": 2, "b": 2}


def test_a_round_takes_the_median_of_its_turns():
    """What a machine does for a moment is in one turn, and left out."""
    seconds = iter([0.0, 2.0, 1.0, 9.0, 4.0, 5.0, 3.0])
    steps = {"apart": lambda: timing.Elapsed(next(seconds))}

    times = timing.interleaved(steps, rounds=2, turns=3, lead=0)

    assert times == {"apart": [2.0, 4.0]}


def test_another_process_times_its_own_steps():
    """What passes here meanwhile does not count."""
    steps = {"apart": lambda: timing.Elapsed(3.0)}

    assert timing.interleaved(steps, rounds=2, turns=2) == {"apart": [3.0, 3.0]}


#: What a process with JAX answers, without JAX.
STAND_IN = """
import json, numpy, pathlib, sys
folder = pathlib.Path(sys.argv[1])
given = json.loads((folder / "given.json").read_text())
names = ["jax", *given["policies"]]
numpy.savez(folder / "found.npz", numpy.ones(2))
print(json.dumps({name: 9 - (k == 1) for k, name in enumerate(names)}), flush=True)
for line in sys.stdin:
    print(0.5 if line.strip() == "jax" else 0.25, flush=True)
"""


def test_jax_takes_its_steps_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A policy's line stands only where it needs less memory than without."""
    child = tmp_path / "child.py"
    child.write_text(STAND_IN)
    monkeypatch.setattr(jax_peer, "CHILD", (str(child),))
    monkeypatch.setattr(jax_peer, "interpreter", lambda: sys.executable)
    monkeypatch.setattr(jax_peer, "_check", lambda *_: None)
    steps, peaks, missing = {}, {}, {}

    with jax_peer.admitted(steps, peaks, missing, work.blocks(1, 1, 2, 8)):
        found = {name: step() for name, step in steps.items()}

    nothing = jax_peer.NAME.format("nothing")
    assert found == {"jax": timing.Elapsed(0.5), nothing: timing.Elapsed(0.25)}
    assert peaks == {"jax": 9, nothing: 8}
    assert set(missing) == {jax_peer.NAME.format(k) for k in ("matmuls", "everything")}


def test_jax_is_handed_all_that_a_step_reads(tmp_path: Path) -> None:
    """Each parameter of each block by its name, and the input."""
    made = work.blocks(2, 1, 2, 8)

    jax_peer.Task({}, made.params, made.x, ()).write(tmp_path)

    found = dict(np.load(tmp_path / "arrays.npz"))
    right = {
        f"{k}.{name}": t for k, own in enumerate(made.params) for name, t in own.items()
    }
    right["x"] = made.x
    assert found.keys() == right.keys()
    assert all(torch.equal(torch.from_numpy(found[k]), right[k]) for k in right)


@pytest.mark.parametrize("row", ["tiny", "convolutions"])
def test_without_jax_the_table_says_so(row: str, monkeypatch: pytest.MonkeyPatch):
    """Where the row's work is one that JAX has been taught."""
    monkeypatch.setattr(jax_peer, "interpreter", lambda: None)
    (found,) = (each for each in rows.ROWS if each.name == row)
    steps, peaks, missing = {}, {}, {}

    with jax_peer.admitted(steps, peaks, missing, found.make_quick()):
        assert steps == peaks == {}

    assert missing == ({"jax.checkpoint": "not installed"} if row == "tiny" else {})


def test_a_table_shows_medians_and_quartiles():
    """One line a contender."""
    shown = timing.table("T", "no remat", {"x": timing.Ratio(0.0015, 1.0, 1.25, 1.5)})

    assert shown.splitlines()[-1] == "| x | 1.50 | 1.25 | 1.00 to 1.50 |"


def test_keyed_draws_are_measured_beside_torchs_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """One table for each of torch's functions, whose own row comes first."""
    monkeypatch.setattr(draws, "COUNT", 1 << 10)
    monkeypatch.setattr(draws, "ROUNDS", 2)

    draws.main(threads=1)

    printed = capsys.readouterr().out
    assert printed.startswith(f"torch {torch.__version__}, 1024 numbers, 1 thread")
    for name in ("torch.rand", "torch.randn", "F.dropout"):
        assert f"Beside `{name}`" in printed
        assert f"| {name} |" in printed


@pytest.mark.sweep
def test_reports_are_measured_beside_steps(capsys: pytest.CaptureFixture[str]):
    """A line for each size: a step, a report, and the first one, which traces."""
    shape = GPTShape(layers=2, width=16, heads=2, time=4, batch=1)

    reports.main(1, (shape,))

    title, heads, row = capsys.readouterr().out.splitlines()
    assert title.endswith("1 thread(s)")
    assert heads.split()[:5] == ["width", "time", "batch", "step", "report"]
    assert row.split()[:3] == ["16", "4", "1"]
    assert row.count(" steps") == 2


@pytest.mark.parametrize(
    ("ratio", "spread", "standing", "fails"),
    [
        (1.19, 0.01, "met", False),
        (1.2, 0.0, "met", False),
        (1.21, 0.02, "within spread", False),
        (1.25, 0.02, "missed", True),
        (1.0, 0.06, "unsteady", True),
        (1.4, 0.06, "missed", True),
    ],
)
def test_a_bound_is_missed_by_more_than_the_spread(
    ratio: float, spread: float, standing: str, fails: bool
):
    """And what is unsteady fails as well, however good it looks."""
    verdict = judged(Bound("a", "time", "b", 1.2), ratio, spread)

    assert (verdict.standing, verdict.fails) == (standing, fails)


def test_the_spread_is_half_of_what_the_quartiles_are_apart():
    """As a fraction of the median."""
    assert timing.Ratio(1.0, low=1.9, median=2.0, high=2.1).spread == pytest.approx(
        0.05
    )


def test_bounds_are_judged_where_both_sides_ran():
    """Times by round, bytes as they are; a peer that does not run bounds nothing."""
    stated = [
        Bound("remat", "time", "peer", 1.0),
        Bound("remat", "peak bytes", "peer", 1.0),
        Bound("remat", "time", "absent", 1.0),
        Bound("remat", "peak bytes", "absent", 1.0),
    ]
    times = {"remat": [1.0, 10.0, 2.0], "peer": [2.0, 20.0, 4.0]}

    found = verdicts(stated, times, {"remat": 30, "peer": 20})

    assert [(v.bound, v.ratio, v.spread) for v in found] == [
        (stated[0], 0.5, 0.0),
        (stated[1], 1.5, 0.0),
    ]


def test_a_limits_time_is_the_sum_of_its_round():
    """The step without remat and the recomputation, measured in one round."""
    assert timing.summed([1.0, 2.0], [0.5, 0.25]) == [1.5, 2.25]


def test_an_exponent_is_a_slope_of_logarithms():
    """A cubic has 3, whatever its factor."""
    sizes = [1, 2, 4, 8]

    assert growth.exponent(sizes, [7.0 * n**3 for n in sizes]) == pytest.approx(3)


def test_a_curve_shows_its_exponents():
    """Over all sizes, and over the last three; what is not measured has no line."""
    points = [growth.Point(n, n << 20, n * n << 20) for n in (1, 2, 4)]

    shown = growth.table({"x": points})

    assert shown.splitlines()[2:] == [
        "| x, held MiB | 1 | 2 | 4 | 1.00 | 1.00 |",
        "| x, peak MiB | 1 | 4 | 16 | 2.00 | 2.00 |",
    ]


def test_a_rank_holds_its_part_in_a_simulated_group():
    """8 layers of 8 by 1,024 by 32 float32 inputs, less what the ranks share."""
    few, many = growth.shards((2, 1024))

    assert few.held_bytes - many.held_bytes == 8 * (8 * 1024 * 32) * 4 * 511 // 1024


def test_a_running_sum_has_a_peak():
    """What is left may be less."""
    assert memory.running([3, 4, -5, 1]) == memory.Bytes(left=3, peak=7)


def test_the_allocator_is_heard():
    """A result that lives, and one that lived on the way."""

    def run() -> torch.Tensor:
        first = torch.zeros(1024)
        second = first.clone()
        del first
        return second

    counted = memory.allocated(run)

    assert counted == memory.Bytes(left=4096, peak=8192)


def test_short_steps_have_more_turns():
    """And long ones have 7 rounds."""
    pace = timing.Pace.of({"a": lambda: None})

    assert pace == timing.Pace(rounds=timing.MAX_ROUNDS, turns=timing.MAX_TURNS, lead=1)


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (policies.nothing_saveable, ["aten.mm", "aten.tanh", "aten.sin"]),
        (policies.save_matmul_outputs, ["aten.tanh", "aten.sin"]),
    ],
    ids=["nothing", "matmuls"],
)
def test_the_limit_runs_what_must_run_again(policy: Any, again: list[str]):
    """And nothing of the backward itself."""
    region = remat(lambda p, x: torch.tanh(x @ p["w"]).sin().sin(), policy=policy)
    w, x = torch.ones(3, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)

    found = limit.recomputed(region.programs({"w": w}, x)[1])

    # A transposed weight is a view: no number is computed again.
    assert [op for op in found.operators if op != "aten.t"] == again


@pytest.mark.parametrize("row", rows.ROWS, ids=lambda row: row.name)
def test_a_region_holds_what_the_limit_says(row: rows.Row):
    """Under `.backward()`, measured at the allocator, for every policy."""
    made = row.make_quick()
    if made.transform != "backward":
        assert made.num_units == 2
        return
    for contender in row.rivals(made, True):
        if contender.kind == "own":
            unit = contender.wrap(made.unit)
            made.step(unit)
            held = memory.allocated(lambda unit=unit: made.forward(unit)).left
            assert held == row.limits.held_bytes(made, contender.keeps)


@pytest.mark.parametrize("row", rows.ROWS, ids=lambda row: row.name)
def test_a_bounds_names_are_measured(row: rows.Row):
    """A misspelled name would never be judged."""
    rivals = row.rivals(row.make_quick(), False)
    names = {each.name for each in rivals}
    names |= {rows.LIMIT.format(each.keeps) for each in rivals}

    stated = row.bounds(rivals)

    assert stated
    assert {name for b in stated for name in (b.contender, b.beside)} <= names
    assert {bound.quantity for bound in stated} <= {"time", "peak bytes"}


def ran(row: rows.Row, quick: bool) -> suite.Result:
    """A row as it would be measured, whose bounds are one met and one missed."""
    ratio = timing.Ratio(0.002, 1.0, 1.1, 1.2)
    lines = [
        suite.Line("remat, nothing", ratio, ratio, 1 << 20, 3 << 20),
        suite.Line("peer", missing="raises RuntimeError"),
    ]
    bound = Bound("remat, nothing", "time", PLAIN, 1.12)
    found = [judged(bound, 1.1, 0.01), judged(bound, 1.3, 0.01)]
    return suite.Result(
        row.name, "T", "grad", 7, lines, found[: 1 + (row.name == "hard")]
    )


@pytest.mark.parametrize(("names", "code"), [(["easy"], 0), ([], 1)])
def test_the_exit_code_and_the_files_say_what_was_missed(
    names: list[str], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Without a name, every row."""
    easy, hard = (
        rows.Row(name, *[lambda: None] * 2, lambda _: [])  # type: ignore[arg-type]
        for name in ("easy", "hard")
    )
    monkeypatch.setattr(rows, "ROWS", (easy, hard))
    monkeypatch.setattr(suite, "measured", ran)
    files = tmp_path / "all.json", tmp_path / "all.md"

    given = [*names, "--json", str(files[0]), "--markdown", str(files[1])]
    assert command.main(given) == code

    found = json.loads(files[0].read_text())
    assert found["schema"] == 1
    assert found["measured_on"]["gpu"] == "not measured"
    assert [row["name"] for row in found["rows"]] == (names or ["easy", "hard"])
    assert len(found["failed"]) == code
    assert found["rows"][0]["lines"][0]["time"]["median"] == 1.1
    shown = files[1].read_text()
    assert (
        "| remat, nothing | 2.00 | 1.100 | 9.1% | 1.100 | 1.000 | 3.000 | 2.000 |"
        in (shown)
    )
    assert "| peer | raises RuntimeError | | | | | | |" in shown
    assert ("- missed, hard: remat, nothing: time at most 1.12" in shown) == bool(code)


@pytest.mark.parametrize("name", ["per-example", *swept(["convolutions", "scan"])])
def test_a_row_runs_and_checks_its_gradients(name: str):
    """Peers run under plain autograd only, and the table says what they raise."""
    peers = {"scan": integration.PEER}
    (row,) = (row for row in rows.ROWS if row.name == name)

    found = suite.measured(row, quick=True)

    lines = {line.name: line for line in found.lines}
    assert all(
        each.time is not None for each in found.lines if each.name.startswith("remat")
    )
    peer = lines[peers.get(name, "torch.utils.checkpoint")]
    refused = "raises RuntimeError" if name == "per-example" else ""
    assert peer.missing == refused
    assert {v.bound.quantity for v in found.verdicts} == {"time", "peak bytes"}


def test_what_is_unsteady_is_measured_again():
    """Its two sides alone, three times as long; that verdict stands, whatever it is."""
    slow, calm = [1.0, 1.0, 2.0, 2.0], [1.1] * 4
    near, far = Bound("a", "time", "b", 1.2), Bound("c", "time", "b", 1.0)
    asked: list[tuple[list[str], int]] = []
    of_a = [slow, calm, slow, slow]

    def measure(names: Collection[str], longer: int) -> dict[str, list[float]]:
        asked.append((list(names), longer))
        times = {"a": of_a.pop(0), "b": [1.0] * 4, "c": [0.5] * 4}
        return {name: times[name] for name in names}

    found = [bounds.steady(measure, "abc", [near, far], {}) for _ in range(2)]

    assert asked == [(["a", "b", "c"], 1), (["a", "b"], 3)] * 2
    assert [times["a"] for times, _ in found] == [slow, slow]
    standings = [[each.standing for each in verdicts] for _, verdicts in found]
    assert standings == [["met", "met"], ["unsteady", "met"]]


def test_two_sides_run_alone_with_what_their_limit_adds_up():
    """The limit's parts run where it is one of them, and nothing else does."""
    ran: list[str] = []
    runs = {
        name: lambda name=name: ran.append(name) for name in (PLAIN, "remat", "peer")
    }
    repeated = {"nothing": lambda: ran.append("again"), "matmuls": lambda: None}
    measure = suite._Interleaved(runs, repeated, quick=True)
    limit = rows.LIMIT.format("nothing")

    with_limit = measure(("remat", limit), 1)
    seen = set(ran)
    ran.clear()
    apart = measure(("remat", "peer"), 1)

    assert seen == {PLAIN, "remat", "again"}
    assert set(with_limit) == {PLAIN, "remat", limit}
    assert set(ran) == set(apart) == {"remat", "peer"}
    assert all(a > b for a, b in zip(with_limit[limit], with_limit[PLAIN], strict=True))


def test_another_benchmark_may_fail_the_command(monkeypatch: pytest.MonkeyPatch):
    """By the number of bounds that it says were missed."""
    for missed in (0, 2, None):
        monkeypatch.setattr(draws, "main", lambda threads, missed=missed: missed)

        assert command.main(["random"]) == bool(missed)


def test_a_model_of_transformers_is_measured_beside_its_own_checkpointing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Gradients agree, bytes are counted, a trace is timed apart, a bound is judged."""
    pytest.importorskip("transformers")
    tiny = models.Size(width=16, layers=2, length=8, vocabulary=40)
    judging = judged(Bound(models.OURS, "time", models.PEER, 1.0), 1.3, 0.01)
    monkeypatch.setattr(
        models, "steady", lambda measure, names, *_: (measure(names, 1), [judging])
    )

    failed = models.main(1, ("BERT",), tiny, least_s=0.0, rounds=2)

    assert failed == 1
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("| BERT, 1 |")]
    cells = [[cell.strip() for cell in row.split("|")[2:-1]] for row in rows]
    assert [row[0] for row in cells] == [PLAIN, models.PEER, models.OURS]
    held, traces = [float(row[5]) for row in cells], [row[7] for row in cells]
    assert min(held) > 0
    assert traces[:2] == ["", ""]
    assert float(traces[2]) > 0
    assert f"- BERT: missed; {models.OURS}: time at most 1 of" in printed


@pytest.mark.parametrize("name", models.MODELS)
def test_eight_models_of_transformers_are_built(name: str):
    """Small ones; each takes a step by its own batch."""
    pytest.importorskip("transformers")
    tiny = models.Size(width=16, layers=1, length=8, vocabulary=40)

    model = models.a_model(models.MODELS[name], tiny, PLAIN)

    assert models.step(model, models.a_batch(model, tiny, 2))


def test_wrong_gradients_end_the_run():
    """What computes something else is no contender."""
    made = work.conv_net(1, 1, 4, 4)
    runner = suite._Runner(made)
    right = [tensor + 1 for tensor in made.step(made.unit)]

    with pytest.raises(AssertionError, match="not close"):
        runner.admit(contenders(quick=True)[0], right)


@pytest.mark.sweep
def test_tiles_agree_with_what_they_are_measured_beside():
    vocabulary = tiles.vocabulary(tokens=64, width=8, classes=512, compiles=False)
    assert "remat, 16 tiles" in tiles.table("", vocabulary, rounds=2)
    assert "| 64 |" in tiles.working_set(tokens=64, width=4, hidden=8)
    gpt = tiles.long_gpt(layers=2, tokens=64, width=8, classes=64)
    assert "remat, blocks and tiles" in tiles.table("", gpt, rounds=1)
