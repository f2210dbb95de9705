"""The only module that imports parts of torch that carry no promise of stability.

Each shim names what would make it obsolete, or the heading of its group does. Everything
here was checked on torch 2.13 and 2.15; what fails to import names the version, so that an
upgrade fails at import and not in the middle of a training run.
"""

from __future__ import annotations

# This module is the one that may: `tests/test_house.py` keeps all others out.
# pyright: reportPrivateUsage=false
import contextlib
import dataclasses
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
    TorchDispatchMode,
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

# `call_unseen(around, function, *args)` is `around(function)(*args)`. Dynamo traces only the
# function; AOTAutograd then runs `around` on Dynamo's graph of it. Obsolete when torch.compile
# has a public way for a library to wrap a part of a graph.
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


class DispatchMode(TorchDispatchMode):
    """The base of dispatch modes. Obsolete when torch annotates the `__init__` of its own."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]


# The levels of torch.func. Obsolete when a primitive can register its own rules there, and
# when torch.func tells which levels wrap a tensor.


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
    # A look-up is faster than asking an enumeration for a name.
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
    """How often each tensor was written to, below all torch.func wrappers.

    A wrapper has a counter of its own, which misses writes to the tensor that it wraps.
    Obsolete when autograd looks at the counter of the wrapped tensor.
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

    This is how a kernel writes its statistics. torch.func refuses an in-place operator on
    a tensor from outside. Obsolete when it permits one where no gradient flows.

    Args:
        tensor: what is written.
        new: its new value.
        unseen: whether its version stays the same, as when a kernel writes statistics, so
            that a backward that saved the tensor does not raise. Obsolete when torch's
            kernels declare that they write statistics.
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

    `autograd.Function` forbids in-place changes of outputs that are views. Obsolete when a
    Function can declare that nothing else holds their base.
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
    """Whether a tensor, or a DTensor's part, was made by this fake mode."""
    innermost = local_part(unwrapped(tensor))
    return isinstance(innermost, FakeTensor) and innermost.fake_mode is mode


def placement(tensor: Tensor) -> Any:
    """How a DTensor is spread over the ranks (its spec), None for any other tensor.

    None under vmap too, whose wrappers hide it: a DTensor is traced as a whole there.
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
    """This rank's part of a DTensor, once it has arrived; any other tensor as it is."""
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
    # Importing it is slow, and a class that is not imported has no instances.
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def _is_mapped() -> bool:
    stack = _functorch_c.get_interpreter_stack() or ()
    return any(each.key() == functorch_c.TransformType.Vmap for each in stack)


def hides_its_number(tensor: Tensor) -> bool:
    """Whether a tensor of a trace has no number that Python could read.

    torch reads the numbers of small constants, which fake tensors remember.
    """
    innermost = unwrapped(tensor)
    return isinstance(innermost, FakeTensor) and innermost.constant is None


