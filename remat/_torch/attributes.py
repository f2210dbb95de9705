"""Attributes that have another value for the length of a block."""

import contextlib
from collections.abc import Generator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def attributes_as(owner: Any, **values: Any) -> Generator[None]:
    """Inside, these attributes of an object, a class or a module are what is given here."""
    before = {name: owner.__dict__.get(name, _ABSENT) for name in values}
    put: Any = type.__setattr__ if isinstance(owner, type) else setattr
    for name, value in values.items():
        put(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not _ABSENT:
                put(owner, name, value)
            elif isinstance(owner, type):
                type.__delattr__(owner, name)
            else:
                delattr(owner, name)
