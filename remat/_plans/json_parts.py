"""The parts of a plan as what JSON knows, and back."""

import dataclasses
from typing import Any, cast

import torch

from remat._errors import PolicyError
from remat.planners import Option, Problem, Step
from remat.storage import AbstractStorage, Chain, links_of
from remat.storage._contract import own_classes

_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def as_plain(part: Any) -> Any:
    """A part of a plan as what JSON knows, parts of this part aside.

    Raises:
        PolicyError: it has a storage that holds what text cannot: a mesh, a key, a class of
            the user's.
    """
    if isinstance(part, (Step, Option)):
        return dataclasses.astuple(part)
    fields = fields_of(part)
    if "storage" in fields:
        fields["storage"] = _from_storage(fields["storage"])
    return fields


def fields_of(part: Any) -> dict[str, Any]:
    """The fields of a dataclass that goes into JSON."""
    return {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}


def _from_storage(storage: AbstractStorage | None) -> Any:
    if storage is None:
        return None
    links = links_of(storage)
    if links != (storage,):
        return [*map(_from_storage, links)]
    kind = type(storage).__name__
    fields = fields_of(storage) if own_classes().get(kind) is type(storage) else None
    if fields is None or not all(isinstance(each, _PLAIN) for each in fields.values()):
        raise PolicyError.of(
            where="Plan.to_json()",
            what=f"the storage {storage!r} cannot be written as text.",
            why="Only storages of this package can, if they have no device mesh and "
            "no key.",
            do="Plan again where the plan is needed, or allow other storages.",
        )
    for name, each in fields.items():
        if isinstance(each, torch.dtype):
            fields[name] = {"dtype": name_of(each)}
    return {"kind": kind, **fields}


def to_storage(text: Any) -> AbstractStorage | None:
    """The storage of what a plan wrote as JSON."""
    if text is None:
        return None
    if isinstance(text, list):
        made = map(to_storage, cast("list[Any]", text))
        return Chain(tuple(each for each in made if each is not None))
    fields: dict[str, Any] = dict(text)
    kind: Any = own_classes()[fields.pop("kind")]
    for name, each in fields.items():
        if isinstance(each, dict):
            fields[name] = getattr(torch, str(cast("Any", each)["dtype"]))
    return kind(**fields)


def name_of(dtype: torch.dtype) -> str:
    """A dtype as people and JSON write it: "float32"."""
    return str(dtype).removeprefix("torch.")


def to_problem(text: Any) -> Problem:
    """The problem of what a plan wrote as JSON."""
    steps = [Step(cost, tuple(uses), item) for cost, uses, item in text["steps"]]
    items = [tuple(Option(*each) for each in options) for options in text["items"]]
    fixed_bytes, base_cost = text["fixed_bytes"], text["base_cost"]
    wanted = tuple(text["wanted"])
    return Problem(tuple(steps), wanted, tuple(items), fixed_bytes, base_cost)
