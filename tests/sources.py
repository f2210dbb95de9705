"""The package's own source, parsed once in a process."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parent.parent


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The code of each module, by its dotted name."""
    return {
        _name_of(path): ast.parse(path.read_text())
        for path in sorted((ROOT / "remat").rglob("*.py"))
    }


def _name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")
