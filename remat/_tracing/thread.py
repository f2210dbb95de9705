"""The trace that this thread is in: what the user's code meets while it runs.

A torch-function mode sees every call of the user's code: it swaps captured tensors for
inputs of the trace, and notes which line and which torch function makes each value.
"""

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Generator, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from remat._errors import RematError
from remat._generators import streams, trackers
from remat._graph.meta import TensorMeta
from remat._switches.blocks import departing
from remat._torch import (
    autograd,
    dtensor,
    isolation,
    levels,
    modes,
    taking_functions,
    tensors,
    tracer,
    trees,
)
from remat._torch.attributes import attributes_as
from remat._torch.fakes import is_fake, is_fake_of, wraps_fakes
from remat._tracing import (
    arrays,
    importing,
    naming,
    refusals,
    refused_kinds,
    taken_functions,
)
from remat._tracing.caught import Raised
from remat._tracing.indexing import LookUps
from remat._user_lines import is_asked_by_package, user_line
from remat.policies._by_op import function_name


class Running:
    """What a running trace knows: the mode asks it, the end of the trace reads it."""

    def __init__(
        self, mode: Any, find: Callable[[Tensor], bool], shape_env: Any
    ) -> None:
        self.mode = mode  # under which tensors are fakes
        self.find = find  # whether a captured tensor may become a further operand
        self.shape_env = shape_env  # of the symbols for open sizes; None without one
        #: The operands that stand for captured tensors, by their ids; the innermost last.
        self.substitutes: tuple[Mapping[int, Tensor], ...] = ()
        self.captured: list[Tensor] = []  # the captured tensors that were met, in order
        self.leaves: list[Tensor] = []  # what stands for each of these
        self.fakes: list[weakref.ref[Tensor]] = []  # to what the user's code has held
        self.operands: list[Tensor] = []  # what stands for the arguments
        #: By their ids, the tensors that belong to a tracker and not to the graph.
        self.aside: dict[int, Tensor] = {}
        #: Where a view that has a gradient was reshaped in place first.
        self.reshapes = ""
        #: Whether a user's `autograd.Function` has run, or a hook was registered, in a region
        #: inside or outside of one.
        self.is_custom = False
        #: Where one with a rule of its own for vmap has: "forward", "backward".
        self.rules: frozenset[str] = frozenset()
        self.policies: frozenset[Any] = frozenset()  # of regions inside
        self.inner: dict[Hashable, Any] = {}  # what is known of regions inside
        #: What stands for tensors in the functions of operators that run, the innermost last.
        self.within: tuple[Callable[[Tensor], Tensor], ...] = ()
        #: Which tensors in parts were met, "given" or "made"; never both.
        self.in_parts: set[str] = set()
        #: Arrays of which tensors were made that share their memory, and these.
        self.shared: list[tuple[arrays.Copied, Tensor]] = []
        self.look_ups = LookUps()  # what `x[i]` gave where `i` is a number in a tensor
        #: An error of ours that torch may have replaced by one of its own.
        self.refused: RematError | None = None
        self.default_dtype = torch.get_default_dtype()
        self.raised = Raised()  # caught by the user's code or not
        # A node of autograd that outlives the trace may hold the mode, and `deepcopy` copies it.
        mode.refuses = weakref.ref(self.raised)

    def is_operand(self, tensor: Tensor) -> bool:
        """Whether a tensor is an argument's stand-in, or one from outside."""
        return not is_fake(tensor) or any(tensor is each for each in self.operands)

    def is_stand_in(self, tensor: Tensor) -> bool:
        """Whether a tensor of the trace stands for an argument, or for a captured tensor."""
        return any(tensor is each for each in (*self.operands, *self.leaves))

    def is_in_given_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor of the trace lies in the memory of such a stand-in."""
        given = {tensors.storage_key(each) for each in (*self.operands, *self.leaves)}
        return tensors.storage_key(tensor) in given

    def is_aside(self, args: Any) -> bool:
        """Whether all tensors of a call are states that a tracker handles."""
        if not trackers.registered:
            return False
        tensors = trees.tensor_leaves(args)
        return bool(tensors) and all(
            not is_fake(each) and (id(each) in self.aside or streams.is_state(each))
            for each in tensors
        )

    def run_aside(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs such a call directly: it is not a part of the function's graph."""
        with isolation.isolated():
            out = func(*args, **kwargs)
        # Held, so that no other tensor can have the id of one of them.
        self.aside |= {id(each): each for each in trees.tensor_leaves(out)}
        return out


class _Thread(threading.local):
    running: Running | None = None  # the trace, if it is in one
    depth: int = 0  # how many traces are around, those of derived programs counted
    #: Where functions run by themselves, and not in a trace inside of that, what stands for
    #: the tensors that they reach; the innermost last.
    again: tuple[Callable[[Tensor], Tensor], ...] = ()


_thread = _Thread()


def is_running() -> bool:
    return _thread.running is not None


def depth() -> int:
    """How many traces are around this thread: more than before inside of a further one."""
    return _thread.depth


