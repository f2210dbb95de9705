"""The house: a module imports its own room and those left of it, and torch has one door."""

import ast
import graphlib
import re
from collections.abc import Iterator

from tests.sources import trees

ROOMS: str = """_version _errors _torch _user_lines _switches _graph _generators random storage policies
planners schedules _captures _tracing _partition _programs _regions _rerun _calls _api _plans
layers modules interop reporting testing remat __main__"""


def room_of(module: str) -> int:
    """How far to the right the room of a module is."""
    return ROOMS.split().index(f"{module}.remat".split(".")[1])


def imports_of(module: str) -> Iterator[str]:
    """The dotted names that a module imports anywhere in it, functions included."""
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_run_one_way():
    """No module imports from a room to its right, or itself by a detour."""
    arrows = {
        module: {
            name if name in trees() else name.rpartition(".")[0]
            for name in imports_of(module)
            if f"{name}.".startswith("remat.")
        }
        for module in trees()
    }
    pairs = ((module, name) for module, names in arrows.items() for name in names)

    assert not [pair for pair in pairs if room_of(pair[1]) > room_of(pair[0])]
    graphlib.TopologicalSorter(arrows).prepare()


def test_torch_internals_come_through_one_door():
    """What torch does not promise is reached in `_torch` alone."""
    private = re.compile(r"torch\.(?!ops\.)([^.]+\.)*(_[^_]|fx\.experimental\b)")
    for module, tree in trees().items():
        read = [ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
        inside = {*filter(private.match, [*read, *imports_of(module)])}

        assert not inside or module.startswith("remat._torch"), inside
