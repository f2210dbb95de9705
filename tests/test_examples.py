"""Every example that a reader may copy runs: in docstrings, the README and the docs."""

import doctest
import importlib
import re
import runpy
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str):
    """The examples in a module's docstrings give what they say."""
    results = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.ELLIPSIS
    )

    assert results.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_examples(page: Path, tmp_path: Path):
    """The Python blocks of a page run from top to bottom, as one program."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    program = tmp_path / f"{page.stem}_example.py"
    program.write_text("\n".join(blocks))

    runpy.run_path(str(program))
