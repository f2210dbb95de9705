"""Streams: whose numbers a draw takes while a function is traced.

Code inside `tracker.fork(name)` draws from the state of that name: the tracker puts the state
into the default generator, and takes it out again afterwards. A trace does not see the swap,
which is not an operator, but it can look at the generator. While a function is traced, each
state of each registered tracker is replaced by a stand-in with a unique seed. So the seed in
the generator tells at each draw whose numbers the draw takes. The stand-in gets a new seed with
each draw, which tells an old state of a stream from its current one. A program sets the
stream's state around the draw; a recomputation sets the recorded state.
"""

import contextlib
import itertools
import threading
from collections.abc import Generator, Iterable
from typing import Any, final

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from remat._errors import ImplicitRandomnessError, SideEffectError, refusal
from remat._generators import device_states, trackers
from remat._generators.trackers import Tracker
from remat._torch import schemas

# What `current` returns if a generator holds neither the state that it had when the trace
# began nor the current state of a stream.
UNKNOWN = "?"

_SEED_BYTES = 8  # the states of generators begin with their seed, on each device
_seeds = itertools.count(int.from_bytes(b"remat\0\0\0", "big"))

_States = list[tuple[int, Tracker, dict[str, Any]]]


def read(stream: str) -> Tensor:
    """The state of a stream, by value."""
    tracker, name = _tracker_of_stream(stream)
    return trackers.state_of(tracker.get_states()[name])


def write(stream: str, state: Tensor) -> None:
    """Moves a stream to a state."""
    tracker, name = _tracker_of_stream(stream)
    states = dict(tracker.get_states())
    states[name] = trackers.holding(states[name], state)
    tracker.set_states(states)


def exists(stream: str) -> bool:
    """Whether the registration under which a trace met a stream still holds."""
    return int(stream.partition("/")[0]) in trackers.registered


def _tracker_of_stream(stream: str) -> tuple[Tracker, str]:
    number, _, name = stream.partition("/")
    return trackers.registered[int(number)], name


@final
class _StandIns:
    """The stand-ins in trackers while functions are traced, for all threads.

    Attributes:
        streams: whose stand-in has a seed.
        expected: the seed at which each stream has arrived. One that was left behind
            turns up again where forks of one name are nested, or one is not written back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._own: _States = []
        self.streams: dict[int, str] = {}
        self.expected: dict[str, int] = {}

    def enter(self) -> tuple[_States, dict[str, int]]:
        """Puts stand-ins in; returns what `leave` puts back."""
        with self._lock:
            self._depth += 1
            found = [
                (number, tracker, dict(tracker.get_states()))
                for number, tracker in trackers.registered.items()
            ]
            if self._depth == 1:
                self._own = found
            before, self.expected = self.expected, {}
            for number, tracker, states in found:
                tracker.set_states(
                    {
                        name: self._stand_in(f"{number}/{name}", held)
                        for name, held in states.items()
                    }
                )
            return found, before

    def leave(self, found: _States, before: dict[str, int]) -> list[str]:
        """Puts the states back; which trackers were changed, in words."""
        with self._lock:
            changed = [
                f"a {type(tracker).__name__}"
                for number, tracker, states in found
                if self._arrived(number, tracker)
                != {name: self.expected[f"{number}/{name}"] for name in states}
            ]
            self._depth -= 1
            # The last to leave puts back the real states, in whatever order threads leave.
            for _, tracker, states in found if self._depth else self._own:
                tracker.set_states(states)
            self.expected = before
            if self._depth == 0:
                self._own, self.streams = [], {}
            return changed

    def at(self, seed: int) -> str:
        """The stream whose current seed this is."""
        stream = self.streams.get(seed, UNKNOWN)
        return stream if self.expected.get(stream) == seed else UNKNOWN

    def advanced(self, stream: str, state: Tensor) -> Tensor:
        """The next stand-in for the state of a stream."""
        seed = next(_seeds)
        self.streams[seed], self.expected[stream] = stream, seed
        state = state.clone()
        state[:_SEED_BYTES].view(torch.int64).fill_(seed)
        return state

    def _stand_in(self, stream: str, held: Any) -> Any:
        state = self.advanced(stream, trackers.state_of(held))
        if not isinstance(held, torch.Generator):
            return state
        return torch.Generator(held.device).set_state(state)

    def _arrived(self, number: int, tracker: Tracker) -> dict[str, int]:
        return {
            name: _seed(trackers.state_of(held))
            for name, held in tracker.get_states().items()
        }


_stand_ins = _StandIns()


def _seed(state: Tensor) -> int:
    """The seed with which a stream's state, or a generator's, begins."""
    return int(state[:_SEED_BYTES].clone().view(torch.int64))


class _Thread(threading.local):
    # The seeds that generators had when the innermost trace began.
    base: dict[torch.device, int] | None = None


_thread = _Thread()


@contextlib.contextmanager
def standing_in(devices: Iterable[torch.device]) -> Generator[None]:
    """Runs a trace of user's code, in which `current` tells whose numbers a draw takes.

    Trackers and the generators of these devices are as before when it ends.
    """
    with trackers.plainly():
        known = filter(device_states.has, {*devices})
        found = {each: device_states.get(each) for each in known}
        base = {device: _seed(state) for device, state in found.items()}
        replaced = _stand_ins.enter()
    outer, _thread.base = _thread.base, base
    changed: list[str] = []
    try:
        yield
    finally:
        _thread.base = outer
        with trackers.plainly():
            changed += _stand_ins.leave(*replaced)
            changed += [
                f"the default generator of {device}"
                for device, state in found.items()
                if _restored(state, device)
            ]
    if changed:
        raise refusal(
            SideEffectError,
            where=changed[0],
            what="was set to another state by a function while it was traced, or "
            "forked while it was in a fork of that name.",
            why="A trace runs Python once, and is valid only if each fork "
            "continues where the last one of that name ended.",
            do='Set states outside the region, or use engine="rerun".',
        )


def _restored(state: Tensor, device: torch.device) -> bool:
    """After a trace, puts a generator back if a stream set it; other draws leave its seed."""
    is_set = _seed(device_states.get(device)) != _seed(state)
    if is_set:
        device_states.put(state, device)
    return is_set


def current(device: torch.device) -> str:
    """Whose numbers a draw would take in a trace: a stream's, "" for the generator's own.

    UNKNOWN if the generator has been set to a state that is nobody's.
    """
    base = _thread.base
    if base is None or not device_states.has(device):
        return ""
    with trackers.plainly():
        seed = _seed(device_states.get(device))
    if seed == base.get(device):
        return ""
    stream = _stand_ins.at(seed)
    return "" if stream == UNKNOWN and device not in base else stream


def take(device: torch.device) -> str:
    """`current` for a draw; moves the stream, so that the next draw finds another seed."""
    stream = current(device)
    if stream not in ("", UNKNOWN):
        with trackers.plainly():
            moved = _stand_ins.advanced(stream, device_states.get(device))
            device_states.put(moved, device)
    return stream


def take_inside(stream: str, device: torch.device) -> str:
    """`take` in a fork of a stream, which an inner region's program makes for a draw."""
    if _thread.base is None:
        return stream
    with trackers.plainly():
        found = enter(stream, device)
        taken = take(device)
        leave(stream, found, device)
    return taken


