"""Writes records as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, cast

import torch


def to_json(schema: str, record: Any) -> str:
    """A dataclass as a JSON object; the schema's name is its first entry."""
    return json.dumps({"schema": schema, **_plain(record)}, indent=2)


def _plain(thing: Any) -> Any:
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        fields = dataclasses.fields(thing)
        return {each.name: _plain(getattr(thing, each.name)) for each in fields}
    if isinstance(thing, tuple | list):
        return [_plain(each) for each in cast("list[Any]", thing)]
    if isinstance(thing, torch.dtype):
        return str(thing).removeprefix("torch.")
    return thing
