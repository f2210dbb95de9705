"""Draws the rooms of the package: which reads which, and the way of a call through them.

The arrows are the package's own imports, and their order is the line of rooms of
`tests/test_house.py`, so that the picture cannot say what the code does not do.
"""

import ast
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

ROOT = Path(__file__).parent.parent

#: What a call that misses the cache does, and in which room; the last one serves every call.
STAGES = (
    ("call", "_calls"),
    ("trace", "_tracing"),
    ("cover", "_captures"),
    ("analyze, decide, cut", "_partition"),
    ("write programs", "_programs"),
    ("apply rules", "_regions"),
)

_INK, _PALE, _CALL = "#333333", "#9db4c8", "#b3541e"


def rooms() -> list[str]:
    """The rooms, from the one that reads no other to the one that may read all."""
    tree = ast.parse((ROOT / "tests/test_house.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ROOMS":
            assert node.value is not None
            return str(ast.literal_eval(node.value)).split()
    raise LookupError("tests/test_house.py has no line of ROOMS")


def files_of(room: str) -> list[Path]:
    """The modules of a room; the package's own `__init__` is the room `remat`."""
    package = ROOT / "remat"
    if room == "remat":
        return [package / "__init__.py"]
    return [*sorted((package / room).rglob("*.py")), *package.glob(f"{room}.py")]


def imports() -> Counter[tuple[str, str]]:
    """How many statements of a room (first) import something of another one (second)."""
    known = rooms()
    pairs = (
        (room, name.split(".")[1])
        for room in known
        for path in files_of(room)
        for name in _imported(ast.parse(path.read_text()))
    )
    return Counter(pair for pair in pairs if pair[0] != pair[1] and pair[1] in known)


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("remat."):
            yield f"{node.module}.{node.names[0].name}"


def purpose(room: str) -> str:
    """The first line of a room's docstring."""
    tree = ast.parse(files_of(room)[0].read_text())
    return (ast.get_docstring(tree) or room).splitlines()[0]


def draw(path: Path) -> None:
    """Writes the picture as SVG."""
    known, figure = rooms(), Figure(figsize=(12, 9), layout="constrained")
    height = {room: place for place, room in enumerate(known)}
    axes = figure.subplots()
    for room, place in height.items():
        axes.text(0, place, room, ha="right", va="center", weight="bold", color=_INK)
        axes.text(0.1, place, purpose(room), va="center", size=7.5, color=_INK)
    for (reader, read), count in imports().items():
        ends = (5.8, height[reader]), (5.8, height[read])
        _arrow(axes, ends, _PALE, width=0.3 + 0.05 * count, bend=-0.45)
    places = [height[room] for _, room in STAGES]
    for number, (stage, _) in enumerate(STAGES):
        label = f"{number + 1}  {stage}"
        axes.text(-1.6, places[number], label, ha="right", va="center", color=_CALL)
    for start, stop in itertools.pairwise(places):
        bend = 0.25 if stop > start else -0.25
        _arrow(axes, ((-1.5, start), (-1.5, stop)), _CALL, width=1.4, bend=bend)
    axes.set(xlim=(-4.2, 9.6), ylim=(-1, len(known)))
    axes.set_title("A miss of the cache, by number; each room reads only rooms below")
    axes.axis("off")
    # No date and no random ids: the same picture from the same code.
    figure.savefig(path, format="svg", metadata={"Date": None})


def _arrow(
    axes: Any,
    ends: tuple[tuple[float, float], tuple[float, float]],
    color: str,
    *,
    width: float,
    bend: float,
) -> None:
    curve = f"arc3,rad={bend}"
    arrow = FancyArrowPatch(
        *ends, connectionstyle=curve, arrowstyle="->", mutation_scale=8,
        color=color, lw=width,
    )  # fmt: skip
    axes.add_patch(arrow)