def is_under_way(tensor: Tensor) -> bool:
    """Whether a tensor is the result of a collective that is still to be waited for.

    Obsolete, with the function below, when such a tensor is a plain one after its wait.
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

    Under vmap of jvp, torch asks for zeros on "meta", the device of a fake tensor's inside,
    instead of on the device that it stands for. Obsolete when functorch's wrappers tell the
    fake device.

    With open sizes, torch's shape functions in Python are used. Those in C++ need numbers in
    some places, as `constant_pad_nd` does for each size. Obsolete when a fake mode with a
    shape environment uses them by itself.
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
            return self._as_laid_out_by_kernels(func, args, found)

    def _as_laid_out_by_kernels(self, func: Any, args: Any, found: Any) -> Any:
        source = _LAID_OUT_BY.get(func)
        if source is not None and args[source].device.type == "cpu":
            return (_in_format_of(found[0], args[source]), *found[1:])
        like = _LAID_OUT_LIKE.get(func)
        if like is None:
            return found
        with self:
            return torch.empty_like(
                like(found, *tensor_leaves(args)), dtype=found.dtype
            )


#: CPU kernels that give their first output the memory format of an argument, and which
#: argument. A fake mode copies the argument's strides instead. Obsolete when torch's test of
#: fake against real strides includes these operators with transposed inputs.
_LAID_OUT_BY: dict[Any, int] = {
    torch.ops.aten.native_batch_norm.default: 0,
    torch.ops.aten.native_batch_norm_backward.default: 1,
}

_aten: Any = torch.ops.aten


def _sum_of_two(_: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return first + second


def _sum_turned(_: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return second + first


def _first(_: Tensor, first: Tensor, *__: Tensor) -> Tensor:
    return first


def _second(_: Tensor, __: Tensor, second: Tensor, *___: Tensor) -> Tensor:
    return second


def _dense(found: Tensor, *_: Tensor) -> Tensor:
    return torch.empty_like(found, memory_format=torch.contiguous_format)


#: What has the strides that kernels give their output, from a fake output and the tensors
#: among their arguments. A fake mode decomposes these operators, and where inputs are laid
#: out in two ways it takes other strides. Obsolete as `_LAID_OUT_BY`.
_LAID_OUT_LIKE: dict[Any, Callable[..., Tensor]] = {
    _aten.softplus_backward.default: _sum_of_two,
    _aten.elu_backward.default: _sum_of_two,
    _aten.hardtanh_backward.default: _sum_of_two,
    _aten.hardswish_backward.default: _sum_of_two,
    _aten.hardsigmoid_backward.default: _sum_of_two,
    _aten.logit_backward.default: _sum_of_two,
    _aten.binary_cross_entropy_backward.default: _second,
    _aten.mse_loss_backward.default: _dense,
    _aten.smooth_l1_loss_backward.default: _dense,
    _aten.huber_loss_backward.default: _dense,
    _aten._log_softmax_backward_data.default: _dense,
    _aten.pow.Scalar: _dense,
    _aten.threshold_backward.default: _sum_turned,
    _aten.leaky_relu_backward.default: _sum_turned,
    _aten.log_sigmoid_backward.default: _first,
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

    If the arguments of a call do not match one overload, torch prints them before it tries
    the next. Printing a tensor asks for its tangent, which fails below autograd and leaves
    the thread's dispatch state broken. Obsolete when a trace of torch.func.jvp over
    `x.lerp_(y, w)` works on plain torch.
    """
    level = _forward_ad._current_level
    _forward_ad._current_level = -1
    try:
        yield
    finally:
        _forward_ad._current_level = level


# The state of this thread, and cheap checks of it: every call of a region needs them.
# Obsolete when the public names are as fast.


_META = torch.device("meta")


def kernel_choices() -> tuple[str, bool, bool, bool, bool]:
    """The precision of float32 products, and which attention kernels may run.

    Every call of a region reads them. These functions in C are three times faster than the
    public ones, which return the same.
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
    """Whether a transform's wrapper shows all of a tensor's metadata.

    A wrapper hides that it wraps a DTensor, and that a level below wants a gradient.
    """
    is_own = type(tensor) in _OWN_KINDS and type(unwrapped(tensor)) in _OWN_KINDS
    return is_own and (tensor.requires_grad or not requires_grad_anywhere(tensor))


def overrides_functions(kind: type[Tensor]) -> bool:
    """Whether a subclass of Tensor overrides functions of torch.

    Obsolete when torch has a public way to ask a class for that.
    """
    handler: Any = getattr(kind, "__torch_function__")  # noqa: B009
    plain: Any = getattr(Tensor, "__torch_function__")  # noqa: B009
    if handler is _torch._C._disabled_torch_function_impl:
        return False
    return getattr(handler, "__func__", handler) is not plain.__func__


def tensor_guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A check that tensors have the metadata of these: type, layout, dtype, device, grad.

    These are torch.compile's own guards. They take a tenth of the time of reading the
    metadata in Python. They also fail if autocast or inference mode differs, and if one of
    the check and its making is under torch.func and the other is not. Under autocast it
    also matters which tensors are cast each time. Obsolete when torch has a public name.
    """
    guards = _guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )
    if not autocast_keeps_casts():
        return guards.check
    weights = [*map(_is_weight, tensors)]
    return lambda *given: guards.check(*given) and [*map(_is_weight, given)] == weights


def wrapped_guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """The same for tensors that reverse mode of torch.func may have wrapped.

    `is_told_by_wrapper` must be true of each of them.
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
    """A check that a thread is in no forward mode and has the switches of this moment.

    The switches are grad mode and everything that decides what operators compute. It is used
    together with `tensor_guard`, which fails under every other transform and dispatch mode.
    It may also fail because the number of threads has changed.
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
            # The guard of the state knows "highest" from the rest, but not the rest apart.
            and (was_precision == "highest" or precision() == was_precision)
            and flash() is was_flash
            and efficient() is was_efficient
            and math() is was_math
            and cudnn() is was_cudnn
        )

    return check


