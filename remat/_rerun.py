"""`engine="rerun"`: functions that cannot be traced run again, in Python, in the backward.

For branches on values, opaque kernels, shapes that depend on data. The same rules as for
traced regions hold (`_bind`): derivatives are regions again, made from the pullback, the
pushforward or the map of the function, and each runs the function anew from its operands.
Generators, registered trackers and module buffers are put back to where the forward found
them meanwhile.

A run records a graph for autograd and throws it away, as the backward does, so that
kernels that look at `requires_grad` choose alike in both.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from remat import (
    _captures,
    _compat,
    _host,
    _rng,
    _sharded,
    _streams,
    _trackers,
    _wrapped,
)
from remat._any_region import Asked, Batched
from remat._bind import Call, bind
from remat._derived import Batch, Pull, mapped, pullback, pushforward, tracked
from remat._errors import CapturedTensorError, explain
from remat._forward import Calls, Results
from remat._function import Roots
from remat._graph import TensorMeta
from remat._lines import user_line
from remat._numerics import Numerics
from remat._running import is_running
from remat._trace import Flat, View
from remat.policies._operators import function_name
from remat.storage import AbstractStorage


def call(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], rng: str
) -> Any:
    """Calls `fun` as a region that runs again in its backward.

    Raises:
        ImplicitRandomnessError: `rng` is "keys", and it draws from a generator.
    """
    survey = _captures.survey((fun, args, dict(kwargs)))
    leaves, spec = _compat.flatten((args, dict(kwargs)))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    # Each once: the function may ask whether two arguments are the same.
    given = [*{id(leaves[place]): leaves[place] for place in places}.values()]
    engine = _sharded.Engine.reached(survey)
    managed = engine.managed if engine else []
    captured = _captured(survey, [*given, *managed])
    if engine:
        captured.append(engine.anchor)
    operands = [*given, *captured]
    if not any(map(_compat.requires_grad_anywhere, operands)):
        return fun(*args, **kwargs)
    result = _Result()
    state = _State(
        _buffers(survey, given),
        [*operands, *managed],
        draws=rng == "preserve",
        engine=engine,
    )
    numerics = Numerics.current()

    def flat(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        # The operands are kept, so that no new tensor can have the id of one of them.
        stand_ins = dict(zip(map(id, operands), tensors, strict=True))
        filled = list(leaves)
        for place in places:
            filled[place] = stand_ins[id(leaves[place])]
        new_args, new_kwargs = _compat.unflatten(filled, spec)
        is_again = state.before is not None
        with (
            survey.in_place(but=managed) if is_again else contextlib.nullcontext(),
            engine.running() if engine else _wrapped.refused(),
            _Substituted(stand_ins, state),
            numerics.applied(),
        ):
            return result.apart(fun(*new_args, **new_kwargs))

    wanted = tuple(map(_compat.requires_grad_anywhere, operands))
    region = Rerun(flat, flat, wanted, state)
    return result.tree(bind(Call(region, (fun,), numerics), operands))


def rerun_of(
    function: Flat, requires_grad: tuple[bool, ...], reached: tuple[bool, ...]
) -> Rerun:
    """The region of a flat function that changes nothing and draws from keys alone.

    Args:
        function: tensors in, tensors out; regions that it binds stay regions.
        requires_grad: for each tensor that it takes whether it is differentiated.
        reached: for each whether some output rests on it.
    """
    state = _State((), ())
    state.resting = tuple(_ALL if each else 0 for each in reached)
    return Rerun(function, function, requires_grad, state)


def _captured(survey: _captures.Survey, given: Sequence[Tensor]) -> list[Tensor]:
    """The reached tensors that some level of reverse mode wants, less the arguments."""
    known = set(map(id, given))
    return [
        tensor
        for tensor in survey.reached
        if id(tensor) not in known and _compat.requires_grad_anywhere(tensor)
    ]


def _buffers(survey: _captures.Survey, given: Sequence[Tensor]) -> list[Tensor]:
    """What the function may change: buffers of modules, arguments without a gradient."""
    own = [tensor for tensor in survey.reached if survey.is_buffer(id(tensor))]
    passed = [each for each in given if not _compat.requires_grad_anywhere(each)]
    return [_compat.unwrapped(tensor) for tensor in [*own, *passed]]


@final
class _Result:
    """How what the function returned came apart, in its last run."""

    def __init__(self) -> None:
        self.statics: list[Any] = []
        self.spec: Any = None

    def apart(self, result: Any) -> Sequence[Tensor]:
        leaves, self.spec = _compat.flatten(result)
        # Tensors are not kept: each holds the graph of its run.
        self.statics = [_TENSOR if isinstance(x, Tensor) else x for x in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def tree(self, tensors: Sequence[Any]) -> Any:
        rest = iter(tensors)
        leaves = [next(rest) if leaf is _TENSOR else leaf for leaf in self.statics]
        return _compat.unflatten(leaves, self.spec)


_TENSOR = object()


class _Substituted(TorchFunctionMode):
    """Puts operands in the place of captured tensors, and sees generators pass by."""

    def __init__(self, stand_ins: Mapping[int, Tensor], state: _State) -> None:
        self._stand_ins = stand_ins
        self._state = state

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = _compat.map_tensors(
            lambda tensor: self._stand_ins.get(id(tensor), tensor), (args, kwargs or {})
        )
        for each in kwargs.values():
            if isinstance(each, torch.Generator):
                self._state.meet(each)
        out = func(*args, **kwargs)
        self._state.watch(func)
        return out


@final
@dataclasses.dataclass(frozen=True)
class _Randomness:
    """The states of generators and trackers at one moment, by value.

    Attributes:
        devices: the states of the default generators.
        trackers: those of the registered trackers.
        explicit: those of generators of the user's.
    """

    devices: dict[torch.device, Tensor]
    trackers: _trackers.Snapshot
    explicit: dict[torch.Generator, Tensor]

    @classmethod
    def take(
        cls,
        devices: Iterable[torch.device],
        explicit: Iterable[torch.Generator] = (),
    ) -> _Randomness:
        """As they are now."""
        return cls(
            {device: _rng.record(device) for device in devices},
            _trackers.Snapshot.take(),
            {each: each.get_state() for each in explicit},
        )

    def has_moved(self) -> bool:
        """Whether some generator has been drawn from, or set, since."""
        now = [_rng.get(each) for each in self.devices]
        now += [each.get_state() for each in self.explicit]
        before = [*self.devices.values(), *self.explicit.values()]
        with _compat.leave_functorch(), _compat.without_torch_function():
            return not all(map(torch.equal, before, now))

    def put_back(self) -> None:
        """Sets all of them to these states."""
        for device, state in self.devices.items():
            _rng.swap(state, device)
        self.trackers.put_back()
        for generator, state in self.explicit.items():
            generator.set_state(state)


@final
class _State:
    """What a run changes outside itself, as the forward found it, by value.

    Attributes:
        buffers: what the function may change.
        devices: whose generators it may draw from.
        draws: whether it may at all.
        engine: of the modules that `fully_shard` drives and that it may call.
        start: the states of these, and of trackers, while the first run runs.
        before: the states of these, and of trackers, when the first run began.
        host: those of Python's and numpy's generators, if the first run drew from them.
        explicit: generators that were handed to an operator, with their states then.
        found: the buffers that the first run changed, with what they held.
        resting: for each leaf the outputs that rest on it, a bit for each.
    """

    def __init__(
        self,
        buffers: Sequence[Tensor],
        operands: Sequence[Tensor],
        *,
        draws: bool = True,
        engine: _sharded.Engine | None = None,
    ) -> None:
        self.buffers = buffers
        self.engine = engine
        self.draws = draws
        self.start: _Randomness | None = None
        kinds = {tensor.device for tensor in operands}
        self.devices = {torch.device("cpu"), *(d for d in kinds if d.type == "cuda")}
        self.before: _Randomness | None = None
        self.host: tuple[Any, ...] | None = None
        self.explicit: dict[torch.Generator, Tensor] = {}
        self.found: list[tuple[Tensor, Tensor]] = []
        self.resting: tuple[int, ...] | None = None

    def meet(self, generator: torch.Generator) -> None:
        """Notes the state of a generator of the user's before it is first drawn from."""
        if generator not in self.explicit and not _rng.is_default(generator):
            self.explicit[generator] = generator.get_state()

    def watch(self, func: Callable[..., Any] | None = None) -> None:
        """Refuses a draw of the first run that should come from a key, and undoes it."""
        # A trace draws nothing, and looks at what is in it itself.
        if self.draws or self.start is None or is_running():
            return
        if not self.start.has_moved():
            return
        self.start.put_back()
        name = "the function" if func is None else f"torch.{function_name(func)}"
        raise _streams.implicit(f"{name} at {user_line()}")

    @contextlib.contextmanager
    def around(self) -> Generator[None]:
        """The first run changes the state; each later one starts from the same."""
        if self.before is None:
            with self._noted():
                yield
        else:
            with self._put_back(self.before):
                yield

    @contextlib.contextmanager
    def _noted(self) -> Generator[None]:
        taken = _Randomness.take(self.devices)
        start = dataclasses.replace(taken, explicit=self.explicit)
        host = _host.states()
        before = [(each, each.clone()) for each in self.buffers]
        self.start = start
        try:
            yield
            self.watch()
        finally:
            self.start = None
        self.before = start
        self.host = None if host == _host.states() else host
        # batch_norm changes its statistics without telling: values are compared.
        self.found = [
            (buffer, old)
            for buffer, old in before
            if not _compat.same_bits(buffer, old)
        ]

    @contextlib.contextmanager
    def _put_back(self, randomness: _Randomness) -> Generator[None]:
        with torch.no_grad():
            now = [(buffer, buffer.clone()) for buffer, _ in self.found]
            for buffer, old in self.found:
                buffer.copy_(old)
        ended = _Randomness.take(self.devices, self.explicit)
        randomness.put_back()
        try:
            with _host.set_to(self.host):
                yield
        finally:
            ended.put_back()
            with torch.no_grad():
                for buffer, value in now:
                    buffer.copy_(value)


