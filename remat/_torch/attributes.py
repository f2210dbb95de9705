"""Attributes that have another value for the length of a block."""

import contextlib
from collections.abc import Generator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def attributes_as(owner: Any, **values: Any) -> Generator[None]:
    """Inside, these attributes of an object, a class or a module are what is given here."""
    before = {name: owner.__dict__.get(name, _ABSENT) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
