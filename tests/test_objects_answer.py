"""Storages, policies and regions answer for themselves: nobody else asks for their class."""

import ast
import functools

import pytest

from remat import policies, storage
from remat.policies import AbstractPolicy
from remat.storage import AbstractStorage
from tests.sources import trees

ROOMS = ("remat.storage", "remat.policies", "remat._regions")
ASKED = {"isinstance", "issubclass", "type"}
# What the rules of differentiation ask of a region.
DERIVED = {"vjp", "jvp", "batched"}


@functools.cache
def regions() -> frozenset[str]:
    """The names of the classes of regions."""
    return frozenset(
        node.name
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and {e.name for e in node.body if isinstance(e, ast.FunctionDef)} > DERIVED
    )


@functools.cache
def classes() -> frozenset[str]:
    """The names of the classes that nobody may ask for."""
    return regions() | {
        name
        for module in (storage, policies)
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, (AbstractStorage, AbstractPolicy))
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
        if (isinstance(node, ast.MatchClass) and names_in(node.cls) & classes())
        or (names_in(node) & ASKED and names_in(node) & classes())
    ]


def test_no_class_is_asked_outside_its_room() -> None:
    """A storage or a policy of a user's is treated as ours: it is asked, not its class."""
    asked = {
        name: found
        for name, tree in trees().items()
        if not name.startswith(ROOMS) and (found := questions_in(tree))
    }

    assert not asked


def test_the_regions_are_known() -> None:
    """The traced one, the one that runs again, and the two of a scheduled stack."""
    assert {"Region", "TracedRegion", "Rerun", "Swept", "Pulled"} == regions()


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
