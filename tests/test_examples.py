"""Every example that a reader may copy runs: in docstrings, the docs, and the root's two pages.

The programs of docs/examples assert what they claim, by themselves.
"""

import doctest
import importlib
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist

from tests.storage.worlds import run_group

# Forward mode's first use compiles torch's own formulas with it.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")

ROOT = Path(__file__).parent.parent
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "remat").rglob("*.py"))
]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted(ROOT.glob("docs/**/*.md"))),
]

# A DeviceMesh keeps gloo's threads beyond `destroy_process_group()`. One that frees its last
# tensor while the interpreter ends aborts the process, about once in 100 runs (torch 2.15).
LEAVE = "import os; os._exit(0)"


# What a module of the package needs beyond what the package installs; a page says so by
# `<!-- needs: name -->`. The extra `dev` brings all of it.
NEEDS = {"remat.interop.transformers": "transformers"}


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str):
    """The examples in a module's docstrings give what they say."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    results = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.ELLIPSIS
    )

    assert results.failed == 0


def program_of(page: Path) -> str:
    """The Python blocks of a page, from top to bottom."""
    text = page.read_text()
    for needed in re.findall(r"^<!-- needs: (\w+) -->$", text, re.M):
        pytest.importorskip(needed)
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S))


#: Pages that two processes run.
OF_TWO_RANKS = [page for page in PAGES if "\n<!-- ranks: 2 -->\n" in page.read_text()]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page not in OF_TWO_RANKS],
    ids=lambda page: page.name,
)
def test_page_examples(page: Path, tmp_path: Path):
    """The Python blocks of a page run, as one program."""
    program = tmp_path / f"{page.stem}_example.py"
    program.write_text(program_of(page))

    runpy.run_path(str(program))


#: The programs of docs/examples, with what makes each quick.
PROGRAMS = {
    "per_example_gradients": ["--steps", "2"],
    "physics_informed": ["--steps", "2"],
    "meta_learning": ["--steps", "2"],
    "hessian": ["--eigenvalues", "1", "--tolerance", "0.01"],
    "neural_ode": ["--length", "60", "--steps", "1"],
    "functional_training": ["--steps", "2"],
    "tensor_parallel": ["--steps", "2"],
}


def test_every_program_is_run_and_shown():
    """A program is listed above, and its page has all of it."""
    names = {path.stem for path in (ROOT / "docs/examples").glob("*.py")}
    page = (ROOT / "docs/examples.md").read_text()

    assert names == PROGRAMS.keys()
    assert set(re.findall(r"{literalinclude} examples/(\w+)\.py", page)) == names


@pytest.mark.parametrize("name", [*PROGRAMS][:-1])
def test_program(name: str, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """Its own assertions hold, of numbers and of bytes, and its table is the page's."""
    program = ROOT / "docs/examples" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(program), *PROGRAMS[name]])

    runpy.run_path(str(program), run_name="__main__")

    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading in (ROOT / "docs/examples.md").read_text()
    assert len(rows) >= 2


#: Imports what takes long once, splits into the ranks of one program after the other, and ends
#: with the name of the first that fails on one of them.
RANKS = """
import gc, os, runpy, sys
import remat, torch._dynamo, torch.distributed.fsdp
gc.freeze()
for program, port in zip(sys.argv[1::2], sys.argv[2::2]):
    ranks = []
    for rank in "01":
        ranks.append(os.fork())
        if not ranks[-1]:
            os.environ.update(RANK=rank, LOCAL_RANK=rank, MASTER_PORT=port)
            runpy.run_path(program)
    if any([os.waitpid(rank, 0)[1] for rank in ranks]):
        sys.exit(f"failed: {program}")
"""


@pytest.mark.apart
def test_pages_and_programs_of_two_ranks(tmp_path: Path):
    """Likewise those that two processes run; their assertions are made on each rank."""
    texts = {page.stem: program_of(page) for page in OF_TWO_RANKS}
    program = ROOT / "docs/examples/tensor_parallel.py"
    arguments = [str(program), *PROGRAMS["tensor_parallel"]]
    texts["tensor_parallel"] = f"""
import runpy, sys
sys.argv = {arguments!r}
runpy.run_path({str(program)!r}, run_name="__main__")"""
    files = [tmp_path / f"{name}_of_two_ranks.py" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(f"{text}\n{LEAVE}")

    run_in_ranks(files)


def run_in_ranks(programs: list[Path]) -> None:
    """Runs each with what torchrun tells its two ranks, and all with a limit of time."""
    stores = [
        dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            "localhost", 0, is_master=True, wait_for_workers=False
        )
        for _ in programs
    ]
    told = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    pairs = zip(programs, stores, strict=True)
    words = [
        word for program, store in pairs for word in (str(program), str(store.port))
    ]

    assert run_group(["-c", RANKS, *words], 300, **told) == 0
