"""Which draws of a trace repeat earlier ones.

What runs again in a trace sets a generator to an earlier state, draws, and sets it back: a
program for one draw, a function with `engine="rerun"` for all of its draws. A trace draws no
numbers, so that states are alike there; where a generator stands among the draws tells.
"""

from collections import defaultdict
from typing import NamedTuple, final

import torch

from remat._graph.values import Ref

Source = torch.device | str  # whose numbers a draw takes: a generator's, or a stream's
#: Where a generator stands: behind so many draws; or at a state from elsewhere, for one draw.
Place = int | Ref


class _Draw(NamedTuple):
    source: Source
    state: Ref  # from which it starts


@final
class Draws:
    """The draws of a trace, each once, and where the generator of each device stands."""

    def __init__(self) -> None:
        # By device; those from streams are among them.
        self._draws: defaultdict[torch.device, list[_Draw]] = defaultdict(list)
        self._places: dict[Ref, int] = {}  # of states, among the draws
        # Where generators stand that do not stand behind all draws.
        self._set: dict[torch.device, Place] = {}
        # The states from which no draw has started yet.
        self._unread: dict[Source, Ref] = {}

    def set_to(self, state: Place, device: torch.device) -> Place:
        """Sets a generator to a state, or to where it stood; returns where it stood."""
        count = len(self._draws[device])
        found = self._set.pop(device, count)
        place = self._places.get(state, state) if isinstance(state, Ref) else state
        if place != count:
            self._set[device] = place
        return found

    def ask(self, source: Source, state: Ref) -> None:
        """Notes a state from which the next draw may start."""
        self._unread[source] = state
        if not isinstance(source, str):
            self._places[state] = len(self._draws[source])

    def unread(self, source: Source) -> Ref | None:
        return self._unread.pop(source, None)

    def add(self, device: torch.device, source: Source, state: Ref) -> None:
        """Notes a draw that repeats none."""
        self._places.setdefault(state, len(self._draws[device]))
        self._draws[device].append(_Draw(source, state))

    def state_again(self, source: Source) -> Ref | None:
        """The state that a device or a stream has had before, if it is to be there again."""
        for device in self._set:
            draw = self._next(device)
            if source in (device, draw.source):
                return draw.state
        return None

    def repeat(self, device: torch.device) -> Ref | None:
        """The state from which the next draw starts again; None if it repeats none."""
        if device not in self._set:
            return None
        state, place = self._next(device).state, self._set[device]
        if isinstance(place, int):
            self.set_to(place + 1, device)
        return state

    def _next(self, device: torch.device) -> _Draw:
        place = self._set[device]
        is_known = isinstance(place, int)
        return self._draws[device][place] if is_known else _Draw(device, place)
