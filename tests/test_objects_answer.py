"""Storages and policies answer for themselves: nobody else asks for their class."""

import ast
import inspect
from pathlib import Path

import pytest

from remat import policies, storage
from remat.policies import AbstractPolicy
from remat.storage import AbstractStorage

PACKAGE = Path(inspect.getfile(policies)).parent.parent
ROOMS = {"storage", "policies"}
ASKED = {"isinstance", "issubclass", "type"}
CLASSES = {
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
    """The tests of a storage's or a policy's class in a module."""
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
    [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in ROOMS
    ],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_no_class_is_asked_outside_its_room(path: Path) -> None:
    """A storage or a policy of a user's is treated as ours: it is asked, not its class."""
    assert questions_in(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(x, Keep)",
        "type(x) is not storage.Keep",
        "match x:\n    case Shard():\n        pass",
        "issubclass(x, (int, policies.Budget))",
    ],
)
def test_a_question_is_found(code: str) -> None:
    """In each form in which Python can ask."""
    assert questions_in(ast.parse(code))
