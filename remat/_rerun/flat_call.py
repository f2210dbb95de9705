"""`engine="rerun"`: functions that cannot be traced run again, in Python, in the backward.

This is for branches on values, opaque kernels, and shapes that depend on data. A call becomes a flat
function of the tensors that it reaches, and that a region (`_rerun.region`). Generators, registered
trackers and module buffers are put back to where the forward found them whenever it runs again.
"""

import contextlib
import functools
import weakref
from collections.abc import (
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from remat._captures.iterators import advanced_since, positions
from remat._captures.places import Step, read_place, write_place
from remat._captures.walk import Survey
from remat._errors import StaticArgumentError, TraceError
from remat._graph.meta import TensorMeta
from remat._regions.out_of_memory import name_of
from remat._regions.protocol import Call
from remat._regions.rules import bind
from remat._rerun import fully_shard
from remat._rerun.constants import Constants, has_storage_to_compare
from remat._rerun.dependence import (
    dependent_outputs,
    read_by_a_backward,
    require_nothing_hidden,
)
from remat._rerun.region import Rerun
from remat._rerun.state import (
    BACKWARD,
    RECORDED_BACKWARD,
    RUN,
    NewOperandError,
    RunState,
    writing_once,
)
from remat._rerun.written import written_tensors
from remat._switches.numerics import Numerics
from remat._torch import (
    autocast,
    autograd,
    dropout,
    dynamo,
    levels,
    modes,
    tracer,
    trees,
)
from remat._torch.modules import untracked
from remat._torch.tensors import (
    ASK_FOR_HISTORY,
    GET_GRAD,
    RESHAPES,
    SET_FOR_AUTOGRAD,
    as_class,
    class_of,
    copy_attributes,
    has_slots,
    storage_key,
)
from remat._tracing import engines
from remat._tracing.aliases import is_view_of, without_false_gradients
from remat._tracing.arguments import Given, own_set
from remat._tracing.once_more import advances, call_once_more
from remat._tracing.refusals import (
    out_keeps_its_shape,
    out_of_reach,
    require_answers,
    require_tellable,
    uninitialized,
)
from remat._tracing.side_effects import require_all_returned, tell_of_marks
from remat._tracing.thread import current, depth, lift, lift_into_trace, running_again


def call(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], rng: str
) -> Any:
    """Calls `fun` as a region that runs again in its backward."""
    engines.require_no_engine(fun)
    reach = _Reached(fun, args, kwargs)
    lifted = [lift(each) for each in reach.operands]
    wanted = tuple(map(levels.requires_grad_anywhere, lifted))
    if not any(wanted):
        found = fun(*args, **kwargs)
        require_nothing_hidden(found, (fun, args, dict(kwargs)))
        return found
    _require_repeatable(args, kwargs)
    _require_stand_ins(reach.operands)
    known = positions(reach.survey)
    flat = _FlatCall(fun, reach, wanted, draws=rng == "preserve")
    region = Rerun(flat, flat, wanted, flat.state)
    try:
        returned = bind(Call(region, (fun,), flat.numerics), lifted)
    except NewOperandError:
        reach.survey.restore()
        return call(fun, args, kwargs, rng)
    flat.constants.replace(reach.without_graphs())
    advanced = advanced_since(known)
    if advanced is not None:
        raise advances(advanced, "the function's first run")
    result, stored = flat.returned.around(flat.with_changed(returned))
    # What is stored of these has other owners, too.
    captured = set(map(id, reach.beyond))
    for (owner, step), value in zip(flat.stored, stored, strict=True):
        kept = [each for each in trees.tensor_leaves(value) if each.grad_fn]
        _stored.update((id(each), each) for each in kept if id(each) not in captured)
        write_place(owner, step, value)
    return result


