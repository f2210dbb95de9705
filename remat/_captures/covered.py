"""What is baked: fetches, checks, explains and restores the covered state."""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, final

from torch import Tensor

from remat._captures.generated_check import generate_check
from remat._captures.places import MISSING, NOT_THERE, fill, in_words, put
from remat._captures.spot_rules import (
    Equal,
    Instance,
    IsTensor,
    Keyed,
    Registered,
    Runs,
    SameAs,
    Sized,
    Spot,
    visit,
)
from remat._errors import RecomputationError, refusal


@final
class Covered:
    """Frozen knowledge of what a trace depends on besides its arguments.

    Holds types, code and simple constants; nothing of the user's is kept alive.

    Attributes:
        gather: the used tensors, found anew from the roots; None if the check fails.
        labels: the fetched tensors in the user's words, in the same order.
        untold: the read objects whose contents are not compared, in the user's words.
    """

    __slots__ = ("__weakref__", "_spots", "gather", "labels", "untold")

    def __init__(
        self,
        spots: Sequence[Spot],
        fetched: Sequence[int],
        untold: Sequence[str] = (),
    ) -> None:
        self.untold = tuple(untold)
        self._spots = tuple(spots)
        self.labels = tuple(str(spots[index].label) for index in fetched)
        self.gather: Callable[[tuple[object, ...]], tuple[Tensor, ...] | None]
        self.gather = generate_check(spots, fetched)

    def check(self, roots: tuple[object, ...]) -> bool:
        """Whether the covered state equals what was baked."""
        return self.gather(roots) is not None

    def fetch(self, roots: tuple[object, ...]) -> tuple[Tensor, ...]:
        """The used tensors, where the state is known to be what was baked."""
        tensors = self.gather(roots)
        assert tensors is not None, self.explain(roots)
        return tensors

    def difference(self, roots: tuple[object, ...]) -> tuple[str, str]:
        """What differs first, and how, in words; of covered state nothing may."""
        for spot, _, value, holds in visit(self._spots, roots):
            if not holds:
                return str(spot.label), _difference_at_spot(spot, value)
        return "a captured tensor", "nothing that is covered has changed"

    def explain(self, roots: tuple[object, ...]) -> str:
        """The first difference in words, or that there is none."""
        return self.difference(roots)[1]

    @contextlib.contextmanager
    def restored(self, roots: tuple[object, ...]) -> Generator[None, None, None]:
        """Sets covered simple values to what was baked, and undoes that at the end.

        Raises:
            RecomputationError: something else changed, or a place cannot be written.
        """
        if self.check(roots):
            yield
            return
        with contextlib.ExitStack() as undo:
            for spot, owner, value, holds in visit(self._spots, roots):
                if not holds:
                    _mend_spot(spot, owner, value, undo)
            yield


def _difference_at_spot(spot: Spot, value: object) -> str:
    now = "gone" if value is MISSING else in_words(value)
    match spot.rule:
        case Equal(const):
            return f"{spot.label} was {in_words(const)} and is {now}"
        case SameAs():
            return f"{spot.label} was shared with another place and is no more"
        case Runs(code):
            return f"{spot.label} ran {code.co_qualname} and runs other code"
        case Sized(kind, num):
            return f"{spot.label} was a {kind.__name__} of {num} items and has changed"
        case Keyed(kind, keys):
            return f"{spot.label} was a {kind.__name__} with the keys {keys} and has changed"
        case Registered():
            return f"{spot.label} was another tracker"
        case Instance(kind) | IsTensor(kind):
            return f"{spot.label} was a {kind.__qualname__} and is {now}"


def _mend_spot(spot: Spot, owner: Any, value: Any, undo: contextlib.ExitStack) -> None:
    try:
        match spot.rule:
            case Equal(const):
                put(owner, spot.step, const)
                undo.callback(put, owner, spot.step, value)
            case Sized(kind, num) if type(value) is kind and kind in {list, deque}:
                undo.callback(fill, value, [*value])
                fill(value, [*value, *[None] * num][:num])
            case Keyed(kind, keys) if type(value) is kind:
                undo.callback(fill, value, {**value})
                fill(value, {key: value.get(key) for key in keys})
            case _:
                raise TypeError("only simple values can be restored")
    except NOT_THERE as error:
        raise refusal(
            RecomputationError,
            where=str(spot.label),
            what=f"changed after the forward: {_difference_at_spot(spot, value)}.",
            why=f"The backward needs the old value, but {error}.",
            do="Change it after the backward, or pass it as an argument.",
        ) from error