@final
@dataclasses.dataclass(frozen=True)
class Rerun:
    """A region without programs.

    Attributes:
        run: what the forward runs.
        function: the same, differentiable: derivatives are made from it.
        requires_grad: for each tensor that it takes whether it is differentiated.
        state: what is put back around each run.
        returned: how what it returns is made from the outputs; None means they are it.
        all_flow: whether every output has a gradient, whatever a run's graph says.
        num_leading: nothing comes before the operands.
    """

    run: Flat
    function: Flat
    requires_grad: tuple[bool, ...]
    state: _State
    returned: tuple[View, ...] | None = None
    all_flow: bool = False
    num_leading: int = 0

    def views(self, roots: Roots) -> tuple[View, ...] | None:
        """How what it returns is made from the outputs."""
        return self.returned

    @property
    def states(self) -> tuple[int, ...]:
        """Generator states are kept aside."""
        return ()

    @property
    def inputs(self) -> dict[int, AbstractStorage]:
        """They are kept as they are."""
        return {}

    @property
    def calls(self) -> Calls:
        """They are not counted."""
        return Calls()

    @property
    def program(self) -> None:
        """It has none."""
        return

    def straight(self, roots: Roots, numerics: Numerics) -> None:
        """It has no program."""
        return

    def num_draws(self, roots: Roots) -> int:
        """Generator states are kept aside."""
        return 0

    @property
    def keeps(self) -> bool:
        """Whether the backward reads what the forward saved: nothing is."""
        return False

    @property
    def runs_first(self) -> bool:
        """A run tells what the outputs rest on, and one of gradients leaves no graph."""
        return not self.all_flow

    def forward(
        self, roots: Roots, save: bool
    ) -> Callable[[Sequence[Tensor], Numerics], Results]:
        """Runs the function on tensors that no transform has wrapped."""

        def run(tensors: Sequence[Tensor], _: Numerics) -> Results:
            leaves = [
                _compat.detached(tensor).requires_grad_(wanted)
                for tensor, wanted in zip(tensors, self.requires_grad, strict=True)
            ]
            with self.state.around(), torch.enable_grad():
                # None, which `Flat` allows, is no output: `_zeros_for_none`, `_Result`.
                outputs = [each for each in self.run(leaves) if each is not None]
            resting = _resting(outputs, leaves, self.state.engine)
            _guard_against_others(leaves)
            if self.state.resting is None:
                self.state.resting = resting
            found = [_compat.detached(each) for each in outputs]
            if self.all_flow:
                return Results(found)
            flows = tuple(each.requires_grad for each in outputs)
            return Results(found, flows=flows, reached=tuple(map(bool, resting)))

        return run

    def vjp(self, roots: Roots, asked: Asked) -> Rerun:
        """The region of the gradients; an operand that no output rests on has none."""
        outputs = tuple(k for k, meta in enumerate(asked.layouts) if meta is not None)
        wanted = [index for index, each in enumerate(asked.wanted) if each]
        resting = self.state.resting if self.function is self.run else None
        pulled = sum(1 << index for index in outputs)
        # What follows the operands, such as tangents, is always reached.
        unreached = {k for k, each in enumerate(resting or ()) if not each & pulled}
        given = [index for index in wanted if index not in unreached]
        pull = Pull(outputs, tuple(given), len(self.requires_grad))
        # Under create_graph torch uses other formulas, which are not the same to the bit.
        first = pullback(self.function, pull, create_graph=False)
        again = pullback(self.function, pull)
        engine = self.state.engine
        if engine and engine.called:
            first, again = _accumulating(self.function, pull, engine), _sharded.twice
        views = tuple(
            View(given.index(index), None, None, False)
            if index in given
            else View(None, None, None, True)
            for index in wanted
        )
        return Rerun(
            _zeros_for_none(first, pull),
            _zeros_for_none(again, pull),
            (*self.requires_grad, *(True for _ in pull.outputs)),
            self.state,
            returned=views,
            all_flow=True,
        )

    def jvp(
        self, roots: Roots, has_tangent: tuple[bool, ...], num_states: int
    ) -> tuple[Rerun, None]:
        """The region of the outputs' tangents."""
        pushed = pushforward(self.function, None, has_tangent)
        wanted = (*self.requires_grad, *(True for has in has_tangent if has))
        return Rerun(pushed, pushed, wanted, self.state), None

    def batched(self, roots: Roots, batch: Batch, save: bool) -> Batched:
        """The region of the mapped function."""
        # Where reverse mode is taken per example, torch runs a function so.
        wanted = [index for index, each in enumerate(self.requires_grad) if each]
        function = tracked(self.function, wanted) if save else self.function
        over = mapped(function, None, batch, 0)
        return Batched(Rerun(over, over, self.requires_grad, self.state), None)


