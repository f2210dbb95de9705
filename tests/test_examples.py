"""Every example that a reader may copy runs: in docstrings, the README and the docs."""

import doctest
import importlib
import re
import runpy
from pathlib import Path

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


#: Imports what takes long once for all ranks, splits into them, and fails as one of them does.
RANKS = """
import os, runpy, sys
import remat
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
