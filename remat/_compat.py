"""The only module that imports parts of torch that carry no promise of stability.

Each shim names what would make it obsolete, or the heading of its group does. Everything
here was checked on torch 2.13 and 2.15; what fails to import names the version, so that an
upgrade fails at import and not in the middle of a training run.
"""

from __future__ import annotations

# This module is the one that may: `tests/test_house.py` keeps all others out.
# pyright: reportPrivateUsage=false
import contextlib
import functools
import importlib
import itertools
import logging
import sys
import threading
import types
import warnings
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from types import FrameType, MappingProxyType
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch._C._functorch as functorch_c
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import eager_transforms, pyfunctorch
from torch._functorch.utils import (
    enable_single_level_autograd_function,
    unwrap_dead_wrappers,
)
from torch._functorch.vmap import restore_vmap as restore_vmap
from torch._higher_order_ops.wrap import dynamo_bypassing_wrapper
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.node import has_side_effect
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree, _thunk as thunk, flop_counter
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

_Tree = TypeVar("_Tree")
_P = ParamSpec("_P")
_R = TypeVar("_R")

OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket

# The autograd.Function that sees one functorch level. Obsolete when autograd.Function
# carries its own rule for nested forward mode (pytorch #197867).
SingleLevelFunction: type[torch.autograd.Function] = _SingleLevelFunction  # pyright: ignore[reportAssignmentType]

# `call_unseen(around, function, *args)` is `around(function)(*args)`, of which Dynamo traces
# the function alone, and AOTAutograd the rest around Dynamo's graph of it. Obsolete when
# torch.compile has a public way for a library to stand around a part of a graph.
call_unseen: Callable[..., Any] = dynamo_bypassing_wrapper

enable_single_level = enable_single_level_autograd_function

# Parts of torch that it has not annotated.
_eval_frame: Any = importlib.import_module("torch._C._dynamo.eval_frame")
_guards: Any = importlib.import_module("torch._C._dynamo.guards")
_functorch_c: Any = functorch_c
_forward_ad: Any = forward_ad
_transforms: Any = eager_transforms
_torch: Any = torch
_grad_mode: Any = torch.autograd.grad_mode
_dist: Any = dist

Interpreter = pyfunctorch.FuncTorchInterpreter


# The levels of torch.func. Obsolete when it lets a primitive register its own rules, and
# tells which levels wrap a tensor.


def interpreter_is_active() -> bool:
    """Whether any torch.func transform is running on this thread."""
    return _functorch_c.peek_interpreter_stack() is not None


def current_interpreter() -> tuple[str, Any] | None:
    """The innermost running transform, as ("grad" | "jvp" | "vmap" | ..., interpreter).

    Obsolete when torch.func lets a primitive register its own rules.
    """
    top = _functorch_c.peek_interpreter_stack()
    if top is None:
        return None
    return _kind_of(top.key()), pyfunctorch.coerce_cinterpreter(top)


@functools.cache
def _kind_of(key: Any) -> str:
    # To ask an enumeration for a name takes longer than to look it up.
    return key.name.lower()


@contextlib.contextmanager
def lowered(interpreter: Any) -> Generator[None]:
    """Runs the body below `interpreter`, with both modes of differentiation on."""
    with (
        torch.enable_grad(),
        _forward_ad._set_fwd_grad_enabled(True),
        interpreter.lower(),
    ):
        yield


def lowered_vmap(interpreter: Any) -> contextlib.AbstractContextManager[Any]:
    """Runs the body below a vmap level, which leaves both modes as they are."""
    return interpreter.lower()


def leave_functorch() -> contextlib.AbstractContextManager[Any]:
    """Runs the body outside every torch.func transform."""
    return pyfunctorch.temporarily_clear_interpreter_stack()


def unwrap_at(tensor: Tensor, level: int) -> Tensor:
    """What a grad or jvp level wraps, or the tensor itself."""
    return _functorch_c._unwrap_for_grad(tensor, level)


def wrap_at(tensor: Tensor, level: int) -> Tensor:
    """The tensor as a grad or jvp level sees it."""
    return _functorch_c._wrap_for_grad(tensor, level)


def unwrap_batched(
    tensors: Sequence[Tensor], level: int
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """The tensors below a vmap level, and which dimension of each is mapped."""
    pairs = [_functorch_c._unwrap_batched(tensor, level) for tensor in tensors]
    return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)


def wrap_batched(
    tensors: Sequence[Tensor], dims: Sequence[int | None], level: int
) -> tuple[Tensor, ...]:
    """The inverse of `unwrap_batched`."""
    return tuple(
        tensor if dim is None else _functorch_c._add_batch_dim(tensor, dim, level)
        for tensor, dim in zip(tensors, dims, strict=True)
    )


