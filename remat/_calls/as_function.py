"""What tools ask of a region as they do of a plain function: its signature, its globals."""

import inspect
from typing import Any

from remat._errors import refusal
from remat._regions.out_of_memory import name_of


class SignatureOfWrapped:
    """The `__signature__` of a region, which `inspect.getfullargspec` asks for; its class has none."""

    def __get__(self, region: Any, owner: type) -> inspect.Signature:
        try:
            return inspect.signature(region.__wrapped__)
        except (AttributeError, TypeError, ValueError) as error:
            raise AttributeError(f"{owner.__name__} has no signature") from error


class NoGlobals:
    """The `__globals__` of a region, for which torch.jit.script asks the methods of a module."""

    def __get__(self, region: Any, owner: type) -> Any:
        raise refusal(
            AttributeError,
            # Not as it prints: a module that torch.fx traces would read its parameters.
            where=f"the region {name_of(region)}",
            what="has no `__globals__`.",
            why="It is no plain function, which torch.jit.script alone takes.",
            do="Script the module without regions: after modules.remove(model), or without "
            "the decorator.",
        )
