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
from collections import Counter
from collections.abc import Generator, Iterable
from typing import Any, final

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from remat._errors import ImplicitRandomnessError, SideEffectError
from remat._generators import device_states, trackers
from remat._generators.trackers import Tracker
from remat._torch import generator_states, schemas
from remat._torch.attributes import attributes_as

# What `current` returns if a generator holds neither the state that it had when the trace
# began nor the current state of a stream.
UNKNOWN = "?"

_SEED_BYTES = 8  # the states of generators begin with their seed, on each device
_seeds = itertools.count(int.from_bytes(b"remat\0\0\0", "big"))


def read(stream: str) -> Tensor:
    """The state of a stream, by value."""
    tracker, name = _tracker_of_stream(stream)
    return trackers.state_of(tracker.get_states()[name])


def write(stream: str, state: Tensor) -> None:
    tracker, name = _tracker_of_stream(stream)
    states = dict(tracker.get_states())
    states[name] = trackers.state_for(states[name], state)
    tracker.set_states(states)


def exists(stream: str) -> bool:
    """Whether the registration under which a trace met a stream still holds."""
    return int(stream.partition("/")[0]) in trackers.registered


def _tracker_of_stream(stream: str) -> tuple[Tracker, str]:
    number, _, name = stream.partition("/")
    return trackers.registered[int(number)], name


@final
class _Trace:
    """The stand-ins of one trace; traces are made one at a time, or inside of another."""

    def __init__(
        self, devices: Iterable[torch.device], around: "_Trace | None"
    ) -> None:
        known = filter(device_states.has, {*devices})
        self._generators = {each: device_states.get(each) for each in known}
        # How many numbers were drawn of each kind of device, but for those of streams; the states
        # that the function was given, with that; whether it has set one, and to one from before.
        self.num_draws: Counter[str] = Counter()
        self._given: list[tuple[Tensor, int]] = []
        self._is_set, self._rewound = False, set[str]()
        # Those of generators when it began.
        self.seeds = {each: _seed(state) for each, state in self._generators.items()}
        # Whose stand-in has a seed, in the traces around too.
        self.streams: dict[int, str] = {} if around is None else {**around.streams}
        # The seed at which each stream has arrived. One that was left behind turns up again
        # where forks of one name are nested, or one is not written back.
        self.expected: dict[str, int] = {}
        self._trackers: list[tuple[int, Tracker, dict[str, Any]]] = [
            (number, tracker, dict(tracker.get_states()))
            for number, tracker in trackers.registered.items()
        ]
        for number, tracker, states in self._trackers:
            tracker.set_states(
                {
                    name: self._stand_in(f"{number}/{name}", held)
                    for name, held in states.items()
                }
            )

    def leave(self) -> list[str]:
        """Puts all states back; which were changed, in words."""
        changed: list[str] = []
        for number, tracker, states in self._trackers:
            arrived = {
                name: _seed(trackers.state_of(held))
                for name, held in tracker.get_states().items()
            }
            if arrived != {name: self.expected[f"{number}/{name}"] for name in states}:
                changed.append(f"a {type(tracker).__name__}")
            tracker.set_states(states)
        for device, state in self._generators.items():
            if not self.is_own(device):
                device_states.put(state, device)
                changed.append(f"the default generator of {device}")
        return changed

    def note_given(self, kind: str, state: Tensor | None) -> None:
        if state is None:
            return
        with trackers.plainly():
            is_of_stream = _seed(state) in self.streams  # asked for in a fork
        if not is_of_stream:
            self._given.append((state, self.num_draws[kind]))

    def note_set(self, kind: str, state: Tensor | None) -> None:
        self._is_set = True
        drawn = [count for given, count in self._given if given is state]
        if drawn and drawn[-1] != self.num_draws[kind]:
            self._rewound.add(kind)  # nothing has moved it since: a trace draws nothing

    def is_own(self, device: torch.device) -> bool:
        """Whether a generator stands where a plain run, without its draws, would have it.

        Another thread may draw meanwhile, which leaves the seed.
        """
        begun, now = self._generators[device], device_states.get(device)
        is_moved = self._is_set and not torch.equal(now, begun)
        return not (is_moved or device.type in self._rewound) and _seed(now) == _seed(
            begun
        )

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


def _seed(state: Tensor) -> int:
    """The seed with which a stream's state, or a generator's, begins."""
    return int(state[:_SEED_BYTES].clone().view(torch.int64))


class _Thread(threading.local):
    trace: _Trace | None = None  # the innermost


_thread = _Thread()


@contextlib.contextmanager
def standing_in(devices: Iterable[torch.device]) -> Generator[None]:
    """Runs a trace of user's code; trackers and generators are as before at its end."""
    with trackers.plainly():
        trace = _Trace(devices, _thread.trace)
    try:
        with (
            attributes_as(_thread, trace=trace),
            generator_states.unwatched(),  # by a run around, which may find this trace made
            generator_states.watched(trace.note_given, trace.note_set),
        ):
            yield
    finally:
        with trackers.plainly():
            changed = trace.leave()
    if changed:
        raise SideEffectError.of(
            where=changed[0],
            what="was set to another state by a function while it was traced, or "
            "forked while it was in a fork of that name.",
            why="A trace runs Python once, and is valid only if each fork "
            "continues where the last one of that name ended.",
            do='Set states outside the region, or use engine="rerun".',
        )


def current(device: torch.device) -> str:
    """Whose numbers a draw would take in a trace: a stream's, "" for the generator's own.

    UNKNOWN if the generator has been set to a state that is nobody's.
    """
    trace = _thread.trace
    if trace is None or not device_states.has(device):
        return ""
    with trackers.plainly():
        seed = _seed(device_states.get(device))
        if device in trace.seeds and trace.is_own(device):
            return ""
    stream = trace.at(seed)
    return "" if stream == UNKNOWN and device not in trace.seeds else stream


def take(device: torch.device, *, draws: bool = True) -> str:
    """`current` for a draw; moves the stream, so that the next draw finds another seed.

    `draws`: whether what may draw does.
    """
    stream, trace = current(device), _thread.trace
    if trace is not None and stream == "":
        trace.num_draws[device.type] += draws
    elif trace is not None and stream != UNKNOWN:
        with trackers.plainly():
            moved = trace.advanced(stream, device_states.get(device))
            device_states.put(moved, device)
    return stream


def take_inside(stream: str, device: torch.device) -> str:
    """`take` in a fork of a stream, which an inner region's program makes for a draw."""
    if _thread.trace is None:
        return stream
    with trackers.plainly():
        found = enter(stream, device)
        taken = take(device)
        leave(stream, found, device)
    return taken


def is_state(tensor: Tensor) -> bool:
    """Whether a tensor is a generator's state that a tracker handles in a trace."""
    trace = _thread.trace
    if trace is None or not looks_like_state(tensor):
        return False
    with trackers.plainly():
        return _seed(tensor) in (*trace.seeds.values(), *trace.streams)


def implicit(
    where: str, does: str = "draws from a torch.Generator"
) -> ImplicitRandomnessError:
    """The error for a function that must draw from keys and draws from a generator."""
    return ImplicitRandomnessError.of(
        where=where,
        what=f"the function {does}.",
        why='Under rng="keys" all randomness comes from keys, so that a '
        "recomputation needs no generator state.",
        do='Pass rng="preserve" to have generator states recorded, or draw from keys '
        "(remat.random).",
    )


def unregistered(where: str) -> ImplicitRandomnessError:
    """The error for a function that sets a generator to a state of no stream."""
    return ImplicitRandomnessError.of(
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
