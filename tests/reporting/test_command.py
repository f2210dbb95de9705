"""`python -m remat report`, `plan` and `compare`: what they print, where, and how they fail."""

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from remat import Plan, RematError, __version__, policies
from remat.__main__ import main, patience
from remat.reporting._arguments import keywords, load_target, policy_of_word
from tests.random.trackers import generator_state

MODEL = """
import torch
from remat import checkpoint_name, remat


@remat
def block(params, x):
    h = checkpoint_name(torch.tanh(x @ params["up"]), "hidden")
    return x + torch.sin(h) @ params["down"]


def loss(params, x, layers=2):
    for _ in range(layers):
        x = block(params, x)
    return x.square().mean()


def fails(x):
    raise ValueError("of the\\nuser's")


def breaks_a_pipe(x):
    raise BrokenPipeError("of the user's")


class Odd(Exception):
    pass


def leaves(x):
    raise SystemExit(0)


def fails_oddly(x):
    raise Odd("neither")


class Line(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 4)


class Wide(torch.nn.Linear):
    def __init__(self):
        super().__init__(10**6, 10**6, bias=False)


def plain(params, x):
    return (torch.tanh(x @ params["up"]).sin() @ params["down"]).sum()


def keeps_products(value):
    return "mm" in str(value.op)


number = 3
"""
SIZES = ["params.up=8,32", "params.down=32,8", "x=4,8"]


def said(errors: str) -> list[str]:
    """What standard error has beside the progress of what took over two seconds."""
    return [line for line in errors.splitlines() if not line.endswith(" ...")]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The path of a file with a model."""
    path = tmp_path / "a_model.py"
    path.write_text(MODEL)
    return str(path)


def test_report_prints_the_report(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output has the text alone, without escapes; nothing else is said."""
    assert main(["report", f"{model}:loss", *SIZES, "layers==3"]) == 0

    out, err = capsys.readouterr()
    assert out.startswith("loss on cpu: one forward and its backward")
    assert "each, x 2" in out
    assert "a_model.py:" in out
    assert "\x1b" not in out
    assert said(err) == []


