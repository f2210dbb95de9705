"""Builds the site: `sphinx-build -W docs site`. A public name without a place in it fails."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging

import remat

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # sphinx imports this file by its path

import _rooms  # noqa: E402

project = "remat"
version = "0.1"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "remat"
exclude_patterns = ["examples"]

myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
napoleon_use_rtype = False
add_module_names = False
# What users see is the page; where a module re-exports a name is one place of two.
suppress_warnings = ["ref.python"]


# The overloads of the decorator are for type checkers: the page shows each option, and its default.
_analyzer = ModuleAnalyzer.for_module("remat._api")
_analyzer.analyze()
_analyzer.overloads.clear()


def setup(app: Any) -> None:
    """Draws the rooms first, and looks for what is missing when all pages were read."""
    app.connect("builder-inited", lambda _: _rooms.draw(HERE / "rooms.svg"))
    app.connect("env-check-consistency", _require_every_public_name)
    app.connect("autodoc-process-docstring", _leave_files_out)


def _leave_files_out(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Of a module's docstring leaves the paragraph out that names its files."""
    if what == "module":
        paragraphs = "\n".join(lines).split("\n\n")
        kept = [each for each in paragraphs if "`_" not in each]
        lines[:] = "\n\n".join(kept).splitlines()


def _require_every_public_name(app: Any, env: Any) -> None:
    known = env.domaindata["py"]["objects"]
    missing = sorted(
        name for name in _public_names("remat", remat) if name not in known
    )
    if missing:
        text = f"reference.md has no place for {', '.join(missing)}"
        logging.getLogger(__name__).warning(text)


def _public_names(path: str, module: ModuleType) -> Iterator[str]:
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            yield from _public_names(f"{path}.{name}", value)
        elif not str(getattr(value, "__module__", "")).startswith("torch."):
            yield f"{path}.{name}"  # what torch says of its own is torch's
