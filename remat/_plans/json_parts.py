"""The parts of a plan as what JSON knows, and back."""

import dataclasses
from typing import Any, cast

import torch

from remat._errors import PolicyError, refusal
from remat.planners import Option, Problem, Step
from remat.storage import AbstractStorage, Chain, links_of
from remat.storage._contract import own_classes

_PLAIN = (bool, int, float, str, type(None))


def from_storage(storage: AbstractStorage | None) -> Any:
    """A storage as what JSON knows.

    Raises:
        PolicyError: it holds what text cannot: a mesh, a key, a class of the user's.
    """
    if storage is None:
        return None
    links = links_of(storage)
    if links != (storage,):
        return [from_storage(link) for link in links]
    kind = type(storage).__name__
    if own_classes().get(kind) is not type(storage):
        raise _not_for_json(storage)
    names = [field.name for field in dataclasses.fields(cast("Any", storage))]
    return {"kind": kind, **{k: _json_of(getattr(storage, k), storage) for k in names}}


def _json_of(value: Any, storage: AbstractStorage) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": name_of(value)}
    if not isinstance(value, _PLAIN):
        raise _not_for_json(storage)
    return value


def _not_for_json(storage: AbstractStorage) -> PolicyError:
    return refusal(
        PolicyError,
        where="Plan.to_json()",
        what=f"the storage {storage!r} cannot be written as text.",
        why="Only storages of this package can, if they have no device mesh and "
        "no key.",
        do="Plan again where the plan is needed, or allow other storages.",
    )


def to_storage(text: Any) -> AbstractStorage | None:
    """The storage that `from_storage` made into what JSON knows."""
    if text is None:
        return None
    if isinstance(text, list):
        made = map(to_storage, cast("list[Any]", text))
        return Chain(tuple(each for each in made if each is not None))
    fields: dict[str, Any] = dict(text)
    kind: Any = own_classes()[fields.pop("kind")]
    return kind(**{key: _of_json(each) for key, each in fields.items()})


def _of_json(text: Any) -> Any:
    return getattr(torch, str(text["dtype"])) if isinstance(text, dict) else text  # pyright: ignore[reportUnknownArgumentType]


def name_of(dtype: torch.dtype) -> str:
    """A dtype as people and JSON write it: "float32"."""
    return str(dtype).removeprefix("torch.")


def from_problem(problem: Problem) -> Any:
    """A problem as lists of numbers, for JSON."""
    return {
        "steps": [dataclasses.astuple(each) for each in problem.steps],
        "wanted": problem.wanted,
        "items": [[dataclasses.astuple(o) for o in each] for each in problem.items],
        "fixed_bytes": problem.fixed_bytes,
        "base_cost": problem.base_cost,
    }


def to_problem(text: Any) -> Problem:
    """The problem that `from_problem` made into lists of numbers, for JSON."""
    return Problem(
        steps=tuple(
            Step(cost, tuple(uses), item) for cost, uses, item in text["steps"]
        ),
        wanted=tuple(text["wanted"]),
        items=tuple(
            tuple(Option(*each) for each in options) for options in text["items"]
        ),
        fixed_bytes=text["fixed_bytes"],
        base_cost=text["base_cost"],
    )
