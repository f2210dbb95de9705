"""The levels of torch.func, what they wrap, steps below one, and forward mode's dual level.

Obsolete when a primitive can register its own rules there, when torch.func tells which
levels wrap a tensor, and with nested dual levels, of which torch has one.
"""

# pyright: reportPrivateUsage=false
import contextlib
import itertools
import operator
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
import torch._C._functorch as functorch_c
from torch import Tensor, fx
from torch._functorch import eager_transforms, pyfunctorch
from torch._functorch.utils import (
    enable_single_level_autograd_function,
    unwrap_dead_wrappers,
)
from torch._functorch.vmap import restore_vmap as restore_vmap
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils._python_dispatch import _disable_current_modes

from remat._torch.attributes import attributes_as
from remat._torch.modes import unseen_by_traces

# The autograd.Function that sees one functorch level. Obsolete when autograd.Function
# carries its own rule for nested forward mode (pytorch #197867).
SingleLevelFunction: type[torch.autograd.Function] = _SingleLevelFunction  # pyright: ignore[reportAssignmentType]

enable_single_level = enable_single_level_autograd_function
functorch: Any = functorch_c
_torch: Any = torch
dual_levels: Any = forward_ad
_transforms: Any = eager_transforms
_grad_mode: Any = torch.autograd.grad_mode

# (a tensor) -> the level of the transform that wrapped it, -1 where none has, -2 where it ended.
level_of: Callable[[Tensor], int] = functorch.maybe_get_level
is_wrapped: Callable[[Tensor], bool] = functorch.is_functorch_wrapped_tensor
# (a tensor, a grad or jvp level) -> what that level wraps, or the tensor itself.
unwrap_at: Callable[[Tensor, int], Tensor] = functorch._unwrap_for_grad
# (a tensor, a grad or jvp level) -> the tensor as that level sees it.
wrap_at: Callable[[Tensor, int], Tensor] = functorch._wrap_for_grad
# (tensors as a grad level sees them) -> the same, which require a gradient there.
require_gradients: Callable[[Sequence[Tensor]], Any] = (
    _transforms._create_differentiable
)
# () -> a context whose body runs outside every torch.func transform.
leave_functorch: Callable[[], contextlib.AbstractContextManager[Any]] = (
    pyfunctorch.temporarily_clear_interpreter_stack
)
_Kind = functorch_c.TransformType
# A look-up is faster than asking an enumeration for a name.
_KINDS = {key: name.lower() for name, key in _Kind.__members__.items()}
# The functions in a graph of Dynamo that take a level, and the place of that argument.
_LEVELS = {
    **dict.fromkeys(("_remove_batch_dim", "_wrap_for_grad", "_unwrap_for_grad"), 1),
    "_add_batch_dim": 2,
}


def interpreter_is_active() -> bool:
    """Whether any torch.func transform is running on this thread."""
    return functorch.peek_interpreter_stack() is not None


def current_interpreter() -> tuple[str, Any] | None:
    """The innermost running transform, as ("grad" | "jvp" | "vmap" | ..., interpreter)."""
    top = functorch.peek_interpreter_stack()
    if top is None:
        return None
    return _KINDS[top.key()], pyfunctorch.coerce_cinterpreter(top)


@contextlib.contextmanager
def lowered(interpreter: Any) -> Generator[None]:
    """Runs the body below `interpreter`, with both modes of differentiation on."""
    forward_mode = dual_levels._set_fwd_grad_enabled(True)
    with torch.enable_grad(), forward_mode, interpreter.lower():
        yield


@contextlib.contextmanager
def outside_maps(tensors: Sequence[Tensor]) -> Generator[tuple[Tensor, ...]]:
    """Runs the body outside the innermost maps that map none of the tensors, which it gets.

    Not outside one that draws for each of its examples.
    """
    active = current_interpreter()
    if active and active[0] == "vmap" and active[1].randomness() == "same":
        below, dims = unwrap_batched(tensors, active[1].level())
        if all(dim is None for dim in dims):
            with active[1].lower(), outside_maps(below) as found:
                yield found
            return
    yield tuple(tensors)