def is_lifting() -> bool:
    """Whether something may stand for a tensor that a region is given, or reaches."""
    return _thread.running is not None or bool(_thread.again)


def has_open_sizes() -> bool:
    return _thread.running is not None and _thread.running.shape_env is not None


def known_inside() -> dict[Hashable, Any]:
    """What is known of regions inside the running trace of this thread, until it ends."""
    assert _thread.running is not None, "no trace is running"
    return _thread.running.inner


def current() -> Running | None:
    """The trace that this thread is in, if it is in one."""
    return _thread.running


def entered(running: Running | None) -> contextlib.AbstractContextManager[None]:
    """Inside, this thread is in that trace, or in none: the calls there are not the user's."""
    return attributes_as(_thread, running=running, again=(), depth=_thread.depth + 1)


@contextlib.contextmanager
def running_again(stand_in: Callable[[Tensor], Tensor]) -> Generator[None]:
    """Inside, regions and users' `autograd.Function`s find what stands for tensors.

    They take them past torch's functions. No region is recognized as one that is called as
    before. `stand_in` gives what stands for a tensor, itself if nothing does.
    """
    again = (*_thread.again, stand_in)
    with (
        attributes_as(_thread, again=again),
        departing(),
        autograd.lifted_past_modes(stand_in),
    ):
        yield


def substituting(
    mapping: Mapping[int, Tensor],
) -> contextlib.AbstractContextManager[None]:
    """Inside, the captured tensors with these ids stand for the given operands."""
    running = _thread.running
    if running is None:
        return contextlib.nullcontext()
    return attributes_as(running, substitutes=(*running.substitutes, mapping))


def lift(tensor: Tensor) -> Tensor:
    """What stands for a tensor from outside: in a trace it becomes an input of the graph.

    To a region inside another one's trace, the outer trace's tensors are from outside too.
    """
    for stand_in in reversed(_thread.again):
        tensor = stand_in(tensor)
    return lift_into_trace(tensor)


def lift_into_trace(tensor: Tensor) -> Tensor:
    """What stands for a tensor in the trace of this thread alone, itself without one."""
    running = _thread.running
    if running is None:
        return tensor
    if running.within:
        return running.within[-1](tensor)
    is_own = is_fake_of(tensor, running.mode)
    if is_own or (wraps_fakes(tensor) and dtensor.placement(tensor) is None):
        if not is_own or tensors.is_in_parts(tensor):
            _note_in_parts(running, tensor, "made")
        return tensor
    for mapping in reversed(running.substitutes):
        if id(tensor) in mapping:
            return mapping[id(tensor)]
    # An inner region lifts its own tensors, while the trace's mode is on.
    with modes.unseen_by_traces():
        return _capture_tensor(running, tensor)


def is_taken_whole(tensor: Tensor) -> bool:
    """Whether a tensor in parts is traced as if it were a plain one of the whole shape."""
    return tensors.is_in_parts(tensor) and dtensor.placement(tensor) is None


def _note_in_parts(running: Running, tensor: Tensor, how: str) -> None:
    """Notes whether a tensor in parts was given, and traced as a whole, or made inside."""
    running.in_parts.add(how)
    if len(running.in_parts) > 1:
        raise refusals.distributed(tensor)


def _capture_tensor(running: Running, tensor: Tensor) -> Tensor:
    if is_taken_whole(tensor):
        _note_in_parts(running, tensor, "given")
    for known, leaf in zip(running.captured, running.leaves, strict=True):
        if known is tensor:
            return leaf
    overrides = tensors.overrides_functions(type(tensor)) and not tensor.is_nested
    if not (refusals.is_strided(tensor) or overrides):
        raise refusals.unstrided(f"a tensor used at {user_line()}", tensor)
    if not running.find(tensor):
        if streams.looks_like_state(tensor):
            raise streams.unregistered(f"at {user_line()}")
        raise refusals.hidden(tensor)
    if is_lazy(tensor):
        raise refusals.uninitialized(f"used at {user_line()}")
    if tensors.overrides_functions(type(tensor)):
        raise refused_kinds.overriding(type(tensor))
    wanted = levels.requires_grad_anywhere(tensor)
    if wanted and torch.is_grad_enabled() and modes.is_below_autograd():
        # TorchScript replaces any error by one of its own, and drops the text.
        where = f"a tensor {TensorMeta.of(tensor)}, used at {user_line()}"
        running.refused = refusals.out_of_sight(where)
        raise running.refused
    name = f"captured_{len(running.captured)}"
    leaf = placeholder(TensorMeta.of_operand(tensor), name)
    running.captured.append(tensor)
    running.leaves.append(leaf)
    return leaf