def state_guard() -> Callable[[], bool]:
    """A check that this thread's autocast, default dtype and determinism are as now.

    This is torch.compile's own guard, which also checks grad mode and the number of threads.
    It takes a fifth of the time of reading them. Obsolete when torch has a public name.
    """
    return _guards.GlobalStateGuard().check


def plain_apply(function: Any) -> Callable[..., Any]:
    """`function.apply` for calls without a transform and without dead wrappers.

    It skips the Python code that looks for them. Obsolete when `Function.apply` is in C.
    """
    above: Any = super(torch.autograd.Function, function)
    return above.apply


def is_batched_by_autograd(tensor: Tensor) -> bool:
    """Whether `torch.autograd.grad(is_grads_batched=True)` maps over a tensor.

    Obsolete when that maps as torch.func does.
    """
    return functorch_c.is_legacy_batchedtensor(tensor)


def changed_since_saved(node: Any) -> list[tuple[int, Tensor]]:
    """Finds the tensors that were written to after a node of autograd saved them.

    Reading all saved tensors raises for the first such tensor without saying which one it
    is. Obsolete when torch's error says so.

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
    """Whether autograd raised an error because a saved tensor was written to.

    Obsolete when torch has a class for it.
    """
    return "modified by an inplace operation" in str(error)


def detached(tensor: Tensor) -> Tensor:
    """`tensor.detach()`, also for tensors that `is_grads_batched=True` maps over.

    torch's older vmap has no rule for `detach`, but one for views. Obsolete when
    `torch.autograd.grad` maps as torch.func does.
    """
    if not is_batched_by_autograd(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.view(tensor.shape)


def leaf_of(tensor: Tensor) -> Tensor:
    """`detached(tensor)`, or a copy of an inference tensor, which autograd cannot record."""
    return tensor.clone() if tensor.is_inference() else detached(tensor)


def forward_pre_hooks(module: torch.nn.Module) -> list[Any]:
    """The hooks that run before a module's forward. Obsolete when torch makes them public."""
    hooks: Any = module._forward_pre_hooks  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return [*hooks.values()]


def pruned_name(hook: Any) -> str:
    """The parameter that a pruning method masks. Obsolete as `forward_pre_hooks`."""
    return hook._tensor_name


# The function that a torch-function mode sees for `x.data = y`. Obsolete when torch names it.
SET_DATA: Any = cast("Any", Tensor.data).__set__


def second_places(kind: type) -> tuple[str, ...]:
    """Attributes of a module's class that hold its parameters a second time.

    Obsolete when recurrent modules read their parameters where they are registered.
    """
    is_recurrent = issubclass(kind, torch.nn.RNNBase)
    return ("_flat_weights", "_flat_weight_refs") if is_recurrent else ()


def refresh_second_places(module: object) -> None:
    """Sets `second_places` to the parameters that the module has now. Obsolete as they are."""
    if isinstance(module, torch.nn.RNNBase):
        module._update_flat_weights()


# Tracing: fakes, open sizes, `make_fx`, collectives and modes inside it. Obsolete when one
# public call traces a function and its backward, captured tensors and symbols included.


def load_tracer() -> None:
    """Imports what torch's tracer imports when it is first used, about a second of it."""
    importlib.import_module("torch._dynamo")


def traceable(func: Any) -> Any:
    """The function itself, or one that does the same without reading numbers.

    `F.one_hot` checks its classes by value unless the tensor is a fake one. It cannot see
    that if a level of torch.func inside the trace (forward mode over reverse mode) wraps the
    fake tensor. Obsolete when it can.
    """
    return _one_hot if func is _ONE_HOT else func


_ONE_HOT: Any = torch.nn.functional.one_hot


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0 or tensor.dtype != torch.int64:
        return _ONE_HOT(tensor, num_classes)
    # What torch itself computes for a fake tensor.
    classes = torch.arange(num_classes, device=tensor.device)
    return torch.eq(tensor.unsqueeze(-1), classes).to(torch.int64)


# Runs the body below autograd: nothing is recorded, no view knows its base, and tensors that
# share memory do not share a version counter. It is cheaper than `torch.no_grad` by a tenth
# of an operator's overhead. Obsolete when torch has a public name for it. Inference mode will
# not do, because its tensors may not be saved for a backward.
below_autograd: Callable[[], contextlib.AbstractContextManager[Any]] = (
    torch._C._AutoDispatchBelowADInplaceOrView
)


