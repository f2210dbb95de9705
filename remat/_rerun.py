"""`engine="rerun"`: functions that cannot be traced run again, in Python, in the backward.

This is for branches on values, opaque kernels, and shapes that depend on data. The same rules
hold as for traced regions (`_bind`): derivatives are regions again, made from the pullback,
the pushforward or the map of the function, and each runs the function again on its operands.
Generators, registered trackers and module buffers are put back to where the forward found
them meanwhile.

A run records a graph for autograd and throws it away, as the backward does, so that
kernels that look at `requires_grad` choose alike in both.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from remat import _captures, _compat, _sharded, _wrapped
from remat._any_region import Asked, Batched, Call, WithoutProgram
from remat._bind import bind
from remat._derived import Batch, Pull, mapped, pullback, pushforward, tracked
from remat._errors import MutationError, SavedTensorModifiedError, explain
from remat._forward import Results
from remat._function import Roots
from remat._hidden import require_nothing_hidden
from remat._lines import mutates, user_line
from remat._numerics import Numerics
from remat._resting import guard_against_others, require_own, resting, variables
from remat._run_state import RunState
from remat._running import depth, lift, running_again, uninitialized
from remat._trace import Flat, View


def call(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], rng: str
) -> Any:
    """Calls `fun` as a region that runs again in its backward.

    Raises:
        ImplicitRandomnessError: `rng` is "keys", and it draws from a generator.
    """
    _wrapped.require_no_engine(fun)
    survey = _captures.survey((fun, args, dict(kwargs)))
    arguments = _Arguments(args, kwargs)
    given = arguments.tensors
    engine = _sharded.Engine.reached(survey)
    managed = engine.managed if engine else []
    beyond = _beyond(survey, [*given, *managed])
    captured = [*filter(_compat.is_followed, beyond)]
    if engine:
        captured.append(engine.anchor)
    operands = [*given, *captured]
    if not any(map(_compat.requires_grad_anywhere, operands)):
        found = fun(*args, **kwargs)
        require_nothing_hidden(found, (fun, args, dict(kwargs)))
        return found
    result = _Result()
    # A trace around would take these looks for the user's own.
    with _compat.without_torch_function():
        constants = _Constants(survey, [*operands, *managed])
        buffers = _buffers(survey, given)
    state = RunState(
        buffers, [*operands, *managed], draws=rng == "preserve", engine=engine
    )
    numerics = Numerics.current()

    def flat(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        # The operands are kept, so that no new tensor can have the id of one of them.
        stand_ins = dict(zip(map(id, operands), tensors, strict=True))
        new_args, new_kwargs = arguments.of(stand_ins)
        is_again = state.before is not None
        substituted = _Substituted(stand_ins, state, constants, is_pure=not beyond)
        with (
            survey.in_place(but=managed) if is_again else contextlib.nullcontext(),
            engine.running() if engine else _wrapped.refused(),
            running_again(substituted.met) if beyond else contextlib.nullcontext(),
            substituted,
            numerics.applied(),
            _compat.own_parametrizations(),
        ):
            if is_again:
                constants.require_unchanged(state.found)
            returned = result.apart(fun(*new_args, **new_kwargs))
            # A captured tensor that no operator met is returned as it is.
            found = [stand_ins.get(id(each), each) for each in returned]
            if is_again:
                require_own(found, tensors, engine)
            else:
                constants.settle(state.used, state.kept)
                state.used.clear()
            return found

    wanted = tuple(map(_compat.requires_grad_anywhere, operands))
    function = _cast_alike(flat, operands)
    region = Rerun(function, function, wanted, state)
    lifted = [lift(each) for each in operands]
    return result.tree(bind(Call(region, (fun,), numerics), lifted))


def _cast_alike(function: Flat, operands: Sequence[Tensor]) -> Flat:
    """The function, on tensors that autocast casts as often as the operands."""
    # Asked of the tensors: sparse and nested ones have no metadata.
    each_time = [*map(_compat.is_cast_each_time, operands)]

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        pairs = zip(each_time, tensors, strict=True)
        return function(
            [_compat.cast_each_time(each) if anew else each for anew, each in pairs]
        )

    return run if any(each_time) else function


def rerun_of(
    function: Flat, requires_grad: tuple[bool, ...], resting: tuple[int, ...]
) -> Rerun:
    """The region of a flat function that changes nothing and draws from keys alone.

    Args:
        function: tensors in, tensors out; regions that it binds stay regions.
        requires_grad: for each tensor that it takes whether it is differentiated.
        resting: for each the outputs that rest on it, a bit for each.
    """
    state = RunState((), ())
    state.resting = resting
    return Rerun(function, function, requires_grad, state)


def _beyond(survey: _captures.Survey, given: Sequence[Tensor]) -> list[Tensor]:
    """The reached tensors less the arguments.

    Raises:
        TraceError: one of them has yet to be made.
    """
    for tensor in survey.reached:
        if is_lazy(tensor):
            raise uninitialized(f"`{survey.tensors[id(tensor)][0].label}`")
    known = set(map(id, given))
    return [tensor for tensor in survey.reached if id(tensor) not in known]


def _buffers(survey: _captures.Survey, given: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that the function may change: buffers, and arguments without a gradient."""
    own = [tensor for tensor in survey.reached if survey.is_buffer(id(tensor))]
    passed = [each for each in given if not _compat.requires_grad_anywhere(each)]
    return [_compat.unwrapped(tensor) for tensor in [*own, *passed]]


