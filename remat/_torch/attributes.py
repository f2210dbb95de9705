"""Attributes that have another value for the length of a block."""

import contextlib
from collections.abc import Generator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def attributes_as(owner: Any, **values: Any) -> Generator[None]:
    """Inside, these attributes of an object, a class or a module are what is given here."""
    before = {name: owner.__dict__.get(name, _ABSENT) for name in values}
    # A metaclass of a user's is passed by; that of pybind11 lets nothing pass.
    past = isinstance(owner, type) and type(owner).__module__ != "pybind11_builtins"
    put: Any = type.__setattr__ if past else setattr
    for name, value in values.items():
        put(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not _ABSENT:
                put(owner, name, value)
            elif past:
                type.__delattr__(owner, name)
            else:
                delattr(owner, name)