def test_report_prints_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json standard output is the JSON."""
    assert main(["report", f"{model}:loss", *SIZES, "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "remat.report/1"
    assert found["regions"][0]["calls"] == 2


def test_report_on_meta_tensors(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes that no machine has: nothing is computed, the bytes are there."""
    words = ["params.up=4096,16384", "params.down=16384,4096", "x=65536,4096"]

    assert main(["report", f"{model}:loss", *words, "--device", "meta", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["regions"][0]["held_bytes"] == 65536 * 4096 * 4
    assert found["recompute_s"] is None


@pytest.mark.parametrize("name", ["r.txt", "r.json", "r.svg", "r.png", "r.pdf"])
def test_out(
    name: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--out writes a file, by its suffix a figure, and prints nothing."""
    path = tmp_path / name

    assert main(["report", f"{model}:loss", *SIZES, "--out", str(path)]) == 0

    assert capsys.readouterr().out == ""
    start = path.read_bytes()[:100]
    expected = {
        "txt": b"loss on",
        "json": b"{",
        "svg": b"<?xml",
        "png": b"\x89PNG",
        "pdf": b"%PDF",
    }
    assert start.startswith(expected[name.partition(".")[2]])


POLICIES = {
    "nothing_saveable": policies.nothing_saveable,
    "budget('20KiB')": policies.budget("20KiB"),
    "save_only_these_names('a', 'b')": policies.save_only_these_names("a", "b"),
}


@pytest.mark.parametrize("word", POLICIES)
def test_a_word_names_a_policy(word: str) -> None:
    """By its name, or by a call with literals."""
    assert policy_of_word(word) == POLICIES[word]


def test_a_function_is_run_as_one_region(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the policy, the generators' rule and the engine that are named."""
    words = ["report", f"{model}:plain", "params.up=8,32", "params.down=32,8", "x=4,8"]
    policy = ["--policy", f"{model}:keeps_products"]

    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["regions"] == []
    assert main([*words, *policy, "--json"]) == 0
    (region,) = json.loads(capsys.readouterr().out)["regions"]
    assert "keeps_products" in region["policy"]
    assert main([*words, "--rng", "preserve", "--engine", "auto", "--json"]) == 0
    (region,) = json.loads(capsys.readouterr().out)["regions"]
    assert region["policy"] == "nothing_saveable"


def test_a_class_is_made_on_meta(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of any size needs no memory there."""
    words = ["report", f"{model}:Wide", "input=8,1000000", "--device", "meta", "--json"]

    assert main(words) == 0

    assert json.loads(capsys.readouterr().out)["parameter_bytes"] == 4 * 10**12


def test_a_terminal_gets_tables(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where standard output is a terminal, and rich is there, tables have borders."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    assert main(["report", f"{model}:loss", *SIZES]) == 0

    assert "│" in capsys.readouterr().out


@pytest.mark.parametrize("is_terminal", [False, True], ids=["pipe", "terminal"])
def test_what_standard_output_cannot_encode_is_escaped(
    is_terminal: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A name in another alphabet, and rich's borders, do not end the command."""
    path = tmp_path / "named.py"
    path.write_text(
        "from remat import checkpoint_name, policies, remat\n"
        "f = remat(lambda x: checkpoint_name(x.sin(), 'λ').exp().sin().exp(), "
        "policy=policies.save_only_these_names('λ'))\n",
        encoding="utf-8",
    )
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(narrow, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdout", narrow)

    assert main(["report", f"{path}:f", "x=2"]) == 0
    assert main(["report", f"{path}:f", "x=2", "--out", str(tmp_path / "out")]) == 0

    assert b"\\u03bb float32[2]" in narrow.buffer.getvalue()
    assert "λ float32[2]" in (tmp_path / "out").read_text(encoding="utf-8")


def test_compare(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One row a policy; under nothing_saveable the least is held and the most repeated."""
    words = ["compare", f"{model}:block", *SIZES, "--steps", "1", "--json"]

    assert main(words) == 0

    out, err = capsys.readouterr()
    found = json.loads(out)
    rows = {row["name"]: row for row in found["rows"]}
    assert found["function"] == "block"
    assert next(iter(rows)) == "no remat"
    held = {name: row["held_bytes"] for name, row in rows.items()}
    assert held["nothing_saveable"] == min(held.values()) < held["no remat"]
    assert rows["nothing_saveable"]["recompute_flops"] > 0
    assert rows["everything_saveable"]["recompute_flops"] == 0
    assert any("torch.utils.checkpoint" in line for line in found["without"])
    assert "comparing" in err


def test_compare_prints_a_table(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Ratios are to no remat."""
    assert main(["compare", f"{model}:block", *SIZES, "--steps", "1"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["block", "held", "peak"]
    assert "1.00 x" in lines[2]


PEERS = """
import functools
from torch.utils.checkpoint import checkpoint


def checkpointed(f):
    return functools.partial(checkpoint, f, use_reentrant=False)
"""


def test_compare_measures_peers_that_are_named(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrapper of another library is a row like the others, and holds what it holds."""
    (tmp_path / "peers.py").write_text(PEERS)
    peer = f"{tmp_path / 'peers.py'}:checkpointed"
    words = ["compare", f"{model}:block", *SIZES, "--steps", "1", "--peer", peer]

    assert main([*words, "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["checkpointed"]["is_peer"]
    assert not rows["no remat"]["is_peer"]
    held = {name: row["held_bytes"] for name, row in rows.items()}
    assert held["checkpointed"] == held["nothing_saveable"] < held["no remat"]
    assert not any("torch.utils.checkpoint" in line for line in found["without"])


def test_compare_draws_the_frontier(model: str, tmp_path: Path) -> None:
    """--out with .svg holds the figure, the peers' points in it."""
    (tmp_path / "peers.py").write_text(PEERS)
    peer, path = f"{tmp_path / 'peers.py'}:checkpointed", tmp_path / "r.svg"
    words = ["compare", f"{model}:block", *SIZES, "--steps", "1", "--peer", peer]

    assert main([*words, "--out", str(path)]) == 0

    text = path.read_text()
    assert text.startswith("<?xml")
    for part in ("checkpointed", "budget(0.5", "time of one step (ms)"):
        assert part in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{}:loss", "x=1,2,"], "x=1,2,: is not an argument."),
        (["{}:loss", "x=2:float33"], "`float33` is not a dtype."),
        (["{}:loss", "n==oops"], "`oops` is not a Python literal."),
        (["{}:loss", "x=2", "x.y=3"], "`x` is already a value, not a dict."),
        (["{}:loss", "x=2", "x=3"], "`x` is given twice."),
        (["{}:loss", "x.y=2", "x=3"], "`x` is given twice."),
        (["{}:los"], "has no `los`."),
        (["{}:number"], "cannot be called."),
        (["{}"], "is not MODULE:FUNCTION."),
        (["no_such_module:f"], "there is no module `no_such_module`."),
        (["no_such_file.py:f"], "there is no file `no_such_file.py`."),
        (["{}:fails", "x=2"], "ValueError: of the user's (a_model.py:"),
        (["{}:fails_oddly", "x=2"], "Odd: neither"),
        (
            ["{}:leaves", "x=2"],
            "sys.exit(0): guard what a script runs by if __name__ ==",
        ),
        (["{}:loss"], "TypeError: "),
    ],
    ids=lambda each: " ".join(each[:2]) if isinstance(each, list) else None,
)
def test_errors_are_one_line(
    words: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, and on standard error one line that says what is wrong."""
    assert main(["report", *(word.replace("{}", model) for word in words)]) == 1

    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("remat: ")
    assert message in line


@pytest.mark.filterwarnings("always")
def test_warnings_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a region warns of goes to standard error without the place that raised it."""
    path = tmp_path / "warns.py"
    path.write_text(
        "from remat import policies, remat\n"
        "f = remat(lambda x: x.sin().sin(), "
        "policy=policies.save_only_these_names('nothing_has_it'))\n"
    )

    assert main(["report", f"{path}:f", "x=2"]) == 0

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("remat: the region <lambda>")


def test_a_file_is_run_as_python_runs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is searched for imports, it hides no module, its prints stay apart."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "beside_it.py").write_text("SCALE = 3.0\n")
    path = folder / "json.py"  # as a module that is loaded long before
    path.write_text(
        "import beside_it, dataclasses\nprint('once')\n"
        "@dataclasses.dataclass\nclass Shape:\n    size: int\n"
        "def f(x):\n    print('at work')\n    return (x * beside_it.SCALE).sin().sum()\n"
        "def peer(g):\n    return g\n"
    )

    assert main(["report", f"{path}:f", "x=2", "--json"]) == 0

    out, err = capsys.readouterr()
    assert sys.modules["json"] is json
    assert json.loads(out)["function"] == "f"
    assert "at work" in err
    assert (
        load_target(f"{path}:f").__globals__ is load_target(f"{path}:peer").__globals__
    )
    assert err.count("once") == 1


def test_a_file_that_fails_is_no_module(tmp_path: Path) -> None:
    """What is left of it is not taken for it the next time."""
    path = tmp_path / "half_a_module.py"
    path.write_text("x = 1\nraise ImportError('half way')\n")

    for _ in range(2):
        with pytest.raises(ImportError, match="half way"):
            load_target(f"{path}:x")
    assert "half_a_module" not in sys.modules


def test_arguments() -> None:
    """Tensors by shape, dtype and bound; literals; dotted names go into dicts."""
    found = keywords(
        ["x=2,3:bfloat16", "ids=50:int64<7", "s=", "p.a.w=1", "p.b==[1, 2]"], "cpu"
    )

    assert found["x"].shape == (2, 3)
    assert found["x"].dtype == torch.bfloat16
    assert found["ids"].dtype == torch.int64
    assert 2 <= int(found["ids"].max()) < 7
    assert found["s"].shape == ()
    assert found["p"]["a"]["w"].shape == (1,)
    assert found["p"]["b"] == [1, 2]


def test_a_bound_is_of_whole_numbers() -> None:
    """What would have no effect is refused."""
    with pytest.raises(RematError, match="has a bound, 5, for normal numbers"):
        keywords(["x=2,3:float32<5"], "cpu")


def test_the_command_tells_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    """As commands do."""
    with pytest.raises(SystemExit) as stop:
        main(["--version"])

    assert stop.value.code == 0
    assert capsys.readouterr().out == f"remat {__version__}\n"


def test_arguments_are_the_same_at_every_call() -> None:
    """And no generator of the process moves."""
    state = generator_state()

    one, other = (keywords(["x=5"], "cpu")["x"] for _ in range(2))

    assert torch.equal(one, other)
    assert torch.equal(generator_state(), state)


def test_a_class_of_modules_is_made(model: str) -> None:
    """MODULE:CLASS is a module with its own parameters."""
    assert isinstance(load_target(f"{model}:Line"), torch.nn.Linear)


def test_what_takes_long_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """After a while, here none, one line says what runs; a quick run says nothing."""
    has_said = threading.Event()
    stream = io.StringIO()
    stream.flush = has_said.set

    with contextlib.redirect_stderr(stream), patience("thinking", after_s=0.0):
        assert has_said.wait(10)
    with patience("thinking"):
        pass

    assert stream.getvalue() == "remat: thinking ...\n"
    assert said(capsys.readouterr().err) == []


WRONG_CALLS = {
    "no command": ([], "the following arguments are required: command"),
    "unknown": (["paint"], "invalid choice: 'paint'"),
    "no budget": (
        ["plan", "m.py:f"],
        "one of the arguments --budget --peak is required",
    ),
    "no policy": (
        ["report", "m.py:f", "--policy", "best"],
        "`remat.policies` has no `best`",
    ),
    "no size": (
        ["report", "m.py:f", "--policy", "budget('much')"],
        "the size 'much' cannot be read",
    ),
    "no kind of file": (
        ["report", "m.py:f", "--out", "r.jpg"],
        "r.jpg: what can be written is .svg, .png, .pdf, .txt, .json, .md",
    ),
    "no figure": (
        ["checklist", "m.py:f", "--out", "c.pdf"],
        "c.pdf: what can be written is .txt, .json, .md",
    ),
    "no folder": (["report", "m.py:f", "--out", "no/r.txt"], "there is no folder no"),
    "a folder": (
        ["report", "m.py:f", "--html", "."],
        "argument --html: .: is a folder",
    ),
}


@pytest.mark.parametrize(("words", "text"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_a_wrong_call_is_one_line(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, before anything has run."""
    with pytest.raises(SystemExit) as stop:
        main(words)

    (line,) = said(capsys.readouterr().err)
    assert stop.value.code == 2
    assert line.startswith("remat: ")
    assert text in line


def test_the_checklist_is_a_command(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows, or JSON; the exit code says whether all passed."""
    code = main(["checklist", f"{model}:loss", *SIZES, "--json"])

    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "remat.checklist/2"
    assert len(found["checks"]) == 7
    assert code == any(check["verdict"] == "fail" for check in found["checks"])


def test_a_comparison_on_meta_has_no_times(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes alone, and no figure of seconds."""
    words = ["compare", f"{model}:loss", *SIZES, "--steps", "1", "--device", "meta"]

    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    code = main([*words, "--out", str(tmp_path / "frontier.svg")])

    assert {row["step_s"] for row in rows} == {None}
    assert rows[1]["held_bytes"] <= rows[0]["held_bytes"]
    assert code == 1
    assert "has no times to draw" in capsys.readouterr().err


@pytest.mark.sweep  # the test of a closed pipe runs it as one each day
def test_the_command_runs_as_a_program(model: str) -> None:
    """Through the shell, into a pipe: text, no escapes, exit code 0."""
    command = [sys.executable, "-m", "remat", "report", f"{model}:loss", *SIZES]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "wait for the backward" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


def test_a_pipe_of_the_users_own_that_breaks_is_an_error(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not that of the command."""
    assert main(["report", f"{model}:breaks_a_pipe", "x=2"]) == 1

    assert "BrokenPipeError: of the user's" in capsys.readouterr().err


def test_a_closed_pipe_ends_the_command_quietly(model: str) -> None:
    """Its reader has gone: there is nobody to complain to."""
    read, write = os.pipe()
    os.close(read)

    done = subprocess.run(
        [sys.executable, "-m", "remat", "report", f"{model}:loss", *SIZES],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)

    assert (done.returncode, said(done.stderr)) == (141, [])


def test_plan_prints_what_to_save(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each value, and the totals."""
    assert main(["plan", f"{model}:loss", *SIZES, "--budget", "0.5"]) == 0

    out, err = capsys.readouterr()
    assert '"hidden" aten.tanh' in out
    assert "predicted peak" in out
    assert said(err) == []


def test_plan_takes_a_peak(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As `plan(peak=...)` does."""
    assert main(["plan", f"{model}:loss", *SIZES, "--peak", "1MiB", "--json"]) == 0

    found = Plan.from_json(capsys.readouterr().out)
    assert found.predicted_peak_bytes <= 2**20


def test_a_plan_is_read_again(model: str, tmp_path: Path) -> None:
    """With --json the file is for `Plan.from_json`; meta tensors will do."""
    path = tmp_path / "plan.json"
    words = ["plan", f"{model}:loss", *SIZES, "--budget", "1KiB", "--device", "meta"]

    assert main([*words, "--solver", "milp", "--json", "--out", str(path)]) == 0

    found = Plan.from_json(path.read_text())
    assert found.saved_bytes <= found.budget_bytes == 1024
    assert found.solver == "milp"


@pytest.mark.parametrize("budget", ["much", "1.5", "-3"])
def test_a_plan_for_no_size_is_one_line(
    model: str, budget: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong with it goes to standard error."""
    assert main(["plan", f"{model}:loss", *SIZES, f"--budget={budget}"]) == 1

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("remat: ")
    assert err.count("\n") == 1