def converter(own: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """What converts a module as torch's `own` does, but leaves it if nothing changes.

    In a trace `own` would put stand-ins in the place of its parameters.
    """

    def convert(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
        if _thread.running is None:
            return own(module, function, recurse)
        each = [*module.parameters(recurse), *module.buffers(recurse)]
        with torch.no_grad():
            changed = [one for one in each if lift(function(one)) is not lift(one)]
        if any(lift(one) is not one for one in changed):
            raise refusals.converts(module)
        return own(module, function, recurse) if changed else module

    return convert


def _as_within(running: Running) -> taken_functions.Within:
    """The running trace, as operators that take functions see it."""
    # A node of autograd that outlives the trace may hold this.
    held = weakref.ref(running)

    @contextlib.contextmanager
    def calls(stand_in: Callable[[Tensor], Tensor]) -> Generator[None]:
        running = held()
        assert running is not None, "the trace has ended"
        within = (*running.within, stand_in)
        with (
            attributes_as(running, within=within),
            UserCalls(running),
            autograd.lifted_past_modes(lift),
        ):
            yield

    around = running.within[-1] if running.within else lift
    return taken_functions.Within(running.mode, around, calls)


class UserCalls(TorchFunctionMode):
    """Sees the torch calls of the traced function, and those alone."""

    def __init__(self, running: Running) -> None:
        self._running = running

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        running = self._running
        kwargs = kwargs or {}
        if _thread.running is not running:
            return func(*args, **kwargs)  # an inner region has a trace of its own
        if not tracer.proxy_is_active():
            if not running.within:
                return func(*args, **kwargs)  # torch's internals are not recorded
            return self._call_lifted(func, *trees.map_tensors(lift, (args, kwargs)))
        running.raised.goes_on()
        try:
            return self._call_recorded(func, args, kwargs)
        except Exception as error:
            running.raised.note(error)
            raise

    def _call_recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        running = self._running
        if running.is_aside(args):
            return running.run_aside(func, args, kwargs)
        if torch.get_default_dtype() is not running.default_dtype:
            raise refusals.other_default_dtype(function_name(func) or "an operator")
        refusals.require_tellable(func, args, kwargs, running.is_operand)
        if (
            func in tensors.RESHAPES
            and args[0].requires_grad
            and tensors.is_view(args[0])
        ):
            running.reshapes = running.reshapes or user_line()
        running.is_custom |= func is Tensor.register_hook  # pyright: ignore[reportUnknownMemberType]
        args, kwargs = trees.map_tensors(lift, (args, kwargs))
        self._require_known_memory(func, args, kwargs)
        args, kwargs, copies = arrays.copied(func, args, kwargs)
        if func == tensors.SET_DATA and not tensors.is_own_data(*args):
            raise refusals.sets_data(args[0])
        if func is torch.autograd.grad:
            # A graph that it frees is one that the trace differentiates, too.
            kwargs = {**kwargs, "retain_graph": True}
        graph = tracer.active_graph()
        before = len(graph.nodes)
        is_gathered = taking_functions.indexes_by_tensors()
        out = NotImplemented if is_gathered else running.look_ups.call(func, args)
        if out is NotImplemented:
            with refusals.out_keeps_its_shape(kwargs, running.is_stand_in):
                out = self._call_lifted(func, args, kwargs)
        if func in arrays.SHARE_MEMORY:
            running.shared += [(each, out) for each in copies]
        refusals.require_no_gradient_inside(func, args, kwargs, out)
        if len(graph.nodes) > before:
            note = importing.Note(
                *(user_line(), function_name(func)),
                is_backward=False,
                is_recorded=torch.is_grad_enabled() or is_asked_by_package(),
            )
            importing.annotate(graph, before, note)
        running.fakes.extend(
            weakref.ref(each) for each in trees.tensor_leaves(out) if is_fake(each)
        )
        return out

    def _require_known_memory(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuses what counts in another tensor's memory, or asks how much a sparse one holds."""
        is_counted = tensors.counts_in_memory(func, args, kwargs)
        if is_counted and self._running.is_in_given_memory(args[0]):
            raise refusals.counts_in_given_memory(func, args[0])
        if tensors.asks_for_unknown_parts(func, args):
            raise refused_kinds.unknown_parts(func)

    def _call_lifted(self, func: Any, args: Any, kwargs: Any) -> Any:
        if taking_functions.takes_functions(func):
            return taken_functions.call(_as_within(self._running), func, args, kwargs)
        if func is tensors.AS_SUBCLASS:
            kind = [*args[1:], *kwargs.values()][0]
            if kind is not Tensor:  # by `in`, the tensor would be compared
                raise refused_kinds.becomes(kind)
        if func is naming.MARK and self._running.within:
            return taken_functions.warn_of_name(args[1])
        if func is tracer.MULTI_HEAD:
            return tracer.multi_head_under(UserCalls(self._running))(*args, **kwargs)
        return tracer.traceable(func)(*args, **kwargs)


def placeholder(meta: TensorMeta, name: str) -> Tensor:
    """A further input of the running trace, made where the trace does not see it."""
    with levels.leave_functorch():
        with tracer.unrecorded():
            fake = fake_of(meta)
        tracer.add_placeholder(fake, name)
        # The function may meet it first where it records no gradients.
        with torch.enable_grad():
            return meta.stand_in(fake)


def fake_of(meta: TensorMeta) -> Tensor:
    """What the running trace knows of an input: of a DTensor, this rank's part."""
    local = dataclasses.replace(meta, requires_grad=meta.is_leaf, placement=None)
    return local.empty()
