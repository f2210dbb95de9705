"""A call of a decorated function, as its cache is asked about it."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, final

from remat._calls.signature import Signature, labels
from remat._regions.retraceable import Roots
from remat._switches.numerics import Numerics


@final
@dataclasses.dataclass(frozen=True, slots=True)
class CallSite:
    """One call: the function, its arguments, and what a trace of it depends on."""

    function: Callable[..., Any]  # the user's function
    args: tuple[Any, ...]  # positional arguments
    kwargs: Mapping[str, Any]  # keyword arguments
    signature: Signature  # of the arguments
    numerics: Numerics  # the switches in force

    @property
    def roots(self) -> Roots:
        """The function and the objects among its arguments."""
        return (self.function, *self.signature.objects)

    @property
    def key(self) -> Hashable:
        """What calls that may share a trace have in common."""
        return (self.signature.key, self.numerics)

    @property
    def general_key(self) -> Hashable:
        """The key of the call, the sizes of its tensors aside."""
        return (self.signature.general_key, self.numerics)

    @property
    def names(self) -> tuple[str, ...]:
        """What messages call the leaves of the arguments."""
        return labels(self.function, *self.signature.arguments)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The names of the leaves that are tensors, each once."""
        pairs = zip(self.names, self.signature.layout.kinds, strict=True)
        return tuple(name for name, kind in pairs if kind == "tensor")

    @property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        """For tensors that are passed more than once: the further names, by the first."""
        firsts, layout = self.tensor_names, self.signature.layout
        again = iter(layout.again)
        further: dict[str, tuple[str, ...]] = {}
        for name, kind in zip(self.names, layout.kinds, strict=True):
            if kind == "again":
                first = firsts[next(again)]
                further[first] = (*further.get(first, ()), name)
        return further