def all_wrapped_at(tensors: Sequence[Tensor], level: int) -> tuple[Tensor, ...]:
    """The tensors as a grad or jvp level sees them; those that it has wrapped stay."""
    return tuple(
        [each if level_of(each) == level else wrap_at(each, level) for each in tensors]
    )


def without_gradient(tensor: Tensor) -> Tensor:
    """A tensor without the gradient that its own level gives it: what levels below know stays.

    So do tangents. `detach` would take both.
    """
    level = level_of(tensor)
    if level > 0:
        return wrap_at(unwrap_at(tensor, level), level)
    if not dual_level_is_active():
        return tensor.detach()
    with leave_functorch(), torch.no_grad():
        return tensor.view_as(tensor)


class ShortLevels(NamedTuple):
    """The only level of reverse mode, and a level of vmap below it."""

    level: int
    vmap: Any


def short_levels() -> ShortLevels | None:
    """The levels of this thread, if they are one of reverse mode, alone or over one vmap."""
    stack: Any = functorch.get_interpreter_stack()
    if stack is None or len(stack) > 2 or dual_levels._current_level >= 0:
        return None
    if stack[-1].key() != _Kind.Grad:
        return None
    if len(stack) == 1:
        return ShortLevels(stack[-1].level(), None)
    if stack[0].key() != _Kind.Vmap:
        return None
    return ShortLevels(stack[-1].level(), pyfunctorch.coerce_cinterpreter(stack[0]))