def is_state(tensor: Tensor) -> bool:
    """Whether a tensor is a generator's state that a tracker handles in a trace."""
    known = (*(_thread.base or {}).values(), *_stand_ins.streams)
    with trackers.plainly():
        return looks_like_state(tensor) and _seed(tensor) in known


def implicit(where: str) -> ImplicitRandomnessError:
    """The error for a function that must draw from keys and draws from a generator."""
    return refusal(
        ImplicitRandomnessError,
        where=where,
        what="the function draws from a torch.Generator.",
        why='Under rng="keys" all randomness comes from keys, so that a '
        "recomputation needs no generator state.",
        do='Pass rng="preserve" to have generator states recorded, or set the rate '
        "to 0.",
    )


def unregistered(where: str) -> ImplicitRandomnessError:
    """The error for a function that sets a generator to a state of no stream."""
    return refusal(
        ImplicitRandomnessError,
        where=where,
        what="the function sets a generator's state.",
        why="A trace cannot see where that state comes from, and would draw from "
        "the generator's own state.",
        do="If a tracker swaps the states, register it with "
        'random.register_tracker(tracker); otherwise use engine="rerun".',
    )


def looks_like_state(tensor: Tensor) -> bool:
    """Whether a tensor has the shape of a state that a stream on some device could have."""
    is_one = tensor.dtype is torch.uint8 and tensor.ndim == 1
    return is_one and tensor.numel() in device_states.SIZES


def enter(stream: str, device: torch.device) -> Tensor:
    """Sets a generator to the state of a stream; returns the state that it had."""
    found = device_states.get(device)
    device_states.put(read(stream), device)
    return found


def leave(stream: str, found: Tensor, device: torch.device) -> None:
    """Writes the generator's state back to the stream, and restores the old state."""
    write(stream, device_states.get(device))
    device_states.put(found, device)


def _fake_state(stream: str) -> Tensor:
    return torch.empty(read(stream).shape, dtype=torch.uint8)


STATE = schemas.define("stream_state", "(str stream) -> Tensor", read, _fake_state)
has_side_effect(STATE)