def unwrap_dead(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors without the wrappers of transforms that have ended."""
    if any(map(_is_wrapped, tensors)):
        return unwrap_dead_wrappers(tuple(tensors))
    return tensors


_is_wrapped: Callable[[Tensor], bool] = _functorch_c.is_functorch_wrapped_tensor


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor below all torch.func wrappers."""
    while _functorch_c.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch_c.get_unwrapped(tensor)
    return tensor


def all_unwrapped(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors below all torch.func wrappers."""
    unwrap = _functorch_c.get_unwrapped
    while any(map(_is_wrapped, tensors)):
        tensors = [unwrap(each) if _is_wrapped(each) else each for each in tensors]
    return tensors


def below(tensor: Tensor) -> Tensor | None:
    """The tensor below the outermost torch.func wrapper, None where there is none."""
    if not _functorch_c.is_functorch_wrapped_tensor(tensor):
        return None
    # A trace sees what users' code touches, and knows the tensor but not what it wraps.
    with without_torch_function():
        return _functorch_c.get_unwrapped(tensor)


def versions_below(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """How often each was written to, below all torch.func wrappers.

    A wrapper counts what is done to itself, not what is done to the tensor that it wraps
    by those who have that. Obsolete when autograd looks there.
    """
    found = all_unwrapped(tensors)
    return tuple([-1 if each.is_inference() else each._version for each in found])


def repeats_itself(tensor: Tensor) -> bool:
    """Whether elements of a tensor, below all torch.func wrappers, share their memory."""
    below = unwrapped(tensor)
    sizes = zip(below.shape, below.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def requires_grad_anywhere(tensor: Tensor) -> bool:
    """Whether some level of reverse mode, torch.func's or autograd's, wants a gradient."""
    if tensor.requires_grad:
        return True
    if not _functorch_c.is_functorch_wrapped_tensor(tensor):
        return False
    # A trace sees what users' code touches, and knows the tensor but not what it wraps.
    with without_torch_function():
        return requires_grad_anywhere(_functorch_c.get_unwrapped(tensor))


def is_followed(tensor: Tensor) -> bool:
    """Whether a transform has wrapped a tensor, or autograd follows it in either mode."""
    if requires_grad_anywhere(tensor):
        return True
    if _functorch_c.is_functorch_wrapped_tensor(tensor):
        return True
    if not dual_level_is_active():
        return False
    with without_torch_function():
        return _forward_ad.unpack_dual(tensor).tangent is not None


def write_back(tensor: Tensor, new: Tensor, *, unseen: bool = False) -> None:
    """Gives a tensor a new value, below the transforms that have not wrapped it.

    As a kernel writes its statistics: torch.func would refuse an in-place operator on a
    tensor from outside. Obsolete when it lets one through where no gradient flows.

    Args:
        tensor: what is written.
        new: its new value.
        unseen: whether its version stays, as with statistics: who saved it before does not
            mind. Obsolete when torch's kernels tell that they write them.
    """
    active = current_interpreter()
    if active is not None and active[0] in {"grad", "jvp"}:
        level = active[1].level()
        if level_of(tensor) < level:
            with lowered(active[1]):
                write_back(tensor, unwrap_at(new, level), unseen=unseen)
            return
    version = (
        _grad_mode._unsafe_preserve_version_counter(unwrapped(tensor))
        if unseen
        else contextlib.nullcontext()
    )
    with torch.no_grad(), version:
        tensor.copy_(new)


def dual_level_is_active() -> bool:
    """Whether a `torch.autograd.forward_ad.dual_level` is open."""
    return _forward_ad._current_level >= 0


def untracked_alias(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that autograd does not take for a view.

    `autograd.Function` forbids in-place changes of outputs that are views. Obsolete when
    it lets a Function say that nobody else holds their base.
    """
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return torch.ops.aten.alias.default(tensor)


def level_of(tensor: Tensor) -> int:
    """The level of the transform that wrapped a tensor, -1 where none has."""
    return _functorch_c.maybe_get_level(tensor)


# Tensors without data, and tensors in parts. Obsolete when both can be told by public
# names; a function that says so itself has an end of its own.


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor, or a DTensor's part, has no data, below all wrappers."""
    return isinstance(local_part(unwrapped(tensor)), FakeTensor)


def is_fake_of(tensor: Tensor, mode: object) -> bool:
    """Whether it was made by this fake mode, likewise."""
    innermost = local_part(unwrapped(tensor))
    return isinstance(innermost, FakeTensor) and innermost.fake_mode is mode


def placement(tensor: Tensor) -> Any:
    """How a DTensor is spread over the ranks (its spec), None for any other tensor.

    None under vmap too, whose wrappers do not tell it: there a DTensor is taken as a whole.
    Obsolete, with the two below, when DTensor makes its spec public.
    """
    kind = _kind_of_parts()
    if kind is None:
        return None
    innermost: Any = unwrapped(tensor)
    if not isinstance(innermost, kind) or _is_mapped():
        return None
    return innermost._spec


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, when it has arrived; another tensor itself."""
    kind = _kind_of_parts()
    if kind is None or not isinstance(tensor, kind):
        return tensor
    parts: Any = tensor
    return _awaited(parts._local_tensor)


def in_place_of(local: Tensor, spec: Any, *, requires_grad: bool = False) -> Tensor:
    """The DTensor of which this rank holds `local`, as a leaf."""
    kind = _kind_of_parts()
    assert kind is not None, "there is a spec, and no DTensor"
    return kind(local, spec, requires_grad=requires_grad)


def _kind_of_parts() -> Any:
    # What has not been imported has no instances, and is slow to import.
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def _is_mapped() -> bool:
    stack = _functorch_c.get_interpreter_stack() or ()
    return any(each.key() == functorch_c.TransformType.Vmap for each in stack)


def hides_its_number(tensor: Tensor) -> bool:
    """Whether a tensor of a trace has no number that Python could read.

    Fake tensors remember small constants, which torch then reads as if they were real.
    """
    innermost = unwrapped(tensor)
    return isinstance(innermost, FakeTensor) and innermost.constant is None


def is_under_way(tensor: Tensor) -> bool:
    """Whether a tensor is the result of a collective that nobody has waited for.

    Obsolete, with the one below, when such a tensor is one of torch's own after its wait.
    """
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(tensor, module.AsyncCollectiveTensor)


def _awaited(tensor: Any) -> Tensor:
    return tensor.trigger_wait() if is_under_way(tensor) else tensor


class _Arrive(torch.autograd.Function):
    """Waits for the result of a collective; gradients flow through."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        return _awaited(args[0])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0]


def arrived(tensor: Tensor) -> Tensor:
    """The result of a collective as a plain tensor, with its gradient."""
    apply: Callable[[Tensor], Tensor] = _Arrive.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return apply(tensor)


def wraps_fakes(tensor: Tensor) -> bool:
    """Whether a tensor of a subclass is made of fake ones, as a DTensor in a trace is."""
    if not is_in_parts(tensor):
        return False
    parts: Any = tensor
    inner = [getattr(tensor, name) for name in parts.__tensor_flatten__()[0]]
    return any(isinstance(each, Tensor) and is_fake(each) for each in inner)


def is_in_parts(tensor: Tensor) -> bool:
    """Whether a tensor is of a subclass that is made of others, as DTensor is.

    Obsolete when the protocol of `__tensor_flatten__` is public.
    """
    return hasattr(tensor, "__tensor_flatten__")


class _FakeMode(FakeTensorMode):
    """Fake tensors of one home device.

    Under vmap of jvp, torch asks for zeros on "meta", which is what a fake tensor is made
    of, instead of on the device that it stands for. Obsolete when functorch's wrappers
    tell the fake device.

    With open sizes the shape of what an operator returns is asked of torch's functions in
    Python. Those in C++ need numbers in places, as `constant_pad_nd` does for each size.
    Obsolete when a fake mode with a shape environment does so by itself.
    """

    def __init__(self, home: torch.device, shape_env: Any) -> None:
        super().__init__(allow_non_fake_inputs=False, shape_env=shape_env)
        self._home = home
        self._in_python = (
            contextlib.nullcontext if shape_env is None else enable_python_dispatcher
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_stray = kwargs.get("device") == _META and self._home != _META
        if is_stray and not self.in_kernel_invocation and not tensor_leaves(args):
            kwargs = kwargs | {"device": self._home}
        with no_dual_level(), self._in_python():
            found: Any = super().__torch_dispatch__(func, types, args, kwargs)
            source = _LAID_OUT_BY.get(func)
            if source is None or args[source].device.type != "cpu":
                return found
            return (_in_format_of(found[0], args[source]), *found[1:])


#: Kernels of the CPU that lay out their first output by the memory format of an argument,
#: and which one. A fake mode takes its strides. Obsolete when torch's test of fake against
#: real strides includes these operators with transposed inputs.
_LAID_OUT_BY: dict[Any, int] = {
    torch.ops.aten.native_batch_norm.default: 0,
    torch.ops.aten.native_batch_norm_backward.default: 1,
}


def _in_format_of(output: Tensor | None, source: Tensor) -> Tensor | None:
    if output is None:
        return None
    return torch.empty_like(output, memory_format=suggest_memory_format(source))


def _are_shapes_alone(args: Any) -> bool:
    """Whether these are torch's own tensors without data, and not fake ones."""
    tensors = tensor_leaves(args)
    return bool(tensors) and all(
        type(each) is Tensor and each.device == _META for each in tensors
    )


@contextlib.contextmanager
def no_dual_level() -> Generator[None]:
    """Hides forward mode from code that runs below it, such as a fake mode's.

    Torch prints the arguments of an overload that does not match, be it only to try the
    next one. Printing a tensor asks for its tangent, which fails below autograd and leaves
    the thread's dispatch state broken. Obsolete when a trace of torch.func.jvp over
    `x.lerp_(y, w)` works on plain torch.
    """
    level = _forward_ad._current_level
    _forward_ad._current_level = -1
    try:
        yield
    finally:
        _forward_ad._current_level = level


# What is in force on this thread, and cheap checks of it. Obsolete when the public names
# are as fast: each call of a region asks.


_META = torch.device("meta")


def kernel_choices() -> tuple[str, bool, bool, bool, bool]:
    """The precision of float32 products, and which attention kernels may run.

    Read in C, because each call of a region does, three times faster than the public
    functions, which would do too.
    """
    return (
        torch._C._get_float32_matmul_precision(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )


def is_quiet() -> bool:
    """Whether this thread has no transform, no forward mode and no dispatch mode."""
    return (
        _functorch_c.peek_interpreter_stack() is None
        and _forward_ad._current_level < 0
        and not is_watched()
    )


def is_only_watched() -> bool:
    """Whether it has a dispatch mode that listens, or more, but none that records."""
    return (
        is_watched()
        and _functorch_c.peek_interpreter_stack() is None
        and _forward_ad._current_level < 0
        and not proxy_is_active()
    )


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is neither wrapped by a transform nor of a foreign subclass."""
    return type(tensor) in _OWN_KINDS and not _is_wrapped(tensor)


_OWN_KINDS = frozenset((Tensor, nn.Parameter, nn.Buffer))


def is_under_reverse_mode() -> bool:
    """Whether reverse mode is this thread's innermost transform, and nothing else listens."""
    top = _functorch_c.peek_interpreter_stack()
    return (
        top is not None
        and top.key() == functorch_c.TransformType.Grad
        and _forward_ad._current_level < 0
        and not is_watched()
    )


def is_told_by_wrapper(tensor: Tensor) -> bool:
    """Whether what a transform's wrapper shows is all that tells a tensor from others.

    It shows neither that it wraps a DTensor, nor that a level below wants a gradient.
    """
    is_own = type(tensor) in _OWN_KINDS and type(unwrapped(tensor)) in _OWN_KINDS
    return is_own and (tensor.requires_grad or not requires_grad_anywhere(tensor))


def overrides_functions(kind: type[Tensor]) -> bool:
    """Whether a subclass says for itself what functions of torch do with its tensors.

    Obsolete when torch has a public name for a class that leaves them as they are.
    """
    handler: Any = getattr(kind, "__torch_function__")  # noqa: B009
    plain: Any = getattr(Tensor, "__torch_function__")  # noqa: B009
    if handler is _torch._C._disabled_torch_function_impl:
        return False
    return getattr(handler, "__func__", handler) is not plain.__func__


def tensor_guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A check that tensors have the metadata of these: type, layout, dtype, device, grad.

    torch.compile's own guards, a tenth of the price of reading it in Python; they fail
    where autocast or inference mode is another, under torch.func if they were made outside
    of it, and outside if under. Obsolete when torch has a public name.
    """
    guards = _guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )
    return guards.check


def wrapped_guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """The same for tensors that reverse mode of torch.func may have wrapped.

    All are such that `is_told_by_wrapper` accepts them.
    """
    check = tensor_guard(tensors)
    unwanted = [k for k, tensor in enumerate(tensors) if not tensor.requires_grad]

    def is_alike(*given: Tensor) -> bool:
        return (
            check(*given)
            and _OWN_KINDS.issuperset(map(type, all_unwrapped(given)))
            and not any(requires_grad_anywhere(given[k]) for k in unwanted)
        )

    return is_alike


def thread_guard() -> Callable[[], bool]:
    """A check that a thread is in no forward mode, and its switches are as here and now.

    The switches: grad mode, and all that decides what operators compute. With it goes
    `tensor_guard`, which fails under every other transform and dispatch mode. It may fail
    where nothing has changed but the number of threads.
    """
    same_state, levels, read = state_guard(), _forward_ad, torch._C
    precision, flash = read._get_float32_matmul_precision, read._get_flash_sdp_enabled
    efficient, math = read._get_mem_efficient_sdp_enabled, read._get_math_sdp_enabled
    cudnn = read._get_cudnn_sdp_enabled
    was_precision, was_flash, was_efficient, was_math, was_cudnn = kernel_choices()

    def check() -> bool:
        return (
            levels._current_level < 0
            and same_state()
            # Of the others, the guard of the state cannot tell one from another.
            and (was_precision == "highest" or precision() == was_precision)
            and flash() is was_flash
            and efficient() is was_efficient
            and math() is was_math
            and cudnn() is was_cudnn
        )

    return check


def state_guard() -> Callable[[], bool]:
    """A check that this thread's autocast, default dtype and determinism are as now.

    torch.compile's own guard, which looks at grad mode and the number of threads as well;
    it is a fifth of the price of reading them. Obsolete when torch has a public name.
    """
    return _guards.GlobalStateGuard().check


def plain_apply(function: Any) -> Callable[..., Any]:
    """`function.apply`, for where neither a transform nor a dead wrapper meets it.

    Leaves out the Python that looks for them. Obsolete when `Function.apply` is in C.
    """
    above: Any = super(torch.autograd.Function, function)
    return above.apply


def is_batched_by_autograd(tensor: Tensor) -> bool:
    """Whether `torch.autograd.grad(is_grads_batched=True)` maps over it.

    Obsolete when that maps as torch.func does.
    """
    return functorch_c.is_legacy_batchedtensor(tensor)


def changed_since_saved(node: Any) -> list[tuple[int, Tensor]]:
    """Which of the tensors that a node of autograd saved were written to since.

    Reading them all raises for the first, and does not say which one it was. Obsolete
    when torch's error does.

    Returns:
        The place of each among the saved tensors, and the tensor as it is now.
    """
    found: list[tuple[int, Tensor]] = []
    for place, each in enumerate(node._raw_saved_tensors):
        try:
            each.unpack()
        except RuntimeError as error:
            if is_of_a_change(error):
                found.append((place, each.data))
    return found


def num_saved(node: Any) -> int:
    """How many tensors a node of autograd saved; `saved_tensors` would read them."""
    return len(node._raw_saved_tensors)


def is_of_a_change(error: RuntimeError) -> bool:
    """Whether autograd raised it because a saved tensor was written to since.

    Obsolete when torch has a class for it.
    """
    return "modified by an inplace operation" in str(error)


def detached(tensor: Tensor) -> Tensor:
    """`tensor.detach()`, of what `is_grads_batched=True` maps over too.

    torch's older vmap has no rule for `detach`, but one for views. Obsolete when
    `torch.autograd.grad` maps as torch.func does.
    """
    if not is_batched_by_autograd(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.view(tensor.shape)


def leaf_of(tensor: Tensor) -> Tensor:
    """`detached(tensor)`, or a copy where autograd records nothing of its memory."""
    return tensor.clone() if tensor.is_inference() else detached(tensor)


def forward_pre_hooks(module: torch.nn.Module) -> list[Any]:
    """What runs in front of a module's forward. Obsolete when torch has a public name."""
    hooks: Any = module._forward_pre_hooks  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return [*hooks.values()]


def pruned_name(hook: Any) -> str:
    """The parameter that a pruning method masks. Obsolete as `forward_pre_hooks`."""
    return hook._tensor_name


# What modes of torch functions see of `x.data = y`. Obsolete when torch names it.
SET_DATA: Any = cast("Any", Tensor.data).__set__


def second_places(kind: type) -> tuple[str, ...]:
    """Attributes of a module's class that hold its parameters a second time.

    Obsolete when recurrent modules read their parameters where they are registered.
    """
    is_recurrent = issubclass(kind, torch.nn.RNNBase)
    return ("_flat_weights", "_flat_weight_refs") if is_recurrent else ()


def refresh_second_places(module: object) -> None:
    """Fills these from the parameters that the module has now. Obsolete as they are."""
    if isinstance(module, torch.nn.RNNBase):
        module._update_flat_weights()


# Tracing: fakes, open sizes, `make_fx`, collectives and modes inside it. Obsolete when one
# public call traces a function and its backward, captured tensors and symbols included.


def load_tracer() -> None:
    """Imports what torch's tracer imports when it is first used, about a second of it."""
    importlib.import_module("torch._dynamo")


def traceable(func: Any) -> Any:
    """The function itself, or what does the same where torch would read numbers.

    `F.one_hot` checks its classes by value unless it sees a tensor to be a fake one, which
    it does not through the wrapper of a level of torch.func inside the trace (forward
    mode over reverse mode). Obsolete when it sees through that.
    """
    return _one_hot if func is _ONE_HOT else func


_ONE_HOT: Any = torch.nn.functional.one_hot


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0 or tensor.dtype != torch.int64:
        return _ONE_HOT(tensor, num_classes)
    # What torch makes of a fake tensor.
    classes = torch.arange(num_classes, device=tensor.device)
    return torch.eq(tensor.unsqueeze(-1), classes).to(torch.int64)


# Runs the body below autograd: nothing is recorded, and no view knows its base. Cheaper
# than `torch.no_grad` by a tenth of an operator's overhead. What shares memory shares no
# version counter. Obsolete when torch has a public name for it; inference mode is none,
# because its tensors may not be saved for a backward.
below_autograd: Callable[[], contextlib.AbstractContextManager[Any]] = (
    torch._C._AutoDispatchBelowADInplaceOrView
)


def bindings(op: Any) -> Iterator[Callable[..., Any]]:
    """The functions in C by which Python may reach an operator, public ones first.

    They take a third of the time of a call of `torch.ops`. Which operator they reach
    depends on the arguments. Obsolete when calls of overloads are as cheap.
    """
    name = op.overloadpacket.__name__
    inner: Any = torch._C
    homes: tuple[Any, ...] = (torch, Tensor, inner._nn)
    for home in homes:
        found = getattr(home, name, None)
        if isinstance(found, (types.BuiltinFunctionType, types.MethodDescriptorType)):
            yield found


def fake_mode(home: torch.device, shape_env: Any = None) -> FakeTensorMode:
    """A fresh mode for one trace: real tensors are refused.

    Sizes are constants, but for the symbols of a shape environment.
    """
    return _FakeMode(home, shape_env)


def shape_env_of(numbers: Iterable[int]) -> Any:
    """The shape environment of the first symbol among some numbers, None without one."""
    for number in numbers:
        if isinstance(number, torch.SymInt):
            return _node(number).shape_env
    return None


#: The numbers of a trace that depend on open sizes.
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class OpenSizes:
    """The symbols that stand for sizes and strides in one trace, and what it took for true.

    No two sizes share a symbol because they happen to be equal; 0 and 1 are constants, as
    everywhere in torch. Obsolete when torch.export's shape environment is public.

    Attributes:
        env: torch's shape environment.
        given: for each size and stride that was opened, in order, the Python text of what
            stands for it: a symbol, a product of symbols, or a constant.
    """

    def __init__(self) -> None:
        symbolic: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
        printers: Any = importlib.import_module("torch.utils._sympy.printers")
        self._torch = symbolic
        self._text: Callable[[Any], str] = printers.PythonPrinter().doprint
        self._symbols: list[Any] = []
        self._ranks: list[int] = []
        self.given: list[str] = []
        self.env: Any = _shape_env()(
            allow_scalar_outputs=False,
            allow_dynamic_output_shape_ops=False,
            assume_static_by_default=False,
            duck_shape=False,
        )

    def open(
        self, shape: Sequence[int], stride: Sequence[int], fixed: Sequence[bool]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and strides of one tensor as symbols, those of `fixed` dimensions aside."""
        dynamic = self._torch.DimDynamic
        context = self._torch.StatelessSymbolicContext(
            dynamic_sizes=[
                dynamic.STATIC if each else dynamic.DYNAMIC for each in fixed
            ]
        )
        sources: Any = importlib.import_module("torch._dynamo.source")
        like = torch.empty_strided(
            [hint(size) for size in shape],
            [hint(step) for step in stride],
            device="meta",
        )
        sizes, strides, _ = self.env.create_symbolic_sizes_strides_storage_offset(
            like,
            sources.ConstantSource(f"given_{len(self.given)}"),
            symbolic_context=context,
        )
        self._ranks.append(len(sizes))
        for number in (*sizes, *strides):
            self._symbols.append(_expression(number))
            self.given.append(self._text(_expression(number)))
        return tuple(sizes), tuple(strides)

    def symbol(self, place: int) -> str | None:
        """The symbol that stands for a given number alone, None if another one binds it."""
        found = self._symbols[place]
        return self.given[place] if getattr(found, "is_Symbol", False) else None

    def fixed_dimensions(self) -> tuple[tuple[int, int], ...]:
        """(tensor, dimension) whose size was a symbol, and was needed as a number."""
        found: list[tuple[int, int]] = []
        start = 0
        for tensor, rank in enumerate(self._ranks):
            for dim in range(rank):
                known = self._symbols[start + dim]
                is_symbol = self.symbol(start + dim) is not None
                if is_symbol and not self.env.replace(known).free_symbols:
                    found.append((tensor, dim))
            start += 2 * rank
        return tuple(found)

    def conditions(self) -> list[str]:
        """What must be true of other sizes, in Python, for the trace to hold for them."""
        found = [self._text(guard.expr) for guard in self.env.guards]
        for symbol, other in self.env.replacements.items():
            found.append(f"{symbol} == {self._text(other)}")
        for symbol in self._symbols:
            if getattr(symbol, "is_Symbol", False):
                bounds = self.env.var_to_range[symbol]
                found.append(f"{symbol} >= {int(bounds.lower)}")
                if bounds.upper < sys.maxsize - 1:
                    found.append(f"{symbol} <= {int(bounds.upper)}")
        return list(dict.fromkeys(found))

    def text(self, number: Any) -> str:
        """A number of the trace, in Python."""
        return self._text(number.node.expr)

    @contextlib.contextmanager
    def like_numbers(self) -> Generator[None]:
        """Inside, these symbols are numbers to code outside torch and this package.

        `isinstance(size, int)` is true, and `size > 4` is True or False. A text of a size is
        that of the number, which is then fixed: a symbol's own text would be a silently wrong
        key, or result; so is what numpy makes of it. Obsolete when torch's symbols answer so.
        """
        with _lock:
            if not _answering:
                for kind, name, hook in _answers():
                    setattr(kind, name, hook)
            _answering.append(self.env)
        try:
            yield
        finally:
            with _lock:
                _answering.remove(self.env)
                if not _answering:
                    for kind, name, _ in _answers():
                        _restore(kind, name)


@functools.cache
def _shape_env() -> type[Any]:
    symbolic: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")

    class Env(symbolic.ShapeEnv):
        """Where a rounded number is needed as a number, the sizes behind it are fixed.

        Torch itself takes the number from an expression whose terms it may have reordered,
        which has other bits.
        """

        def evaluate_sym_node(self, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
            is_whole = sym_node.pytype is int and _is_whole(sym_node.expr)
            if is_whole or sym_node.pytype is bool or sym_node.hint is None:
                torchs: Any = super()
                return torchs.evaluate_sym_node(sym_node, *args, **kwargs)
            for symbol in sym_node.expr.free_symbols:
                self.evaluate_expr(symbol)
            return sym_node.hint

    return Env


# The shape environments whose symbols answer, and what guards the list.
_answering: list[Any] = []
_lock = threading.Lock()
_INTERNAL = {"torch", "functorch", "sympy", "mpmath", "remat"}
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
# What the symbols answer by themselves.
_OWN: dict[tuple[type[Any], str], Callable[..., Any]] = {
    (kind, name): vars(kind)[name]
    for kind in SYMBOLIC
    for name in ("__repr__", *_COMPARISONS)
    if name in vars(kind)
}


def _answers() -> Iterator[tuple[type[Any], str, Callable[..., Any]]]:
    for kind in SYMBOLIC:
        yield kind, "__repr__", _text
        yield kind, "__format__", _formatted
        yield kind, "__getattribute__", _attribute
        yield kind, "__array__", _array
    for kind, name in _OWN:
        if name in _COMPARISONS and kind is not torch.SymBool:
            yield kind, name, _comparing(_OWN[kind, name])


def _restore(kind: type[Any], name: str) -> None:
    if (kind, name) in _OWN:
        setattr(kind, name, _OWN[kind, name])
    else:
        delattr(kind, name)


def _text(symbol: Any) -> str:
    if _is_users(symbol):
        asks = caller(1)
        if asks is not None and asks.f_globals.get("__name__") == "json.encoder":
            # `default=str` would make "4" of what is not a number of Python's to it.
            raise TypeError("json writes a size as an object of another class")
        return repr(number(symbol))
    return _OWN[type(symbol), "__repr__"](symbol)


def _comparing(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A comparison with a truth value of Python's own, on which the trace then rests."""

    def compared(symbol: Any, other: Any) -> Any:
        found = compare(symbol, other)
        return number(found) if _is_users(symbol) else found

    return compared


def _array(symbol: Any, *args: Any, **kwargs: Any) -> Any:
    """What numpy asks for, which would make an array of objects otherwise."""
    numpy: Any = importlib.import_module("numpy")
    return numpy.asarray(number(symbol), *args, **kwargs)


def _formatted(symbol: Any, how: str) -> str:
    if _is_users(symbol):
        return format(number(symbol), how)
    return object.__format__(symbol, how)


def _attribute(symbol: Any, name: str) -> Any:
    # `isinstance` asks the type first, and then for this.
    if name == "__class__" and _is_users(symbol):
        return next(plain for kind, plain in _SYMBOLS if kind is type(symbol))
    return object.__getattribute__(symbol, name)


def _is_users(symbol: Any) -> bool:
    """Whether it is the traced function that wants to know: for others the library asks."""
    env = getattr(_node(symbol), "shape_env", None)
    if not any(each is env for each in _answering):
        return False
    frame, package = caller(2), ""
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in sys.stdlib_module_names:
            break
        frame = frame.f_back
    return package not in _INTERNAL


def _node(number: Any) -> Any:
    return number.node


def _expression(number: Any) -> Any:
    return _node(number).expr if isinstance(number, torch.SymInt) else number


def is_exact(number: Any) -> bool:
    """Whether a number of a trace is made of whole numbers alone.

    Of others torch keeps an expression whose terms it may have reordered.
    """
    if not isinstance(number, torch.SymInt):
        return False
    return not any(each.is_Float for each in _expression(number).atoms())


def is_whole(number: Any) -> bool:
    """Whether nothing in a number of a trace is rounded before its last step."""
    return _is_whole(_node(number).expr)


def _is_whole(expression: Any) -> bool:
    return all(each.is_integer for each in _below(expression))


def _below(expression: Any) -> Iterator[Any]:
    for each in expression.args:
        yield each
        yield from _below(each)


def hint(number: Any) -> Any:
    """A size as it was in the call that is traced; anything else as it is."""
    return int(_node(number).hint) if isinstance(number, torch.SymInt) else number


def is_open(tensor: Tensor) -> bool:
    """Whether a size or stride of a tensor is a symbol of some trace."""
    return any(
        isinstance(number, torch.SymInt) for number in (*tensor.shape, *tensor.stride())
    )


def call_on_fakes(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Calls a module on tensors like its own and like the arguments, without data.

    Obsolete when `torch.subclasses` has a public mode for this.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        state, args, kwargs = map_tensors(mode.from_tensor, (own, args, kwargs))
        torch.func.functional_call(module, state, args, kwargs)


@contextlib.contextmanager
def isolated() -> Generator[None]:
    """Runs the body outside every transform and every mode of the caller."""
    with (
        leave_functorch(),
        without_inference_mode(),
        _disable_current_modes(),
        shared_dual_level(),
        _forward_ad._set_fwd_grad_enabled(True),
        # Its checks for nan read values, which fakes do not have.
        torch.autograd.set_detect_anomaly(False),
        _quiet_fakes(),
        _without_saving_hooks(),
    ):
        yield


@contextlib.contextmanager
def without_inference_mode() -> Generator[None]:
    """Lets autograd record, whether or not the caller is in inference mode.

    Nothing tells: within a level of torch.func the mode says that it is off, while what it
    excludes from dispatch still holds outside of the level. Obsolete when torch undoes both.
    """
    records = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(records):
        yield


@contextlib.contextmanager
def _without_saving_hooks() -> Generator[None]:
    """Takes the caller's saved-tensor hooks away: they would be given fake tensors."""
    autograd: Any = cast("Any", torch._C)._autograd
    hooks: list[Any] = []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(*pair)


@contextlib.contextmanager
def _quiet_fakes() -> Generator[None]:
    # Fake tensors log a traceback of each failure before they raise it.
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def shared_dual_level() -> Generator[None]:
    """Lets torch.func.jvp run where the caller has opened forward mode.

    Torch has one level of it, which torch.func.jvp opens again unless it has opened it
    itself. Obsolete with nested dual levels.
    """
    if _forward_ad._current_level < 0 or _transforms.JVP_NESTING:
        yield
        return
    _transforms.JVP_NESTING += 1
    try:
        yield
    finally:
        _transforms.JVP_NESTING -= 1


@contextlib.contextmanager
def dual_level_told() -> Generator[None]:
    """Tells torch's Python of a level of forward mode that is known in C alone.

    Dynamo's graphs open it there for torch.func.jvp. Tangents would go unnoticed, and be
    lost. Obsolete when AOTAutograd runs what torch.func.jvp runs.
    """
    stack: Any = _functorch_c.get_interpreter_stack() or ()
    jvp = _functorch_c.TransformType.Jvp
    if _forward_ad._current_level >= 0 or all(each.key() != jvp for each in stack):
        yield
        return
    _forward_ad._current_level = 0
    _transforms.JVP_NESTING += 1
    try:
        yield
    finally:
        _transforms.JVP_NESTING -= 1
        _forward_ad._current_level = -1


_tracing = threading.RLock()


@contextlib.contextmanager
def one_trace_at_a_time() -> Generator[None]:
    """Inside, no other thread traces or compiles, and a backward stays on this thread.

    Torch's tracer patches `nn.Module` and notes in one place for all threads what it has to
    put back; ours patches the classes that it watches. A thread that autograd has for a
    device must not be waited for here: what it runs may itself be waiting to trace.
    Obsolete when traces on two threads work on plain torch, and patch nothing.
    """
    with _tracing, torch.autograd.set_multithreading_enabled(False):
        yield


def make_fx(
    function: Callable[..., Any],
    args: Sequence[Tensor],
    twins: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
) -> fx.GraphModule:
    """The operators below autograd that `function` runs on the fake tensors `args`.

    Those that have a twin are recorded as what the twin runs. The module is not to be called:
    no Python is written for it, which an argument of the name `from` would spoil.
    """
    is_open_ = any(map(is_open, args))

    def run(*inputs: Tensor) -> Any:
        with _ShapesAside():
            if not is_open_:
                return function(*inputs)
            with proxy_tensor.maybe_enable_thunkify(), _SizesTracked():
                return function(*inputs)

    with _use_lazy_graph_module(True), _compiled_functions_as_written():
        return proxy_tensor.make_fx(
            run,
            decomposition_table=dict(twins),
            tracing_mode="real",
            _error_on_data_dependent_ops=True,
        )(*args)


@contextlib.contextmanager
def _compiled_functions_as_written() -> Generator[None]:
    """Has functions of torch.compile, which refuse to be traced, run what they compile.

    Obsolete when they do so in a trace by themselves.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    config: Any = _torch._dynamo.config
    with config.patch(error_on_nested_fx_trace=False):
        yield


class _ShapesAside(TorchDispatchMode):
    """Keeps from a trace what torch runs on "meta" to find out shapes.

    Where an operand has no tangent, forward mode's kernels for zeros without memory
    (`mul_zerotensor`, `add_zerotensor`) do so in the sight of every mode, and fake modes
    take such tensors for strangers. Obsolete when a trace of torch.func.jvp over layer_norm
    with a constant weight works on plain torch.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if _are_shapes_alone(args):
            with _disable_current_modes():
                return func(*args, **kwargs or {})
        return func(*args, **kwargs or {})


class _SizesTracked(TorchDispatchMode):
    """Has a trace know each whole number that depends on open sizes by itself.

    Torch's tracer records how such a number came about; it fails where one that it has not
    met is a product of three (torch 2.13) or has become a constant since. Obsolete when a
    trace of `x.sum()` with three open sizes, and of the parts of a split, works on plain
    torch.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given: Any = (args, kwargs or {})
        if proxy_is_active():
            given = pytree.tree_map_only(torch.SymInt, _tracked, given)
        return func(*given[0], **given[1])


def _tracked(number: Any) -> Any:
    if _expression(number).is_number:
        return int(_expression(number))
    if is_exact(number):
        tracer = _tracer()

        def size() -> Any:
            return number

        proxy = tracer.create_proxy("call_function", size, (), {})
        proxy.node.meta["val"] = number
        tracer.symnode_tracker[number] = thunk.Thunk(lambda: proxy)
    return number


@functools.cache
def collective_operators() -> dict[str, Any]:
    """The operators that functions of `torch.distributed` run on tensors, by name.

    Obsolete when their schemas say what they write, and waiting is an operator.
    """
    if not dist.is_available():
        return {}
    packets = (
        "allreduce_ allreduce_coalesced_ broadcast_ reduce_ allgather_ _allgather_base_ "
        "allgather_coalesced_ allgather_into_tensor_coalesced_ reduce_scatter_ "
        "_reduce_scatter_base_ reduce_scatter_tensor_coalesced_ gather_ scatter_ alltoall_ "
        "alltoall_base_ send recv_ recv_any_source_"
    )
    c10d: Any = torch.ops.c10d
    return {
        name: getattr(c10d, name).default
        for name in packets.split(" ")
        if hasattr(c10d, name)
    }


def group_of(boxed: Any) -> Any:
    """The process group that an operator is given. Obsolete as the above is."""
    return _dist.ProcessGroup.unbox(boxed)


def reduction(boxed: Any) -> str:
    """What functional collectives call a reduction. Obsolete as the above is."""
    return _dist.ReduceOp.RedOpType(boxed.op()).name.lower()


def finished_work() -> Any:
    """Work that needs no waiting for, as an operator returns it. Obsolete as the above is."""
    work = importlib.import_module("torch._C._distributed_c10d").FakeWork()
    return work.boxed()


def is_watched() -> bool:
    """Whether a dispatch mode hears each operator on this thread."""
    return torch._C._len_torch_dispatch_stack() > 0


def dispatch_modes() -> Sequence[Any]:
    """The dispatch modes of this thread, the innermost last.

    Obsolete when torch has a public name for it.
    """
    return _get_current_dispatch_mode_stack()


def run_in_mode(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operator that a dispatch mode of ours was given.

    Forward mode has zeros without memory, for which torch has its own kernels in front of a
    mode. Those of these two operators let it pass, and the next one reads what is not there:
    a segmentation fault. Obsolete when `aten.mul.Scalar` of `torch._efficientzerotensor`
    works under a mode that only runs it (torch 2.13 and 2.15 do not).
    """
    if op in _BY_SCALAR and args[0]._is_zerotensor():
        given = args[0]
        zero = torch.zeros((), dtype=given.dtype, device=given.device)
        args = (zero.expand(given.shape), *args[1:])
    return op(*args, **kwargs)


_BY_SCALAR = frozenset({torch.ops.aten.mul.Scalar, torch.ops.aten.add.Scalar})


def is_composite(op: Any) -> bool:
    """Whether an operator is other operators, on every device.

    TorchScript has overloads of its own, such as `aten.mul.default` of two numbers, which
    the dispatcher does not know and fails for.
    """
    composite: Any = torch._C.DispatchKey.CompositeImplicitAutograd
    is_known = torch._C._dispatch_has_kernel(op.name())
    return is_known and op.has_kernel_for_dispatch_key(composite)


def proxy_is_active() -> bool:
    """Whether operators are being recorded on this thread by `make_fx`."""
    return is_watched() and proxy_tensor.get_proxy_mode() is not None


def is_in_compiler() -> bool:
    """Whether AOTAutograd, torch.compile's second half, runs this thread's operators.

    Obsolete when `torch.compiler` tells that from a trace by Dynamo.
    """
    functional: Any = torch._C._TorchDispatchModeKey.FUNCTIONAL
    return _torch._C._get_dispatch_mode(functional) is not None


def active_graph() -> fx.Graph:
    """The graph that `make_fx` is filling on this thread."""
    return _tracer().graph


def _tracer() -> Any:
    mode: Any = proxy_tensor.get_proxy_mode()
    assert mode is not None, "no trace is running"
    return mode.tracer


_GRAD_MODE = frozenset({torch.ops.aten.mkldnn_rnn_layer.default})


def needs_grad_mode(op: Any) -> bool:
    """Whether a kernel asks for grad mode to learn if a backward will follow.

    mkldnn's recurrent layers hand out no workspace without. Obsolete when they go by their
    argument `train`.
    """
    return op in _GRAD_MODE


def with_grad_mode(op: Any) -> Callable[..., Any]:
    """The operator below autograd, with grad mode on."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
            return op(*args, **kwargs)

    return run


def draws_alike(interpreter: Any) -> bool:
    """Whether a vmap level gives every example the same random numbers."""
    return interpreter.randomness() == "same"


@contextlib.contextmanager
def autocast_cache(enabled: bool) -> Generator[None]:
    """Keeps autocast's casts of weights, or not; `make_fx` turns that off."""
    found = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(found)


def unrecorded() -> contextlib.AbstractContextManager[Any]:
    """Runs the body without recording it in the trace being made."""
    return proxy_tensor.disable_proxy_modes_tracing()


def add_placeholder(tensor: Tensor, name: str) -> None:
    """Adds an input, found while the trace runs, to the graph being filled."""
    tracer = _tracer()
    first_call = next(
        (node for node in tracer.graph.nodes if node.op != "placeholder"), None
    )
    where = (
        contextlib.nullcontext()
        if first_call is None
        else tracer.graph.inserting_before(first_call)
    )
    with where:
        proxy = tracer.create_proxy("placeholder", name, (), {})
    proxy_tensor.track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)


def functionalized(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its in-place operators replaced, its views kept.

    As torch.func.functionalize does it, but not as a transform: where one is active, torch
    takes some operators apart (binary_cross_entropy_with_logits), which changes bits.
    Obsolete when torch.func.functionalize leaves those operators whole.
    """

    def run(*args: Tensor) -> list[Tensor | None]:
        with _functionalization_permitted():
            return replaced(args)

    def replaced(args: tuple[Tensor, ...]) -> list[Tensor | None]:
        _torch._enable_functionalization(reapply_views=True)
        try:
            wrapped = [_torch._to_functional_tensor(each) for each in args]
            outputs = [
                None if each is None else _from_functional(each)
                for each in function(*wrapped)
            ]
            for given, each in zip(args, wrapped, strict=True):
                changed = _from_functional(each)
                if changed is not given:
                    given.copy_(changed)
            return outputs
        finally:
            _torch._disable_functionalization()

    return run


def is_functionalized(op: Any) -> bool:
    """Whether torch knows how to replace an in-place operator. Obsolete as `functionalized`."""
    return _torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Functionalize")


def put_for(tensor: Tensor, new: Tensor) -> None:
    """Writes `new` to a tensor inside of `functionalized`. Obsolete as that is.

    `copy_` would do the same by a copy of its own.
    """
    _torch._functionalize_replace(tensor, _from_functional(new))
    _torch._functionalize_commit_update(tensor)
    _torch._sync(tensor)


def _functionalization_permitted() -> contextlib.AbstractContextManager[Any]:
    # AOTAutograd switches this key off around all that it calls.
    excluded: Any = _torch._C._dispatch_tls_local_exclude_set()
    return _torch._C._ForceDispatchKeyGuard(
        _torch._C._dispatch_tls_local_include_set(),
        excluded.remove(torch._C.DispatchKey.Functionalize),
    )


def _from_functional(tensor: Tensor) -> Tensor:
    if not _torch._is_functional_tensor(tensor):
        return tensor
    _torch._sync(tensor)
    return _torch._from_functional_tensor(tensor)


# FLOPs by operator. Obsolete when the registry of torch.utils.flop_counter is public.


def flops_of(op: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs of one operator by torch's own formulas, 0 where it has none.

    The CPU's attention has none in torch 2.13, and takes those of its likes. Most formulas
    look at shapes alone, and are asked once for equal ones; those that look at numbers
    (attention over ragged sequences) tell nothing of shapes: 0.

    Args:
        op: the operator.
        args: its arguments: tensors, or shapes in their place.
        kwargs: likewise.
        out: what it returns, likewise.
    """
    formula = _formula_of(op)
    if formula is None:
        return 0
    if getattr(formula, "_get_raw", False):
        has_numbers = any(isinstance(each, Tensor) for each in args)
        return int(formula(*args, **kwargs, out_val=out)) if has_numbers else 0
    try:
        return _flops_at(formula, _shapes(args), _shapes(kwargs), _shapes(out))
    except TypeError:  # an argument that does not hash
        return int(formula(*args, **kwargs, out_val=out))


@functools.lru_cache(maxsize=4096)
def _flops_at(formula: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> int:
    return int(formula(*args, **dict(kwargs), out_val=out))


def _shapes(tree: Any) -> Any:
    """Arguments with shapes in place of tensors, to be hashed."""
    if isinstance(tree, Tensor):
        return tree.shape
    if isinstance(tree, torch.Size):
        return tree
    if isinstance(tree, tuple | list):
        return tuple(map(_shapes, cast("Sequence[Any]", tree)))
    if isinstance(tree, dict):
        given = cast("dict[str, Any]", tree)
        return tuple((name, _shapes(each)) for name, each in given.items())
    return tree


def has_flops(op: Any) -> bool:
    """Whether torch has a formula for the FLOPs of an operator, see `flops_of`."""
    return _formula_of(op) is not None


def _formula_of(op: Any) -> Callable[..., Any] | None:
    packet = getattr(op, "overloadpacket", op)
    registry = flop_counter.flop_registry
    return registry.get(packet) or registry.get(_COUNTED_AS.get(packet))


_aten: Any = torch.ops.aten
_COUNTED_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_efficient_attention_backward,
}


# Operators of this package. Obsolete when torch annotates torch.library.


@functools.cache
def library() -> Any:
    """The namespace of this package's own operators: a library that torch types poorly."""
    return torch.library.Library("remat", "DEF")


def register_fake(name: str, function: Callable[..., Tensor]) -> None:
    """Says what an operator of this package returns for tensors without data."""
    api: Any = torch.library
    api.register_fake(f"remat::{name}", function, lib=library())


def define(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    tags: tuple[torch.Tag, ...],
) -> Any:
    """Makes an operator of this package, the same for every device."""
    library().define(name + schema, tags=tags)
    library().impl(name, kernel, "CompositeExplicitAutograd")
    register_fake(name, fake)
    return getattr(torch.ops.remat, name).default


def register_vmap(name: str, function: Callable[..., Any]) -> None:
    """Says how an operator of this package is mapped."""
    api: Any = torch.library
    api.register_vmap(f"remat::{name}", function, lib=library())


# Draws from keys. Obsolete as `has_philox` is.


_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}
_PHILOX = (
    "_philox_key_split",
    "_philox_uniform_",
    "_philox_normal_",
    "_philox_randint_",
)


@functools.cache
def has_philox(device_type: str) -> bool:
    """Whether torch has stateless kernels for a kind of device: a CPU's since 2.15.

    Obsolete, with all that draws without them, when the oldest supported torch has them
    on every device.
    """
    return device_type in _DISPATCH_KEYS and all(
        hasattr(torch.ops.aten, name)
        and torch._C._dispatch_has_kernel_for_dispatch_key(
            f"aten::{name}", _DISPATCH_KEYS[device_type]
        )
        for name in _PHILOX
    )


def philox_split(keys: Tensor, num: int) -> Tensor:
    """Keys of shape (key, 2) -> (num, key, 2).

    This and the three below are obsolete when `torch.func._random` becomes public.
    """
    return torch.ops.aten._philox_key_split(keys, num)


def philox_uniform(out: Tensor, keys: Tensor, low: float, high: float) -> Tensor:
    """Fills (key, number) from keys of shape (key, 1, 2)."""
    return torch.ops.aten._philox_uniform_(out, keys, low, high)


def philox_normal(out: Tensor, keys: Tensor, mean: float, std: float) -> Tensor:
    """Fills (key, number) from keys of shape (key, 1, 2)."""
    return torch.ops.aten._philox_normal_(out, keys, mean, std)


def philox_integers(out: Tensor, keys: Tensor, low: int, span: int) -> Tensor:
    """Fills (key, number) from keys of shape (key, 1, 2)."""
    info = torch.iinfo(out.dtype)
    end = low + span
    # A bound goes as the int64 with its bits; None is the end of the dtype's range.
    bounds = [value - (1 << 64) * (value >= 1 << 63) for value in (low, end)]
    high = None if end == info.max + 1 else bounds[1]
    return torch.ops.aten._philox_randint_(out, keys, bounds[0], high)


# The engine and the graph of autograd, and what `fully_shard` hangs on it. Obsolete when
# torch annotates `backward`, and gives the rest public names.


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread.

    Obsolete when torch makes the function public by which its hooks ask.
    """
    return torch._C._current_graph_task_id() != -1


def graph_task() -> int:
    """The number of the run of autograd on this thread. Obsolete as `in_backward` is."""
    return torch._C._current_graph_task_id()


def will_execute(node: Any) -> bool:
    """Whether the backward that is under way on this thread runs a node of autograd's.

    Obsolete when torch makes the function public by which its own checkpoint asks.
    """
    return torch._C._will_engine_execute_node(node)


def backward(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor]
) -> None:
    """`torch.autograd.backward`, which torch has not annotated."""
    function: Any = torch.autograd.backward
    function(outputs, cotangents, inputs=inputs)


def is_plain_autograd() -> bool:
    """Whether this thread has no transform, no forward mode and no trace."""
    return (
        _functorch_c.peek_interpreter_stack() is None
        and _forward_ad._current_level < 0
        and not proxy_is_active()
    )


def is_idle(module: Any) -> bool:
    """Whether a module of `fully_shard` is in no forward or backward.

    Obsolete when torch tells the state of such a module.
    """
    return module._get_fsdp_state()._training_state.name == "IDLE"


def sharded_parameters(module: Any) -> list[Tensor]:
    """What stands at the places of the parameters that `fully_shard` splits.

    It leaves out those of modules in it that are sharded apart, and `ignored_params`.
    Obsolete when torch lists them.
    """
    groups: Any = module._get_fsdp_state()._fsdp_param_groups
    places = [each._module_info for group in groups for each in group.fsdp_params]
    return [getattr(place.module, place.param_name) for place in places]


@contextlib.contextmanager
def called_again(module: Any) -> Generator[None]:
    """Inside, a call of a module of `fully_shard` in a backward is a forward of its own.

    After its first backward, and until autograd ends, torch takes each call for the
    recomputation of a forward whose hooks are there already. And a forward would gather
    ahead of the modules that follow it, which a backward has done with. Obsolete when torch
    can be told what a call is.
    """
    state: Any = module._get_fsdp_state()
    if state._training_state.name == "PRE_BACKWARD":
        state._training_state = state._training_state.__class__.IDLE
    ahead = state._states_to_forward_prefetch
    state._states_to_forward_prefetch = []
    try:
        yield
    finally:
        state._states_to_forward_prefetch = ahead


def at_end_of_task(function: Callable[[], None]) -> None:
    """Calls a function when the run of autograd that is under way ends without an error.

    Obsolete when torch makes the engine's callbacks public.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def node_number(node: Any) -> int:
    """Of two nodes of autograd on one thread the later one has the larger number.

    Obsolete when torch gives `Node._sequence_nr` a public name.
    """
    return node._sequence_nr()


# What torch knows of an operator, a tensor or a pytree, by names that it has not made
# public or not annotated: obsolete when it does.


def schema_of(op: Any) -> Any:
    """The schema of an operator of `torch.ops`. Obsolete when overloads show theirs."""
    return op._schema


def is_view(tensor: Tensor) -> bool:
    """Whether autograd takes a tensor for a view. Obsolete when torch has a public name."""
    return tensor._is_view()


def without_torch_function() -> contextlib.AbstractContextManager[Any]:
    """Runs the body hidden from the torch-function modes, such as a trace's.

    Obsolete when torch makes the one of its two switches public that leaves subclasses on.
    """
    return torch._C.DisableTorchFunction()


def torch_function_state() -> Any:
    """Whether subclasses and modes handle functions of torch on this thread."""
    return _torch._C._get_torch_function_state()


@contextlib.contextmanager
def torch_function_as(state: Any) -> Generator[None]:
    """Inside, they do so as they did: `loss.backward()` turns subclasses off for its time.

    It does where the loss is of a subclass. Obsolete when a backward does not.
    """
    before = torch_function_state()
    _torch._C._set_torch_function_state(state)
    try:
        yield
    finally:
        _torch._C._set_torch_function_state(before)


@contextlib.contextmanager
def own_parametrizations() -> Generator[None]:
    """Inside, `torch.nn.utils.parametrize.cached()` starts with nothing, and leaves nothing.

    What it keeps belongs to one run, on stand-ins. Obsolete when its cache is public.
    """
    if not parametrize._cache_enabled:  # pyright: ignore[reportUnknownMemberType]
        yield
        return
    before, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = before


def caller(depth: int) -> FrameType | None:
    """The frame `depth` calls above the function that asks, which is 0.

    Obsolete when Python has a public function that does not build the whole stack.
    """
    return sys._getframe(depth + 1)


def keep_in_traces(op: Any) -> None:
    """Tells dead-code elimination that an operator without users matters."""
    has_side_effect(op)


def leave_out_of_compilers(op: Any) -> None:
    """Has AOTAutograd take an operator that returns nothing for nothing at all.

    Obsolete when it drops what only Dynamo's graphs are to hold.
    """
    op.py_impl(FunctionalTensorMode)(_nothing)


def _nothing(*_: Any) -> None:
    """What an operator does that is left out."""


def tensor_leaves(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of a pytree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], tree: _Tree) -> _Tree:
    """A pytree with `function` applied to its tensors."""
    return pytree.tree_map_only(Tensor, function, tree)


def is_lift(node: fx.Node) -> bool:
    """Whether a node brings a real tensor that was just made into the trace."""
    lifts = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
    return node.target in lifts


def reads_arrays(args: Any) -> bool:
    """Whether a numpy array is among the arguments of a call."""
    return any(
        type(leaf).__module__ == "numpy"
        for leaf in pytree.tree_leaves(args)
        if hasattr(leaf, "__array_interface__")
    )


def shares_storage(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have their numbers in the same memory."""
    return storage_key(one) == storage_key(other)


def tensor_without_data(kind: type[Any], like: Tensor) -> Any:
    """A tensor of a subclass with the metadata of another and no memory.

    Obsolete when torch gives `Tensor._make_wrapper_subclass` a public name.
    """
    return Tensor._make_wrapper_subclass(  # pyright: ignore[reportUnknownMemberType]
        kind,
        like.shape,
        strides=like.stride(),
        dtype=like.dtype,
        device=like.device,
    )


def storage_key(tensor: Tensor) -> int:
    """One number for all tensors that share memory, fake ones too."""
    return key_of(tensor.untyped_storage())


def key_of(storage: torch.UntypedStorage) -> int:
    """A number that no other living storage has. Obsolete when torch makes one public."""
    return storage._cdata


@contextlib.contextmanager
def lifted_function_apply(lift: Callable[[Tensor], Tensor]) -> Generator[None]:
    """Lifts the arguments of users' `autograd.Function`s on this thread.

    `Function.apply` is not a torch function, so that a mode does not see it. Obsolete when it
    becomes one.
    """
    thread = threading.get_ident()
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            args, kwargs = map_tensors(lift, (args, kwargs))
        return original.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original


def is_below_autograd() -> bool:
    """Whether autograd has passed on what runs now, and records nothing of it.

    So it is in operators that C++ calls (TorchScript's interpreter) once a mode has them.
    Obsolete when such calls are torch functions.
    """
    return torch._C._dispatch_tls_is_dispatch_key_excluded(  # pyright: ignore[reportPrivateUsage]
        torch._C.DispatchKey.AutogradFunctionality  # pyright: ignore[reportPrivateUsage]
    )


# What tracing raises when a function needs the values of a tensor.
UNTRACEABLE = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)


def takes_functions(error: Exception) -> bool:
    """Whether a trace met an operator that takes functions, such as `torch.cond`.

    Obsolete when such operators ask every mode as others do.
    """
    text = "There was no rule registered for HigherOrderOperator"
    return isinstance(error, NotImplementedError) and text in str(error)


def needs_values(error: Exception) -> bool:
    """Whether an error says that a trace would have needed the data of a tensor."""
    return isinstance(error, UNTRACEABLE) or any(
        words in str(error)
        for words in (
            "trying to get a value out of a tracing tensor",
            "Please convert all Tensors to FakeTensors first",
            "Cannot access data pointer of Tensor",
            "data is not allocated yet",
            ".numpy() is not supported",
            "passed to FakeTensor.__format__",
            "Can't call numpy()",
            # Nested tensors, which learn their lengths from values.
            "does not support tracing with fx.symbolic_trace",
        )
    )


def new_nodes(graph: fx.Graph, count: int) -> Iterator[fx.Node]:
    """The last `count` nodes of a graph being filled, newest first."""
    nodes = reversed(graph.nodes)
    for _ in range(count):
        yield next(nodes)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a pytree and what puts them together again."""
    return pytree.tree_flatten(tree)


def unflatten(leaves: Sequence[Any], spec: Any) -> Any:
    """The inverse of `flatten`."""
    return pytree.tree_unflatten(leaves, spec)


def leaves_up_to(tree: Any, spec: Any) -> list[Any]:
    """The subtrees of a pytree at the leaves of a spec.

    Raises:
        ValueError: the pytree has another structure.
    """
    return spec.flatten_up_to(tree)


def leaves_with_path(tree: Any) -> list[tuple[list[str], Any]]:
    """The leaves of a pytree, each with the keys that lead to it.

    A type that was registered without names for its parts gets numbers: torch raises.
    """
    leaves, spec = pytree.tree_flatten(tree)
    return list(zip(_paths(tree, spec), leaves, strict=True))


def _paths(tree: Any, spec: Any) -> list[list[str]]:
    if spec.is_leaf():
        return [[]]
    node = pytree.SUPPORTED_NODES[spec.type]
    parts: list[Any] = list(node.flatten_fn(tree)[0])
    keys = [str(index) for index in range(len(parts))]
    if node.flatten_with_keys_fn is not None:
        keys = [_key_text(key) for key, _ in node.flatten_with_keys_fn(tree)[0]]
    return [
        [key, *path]
        for key, part, inner in zip(keys, parts, spec.children(), strict=True)
        for path in _paths(part, inner)
    ]


def _key_text(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold the same bits: nan equals itself, -0.0 is not 0.0."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    bits = [
        # A column of one row is contiguous in torch's eyes, whatever its stride.
        each.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)
        for each in (first, second)
        if each.numel()
    ]
    return not bits or torch.equal(*bits)


# Dynamo and the graphs that it makes. Obsolete when a library can tell torch.compile in
# public what a region is.


def unseen_by_dynamo(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keeps torch.compile from frames of the function, and of all that it calls.

    `torch.compiler.disable` does so by a wrapper, and imports Dynamo at once, which takes a
    second. Obsolete when Dynamo leaves a package alone that asks for it.
    """
    skip = _eval_frame._FrameAction.SKIP
    code = cast("types.FunctionType", function).__code__
    _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(skip, skip))
    return function


def end_graph(why: str) -> None:
    """Ends the graph that Dynamo makes, or with `fullgraph=True` raises what says why.

    Obsolete when `torch.compiler` has a public name for it.
    """
    _torch._dynamo.graph_break(msg=why)


def constant_for_dynamo(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Has Dynamo call a function as it traces, and take the result for a constant.

    `torch.compiler.assume_constant_result` does so, and imports Dynamo at once.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def compilation() -> object:
    """What stands for one frame's way through Dynamo, with all its attempts, if any is on.

    Obsolete when a backend may end the graph at a node.
    """
    return _torch._guards.CompileContext.try_get()


def take_floats_for_constants() -> None:
    """Has Dynamo take each float that it meets from here on for a constant, and guard it.

    In the frame that it traces, to the end. Otherwise a float that has changed becomes an
    input, and fails in the second subgraph that reads it. Obsolete when a float that two
    `torch.utils.checkpoint` regions read may change under torch.compile.
    """
    _torch._dynamo.comptime.comptime(_specialize_floats)


def _specialize_floats(context: Any) -> None:
    config: Any = _torch._dynamo.config
    if config.specialize_float:
        return
    config.specialize_float = True
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    translator.output.add_cleanup_hook(
        lambda: setattr(config, "specialize_float", False)
    )


def number(symbol: Any) -> Any:
    """What a symbol of torch.compile stands for, which is then guarded.

    What is not one comes back. Obsolete, like the next, when graphs may hold for all sizes.
    """
    for symbolic, plain in _SYMBOLS:
        if isinstance(symbol, symbolic):
            return plain(symbol)
    return symbol


_SYMBOLS: tuple[tuple[type[Any], Callable[[Any], Any]], ...] = (
    (torch.SymInt, int),
    (torch.SymFloat, float),
    (torch.SymBool, bool),
)


def why_open(symbol: Any) -> str:
    """What a symbol of torch.compile depends on that has to stay open, if on anything.

    A size that the user has marked by `torch._dynamo.mark_dynamic`, where torch raises once
    a guard settles it; or a number that no example tells. Obsolete when a `SymInt` can be
    asked for its constraint.
    """
    if not isinstance(symbol, tuple(symbolic for symbolic, _ in _SYMBOLS)):
        return ""
    node = _node(symbol)
    if not node.has_hint():
        return f"{symbol}, a number that only values tell"
    for tracked in node.shape_env.tracked_fakes or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", ())
        for dim, constraint in enumerate(constraints):
            is_asked = constraint is not None and not constraint.warn_only
            size: Any = tracked.fake.shape[dim] if is_asked else None
            if is_asked and not node.expr.free_symbols.isdisjoint(
                _expression(size).free_symbols
            ):
                return f"dimension {dim} of {tracked.source.name}, marked as dynamic"
    return ""


# Where the level is among the arguments, of what names one in a graph of Dynamo's.
_LEVELS = {
    "_add_batch_dim": 2,
    "_remove_batch_dim": 1,
    "_wrap_for_grad": 1,
    "_unwrap_for_grad": 1,
}


def at_current_level(module: fx.GraphModule) -> fx.GraphModule:
    """A graph of Dynamo's as it would be, had Dynamo met it among the active transforms.

    torch.func's transforms inside it have the numbers of the place where it was met.
    Obsolete when Dynamo's graphs count levels from where they run.
    """
    places = {
        node: _LEVELS[name]
        for node in module.graph.nodes
        if (name := getattr(node.target, "__name__", "")) in _LEVELS
    }
    first = min((node.args[place] for node, place in places.items()), default=None)
    depth = len(_functorch_c.get_interpreter_stack() or ())
    if first is None or first == depth + 1:
        return module
    graph, env = fx.Graph(), dict[fx.Node, Any]()
    for node in module.graph.nodes:
        copied = env[node] = graph.node_copy(node, env.__getitem__)
        if node in places:
            place = places[node]
            copied.update_arg(place, node.args[place] - first + depth + 1)
    return fx.GraphModule(module, graph)


def trace_again() -> Exception:
    """What makes Dynamo trace the frame again from its beginning, raised by a backend.

    Of the two kinds of which it is, the one passes what calls the backend, the other has
    Dynamo forget where it went. Obsolete when a backend may end the graph at a node.
    """
    exc: Any = _torch._dynamo.exc
    kinds = (exc.UnspecializeRestartAnalysis, exc.TensorifyScalarRestartAnalysis)
    return type("TraceAgain", kinds, {})()


def traced_as(
    other: Callable[..., Any],
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Has Dynamo trace another function in place of one that users call.

    Where the other ends the graph, and outside one, the function itself runs, unseen.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if torch.compiler.is_dynamo_compiling():
                return other(*args, **kwargs)
            return function(*args, **kwargs)

        return unseen_by_dynamo(run)

    return decorate


# What runs a graph instead of Python: Inductor, and the interpreter in C.


#: Inductor would move the gradients of weights to the end, and keep all that they read. A
#: program is in the order in which it holds least. Sizes were checked where it was chosen.
_INDUCTOR = {
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "size_asserts": False,
}


def inductor(
    module: fx.GraphModule, inputs: Sequence[Tensor], *, wrapper_in_cpp: bool
) -> Callable[..., Any]:
    """A graph compiled for tensors like these; takes one list of them, which it empties.

    What calls the kernels is written in Python, or in C++: that takes the C++ compiler
    seconds more, and each call of a kernel microseconds less.

    Who calls a function holds its arguments until it returns, so that compiled code can let
    go only of what is in a list. It takes one for a module in Dynamo's wrapper. Obsolete when
    `torch._inductor.compile`, which torch documents, loses its underscore and has a way to
    hand inputs over.
    """
    compiler: Any = importlib.import_module("torch._inductor")
    dynamo: Any = importlib.import_module("torch._dynamo.utils")
    from_list = dynamo.GmWrapper(module, list)
    options = {**_INDUCTOR, "cpp_wrapper": wrapper_in_cpp}
    return compiler.compile(from_list, list(inputs), options=options)


_MEMORY_FORMATS = (
    torch.contiguous_format,
    torch.preserve_format,
    torch.channels_last,
    torch.channels_last_3d,
)
_interpreter: Any = torch._C


class Interpreted:
    """A graph for torch's own interpreter: no Python runs between its operators.

    It runs as it is written: what TorchScript's executor would fuse or specialize is off.
    Its parts are alike in torch 2.13 and 2.15. Obsolete when torch has a public way to run
    a list of operators in one call.
    """

    def __init__(self) -> None:
        self._graph: Any = _interpreter.Graph()

    def inputs(self, count: int) -> list[Any]:
        """The tensors that the function takes, in the order of its list."""
        given = self._graph.addInput()
        given.setType(_interpreter.ListType.ofTensors())
        return self.unpack(given, count)[::-1]

    def call(self, op: OpOverload, arguments: Mapping[str, Any]) -> list[Any]:
        """The values that an operator makes of values and literals, all of them by name.

        Raises:
            LookupError: the interpreter finds another overload for these arguments.
        """
        schema: Any = op._schema
        inputs = [
            self._argument(arguments[declared.name], declared.type)
            for declared in schema.arguments
        ]
        node = self._node(schema.name, inputs, len(schema.returns))
        made = list(node.outputs())
        for each, declared in zip(made, schema.returns, strict=True):
            each.setType(declared.type)
        if node.schema() != str(schema):
            raise LookupError(f"the interpreter takes {node.schema()} for {schema}")
        return made

    def unpack(self, tensors: Any, count: int) -> list[Any]:
        """The members of a list of tensors."""
        return list(self._node("prim::ListUnpack", [tensors], count).outputs())

    def function(
        self, outputs: Sequence[Any]
    ) -> Callable[[list[Tensor]], list[Tensor]]:
        """The graph as a function of a list, which it empties, that returns these values."""
        self._graph.registerOutput(self._list(outputs, _interpreter.TensorType.get()))
        run: Any = _interpreter._create_function_from_graph("remat", self._graph)

        def as_written(inputs: list[Tensor]) -> list[Tensor]:
            found = _interpreter._get_graph_executor_optimize()
            _interpreter._set_graph_executor_optimize(False)
            # The interpreter reads them all before it runs: from then on, it alone has them.
            drained = map(inputs.pop, itertools.repeat(-1, len(inputs)))
            try:
                return run(drained)
            finally:
                _interpreter._set_graph_executor_optimize(found)

        return as_written

    def _node(self, kind: str, inputs: Sequence[Any], count: int) -> Any:
        return self._graph.insertNode(self._graph.create(kind, list(inputs), count))

    def _argument(self, argument: Any, declared: Any) -> Any:
        if isinstance(argument, _interpreter.Value):
            return argument
        if argument is None:
            return self._graph.insertConstant(None)
        if isinstance(declared, _interpreter.OptionalType):
            declared = declared.getElementType()
        if isinstance(argument, (list, tuple)):
            return self._list(
                cast("Sequence[Any]", argument), declared.getElementType()
            )
        if isinstance(argument, torch.memory_format):
            argument = _MEMORY_FORMATS.index(argument)
        if str(declared) == "float":
            argument = float(argument)
        return self._graph.insertConstant(argument)

    def _list(self, items: Sequence[Any], declared: Any) -> Any:
        made = [self._argument(item, declared) for item in items]
        node = self._node("prim::ListConstruct", made, 1)
        node.output().setType(_interpreter.ListType(declared))
        return node.output()


# Collectives, and a peer's policies.


def start_gather(out: Tensor, part: Tensor, group: Any) -> Any:
    """Begins to gather the parts of all ranks into `out`; the result has `wait`.

    torch 2.13 calls this function deprecated, and 2.15 took that back. Obsolete, and a call
    of torch's own, when 2.13 is no longer supported.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*gather.*")
        return _dist.all_gather_into_tensor(out, part, group=group, async_op=True)


def gather_records(record: Tensor, group: Any) -> list[Tensor]:
    """The records of all ranks, of one shape and dtype. Obsolete when torch types it."""
    found = [torch.empty_like(record) for _ in range(_dist.get_world_size(group))]
    _dist.all_gather(found, record, group=group)
    return found


def ranks_of(group: Any) -> list[int]:
    """The ranks of a process group. Obsolete when torch types it."""
    return _dist.get_process_group_ranks(group)


def selective_policy(context: object) -> Callable[..., Any] | None:
    """The policy of a context of torch's own selective checkpointing, None of another.

    Looked up by the class's module, so that torch.utils.checkpoint is not imported. Obsolete
    when torch lets one ask such a context for its policy.
    """
    is_of_torch = type(context).__module__ == "torch.utils.checkpoint"
    return getattr(context, "policy_fn", None) if is_of_torch else None


def picked_as_a_whole(policy: Any, model: Any) -> dict[Any, dict[str, Any]] | None:
    """The modules, and options for each, that a policy of FSDP's picks out of a model.

    None for a policy that is asked about one module after the other. Obsolete when torch
    has a public way to ask `torch.distributed.fsdp.wrap.CustomPolicy`.
    """
    if callable(policy) or not hasattr(policy, "_run_policy"):
        return None
    return policy._run_policy(model, ignored_modules=set(), root_kwargs={})