def bindings(op: Any) -> Iterator[Callable[..., Any]]:
    """The functions in C by which Python may reach an operator, public ones first.

    A call takes a third of the time of a call by `torch.ops`. Which operator it reaches
    depends on the arguments. Obsolete when calls of overloads are as cheap.
    """
    name = op.overloadpacket.__name__
    inner: Any = torch._C
    homes: tuple[Any, ...] = (torch, Tensor, inner._nn)
    for home in homes:
        found = getattr(home, name, None)
        if isinstance(found, (types.BuiltinFunctionType, types.MethodDescriptorType)):
            yield found


@functools.cache
def out_variant(op: Any) -> tuple[OpOverload, str] | None:
    """The operator that writes what `op` returns into a tensor, and that argument's name.

    Only where both forms are one kernel, as torch's "structured" operators are: of others
    the writing form has no kernel for meta tensors, or copies what the first form returns.
    Obsolete when torch has a public name for the pair.
    """
    for name in op.overloadpacket.overloads():
        found: OpOverload = getattr(op.overloadpacket, name)
        *given, written = schema_of(found).arguments or (None,)
        if written is None or not written.is_out or not _are_alike(given, op):
            continue
        if all(map(found.has_kernel_for_dispatch_key, _WITH_STRUCTURED_KERNELS)):
            return found, written.name
    return None


_WITH_STRUCTURED_KERNELS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.Meta)


def _are_alike(arguments: Sequence[Any], op: Any) -> bool:
    """Whether these are declared as the arguments of an operator are."""
    declared = [(each.name, str(each.type)) for each in schema_of(op).arguments]
    return [(each.name, str(each.type)) for each in arguments] == declared


def fake_mode(home: torch.device, shape_env: Any = None) -> FakeTensorMode:
    """A fresh mode for one trace: real tensors are refused.

    Sizes are constants, except symbols of a shape environment.
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
    """The symbols for sizes and strides in one trace, and the conditions that it assumed.

    Sizes that happen to be equal do not share a symbol. 0 and 1 are constants, as
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
        """The symbol that stands for exactly this number; None for an expression of others."""
        found = self._symbols[place]
        return self.given[place] if getattr(found, "is_Symbol", False) else None

    def fixed_dimensions(self) -> tuple[tuple[int, int], ...]:
        """(tensor, dimension) whose size was a symbol, and which the trace needed as a number."""
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
        """The conditions, in Python, under which the trace holds for other sizes."""
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
        """Inside, these symbols look like numbers to code outside torch and this package.

        `isinstance(size, int)` is true, and `size > 4` is True or False. The text of a size
        is that of its number, and an array of it holds its number; the trace then fixes the
        size. The symbol's own text would be a wrong key, or a wrong result, without an error.
        Obsolete when torch's symbols behave so.
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
        """Fixes the sizes behind a rounded number when that number is needed.

        Torch itself evaluates an expression whose terms it may have reordered, and gets
        other bits.
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


# The shape environments whose symbols look like numbers, and the lock of the list.
_answering: list[Any] = []
_lock = threading.Lock()
_INTERNAL = {"torch", "functorch", "sympy", "mpmath", "remat"}
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
# The symbols' own methods.
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
            # It asks because a symbol is no number to it: `default=str` would write "4".
            raise TypeError("json writes a size as an object of another class")
        return repr(number(symbol))
    return _OWN[type(symbol), "__repr__"](symbol)


def _comparing(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A comparison that gives the user's code True or False, which the trace then assumes."""

    def compared(symbol: Any, other: Any) -> Any:
        found = compare(symbol, other)
        return number(found) if _is_users(symbol) else found

    return compared


def _array(symbol: Any, *args: Any, **kwargs: Any) -> Any:
    """The array that numpy asks for; otherwise it would make an array of objects."""
    numpy: Any = importlib.import_module("numpy")
    return numpy.asarray(number(symbol), *args, **kwargs)


def _formatted(symbol: Any, how: str) -> str:
    if _is_users(symbol):
        return format(number(symbol), how)
    return object.__format__(symbol, how)


def _attribute(symbol: Any, name: str) -> Any:
    # `isinstance` looks at the type first, then at `__class__`.
    if name == "__class__" and _is_users(symbol):
        return next(plain for kind, plain in _SYMBOLS if kind is type(symbol))
    return object.__getattribute__(symbol, name)


def _is_users(symbol: Any) -> bool:
    """Whether the user's code asks, and not a library."""
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

    For other numbers torch keeps an expression whose terms it may have reordered.
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
        # Its checks for nan read numbers, which fake tensors do not have.
        torch.autograd.set_detect_anomaly(False),
        _quiet_fakes(),
        _without_saving_hooks(),
    ):
        yield