def below_functionalize(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors below a level of `functionalize`, as its pending writes leave them."""
    return _transforms._unwrap_all_tensors_from_functional(
        [*tensors], reapply_views=True
    )


def wrap_functional(tensors: Sequence[Tensor], level: int) -> list[Tensor]:
    """The tensors as a level of `functionalize` sees them."""
    return _transforms._wrap_all_tensors_to_functional([*tensors], level)


def unwrap_batched(
    tensors: Sequence[Tensor], level: int
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """The tensors below a vmap level, and which dimension of each is mapped."""
    unwrap: Any = functorch._unwrap_batched
    pairs = zip(*map(unwrap, tensors, itertools.repeat(level)), strict=True)
    below, dims = pairs if tensors else ((), ())
    return below, dims


def wrap_batched(
    tensors: Sequence[Tensor], dims: Sequence[int | None], level: int
) -> tuple[Tensor, ...]:
    """The inverse of `unwrap_batched`."""
    return tuple(
        tensor if dim is None else functorch._add_batch_dim(tensor, dim, level)
        for tensor, dim in zip(tensors, dims, strict=True)
    )


def unwrap_dead(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors without the wrappers of transforms that have ended."""
    if any(map(is_wrapped, tensors)):
        return unwrap_dead_wrappers(tuple(tensors))
    return tensors


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor below all torch.func wrappers."""
    while is_wrapped(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def all_unwrapped(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors below all torch.func wrappers."""
    unwrap = functorch.get_unwrapped
    while any(map(is_wrapped, tensors)):
        below: list[Tensor] = []
        # At several places of each call: Python 3.11 makes a frame for a comprehension.
        for each in tensors:
            below.append(unwrap(each) if is_wrapped(each) else each)
        tensors = below
    return tensors


def layers(tensor: Tensor) -> list[Tensor]:
    """A tensor, and what is below each of its torch.func wrappers, the outermost first."""
    found = [tensor]
    with unseen_by_traces():
        while is_wrapped(found[-1]):
            found.append(functorch.get_unwrapped(found[-1]))
    return found


def versions_below(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """How often each tensor was written to, below all torch.func wrappers.

    A wrapper has a counter of its own, which misses writes to the tensor that it wraps; that
    of `functionalize` has none, but its memory has one.
    Obsolete when autograd looks at the counter of the wrapped tensor.
    """
    versions = versions_of(all_unwrapped(tensors))
    stack: Any = functorch.get_interpreter_stack() or ()
    if _Kind.Functionalize not in [each.key() for each in stack]:
        return versions
    found: list[int] = []
    for tensor, version in zip(tensors, versions, strict=True):
        functional = filter(_torch._is_functional_tensor, layers(tensor))
        found += [*map(_torch._functionalize_mutation_counter, functional), version][:1]
    return tuple(found)


def versions_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """How often each tensor was written to; -1 for one of inference mode."""
    if any(map(Tensor.is_inference, tensors)):
        return tuple([-1 if each.is_inference() else each._version for each in tensors])
    return tuple(map(operator.attrgetter("_version"), tensors))


def repeats_itself(tensor: Tensor) -> bool:
    """Whether elements of a tensor, below all torch.func wrappers, share their memory."""
    below = unwrapped(tensor)
    sizes = zip(below.shape, below.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def requires_grad_anywhere(tensor: Tensor) -> bool:
    """Whether some level of reverse mode, torch.func's or autograd's, wants a gradient."""
    if tensor.requires_grad or not is_wrapped(tensor):
        return tensor.requires_grad
    with unseen_by_traces():
        return any(each.requires_grad for each in layers(tensor))


def is_wanted_by_func(tensor: Tensor) -> bool:
    """Whether some level of torch.func's reverse mode wants a gradient; autograd's is none."""
    with unseen_by_traces():
        return any(each.requires_grad for each in layers(tensor)[:-1])


def lost_around(tensor: Tensor) -> str | None:
    """What levels that have been left, around a region, know of a tensor; None if nothing."""
    top: Any = functorch.peek_interpreter_stack()
    running = 0 if top is None else top.level()
    # A wrapper that has ended, as `torch.func.vjp` keeps, may hold one that has not.
    with unseen_by_traces():
        around = [each for each in layers(tensor)[:-1] if level_of(each) > running]
        if any(each.requires_grad for each in around):
            return "gradient"
        if any(map(functorch.is_batchedtensor, around)):
            return "mapped dimension"
        is_pushed = dual_level_is_active() and any(map(_has_tangent, around))
    return "tangent" if is_pushed else None


def _has_tangent(wrapper: Tensor) -> bool:
    """Whether a level that has been left has a tangent of what it wraps.

    Only at that level's number torch tells, by an operator that a trace's modes refuse.
    Obsolete when it tells from below.
    """
    count = 0
    try:
        while level_of(wrapper) != functorch._jvp_increment_nesting():
            count += 1
        with _disable_current_modes():
            return dual_levels.unpack_dual(wrapper).tangent is not None
    finally:
        for _ in range(count + 1):
            functorch._jvp_decrement_nesting()


def is_pushed_below() -> bool:
    """Whether a level below this one is one of forward mode."""
    stack: Any = functorch.get_interpreter_stack() or ()
    return any(each.key() == _Kind.Jvp for each in stack[:-1])


def is_followed(tensor: Tensor) -> bool:
    """Whether a transform has wrapped a tensor, or autograd follows it in either mode."""
    if is_wrapped(tensor) or tensor.requires_grad:
        return True
    if not dual_level_is_active():
        return False
    with (
        _disable_current_modes()
    ):  # a trace around has no fake for a tensor from outside
        return dual_levels.unpack_dual(tensor).tangent is not None


def write_back(tensor: Tensor, new: Tensor, *, unseen: bool = False) -> None:
    """Gives a tensor a new value, below the transforms that have not wrapped it.

    This is how a kernel writes its statistics. torch.func refuses an in-place operator on
    a tensor from outside. Obsolete when it permits one where no gradient flows.

    A write that is `unseen`, as a kernel's of statistics, leaves the tensor's version, so that
    a backward that saved it does not raise. Obsolete when torch's kernels declare such writes.
    """
    active = current_interpreter()
    if active is not None and active[0] != "vmap":
        level = active[1].level()
        if level_of(tensor) < level:
            with lowered(active[1]):
                if active[0] == "functionalize":
                    (new,) = below_functionalize([new])
                else:
                    new = unwrap_at(new, level)
                write_back(tensor, new, unseen=unseen)
            return
    version = version_kept(tensor) if unseen else contextlib.nullcontext()
    with torch.no_grad(), version:
        put_numbers(tensor, new)


def put_numbers(tensor: Tensor, new: Tensor) -> None:
    """Writes all of a tensor; it gets another size, as a kernel may give an observer's buffer."""
    if tensor.shape != new.shape:
        tensor.resize_(new.shape)
    tensor.copy_(new)


def version_kept(*tensors: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Inside, writes to tensors do not count: no backward that saved them will raise."""
    found = itertools.chain(*map(layers, tensors))
    counted = tuple(each for each in found if not each.is_inference())
    return _grad_mode._unsafe_preserve_version_counter(counted)


def is_mapped() -> bool:
    stack = functorch.get_interpreter_stack() or ()
    return any(each.key() == _Kind.Vmap for each in stack)


def draws_in_place(tensor: Tensor) -> bool:
    """Whether vmap has a rule for a draw into a tensor: one level, which maps it or repeats the draw."""
    stack: Any = functorch.get_interpreter_stack() or ()
    maps = [each for each in stack if each.key() == _Kind.Vmap]
    if len(maps) != 1:
        return not maps
    only: Any = pyfunctorch.coerce_cinterpreter(maps[0])
    if only.randomness() == "same":
        return True
    mapped = [x for x in layers(tensor) if functorch.is_batchedtensor(x)]
    return only.level() in map(level_of, mapped)


def dual_level_is_active() -> bool:
    return dual_levels._current_level >= 0


def no_dual_level() -> contextlib.AbstractContextManager[None]:
    """Hides forward mode from code that runs below it, such as a fake mode's.

    If the arguments of a call do not match one overload, torch prints them before it tries the
    next. Printing a tensor asks for its tangent, which fails below autograd and leaves the
    thread's dispatch state broken. Obsolete when torch can trace a jvp over `x.lerp_(y, w)`.
    """
    return attributes_as(dual_levels, _current_level=-1)


def shared_dual_level() -> contextlib.AbstractContextManager[None]:
    """Lets torch.func.jvp run where the caller has opened forward mode.

    It would open the single level a second time, unless it had opened it itself.
    """
    if dual_levels._current_level < 0 or _transforms.JVP_NESTING:
        return contextlib.nullcontext()
    return attributes_as(_transforms, JVP_NESTING=1)


@contextlib.contextmanager
def dual_level_told() -> Generator[None]:
    """Tells torch.func's Python code of a level of jvp that only its C++ code knows.

    Dynamo's graphs open the level there for torch.func.jvp. Without this, tangents would not
    be noticed, and lost. Obsolete when AOTAutograd runs what torch.func.jvp runs.
    """
    stack: Any = functorch.get_interpreter_stack() or ()
    is_known = dual_levels._current_level >= 0
    if is_known or all(each.key() != _Kind.Jvp for each in stack):
        yield
        return
    opened = attributes_as(dual_levels, _current_level=0)
    with opened, attributes_as(_transforms, JVP_NESTING=_transforms.JVP_NESTING + 1):
        yield


def at_current_level(module: fx.GraphModule) -> fx.GraphModule:
    """A graph of Dynamo with its levels of torch.func renumbered for the active transforms.

    Dynamo numbers the levels by the transforms that were active where it traced the graph.
    Obsolete when its graphs count levels from where they run.
    """
    places = {
        node: _LEVELS[name]
        for node in module.graph.nodes
        if (name := getattr(node.target, "__name__", "")) in _LEVELS
    }
    first = min((node.args[place] for node, place in places.items()), default=None)
    depth = len(functorch.get_interpreter_stack() or ())
    if first is None or first == depth + 1:
        return module
    graph, env = fx.Graph(), dict[fx.Node, Any]()
    for node in module.graph.nodes:
        copied = env[node] = graph.node_copy(node, env.__getitem__)
        if node in places:
            place = places[node]
            copied.update_arg(place, node.args[place] - first + depth + 1)
    return fx.GraphModule(module, graph)
