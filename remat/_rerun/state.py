"""The state outside a function that a run changes, so that each run starts from the same.

Generators, registered trackers and buffers. The first run notes them by value; each later
one starts from there, and then puts back what stood when it began.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Set
from typing import Any, Self, final

import torch
from torch import Tensor

from remat._errors import RecomputationError
from remat._generators import device_states, streams, trackers
from remat._generators.python_and_numpy import drawing_from, set_states, states
from remat._graph.meta import TensorMeta
from remat._rerun import fully_shard
from remat._torch import (
    autograd,
    fakes,
    generator_states,
    isolation,
    levels,
    modes,
    tensors,
    tracer,
)
from remat._tracing.in_place_operators import written_inputs
from remat._tracing.refused_writes import changes_twice, gains_gradient
from remat._tracing.thread import is_running
from remat._user_lines import user_line
from remat.policies._by_op import function_name


@final
@dataclasses.dataclass(frozen=True)
class _Randomness:
    """The states of generators and trackers at one moment, by value."""

    devices: dict[torch.device, Tensor]  # the states of the default generators
    put_trackers_back: Callable[[], None]  # sets the registered trackers to theirs
    explicit: dict[torch.Generator, Tensor]  # those of generators of the user's

    @classmethod
    def take(
        cls, devices: Iterable[torch.device], explicit: Iterable[torch.Generator] = ()
    ) -> Self:
        return cls(
            {device: device_states.record(device) for device in devices},
            trackers.recorded(),
            {each: each.get_state() for each in explicit},
        )

    def has_moved(self) -> bool:
        """Whether some generator has been drawn from, or set, since; under a fake mode, none has."""
        if not all(map(_has_numbers, self.devices.values())):
            return False
        now = [device_states.get(each) for each in self.devices]
        now += [each.get_state() for each in self.explicit]
        before = [*self.devices.values(), *self.explicit.values()]
        with isolation.isolated(), modes.unseen_by_traces():
            return not all(map(torch.equal, before, now))

    def put_back(self) -> None:
        for device, state in self.devices.items():
            device_states.swap(state, device)
        self.put_trackers_back()
        for generator, state in self.explicit.items():
            generator.set_state(state)


# Where tensors are replaced: in a run, in its backward, or in one that is to be differentiated.
RUN, BACKWARD, RECORDED_BACKWARD = "run", "backward", "recorded backward"


class NewOperandError(Exception):
    """Ends a first run that had autograd follow a captured tensor, which is an operand then."""


@final
class RunState:
    """What a run changes outside itself, as the forward found it, by value."""

    def __init__(
        self,
        buffers: Sequence[Tensor],
        operands: Sequence[Tensor],
        *,
        draws: bool = True,
        engine: fully_shard.Engine | None = None,
    ) -> None:
        self.buffers = buffers  # what the function may change
        self.engine = engine  # of the modules of `fully_shard` that it may call
        self.draws = draws  # whether it may draw, from the generators of these devices
        devices = {torch.device("cpu"), *(tensor.device for tensor in operands)}
        self.devices = set(filter(device_states.has, devices))
        # The states of generators and trackers when the first run began: while it runs, after.
        self.start: _Randomness | None = None
        self.before: _Randomness | None = None
        # Those around a later run, which it leaves as they are but for what its backward draws.
        self.outside: _Randomness | None = None
        # Those of Python's and numpy's generators, if the first run drew from them.
        self.host: tuple[Any, ...] | None = None
        # Generators that were passed to an operator, with their states then.
        self.explicit: dict[torch.Generator, Tensor] = {}
        # What the first run changed, buffers and captured constants, with what they held;
        # what it may change, while it runs.
        self.found: list[tuple[Tensor, Tensor]] = []
        self.kept: list[tuple[Tensor, Tensor]] = []
        # For each leaf the outputs that depend on it, a bit for each.
        self.dependent_outputs: tuple[int, ...] | None = None
        self.torch_functions = modes.torch_function_state()
        # The states to which the first run set default generators, by their numbers.
        self.settings: list[int] = []
        self.used: set[int] = set()  # the ids of what operators get, in the first run
        self.made: set[int] = set()  # those of what a run has made, until the next one
        # What the backward of the last run is in, such that it finds what the run found.
        self.last: Callable[[str], contextlib.AbstractContextManager[None]] | None = (
            None
        )

    def note_generator(self, generator: torch.Generator) -> None:
        """Notes the state of a user's generator before the first draw from it."""
        if generator not in self.explicit and not device_states.is_default(generator):
            self.explicit[generator] = generator.get_state()

    def note_numbers(self, tensor: Tensor) -> None:
        if all(tensor is not each for each, _ in self.kept):
            self.kept.append((tensor, tensor.detach().clone()))

    def refuse_draws(self, func: Callable[..., Any] | None = None) -> None:
        """Refuses a first run in which `func` draws, or a generator was set, if keys must do.

        Which of the two it was, only a second look at the states before `func` would tell.
        """
        # In a trace nothing is drawn, and the trace checks its own draws.
        if self.draws or is_running() or not (self.start and self.start.has_moved()):
            return
        self.start.put_back()
        name = "the function" if func is None else f"torch.{function_name(func)}"
        does = "draws from a torch.Generator there, or has set one before"
        raise streams.implicit(f"{name} at {user_line()}", does)

    def around(self) -> contextlib.AbstractContextManager[None]:
        """The first run changes the state; each later one starts from the same."""
        return self._noted() if self.before is None else self._put_back(self.before)

    def gradients(self) -> Callable[..., Sequence[Tensor | None]]:
        """`torch.autograd.grad` of the last run, in whose backward stand-ins stand as in the run.

        What the backward draws it draws where the generators are, not where the run put them, and
        when it runs again it draws the same.
        """
        starts: list[_Randomness] = []

        def grad(*given: Any, **how: bool) -> Sequence[Tensor | None]:
            last, self.last = self.last, None
            # A checkpoint inside sets them for what it runs again there.
            with generator_states.unwatched(), self._drawing_outside(starts):
                if last is None:
                    return vars(torch.autograd)["grad"](*given, **how)
                with last(RECORDED_BACKWARD if how["create_graph"] else BACKWARD):
                    return autograd.grad_in_modes(*given, **how)

        return grad

    @contextlib.contextmanager
    def _drawing_outside(self, starts: list[_Randomness]) -> Generator[None]:
        """Inside, generators are where the run that goes on began, or where `starts` says."""
        if self.outside is None or not self.draws:
            yield
            return
        run, is_first = _Randomness.take(self.devices, self.explicit), not starts
        if is_first:
            starts.append(self.outside)
        starts[0].put_back()
        try:
            yield
        finally:
            if is_first:
                self.outside = _Randomness.take(self.devices, self.explicit)
            run.put_back()

    @contextlib.contextmanager
    def _noted(self) -> Generator[None]:
        taken = _Randomness.take(self.devices)
        start = dataclasses.replace(taken, explicit=self.explicit)
        host = states()
        # A graph that is made meanwhile has no use for these looks, and no numbers for them.
        buffers = () if is_running() else self.buffers
        with tracer.unrecorded():
            self.kept = [(each, each.clone()) for each in buffers]
        had = {id(each) for each in self.buffers if each.requires_grad}
        self.start = start
        try:
            with self._settings_noted():
                yield
            self.refuse_draws()
            self._require_constants(had)
        except NewOperandError:
            start.put_back()
            set_states(host)
            # Of most the numbers are the same: earlier calls, which read them, may still run again.
            with levels.version_kept(*(buffer for buffer, _ in self.kept)):
                _copy_back(self.kept)
            raise
        finally:
            self.start = None
        self.before = start
        self.host = None if host == states() else host
        # batch_norm changes its statistics but not their version: compare the numbers.
        with tracer.unrecorded():
            self.found = [
                (buffer, old)
                for buffer, old in self.kept
                if _has_numbers(buffer) and not tensors.same_bits(buffer, old)
            ]
        self.kept = []

    def _require_constants(self, had: Set[int]) -> None:
        """Refuses a first run that wrote to a buffer what has a gradient, and undoes it.

        `had`: the ids of buffers that had one before, as a module's state after its last call.
        """
        changed = [each for each, _ in self.kept if each.requires_grad]
        gained = [each for each in changed if not (each.is_leaf or id(each) in had)]
        if not gained:
            return
        _copy_back(self.kept)
        for buffer in gained:
            buffer.detach_()
        raise gains_gradient(f"a captured tensor ({TensorMeta.of(gained[0])})")

    def _settings_noted(
        self, before: Iterator[int] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, a default generator may be set, and in a later run to what it was before."""
        # A trace knows the states of trackers by stand-ins, and refuses all others.
        if not self.draws or is_running():
            return contextlib.nullcontext()

        def note(kind: str, state: Tensor | None) -> None:
            if state is None:
                return
            with trackers.plainly():
                numbers = hash(state.numpy().tobytes())
            if before is None:
                self.settings.append(numbers)
            elif numbers != next(before, None):
                raise _sets_another(kind)

        return generator_states.watched(lambda kind, state: None, note)

    @contextlib.contextmanager
    def _put_back(self, randomness: _Randomness) -> Generator[None]:
        with torch.no_grad():
            now = [(buffer, buffer.clone()) for buffer, _ in self.found]
        self.outside = _Randomness.take(self.devices, self.explicit)
        # At the end their numbers are those of before, which other regions may have read.
        with levels.version_kept(*(buffer for buffer, _ in now)):
            _copy_back(self.found)
            randomness.put_back()
            try:
                with (
                    drawing_from(self.host),
                    generator_states.unwatched(),  # by a run around, in its backward
                    self._settings_noted(iter(self.settings)),
                ):
                    yield
            finally:
                self.outside.put_back()
                self.outside = None
                _copy_back(now)


@contextlib.contextmanager
def writing_once() -> Generator[None]:
    """Refuses a first run that writes to an input of the trace it is in: that would do so twice."""
    graph = tracer.active_graph() if is_running() and tracer.proxy_is_active() else None
    before = 0 if graph is None else len(graph.nodes)
    yield
    for node in () if graph is None else written_inputs(graph, before):
        note = node.meta.get("remat")
        raise changes_twice("" if note is None else note.source)


def _sets_another(kind: str) -> RecomputationError:
    return RecomputationError.of(
        where=f"the default generator of {kind} at {user_line()}",
        what="is set to another state than in the forward.",
        why="Draws from there would give other numbers, as from a tracker that hides from remat "
        "and goes on with each fork.",
        do="Register the tracker: random.register_tracker(tracker).",
    )


def _has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor can be compared: no fake one, none of a compiler's graph, none mapped."""
    is_mapped = autograd.is_batched_by_autograd(tensor)
    return not (is_mapped or fakes.is_fake(tensor) or tracer.is_in_compiler())


def _copy_back(buffers: Iterable[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, value in buffers:
            levels.put_numbers(buffer, value)
