"""Storages, policies and regions answer for themselves: nobody else asks for their class."""

import ast
import inspect
from pathlib import Path

import pytest

from remat import policies, storage
from remat.policies import AbstractPolicy
from remat.storage import AbstractStorage

PACKAGE = Path(inspect.getfile(policies)).parent.parent
ROOMS = {"storage", "policies", "_regions"}
ASKED = {"isinstance", "issubclass", "type"}
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
# What the rules of differentiation ask of a region.
DERIVED = {"vjp", "jvp", "batched"}
REGIONS = {
    node.name
    for tree in TREES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef)
    and {each.name for each in node.body if isinstance(each, ast.FunctionDef)} > DERIVED
}
CLASSES = REGIONS | {
    name
    for module in (storage, policies)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, (AbstractStorage, AbstractPolicy))
}


def names_in(node: ast.AST) -> set[str]:
    """The last names of everything that a piece of code mentions."""
    nodes = list(ast.walk(node))
    names = {each.id for each in nodes if isinstance(each, ast.Name)}
    return names | {each.attr for each in nodes if isinstance(each, ast.Attribute)}


def questions_in(tree: ast.Module) -> list[str]:
    """The tests of a storage's, a policy's or a region's class in a module."""
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.Call, ast.Compare, ast.MatchClass))
    ]
    return [
        ast.unparse(node)
        for node in found
        if (isinstance(node, ast.MatchClass) and names_in(node.cls) & CLASSES)
        or (names_in(node) & ASKED and names_in(node) & CLASSES)
    ]


@pytest.mark.parametrize(
    "path",
    [path for path in TREES if path.relative_to(PACKAGE).parts[0] not in ROOMS],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_no_class_is_asked_outside_its_room(path: Path) -> None:
    """A storage or a policy of a user's is treated as ours: it is asked, not its class."""
    assert questions_in(TREES[path]) == []


def test_the_regions_are_known() -> None:
    """The traced one, the one that runs again, and the two of a scheduled stack."""
    assert {"Region", "TracedRegion", "Rerun", "Swept", "Pulled"} == REGIONS


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(x, Keep)",
        "type(x) is not storage.Keep",
        "match x:\n    case Shard():\n        pass",
        "issubclass(x, (int, policies.Budget))",
        "assert isinstance(call.region, TracedRegion)",
    ],
)
def test_a_question_is_found(code: str) -> None:
    """In each form in which Python can ask."""
    assert questions_in(ast.parse(code))