def _require_repeatable(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuses arguments that a first run uses up."""
    for leaf in trees.flatten((args, dict(kwargs)))[0]:
        if isinstance(leaf, Iterator):
            raise StaticArgumentError.of(
                where=f"an argument that is a {type(cast('object', leaf)).__name__}",
                what='is used up by the first run of engine="rerun".',
                why="The second run, in the backward, would get what comes after.",
                do="Pass what it yields as a tuple, a list or a dict.",
            )


def _require_stand_ins(operands: Sequence[Tensor]) -> None:
    """Refuses tensors of which a copy would lack what the function may ask of them."""
    for each in operands:
        if has_slots(class_of(each)):
            raise TraceError.of(
                where=f"a tensor {TensorMeta.of(each)} of the class {type(each).__qualname__}",
                what='has `__slots__`, which engine="rerun" cannot copy.',
                why="The function runs on what stands for its tensors.",
                do="Leave out `__slots__`, or pass `x.as_subclass(torch.Tensor)`.",
            )


# What functions have stored, by its id. It is no operand of a later call that does not read it: its
# graph may have been freed, and a function that only stores another in its place asks for nothing.
_stored: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


@final
class _Reached:
    """The tensors that a call reaches: `passed` ones, and others `beyond`.

    If modules of `fully_shard` are among them, their `engine` gathers and frees the `managed`
    ones. The region's `operands` are passed ones first, then captured ones.
    """

    def __init__(
        self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self.survey = Survey((fun, args, dict(kwargs)))
        self.survey.follow_counts()
        # A copy of each container: the caller may change its own before the backward.
        self.arguments = trees.map_tensors(lambda each: each, (args, dict(kwargs)))
        tensors = trees.tensor_leaves(self.arguments)
        # Each once: the function may ask whether two arguments are the same.
        self.passed = [*{id(each): each for each in tensors}.values()]
        self.engine = fully_shard.Engine.reached(self.survey)
        self.managed = self.engine.managed if self.engine else []
        reached = self.survey.reached
        require_answers([*self.passed, *reached])
        others = set(map(id, [*self.passed, *self.managed]))
        for tensor in reached:
            if is_lazy(tensor):
                raise uninitialized(str(self.survey.tensors[id(tensor)][0].label))
        self.beyond = [each for each in reached if id(each) not in others]
        with modes.unseen_by_traces():  # what stands for a tensor there tells less
            followed = [*filter(levels.is_followed, self.beyond)]
        captured: list[Tensor] = []
        self._left_out: list[Tensor] = []  # what earlier calls have stored
        for each in followed:
            (self._left_out if id(each) in _stored else captured).append(each)
        self.operands = [*self.passed, *captured]
        if self.engine:
            self.operands.append(self.engine.anchor)
        # Whether it reaches a tensor in another way than as an argument, which it may be too.
        paths = [self.survey.tensors.get(id(each), ()) for each in self.passed]
        self.captures = bool(self.beyond) or any(len(each) > 1 for each in paths)

    def require_unread(self, outputs: Sequence[Tensor]) -> None:
        """Ends a first run that read what an earlier call has stored, to start over with it.

        As a layer does that keeps its state from call to call.
        """
        if not self._left_out:
            return
        ends = [each.grad_fn for each in outputs if each.grad_fn is not None]
        behind = set(autograd.nodes_behind(ends))
        read = [each for each in self._left_out if each.grad_fn in behind]
        for each in read:
            _stored.pop(id(each), None)
        if read:
            raise NewOperandError

    def without_graphs(self) -> dict[int, Tensor]:
        """What stands from now on for what earlier calls have stored, by its id.

        Its graph would hold the call that stored it, with what it met there, and so all before.
        """
        left_out = [] if levels.interpreter_is_active() else self._left_out
        with modes.unseen_by_traces():
            found = {id(each): each.detach().requires_grad_() for each in left_out}
        self.survey.replace(found)
        self.beyond = [found.get(id(each), each) for each in self.beyond]
        self._left_out.clear()
        return found

    @property
    def may_change(self) -> list[Tensor]:
        """What the function may change: buffers, and arguments without a gradient."""
        survey = self.survey
        own = [each for each in survey.reached if survey.is_buffer(id(each))]
        own += [each for each in self.passed if not levels.requires_grad_anywhere(each)]
        return [levels.unwrapped(tensor) for tensor in own]


@final
class _FlatCall:
    """A call as a flat function of its operands, which runs as often as it is asked."""

    def __init__(
        self,
        fun: Callable[..., Any],
        reach: _Reached,
        wanted: Sequence[bool],
        *,
        draws: bool,
    ) -> None:
        self.fun = fun
        self.reach = reach
        self._wanted = wanted
        # Asked of the tensors: sparse and nested ones have no metadata.
        self._cast_each_time = [*map(autocast.is_cast_each_time, reach.operands)]
        # What each run is under; a backward may have a thread of its own.
        self.numerics = Numerics.current()
        # The caller may set others before the backward.
        self._attributes = [{**vars(each)} for each in reach.operands]
        # What the last run returned, without its tensors: each holds the graph of its run.
        self.returned: trees.Frame
        # The places of operands that got a gradient by what the first run wrote to them. All
        # runs return these after their results.
        self.changed: tuple[int, ...] = ()
        # Where the first run has stored what has a gradient, in objects that it reaches. All
        # runs return it with their results.
        self.stored: list[tuple[object, Step]] = []
        # The classes of results: a region gives plain tensors for those of a user's own class.
        self.classes: list[type[Tensor]] = []
        # The places of results that are an operand themselves, and that operand's.
        self.own: dict[int, int] = {}
        # The places of results that share the memory of another one.
        self.shared: dict[int, _SharedResult] = {}
        # By the ids of captured tensors, what stood for them in the first run, in a trace.
        self.lifted: dict[int, Tensor] = {}
        followed = [*reach.operands, *reach.managed]
        with modes.unseen_by_traces():
            # What must still have its numbers when it runs again.
            self.constants = Constants(reach.survey, followed)
            buffers = reach.may_change
        self.state = RunState(buffers, followed, draws=draws, engine=reach.engine)

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Runs the function on other operands, which autocast casts as often as the first."""
        pairs = zip(self._cast_each_time, tensors, strict=True)
        tensors = [autocast.cast_each_time(t) if anew else t for anew, t in pairs]
        # The operands are kept, so that no new tensor can have the id of one of them.
        stand_ins = dict(zip(map(id, self.reach.operands), tensors, strict=True))
        for each in zip(self.reach.operands, tensors, self._attributes, strict=True):
            copy_attributes(*each)
        leaves, spec = trees.flatten(self.reach.arguments)
        given = [
            stand_ins[id(leaf)] if isinstance(leaf, Tensor) else own_set(leaf)
            for leaf in leaves
        ]
        passed = Given(*trees.unflatten(given, spec))
        is_again = self.state.before is not None
        self.state.made.clear()
        with self._prepared(stand_ins, is_again):
            result = self._run(passed, stand_ins, is_again)
            passed.require_unchanged(self.fun)
            if not is_again:
                self.constants.require_no_operands()
                known = set(map(id, tensors))
                self.stored = [
                    (owner, step)
                    for owner, step, value in self.reach.survey.assigned()
                    if any(
                        each.grad_fn or id(each) in known
                        for each in trees.tensor_leaves(value)
                    )
                ]
            stored = [read_place(*place) for place in self.stored]
            returned: list[Tensor]
            returned, self.returned = trees.Frame.of((result, stored))
            if not is_again:
                where = f"the region {name_of(self.fun)}"
                arguments = tensors[: len(self.reach.passed)]
                require_all_returned(self.returned.statics, where, arguments)
                tell_of_marks(self.reach.survey, self._marks(tensors, returned), where)
            # A captured tensor that no operator met is returned as it is.
            found = [stand_ins.get(id(each), each) for each in returned]
            found = without_false_gradients(tensors, found)
            if is_again and all(each.is_leaf for each in tensors):
                # What the function kept in the forward (in a cache of functools) depends on the
                # stand-ins of that run: the gradient would end there.
                dependent_outputs(found, tensors, self.reach.engine, self.state.made)
            elif not is_again:
                self.reach.require_unread(found)
                self.constants.require_unwritten(self.state.used, self.state.kept)
                self.state.used.clear()
                self._note_changed(tensors, found)
            return [*found, *(tensors[place] for place in self.changed)]

    def _run(
        self, passed: Given, stand_ins: dict[int, Tensor], is_again: bool
    ) -> object:
        if not is_again:
            with writing_once():
                return self.fun(*passed.args, **passed.kwargs)
        if self.reach.captures:
            self.state.last = functools.partial(self._substituted, stand_ins)
        with modes.unseen_by_traces():  # nothing stands for a tensor that is looked at
            self.constants.require_unchanged(self.state.found)
        return call_once_more(self.fun, passed.args, passed.kwargs)

    def _marks(self, tensors: Sequence[Tensor], returned: list[Tensor]) -> set[str]:
        """The attributes that a run has set on stand-ins, and on what it has made."""
        own = {
            id(each): {"_is_param", *vars(operand)}
            for each, operand in zip(tensors, self.reach.operands, strict=True)
        }
        made = [each for each in returned if not self.constants.has(each)]
        return {
            name
            for each in [*tensors, *made]
            for name in vars(each)
            if name not in own.get(id(each), ())
        }

    def _note_changed(self, tensors: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        pairs = enumerate(zip(tensors, self._wanted, strict=True))
        self.changed = tuple(
            place for place, (each, had) in pairs if each.requires_grad and not had
        )
        self.classes = [class_of(each) for each in found]
        places = {id(each): place for place, each in enumerate(tensors)}
        self.own = {
            index: places[id(each)]
            for index, each in enumerate(found)
            if id(each) in places
        }
        with modes.unseen_by_traces():
            self.shared = _shared_results(found)

    def with_changed(self, returned: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The results, of which some are operands: with the gradient of what they now hold."""
        count, operands = len(returned) - len(self.changed), self.reach.operands
        for place, new in zip(self.changed, returned[count:], strict=True):
            assert new is not None, "an operand is returned"
            # It holds these numbers already, and gets their graph.
            with levels.version_kept(operands[place]):
                operands[place].copy_(new)
        pairs = zip(returned[:count], self.classes, strict=True)
        found = [
            operands[self.own[index]] if index in self.own else as_class(each, kind)
            for index, (each, kind) in enumerate(pairs)
        ]
        for index, shared in self.shared.items():
            if index not in self.own:
                found[index] = shared.of(found[shared.owner], found[index])
        return found

    @contextlib.contextmanager
    def _prepared(
        self, stand_ins: dict[int, Tensor], is_again: bool
    ) -> Generator[None]:
        """Inside, each operand is replaced, and all else is as in the first run."""
        reach = self.reach
        with (
            reach.survey.in_place(but=reach.managed) if is_again else _NOTHING,
            reach.engine.running() if reach.engine else engines.refused(),
            self._substituted(stand_ins),
            self.numerics.applied(),
            tracer.own_parametrizations(),
            untracked(),
        ):
            yield

    @contextlib.contextmanager
    def _substituted(
        self, stand_ins: dict[int, Tensor], where: str = RUN
    ) -> Generator[None]:
        """Inside, what stands for an operand replaces it: in a run, or in its backward.

        There an `autograd.Function` may call a module. A hook finds its own, unless it is recorded.
        """
        substituted = _Substituted(self, stand_ins, where)
        again = (
            running_again(substituted.operand_for) if self.reach.captures else _NOTHING
        )
        with again, substituted:
            yield


class _SharedResult(NamedTuple):
    """A result that is another one, or lies in its memory: a change of one changes the other."""

    owner: int
    is_owner: bool
    layout: tuple[torch.Size, tuple[int, ...], int]  # size, stride and offset

    def of(self, owner: Tensor | None, found: Tensor | None) -> Tensor | None:
        """The result, such that autograd knows of it."""
        if self.is_owner:
            return owner
        if owner is None or found is None:
            return found
        # Of two one may be detached; a wrapper does not tell how its memory lies.
        is_detached = owner.requires_grad != found.requires_grad
        if is_detached or levels.interpreter_is_active():
            return found
        return owner.as_strided(*self.layout)


def _shared_results(results: Sequence[Tensor]) -> dict[int, _SharedResult]:
    owners: dict[object, int] = {}
    plain = {
        index: each
        for index, each in enumerate(results)
        if has_storage_to_compare(each) and levels.level_of(each) < 0
    }
    for index, each in plain.items():
        if each.untyped_storage().nbytes() == each.numel() * each.element_size() > 0:
            owners.setdefault(storage_key(each), index)
    found: dict[int, _SharedResult] = {}
    for index, each in plain.items():
        owner = owners.get(storage_key(each), index)
        if owner == index or each.dtype != results[owner].dtype:
            continue
        if each is results[owner] or is_view_of(each, results[owner]):
            layout = each.shape, each.stride(), int(each.storage_offset())
            found[index] = _SharedResult(owner, each is results[owner], layout)
    return found


_NOTHING = contextlib.nullcontext()


_IN_A_GRAPH = (
    'A function that is run again by @remat(engine="rerun") reaches tensors beyond its '
    "arguments, which a graph would not see replaced. Pass them as arguments, or compile "
    "without fullgraph=True."
)


class _Substituted(TorchFunctionMode):
    """Replaces captured tensors by operands, and notes the generators that are used."""

    def __init__(
        self, call: _FlatCall, stand_ins: Mapping[int, Tensor], where: str
    ) -> None:
        self._where = where
        self._constants, self._state = call.constants, call.state
        self._lifted = call.lifted
        self._is_pure = not call.reach.captures
        self._stand_ins = stand_ins
        self._depth = depth()
        pairs = zip(
            call.reach.operands, self._state.dependent_outputs or (), strict=False
        )
        self._unreached = {id(operand) for operand, bits in pairs if not bits}

    @dynamo.unseen_by_dynamo
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
                dynamo.end_graph(_IN_A_GRAPH)
            return func(*args, **(kwargs or {}))
        is_asked = func == GET_GRAD or func in SET_FOR_AUTOGRAD
        if self._is_left_alone(is_asked):
            return func(*args, **(kwargs or {}))
        around = current()
        if around is not None and around.is_aside(args):
            return around.run_aside(func, args, kwargs or {})
        if is_asked or ASK_FOR_HISTORY.get(func) in ("is_leaf", "grad_fn"):
            require_tellable(func, args, kwargs or {}, self._is_operand)
        if func in RESHAPES:
            require_tellable(func, args, kwargs or {}, self._is_from_outside)
        args, kwargs = trees.map_tensors(self.operand_for, (args, kwargs or {}))
        return self._call(func, args, kwargs)

    def _call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls a torch function of the user's on what stands for its operands."""
        for each in kwargs.values():
            if isinstance(each, torch.Generator):
                self._state.note_generator(each)
        if self._state.before is None:
            for target in written_tensors(func, args, kwargs):
                with modes.unseen_by_traces():
                    self._constants.before_write(target, self._state)
        with out_keeps_its_shape(kwargs, self._is_from_outside):
            out = dropout.drawn_alike(func)(*args, **kwargs)
        given = set(map(id, trees.tensor_leaves((args, kwargs))))
        self._state.made |= set(map(id, trees.tensor_leaves(out))) - given
        self._state.refuse_draws(func)
        return out

    def _is_left_alone(self, is_asked: bool) -> bool:
        """Whether nothing is replaced in a call here, which may ask for a `.grad`."""
        # A region inside is traced on its own; it has its tensors from `lift`.
        if depth() != self._depth:
            return True
        # A hook sees the tensors themselves, with their gradients.
        return self._where != RUN and (is_asked or not self._replaces())

    def _replaces(self) -> bool:
        return self._where != BACKWARD or autograd.is_in_users_backward()

    def _is_operand(self, tensor: Tensor) -> bool:
        pairs = self._stand_ins.items()
        return any(id(tensor) == known or tensor is each for known, each in pairs)

    def _is_from_outside(self, tensor: Tensor) -> bool:
        return self._is_operand(tensor) or self._constants.has(tensor)

    def operand_for(self, tensor: Tensor) -> Tensor:
        """What stands for a tensor, itself if nothing does; it counts as used."""
        if not self._replaces():
            return tensor
        known = self._stand_ins.get(id(tensor))
        if self._where == RECORDED_BACKWARD and id(tensor) in self._unreached:
            raise read_by_a_backward(tensor)
        if self._state.before is None:
            self._state.used.add(id(tensor))
            # Autograd's graph of the run, which is searched later, does not show these levels.
            lost = levels.lost_around(tensor) if known is None else None
            if lost is not None:
                raise out_of_reach(
                    f"a tensor {TensorMeta.of(tensor)} of a torch.func transform",
                    f"Its {lost} would be lost.",
                )
        return self._lift(tensor) if known is None else known

    def _lift(self, tensor: Tensor) -> Tensor:
        """What stands for a tensor in a trace around, as in the first run.

        No mode but this one hears what runs there in a backward, where only the first run knows
        what stands for what the trace of a derivative captures.
        """
        known = self._lifted.get(id(tensor))
        if known is not None and self._state.before is not None:
            return known
        found = lift_into_trace(tensor)
        if found is not tensor:
            self._lifted[id(tensor)] = levels.unwrapped(found)
        return found