def _zeros_for_none(function: Flat, pull: Pull) -> Flat:
    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        found = function(tensors)
        return [
            torch.zeros_like(tensors[index]) if gradient is None else gradient
            for index, gradient in zip(pull.wanted, found, strict=True)
        ]

    return run


def _accumulating(function: Flat, pull: Pull, engine: _sharded.Engine) -> Flat:
    """(operands, ..., cotangents) -> the gradients, by a backward inside of autograd's own.

    It leaves the gradients of gathered parameters where the engine's hooks find them.
    """

    def gradients(tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        given = tensors[len(tensors) - len(pull.outputs) :]
        accumulates = engine.accumulates(given)
        operands = tensors[: pull.num_operands]
        wanted = [operands[index] for index in pull.wanted]
        outputs = [each for each in function(operands) if each is not None]
        pairs = [
            (outputs[index], _compat.detached(cotangent))
            for index, cotangent in zip(pull.outputs, given, strict=True)
            if outputs[index].requires_grad
        ]
        differentiable = [output for output, _ in pairs]
        inputs = [each for each in wanted if each.requires_grad]
        if accumulates:
            variables = (variable for variable, _ in _variables(differentiable))
            inputs += filter(engine.stands_for, variables)
        if pairs and inputs:
            _compat.backward(differentiable, [each for _, each in pairs], inputs)
        return [leaf.grad for leaf in wanted]

    return gradients


_ALL = -1


def _resting(
    outputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    engine: _sharded.Engine | None = None,
) -> tuple[int, ...]:
    """For each leaf the outputs that rest on it, a bit for each; all where none can.

    The last leaf stands for the parameters that an engine has gathered.

    Raises:
        CapturedTensorError: some output rests on a tensor that is no leaf of the run.
    """
    found: dict[int, int] = {}
    known = set(map(id, leaves))
    for variable, bits in _variables(outputs):
        if engine and engine.stands_for(variable):
            variable = leaves[-1]
        if id(variable) not in known:
            raise _other(variable)
        found[id(variable)] = found.get(id(variable), 0) | bits
    return tuple(
        found.get(id(leaf), 0) if leaf.requires_grad else _ALL for leaf in leaves
    )


def _variables(outputs: Sequence[Tensor]) -> Generator[tuple[Tensor, int]]:
    """What the outputs rest on, by autograd's own graph, each with the bits of these."""
    bits: dict[Any, int] = {}
    for index, each in enumerate(outputs):
        if each.grad_fn is not None:
            bits[each.grad_fn] = bits.get(each.grad_fn, 0) | 1 << index
        elif each.requires_grad:
            yield each, 1 << index
    for node in _in_order([*bits]):
        own = bits[node]
        for edge in _edges(node):
            bits[edge] = bits.get(edge, 0) | own
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            yield variable, own


def _in_order(roots: Sequence[Any]) -> list[Any]:
    """The nodes behind these, each before those that it leads to."""
    ended: list[Any] = []
    seen: set[Any] = set()
    pending = [(node, False) for node in roots]
    while pending:
        node, has_led = pending.pop()
        if has_led:
            ended.append(node)
        elif node not in seen:
            seen.add(node)
            pending.append((node, True))
            pending.extend((edge, False) for edge in _edges(node))
    return ended[::-1]


def _edges(node: Any) -> list[Any]:
    return [edge for edge, _ in node.next_functions if edge is not None]


def _guard_against_others(leaves: Sequence[Tensor]) -> None:
    """Fails in a backward that reaches a run from elsewhere than through its outputs.

    A tensor that the function left somewhere (a hook that collects) holds the graph of the
    run, which ends in leaves that nobody reads.
    """
    for leaf in leaves:
        if leaf.requires_grad:
            leaf.register_hook(_lost)  # pyright: ignore[reportUnknownMemberType]


def _lost(gradient: Tensor) -> Tensor:
    raise CapturedTensorError(
        explain(
            where=f"a gradient {TensorMeta.of(gradient)}",
            what="arrives at a region by a tensor that the function left somewhere, and "
            "did not return.",
            why="The region's inputs are not reached from there: the gradient would be "
            "lost.",
            do="Return the tensor from the function.",
        )
    )


def _other(variable: Tensor) -> CapturedTensorError:
    return CapturedTensorError(
        explain(
            where=f"a tensor {TensorMeta.of(variable)} that requires grad",
            what="is reached by a way that cannot be followed at the next run.",
            why="Its gradient would be lost.",
            do="Pass it as an argument, or keep it in a closure, a global, a list, "
            "a dict or an attribute that the function names.",
        )
    )