@final
class _Arguments:
    """The arguments of a call, and their tensors apart from them.

    Attributes:
        tensors: each once: the function may ask whether two arguments are the same.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._leaves, self._spec = _compat.flatten((args, dict(kwargs)))
        found = {id(leaf): leaf for leaf in self._leaves if isinstance(leaf, Tensor)}
        self.tensors: list[Tensor] = [*found.values()]

    def of(self, stand_ins: Mapping[int, Tensor]) -> tuple[Any, Any]:
        """The arguments with other tensors, each under the id of the one it stands for."""
        filled = [
            stand_ins[id(leaf)] if isinstance(leaf, Tensor) else leaf
            for leaf in self._leaves
        ]
        return _compat.unflatten(filled, self._spec)


@final
class _Result:
    """The structure of what the function returned in its last run."""

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


_IN_A_GRAPH = (
    'A function that is run again by @remat(engine="rerun") reaches tensors beyond its '
    "arguments, which a graph would not see replaced. Pass them as arguments, or compile "
    "without fullgraph=True."
)


class _Substituted(TorchFunctionMode):
    """Replaces captured tensors by operands, and notes the generators that are used."""

    def __init__(
        self,
        stand_ins: Mapping[int, Tensor],
        state: RunState,
        constants: _Constants,
        *,
        is_pure: bool,
    ) -> None:
        self._stand_ins = stand_ins
        self._state = state
        self._constants = constants
        self._is_pure = is_pure
        self._depth = depth()

    @_compat.unseen_by_dynamo
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
            # Dynamo reads this too, where the function calls what torch.compile made.
            if not self._is_pure:
                _compat.end_graph(_IN_A_GRAPH)
            return func(*args, **(kwargs or {}))
        if depth() != self._depth:
            # A region inside is traced on its own; it has its tensors from `lift`.
            return func(*args, **(kwargs or {}))
        args, kwargs = _compat.map_tensors(self.met, (args, kwargs or {}))
        for each in kwargs.values():
            if isinstance(each, torch.Generator):
                self._state.meet(each)
        if self._state.before is None:
            for target in _targets(func, args, kwargs):
                self._constants.before_write(target, self._state)
        out = func(*args, **kwargs)
        self._state.watch(func)
        return out

    def met(self, tensor: Tensor) -> Tensor:
        """What stands for a tensor, itself if nothing does; it counts as used."""
        if self._state.before is None:
            self._state.used.add(id(tensor))
        return self._stand_ins.get(id(tensor), tensor)


def _targets(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The tensors that a call writes to, as far as its name tells."""
    name = str(getattr(func, "__name__", "")).split(".")[0]
    found = _compat.tensor_leaves(kwargs.get("out"))
    is_own = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
    is_written = is_own or name in _ASSIGNING or func == _compat.SET_DATA
    if is_written or kwargs.get("inplace"):
        found += _compat.tensor_leaves(args[:1])
    if name in _TRACKING:
        running = (kwargs.get("running_mean"), kwargs.get("running_var"))
        found += _compat.tensor_leaves((args[1:3], running))
    return found