@contextlib.contextmanager
def without_inference_mode() -> Generator[None]:
    """Lets autograd record, whether or not the caller is in inference mode.

    The caller cannot be asked: inside a level of torch.func the mode reports that it is off,
    although the dispatch keys that it excludes still are excluded outside the level. Obsolete
    when torch undoes both.
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

    Torch has a single level of forward mode. torch.func.jvp would open it a second time,
    unless it had opened it itself. Obsolete with nested dual levels.
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
    """Tells torch's Python code of a level of forward mode that only its C++ code knows.

    Dynamo's graphs open the level there for torch.func.jvp. Without this, tangents would not
    be noticed, and lost. Obsolete when AOTAutograd runs what torch.func.jvp runs.
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

    Torch's tracer patches `nn.Module`, and all threads share the record of what to put back;
    ours patches the classes that it watches. A backward would use autograd's own threads for
    devices. We must not wait for them here: what they run may itself wait to trace. Obsolete
    when traces on two threads work on plain torch, and patch nothing.
    """
    with _tracing, torch.autograd.set_multithreading_enabled(False):
        yield


def make_fx(
    function: Callable[..., Any],
    args: Sequence[Tensor],
    twins: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
) -> fx.GraphModule:
    """The operators below autograd that `function` runs on the fake tensors `args`.

    An operator that has a twin is recorded as the operators that its twin runs. The module
    must not be called: no Python code is generated for it, because an argument named `from`
    would make that code invalid.
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
    """Lets compiled functions, which refuse to be traced, run uncompiled.

    Obsolete when they do so in a trace by themselves.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    config: Any = _torch._dynamo.config
    with config.patch(error_on_nested_fx_trace=False):
        yield


class _ShapesAside(TorchDispatchMode):
    """Hides from a trace the operators that torch runs on "meta" to find out shapes.

    Forward mode's kernels for zeros without memory (`mul_zerotensor`, `add_zerotensor`) do
    so if an operand has no tangent. All modes see these operators, and fake modes refuse
    their tensors. Obsolete when a trace of torch.func.jvp over layer_norm with a constant
    weight works on plain torch.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if _are_shapes_alone(args):
            with _disable_current_modes():
                return func(*args, **kwargs or {})
        return func(*args, **kwargs or {})


class _SizesTracked(TorchDispatchMode):
    """Registers with the tracer each whole number that depends on open sizes.

    Torch's tracer derives such a number from others. It fails if the number is a product of
    three (torch 2.13), or has since become a constant. Obsolete when a trace of `x.sum()`
    with three open sizes, and of the parts of a split, works on plain torch.
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

    Obsolete when their schemas declare what they write, and waiting is an operator.
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

    Forward mode has zeros without memory, for which torch has special kernels that run before
    a mode. Those of `_BY_SCALAR` pass such zeros on, and the next kernel reads memory that is
    not there: a segmentation fault. Obsolete when `aten.mul.Scalar` of
    `torch._efficientzerotensor` works under a mode that only runs it (in torch 2.13 and 2.15
    it does not).
    """
    if op in _BY_SCALAR and args[0]._is_zerotensor():
        given = args[0]
        zero = torch.zeros((), dtype=given.dtype, device=given.device)
        args = (zero.expand(given.shape), *args[1:])
    return op(*args, **kwargs)


_BY_SCALAR = frozenset({torch.ops.aten.mul.Scalar, torch.ops.aten.add.Scalar})


def is_composite(op: Any) -> bool:
    """Whether an operator is made of other operators, on every device.

    The dispatcher raises for overloads that only TorchScript has, such as the
    `aten.mul.default` of two numbers.
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
    """Whether a kernel looks at grad mode to learn if a backward will follow.

    mkldnn's recurrent layers return no workspace without grad mode. Obsolete when they look
    at their argument `train` instead.
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
    """Switches autocast's cache of cast weights on or off; `make_fx` turns it off."""
    found = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(found)


