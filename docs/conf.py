"""Builds the site: `sphinx-build -W docs site`. A public name without a place in it fails."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from sphinx.util import logging

import remat

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


def setup(app: Any) -> None:
    """Has Sphinx look for what is missing when all pages were read."""
    app.connect("env-check-consistency", _require_every_public_name)


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
        else:
            yield f"{path}.{name}"