_ASSIGNING = frozenset(
    f"__{name}__"
    for name in (
        *("iadd", "isub", "imul", "imatmul", "itruediv", "idiv", "ifloordiv", "imod"),
        *("ipow", "ilshift", "irshift", "iand", "ior", "ixor", "setitem"),
    )
)
# Their names end like those of writers, but they change no numbers.
_HARMLESS = frozenset({"detach_", "rename_", "requires_grad_", "share_memory_"})
# They write to statistics without telling: no version changes.
_TRACKING = frozenset({"batch_norm", "instance_norm"})


@final
class _Constants:
    """The tensors without a gradient that a function reaches, which are not copied.

    Those that it used and did not change must have the same numbers when it runs again.
    """

    def __init__(self, survey: _captures.Survey, operands: Sequence[Tensor]) -> None:
        known = set(map(id, operands))
        self._survey = survey
        self._versions = [
            (tensor, tensor._version)
            for tensor in survey.reached
            if id(tensor) not in known and _has_version(tensor)
        ]
        self._by_storage: dict[int, list[Tensor]] = {}
        for tensor, _ in self._versions:
            if not survey.is_buffer(id(tensor)) and _has_storage(tensor):
                key = _compat.storage_key(tensor)
                self._by_storage.setdefault(key, []).append(tensor)
        leaves = map(
            _compat.unwrapped, filter(_compat.requires_grad_anywhere, operands)
        )
        self._wanted = set(map(_compat.storage_key, filter(_has_storage, leaves)))

    def before_write(self, target: Tensor, state: RunState) -> None:
        """Saves the numbers of those tensors that share memory with what is written to.

        Raises:
            MutationError: an argument that is to be differentiated does.
        """
        if not (_has_version(target) and _has_storage(target)):
            return
        key = _compat.storage_key(target)
        if key in self._wanted:
            raise mutates(user_line())
        for tensor in self._by_storage.get(key, ()):
            state.keep(tensor)

    def settle(self, used: Set[int], kept: Iterable[Tensor]) -> None:
        """Forgets all but those that the first run used and has not changed.

        Args:
            used: the ids of what it used.
            kept: what it wrote to, and what is put back.

        Raises:
            MutationError: it wrote to another.
        """
        put_back = set(map(id, kept))
        for tensor, version in self._versions:
            moved = id(tensor) in used and tensor._version != version
            if moved and id(tensor) not in put_back:
                raise _unseen(self._survey.tensors[id(tensor)][0].label)
        self._versions = [
            (tensor, version)
            for tensor, version in self._versions
            if id(tensor) in used and tensor._version == version
        ]

    def require_unchanged(self, found: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Refuses a run if one of them was written to since.

        Args:
            found: buffers that are put back to what they were.

        Raises:
            SavedTensorModifiedError: one was.
        """
        put_back = {id(buffer) for buffer, _ in found}
        for tensor, version in self._versions:
            if tensor._version != version and id(tensor) not in put_back:
                raise _modified(self._survey.tensors[id(tensor)][0].label)


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and _compat.placement(tensor) is None


def _has_version(tensor: Tensor) -> bool:
    return not tensor.is_inference() and _compat.level_of(tensor) < 0


def _unseen(label: str) -> MutationError:
    return MutationError(
        explain(
            where=f"the region reaches {label}",
            what="a tensor that the function changes in place, by a call that does not show it.",
            why="The function runs again, and would start from the changed numbers.",
            do="Register it as a buffer of a module, or write to it by a method of its own "
            "(x.copy_(y)).",
        )
    )


def _modified(label: str) -> SavedTensorModifiedError:
    return SavedTensorModifiedError(
        explain(
            where=f"the backward of a region that reaches {label}",
            what="a tensor that the function reads was changed in place since the forward.",
            why="The function runs again, and would start from other numbers.",
            do="Change a copy (x = x + 1 instead of x += 1), or do it after backward().",
        )
    )


@final
@dataclasses.dataclass(frozen=True)
class Rerun(WithoutProgram):
    """A region without programs.

    Attributes:
        run: what the forward runs.
        function: the same, differentiable: derivatives are made from it.
        requires_grad: for each tensor that it takes whether it is differentiated.
        state: what is put back around each run.
        returned: how what it returns is made from the outputs; None means they are it.
        all_flow: whether every output has a gradient, whatever a run's graph says.
        is_primal: whether it returns what the user's function does, or that in tangents
            or mapped: what `state.resting` tells of. Gradients rest on others.
        num_leading: nothing comes before the operands.
    """

    run: Flat
    function: Flat
    requires_grad: tuple[bool, ...]
    state: RunState
    returned: tuple[View, ...] | None = None
    all_flow: bool = False
    is_primal: bool = True
    num_leading: int = 0

    def views(self, roots: Roots) -> tuple[View, ...] | None:
        """How what it returns is made from the outputs."""
        return self.returned

    @property
    def keeps(self) -> bool:
        """False: the forward saves nothing for the backward."""
        return False

    @property
    def runs_first(self) -> bool:
        """Whether a run tells what the outputs depend on: that of gradients leaves no graph."""
        return not self.all_flow

    def forward(
        self, roots: Roots, save: bool
    ) -> Callable[[Sequence[Tensor], Numerics], Results]:
        """Runs the function on tensors that no transform has wrapped."""

        def run(tensors: Sequence[Tensor], _: Numerics) -> Results:
            with (
                _compat.torch_function_as(self.state.torch_functions),
                _compat.without_inference_mode(),
            ):
                leaves = [
                    _compat.leaf_of(tensor).requires_grad_(wanted)
                    for tensor, wanted in zip(tensors, self.requires_grad, strict=True)
                ]
                with self.state.around(), torch.enable_grad():
                    # None, which `Flat` allows, is not an output: `_zeros_for_none`, `_Result`.
                    outputs = [each for each in self.run(leaves) if each is not None]
            bits = resting(outputs, leaves, self.state.engine)
            guard_against_others(leaves)
            if self.state.resting is None and self.is_primal:
                self.state.resting = bits
            # Unseen by a trace around it, which would take these for the user's own.
            with _compat.without_torch_function():
                found = [_compat.detached(each) for each in outputs]
            if self.all_flow:
                return Results(found)
            flows = tuple(each.requires_grad for each in outputs)
            return Results(found, flows=flows, reached=tuple(map(bool, bits)))

        return run

    def vjp(self, roots: Roots, asked: Asked) -> Rerun:
        """The region of the gradients; an operand that no output depends on has none."""
        outputs = tuple(k for k, meta in enumerate(asked.layouts) if meta is not None)
        wanted = [index for index, each in enumerate(asked.wanted) if each]
        rests = self.state.resting if self.is_primal else None
        pulled = sum(1 << index for index in outputs)
        # What follows the operands, such as tangents, is always reached.
        unreached = {k for k, each in enumerate(rests or ()) if not each & pulled}
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
            is_primal=False,
        )

    def jvp(
        self, roots: Roots, has_tangent: tuple[bool, ...], num_states: int
    ) -> tuple[Rerun, None]:
        """The region of the outputs' tangents."""
        pushed = pushforward(self.function, None, has_tangent)
        wanted = (*self.requires_grad, *(True for has in has_tangent if has))
        return Rerun(pushed, pushed, wanted, self.state, is_primal=self.is_primal), None

    def batched(self, roots: Roots, batch: Batch, save: bool) -> Batched:
        """The region of the mapped function."""
        # This is how torch runs a function if reverse mode is taken per example.
        wanted = [index for index, each in enumerate(self.requires_grad) if each]
        function = tracked(self.function, wanted) if save else self.function
        over = mapped(function, None, batch, 0)
        region = Rerun(
            over, over, self.requires_grad, self.state, is_primal=self.is_primal
        )
        return Batched(region, None)


def _zeros_for_none(function: Flat, pull: Pull) -> Flat:
    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        found = function(tensors)
        return [
            torch.zeros_like(tensors[index]) if gradient is None else gradient
            for index, gradient in zip(pull.wanted, found, strict=True)
        ]

    return run


def _accumulating(function: Flat, pull: Pull, engine: _sharded.Engine) -> Flat:
    """(operands, ..., cotangents) -> the gradients, by a backward inside a backward.

    It leaves the gradients of gathered parameters where the engine's hooks look for them.
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
            met = (variable for variable, _ in variables(differentiable))
            inputs += filter(engine.stands_for, met)
        if pairs and inputs:
            _compat.backward(differentiable, [each for _, each in pairs], inputs)
        return [leaf.grad for leaf in wanted]

    return gradients