def autocast_keeps_casts() -> bool:
    """Whether autocast is on, and keeps its casts of weights for their next use."""
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled()


def is_cast_each_time(tensor: Tensor) -> bool:
    """Whether autocast keeps casts, but none of this tensor, which some transform differentiates.

    It keeps those of leaves, which weights are. The gradients of all uses of a cast are summed
    in the lower precision; the gradients of casts are cast back first. Obsolete when torch has
    a public name for the condition.
    """
    if tensor.dtype is not torch.float32 or not autocast_keeps_casts():
        return False
    return requires_grad_anywhere(tensor) and not _is_weight(tensor)


def _is_weight(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf and not tensor._is_view()


def cast_each_time(tensor: Tensor) -> Tensor:
    """The same numbers, of which autocast keeps no cast: it keeps those of leaves alone.

    A view, where the layout has some. Obsolete when every layout has `alias`.
    """
    if tensor.layout is torch.strided:
        return torch.ops.aten.alias.default(tensor)
    return tensor.view_as(tensor) if tensor.layout is torch.jagged else tensor.clone()


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

    It does what torch.func.functionalize does, but is not a transform. Under a transform
    torch decomposes some operators (binary_cross_entropy_with_logits), which changes bits.
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
                None if each is None else value_of(each) for each in function(*wrapped)
            ]
            for given, each in zip(args, wrapped, strict=True):
                changed = value_of(each)
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
    _torch._functionalize_replace(tensor, value_of(new))
    _torch._functionalize_commit_update(tensor)
    _torch._sync(tensor)


def _functionalization_permitted() -> contextlib.AbstractContextManager[Any]:
    # AOTAutograd switches this key off around all that it calls.
    excluded: Any = _torch._C._dispatch_tls_local_exclude_set()
    return _torch._C._ForceDispatchKeyGuard(
        _torch._C._dispatch_tls_local_include_set(),
        excluded.remove(torch._C.DispatchKey.Functionalize),
    )


def value_of(tensor: Tensor) -> Tensor:
    """What a tensor inside of `functionalized` stands for now. Obsolete as that is."""
    if not _torch._is_functional_tensor(tensor):
        return tensor
    _torch._sync(tensor)
    return _torch._from_functional_tensor(tensor)


# FLOPs by operator. Obsolete when the registry of torch.utils.flop_counter is public.


def flops_of(op: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs of one operator by torch's own formulas, 0 where it has none.

    The CPU's attention has none in torch 2.13: the formulas of other attention kernels are
    used. Most formulas need only shapes; their results are cached. Formulas that need numbers
    (attention over ragged sequences) give 0 if there are only shapes.

    Args:
        op: the operator.
        args: its arguments; shapes may be given instead of tensors.
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
    """Arguments with shapes instead of tensors, so that they can be hashed."""
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


_COUNTED_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_efficient_attention_backward,
}


# Operators of this package. Obsolete when torch annotates torch.library.


@functools.cache
def library() -> Any:
    """The library of this package's own operators; torch has no good types for it."""
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
    """Whether torch has stateless kernels for a kind of device; for CPUs since 2.15.

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

    Obsolete when torch makes public the function that its hooks use for this.
    """
    return torch._C._current_graph_task_id() != -1


def graph_task() -> int:
    """The number of the run of autograd on this thread. Obsolete as `in_backward` is."""
    return torch._C._current_graph_task_id()


def will_execute(node: Any) -> bool:
    """Whether the backward that is under way on this thread runs a node of autograd's.

    Obsolete when torch makes public the function that its own checkpoint uses for this.
    """
    return torch._C._will_engine_execute_node(node)


def backward(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor]
) -> None:
    """`torch.autograd.backward`, which torch has not annotated."""
    function: Any = torch.autograd.backward
    function(outputs, cotangents, inputs=inputs)


def is_plain_autograd() -> bool:
    """Whether this thread has no transform, no forward mode and no trace by `make_fx`."""
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
    """The tensors that a module holds for the parameters that `fully_shard` splits.

    Parameters of inner modules that are sharded separately, and `ignored_params`, are left
    out. Obsolete when torch lists these parameters.
    """
    groups: Any = module._get_fsdp_state()._fsdp_param_groups
    places = [each._module_info for group in groups for each in group.fsdp_params]
    return [getattr(place.module, place.param_name) for place in places]


