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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_examples(page: Path, tmp_path: Path):
    """The Python blocks of a page run from top to bottom, as one program.

    A page that says `<!-- ranks: 2 -->` is run by as many processes.
    """
    text = page.read_text()
    for needed in re.findall(r"^<!-- needs: (\w+) -->$", text, re.M):
        pytest.importorskip(needed)
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    program = tmp_path / f"{page.stem}_example.py"

    ranks = re.search(r"^<!-- ranks: (\d+) -->$", text, re.M)
    if ranks is None:
        program.write_text("\n".join(blocks))
        runpy.run_path(str(program))
    else:
        program.write_text("\n".join([*blocks, LEAVE]))
        run_in_ranks(program, int(ranks[1]))


#: The programs of docs/examples, with what makes each quick.
PROGRAMS = {
    "per_example_gradients": ["--steps", "2"],
    "physics_informed": ["--steps", "2"],
    "meta_learning": ["--steps", "2"],
    "hessian": ["--eigenvalues", "1"],
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


def test_program_of_two_ranks(tmp_path: Path):
    """Likewise; its assertions are made on each rank."""
    program = ROOT / "docs/examples/tensor_parallel.py"
    arguments = [str(program), *PROGRAMS["tensor_parallel"]]
    run = f"""
import runpy, sys
sys.argv = {arguments!r}
runpy.run_path({str(program)!r}, run_name="__main__")
{LEAVE}"""
    (tmp_path / "program.py").write_text(run)

    run_in_ranks(tmp_path / "program.py", 2)


#: Imports what takes long once for all ranks, splits into them, and fails as one of them does.
RANKS = """
import os, runpy, sys
import remat, torch._dynamo, torch.distributed.fsdp
ranks = []
for rank in map(str, range(int(os.environ["WORLD_SIZE"]))):
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        runpy.run_path(sys.argv[1])
sys.exit(any([os.waitpid(rank, 0)[1] for rank in ranks]))
"""


def run_in_ranks(program: Path, num_ranks: int) -> None:
    """Runs a program with what torchrun tells its ranks, and with a limit of time."""
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        "localhost", 0, is_master=True, wait_for_workers=False
    )
    told = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }

    assert run_group(["-c", RANKS, str(program)], 120, **told) == 0