@contextlib.contextmanager
def called_again(module: Any) -> Generator[None]:
    """Inside, a call of a module of `fully_shard` during a backward is a forward of its own.

    After the module's first backward, and until autograd ends, torch takes each call for the
    recomputation of a forward that has its hooks already. And a forward would gather the
    parameters of the modules after it, which the backward needs no more. Obsolete when torch
    can be told what a call is for.
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
    """The number of a node of autograd; of two nodes of one thread the later one's is larger.

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

    Obsolete when torch makes public the switch that leaves subclasses enabled.
    """
    return torch._C.DisableTorchFunction()


def torch_function_state() -> Any:
    """Whether subclasses and modes handle functions of torch on this thread."""
    return _torch._C._get_torch_function_state()


@contextlib.contextmanager
def torch_function_as(state: Any) -> Generator[None]:
    """Restores, inside, an earlier `torch_function_state`.

    `loss.backward()` turns subclasses off while it runs, if the loss is of a subclass.
    Obsolete when it does not.
    """
    before = torch_function_state()
    _torch._C._set_torch_function_state(state)
    try:
        yield
    finally:
        _torch._C._set_torch_function_state(before)


@contextlib.contextmanager
def own_parametrizations() -> Generator[None]:
    """Inside, `torch.nn.utils.parametrize.cached()` has an empty cache of its own.

    What it caches there comes from stand-ins. Obsolete when the cache is public.
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
    """Lets AOTAutograd drop an operator that returns nothing.

    Obsolete when it drops operators that only Dynamo's graphs should hold.
    """
    op.py_impl(FunctionalTensorMode)(_nothing)


def _nothing(*_: Any) -> None:
    """Stands for an operator that is dropped."""


def tensor_leaves(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of a pytree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], tree: _Tree) -> _Tree:
    """A pytree with `function` applied to its tensors."""
    return pytree.tree_map_only(Tensor, function, tree)


def is_lift(node: fx.Node) -> bool:
    """Whether a node brings a newly made real tensor into the trace."""
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


class _Lifts(threading.local):
    """How tensors are lifted on a thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Callable[[Tensor], Tensor]] = []


class _LiftedApply:
    """`Function.apply` replaced while some thread lifts; a thread that does not passes by."""

    def __init__(self) -> None:
        self._lifts = _Lifts()
        self._lock = threading.Lock()
        self._num_blocks = 0
        self._original: Any = None

    def enter(self, lift: Callable[[Tensor], Tensor]) -> None:
        with self._lock:
            if not self._num_blocks:
                self._original = torch.autograd.Function.__dict__["apply"]
                torch.autograd.Function.apply = classmethod(self._replacement())  # pyright: ignore[reportAttributeAccessIssue]
            self._num_blocks += 1
        self._lifts.stack.append(lift)

    def leave(self) -> None:
        self._lifts.stack.pop()
        with self._lock:
            self._num_blocks -= 1
            if not self._num_blocks:
                torch.autograd.Function.apply = self._original

    def _replacement(self) -> Callable[..., Any]:
        original = self._original

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            for lift in reversed(self._lifts.stack):
                args, kwargs = map_tensors(lift, (args, kwargs))
            return original.__get__(None, cls)(*args, **kwargs)

        return apply


_lifted_apply = _LiftedApply()


@contextlib.contextmanager
def lifted_function_apply(lift: Callable[[Tensor], Tensor]) -> Generator[None]:
    """Lifts the arguments of users' `autograd.Function`s on this thread.

    `Function.apply` is not a torch function, so no mode sees it. Obsolete when it becomes
    one.
    """
    _lifted_apply.enter(lift)
    try:
        yield
    finally:
        _lifted_apply.leave()


def is_below_autograd() -> bool:
    """Whether the code that runs now is below autograd, which records nothing of it.

    A mode meets operators that C++ calls (TorchScript's interpreter) only there. Obsolete
    when such calls are torch functions.
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
            # Nested tensors compute their lengths from values.
            "does not support tracing with fx.symbolic_trace",
        )
    )


def met_a_tensor_outside(error: Exception) -> bool:
    """Whether an error says that a trace met a tensor that it does not stand in for."""
    return "Please convert all Tensors to FakeTensors first" in str(error)


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

    Parts of a type that was registered without names get numbers; torch's own function raises.
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
        # torch takes a column of one row for contiguous, whatever its stride.
        each.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)
        for each in (first, second)
        if each.numel()
    ]
    return not bits or torch.equal(*bits)


# Dynamo and the graphs that it makes. Obsolete when a library can tell torch.compile in
# public what a region is.


def unseen_by_dynamo(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Hides a function, and all that it calls, from torch.compile.

    `torch.compiler.disable` does so by a wrapper, and imports Dynamo at once, which takes a
    second. Obsolete when a package can ask Dynamo to leave it alone.
    """
    skip = _eval_frame._FrameAction.SKIP
    code = cast("types.FunctionType", function).__code__
    _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(skip, skip))
    return function


def end_graph(why: str) -> None:
    """Ends the graph that Dynamo makes; with `fullgraph=True` raises an error that says why.

    Obsolete when `torch.compiler` has a public name for it.
    """
    _torch._dynamo.graph_break(msg=why)


def constant_for_dynamo(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Has Dynamo call a function as it traces, and take the result for a constant.

    `torch.compiler.assume_constant_result` does so, and imports Dynamo at once.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def has_its_attributes(value: object) -> bool:
    """Whether an object has its attributes, which one that Dynamo makes has not yet.

    Obsolete when a constant function of Dynamo's refuses what is not a constant.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(hasattr(value, field.name) for field in dataclasses.fields(value))
    sets_some = type(value).__init__ is not object.__init__
    return not sets_some or getattr(value, "__dict__", None) != {}


def compilation() -> object:
    """An object that identifies the compilation of one frame, all attempts of it; or None.

    Obsolete when a backend may end the graph at a node.
    """
    return _torch._guards.CompileContext.try_get()


def take_floats_for_constants() -> None:
    """Lets Dynamo take each float for a constant, and guard it, to the end of the frame.

    Otherwise a float that has changed between calls becomes an input, and the second subgraph
    that reads it fails. Obsolete when a float that two `torch.utils.checkpoint` regions read
    may change under torch.compile.
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
    """The number that a symbol of torch.compile stands for, which is then guarded.

    Anything else is returned as it is. Obsolete, like the next function, when graphs may hold
    for all sizes.
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
    """Says what a symbol depends on that a guard must not fix; "" if on nothing.

    That is a size that the user has marked by `torch._dynamo.mark_dynamic`, for which torch
    raises if a guard fixes it; or a number that is known only from values. Obsolete when a
    `SymInt` can be asked for its constraint.
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


# The functions in a graph of Dynamo that take a level, and the place of that argument.
_LEVELS = {
    "_add_batch_dim": 2,
    "_remove_batch_dim": 1,
    "_wrap_for_grad": 1,
    "_unwrap_for_grad": 1,
}


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
    """An error by which a backend makes Dynamo trace the frame again from its beginning.

    It has two base classes: the code that calls the backend lets the one pass, and Dynamo
    forgets its earlier attempt because of the other. Obsolete when a backend may end the graph
    at a node.
    """
    exc: Any = _torch._dynamo.exc
    kinds = (exc.UnspecializeRestartAnalysis, exc.TensorifyScalarRestartAnalysis)
    return type("TraceAgain", kinds, {})()


def traced_as(
    other: Callable[..., Any],
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a function that users call so that Dynamo traces another one instead.

    Outside a graph, and where the other function ends the graph, the function itself runs,
    hidden from Dynamo.
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


#: Inductor would move the gradients of weights to the end, and keep all their inputs until
#: then. The order of a program already holds least. The look-up has checked the sizes.
_INDUCTOR = {
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "size_asserts": False,
}


def inductor(
    module: fx.GraphModule, inputs: Sequence[Tensor], *, wrapper_in_cpp: bool
) -> Callable[..., Any]:
    """A graph compiled for tensors like these; takes one list of them, which it empties.

    The code that calls the kernels is written in Python or in C++. C++ takes seconds more to
    compile, and saves microseconds at each call of a kernel.

    A caller holds the arguments of a call until it returns, so compiled code can free only
    tensors in a list. It takes a list if the module is in Dynamo's wrapper. Obsolete when
    `torch._inductor.compile`, which torch documents, loses its underscore and has a way to
    give inputs away.
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

    It runs as it is written: TorchScript's fusion and specialization are off. The API is the
    same in torch 2.13 and 2.15. Obsolete when torch has a public way to run
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
            # The interpreter reads all of them before it runs, and then is their only owner.
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

    torch 2.13 warns that this function is deprecated; 2.15 does not. Obsolete when 2.13 is no
    longer supported.
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
