"""Cheap checks of tensors and of the state of a thread: every call of a region needs them.

Obsolete when the public names are as fast.
"""

# pyright: reportPrivateUsage=false
import contextlib
import importlib
import operator
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch._C._functorch as functorch_c
from torch import Tensor, nn

from remat._torch.autocast import autocast_devices, autocast_keeps_casts, is_weight
from remat._torch.autograd import is_mapping
from remat._torch.levels import (
    all_unwrapped,
    dual_levels,
    functorch,
    is_wrapped,
    requires_grad_anywhere,
    short_levels,
    unwrapped,
)
from remat._torch.modes import (
    FunctionModes,
    function_modes,
    is_heard_by_users,
    is_watched,
    num_function_modes,
)

requires_grad: Callable[[Tensor], bool] = operator.attrgetter("requires_grad")

_guards: Any = importlib.import_module("torch._C._dynamo.guards")
_OWN_KINDS = frozenset((Tensor, nn.Parameter, nn.Buffer))
#: A name for all backends, or the precision of each, in the order of `_PRODUCTS`.
Precision = str | tuple[str, ...]
# The settings of what computes float32 products.
_PRODUCTS: list[Any] = [
    backend.matmul
    for backend in vars(torch.backends).values()
    if hasattr(getattr(backend, "matmul", None), "fp32_precision")
]


def kernel_choices() -> tuple[Precision, bool, bool, bool, bool]:
    """Of a thread's state: the precision of float32 products, and which attention kernels may run.

    Every call of a region reads them. These functions in C are three times faster than the
    public ones, which return the same.
    """
    return (
        matmul_precision(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )


def matmul_precision() -> Precision:
    """The precision of float32 products.

    torch has no name for all, and raises, where `torch.backends.cuda.matmul.fp32_precision` or
    one of its kind was set to another than the older functions had set.
    """
    try:
        return torch._C._get_float32_matmul_precision()
    except RuntimeError:
        return _precisions()


@contextlib.contextmanager
def with_matmul_precision(precision: Precision) -> Generator[None]:
    """Runs the body under what `matmul_precision` once returned.

    A backend may follow `torch.backends.fp32_precision`, and does so again afterwards. A name
    for all ends that.
    """
    found, before = matmul_precision(), _precisions()
    try:
        if precision != found:
            set_matmul_precision(precision)
        yield
    finally:
        if not precision == found == matmul_precision():
            if isinstance(found, str):
                set_matmul_precision(found)
            for product, each in zip(_PRODUCTS, before, strict=True):
                product.fp32_precision = "none"
                if product.fp32_precision != each:
                    product.fp32_precision = each


def set_matmul_precision(precision: Precision) -> None:
    """Sets what `matmul_precision` once returned."""
    if isinstance(precision, str):
        torch._C._set_float32_matmul_precision(precision)
        return
    for product, each in zip(_PRODUCTS, precision, strict=True):
        product.fp32_precision = each


def _precisions() -> tuple[str, ...]:
    return tuple(each.fp32_precision for each in _PRODUCTS)


def choose_attention(are_allowed: Sequence[bool]) -> None:
    """Sets which attention kernels may run, in the order of `kernel_choices`."""
    flash, efficient, math, cudnn = are_allowed
    torch._C._set_sdp_use_flash(flash)
    torch._C._set_sdp_use_mem_efficient(efficient)
    torch._C._set_sdp_use_math(math)
    torch._C._set_sdp_use_cudnn(cudnn)


def is_quiet() -> bool:
    """Whether this thread has no transform, no forward mode and no mode of a user's."""
    return (
        functorch.peek_interpreter_stack() is None
        and not is_mapping()
        and dual_levels._current_level < 0
        and not is_watched()
        and not (num_function_modes() and is_heard_by_users())
    )


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether `is_plain` is true of each; asked at every call, so not one by one."""
    are_own = _OWN_KINDS.issuperset(map(type, tensors))
    return are_own and not any(map(is_wrapped, tensors))


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is neither wrapped by a transform nor of a foreign subclass."""
    return type(tensor) in _OWN_KINDS and not is_wrapped(tensor)


def is_under_reverse_mode() -> bool:
    """Whether reverse mode is this thread's innermost transform, and nothing else listens."""
    top = functorch.peek_interpreter_stack()
    return (
        top is not None
        and top.key() == functorch_c.TransformType.Grad
        and dual_levels._current_level < 0
        and not is_watched()
    )


def is_told_by_wrapper(tensor: Tensor) -> bool:
    """Whether a transform's wrapper shows all of a tensor's metadata.

    A wrapper hides that it wraps a DTensor, and that a level below wants a gradient.
    """
    is_own = type(tensor) in _OWN_KINDS and type(unwrapped(tensor)) in _OWN_KINDS
    return is_own and (tensor.requires_grad or not requires_grad_anywhere(tensor))


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
    weights = [*map(is_weight, tensors)]
    return lambda *given: guards.check(*given) and [*map(is_weight, given)] == weights


def wrapped_guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A `tensor_guard` for tensors of which `is_told_by_wrapper` is true, wrapped or not."""
    check = tensor_guard(tensors)
    unwanted = [k for k, tensor in enumerate(tensors) if not tensor.requires_grad]

    def is_alike(*given: Tensor) -> bool:
        if not check(*given):
            return False
        below = all_unwrapped(given)
        if not _OWN_KINDS.issuperset(map(type, below)):
            return False
        if short_levels() is None:
            return not any(requires_grad_anywhere(given[k]) for k in unwanted)
        return not any(map(requires_grad, map(below.__getitem__, unwanted)))

    return is_alike


def thread_guard() -> Callable[[], bool]:
    """A check that a thread is in no forward mode and has the switches of this moment.

    The switches are grad mode, the default device and everything that decides what operators
    compute; under a torch-function mode of a user's it fails. It is used together with
    `tensor_guard`, which fails under every other transform and dispatch mode. It may also fail
    because the number of threads has changed.
    """
    same_state, levels, read = _guards.GlobalStateGuard().check, dual_levels, torch._C
    autocast_dtype, devices = torch.get_autocast_dtype, autocast_devices()
    were_dtypes = [*map(autocast_dtype, devices)]
    precision, flash = matmul_precision, read._get_flash_sdp_enabled
    efficient, math = read._get_mem_efficient_sdp_enabled, read._get_math_sdp_enabled
    cudnn, products = read._get_cudnn_sdp_enabled, read._get_fp32_precision_getter
    was_precision, was_flash, was_efficient, was_math, was_cudnn = kernel_choices()
    # The guard of the state knows "highest" from the rest, but not the rest apart, nor oneDNN's.
    is_highest = was_precision == "highest"
    was_in_onednn = products("mkldnn", "matmul")
    were, num_modes = FunctionModes(function_modes().device), num_function_modes
    had_none = were.device is None

    def check() -> bool:
        return (
            levels._current_level < 0
            and same_state()
            and [*map(autocast_dtype, devices)] == were_dtypes
            and products("mkldnn", "matmul") == was_in_onednn
            and (is_highest or precision() == was_precision)
            and flash() is was_flash
            and efficient() is was_efficient
            and math() is was_math
            and cudnn() is was_cudnn
            # Without any mode, as nearly always, one call in C tells.
            and ((had_none and not num_modes()) or function_modes() == were)
        )

    return check


def state_guard() -> Callable[[], bool]:
    """A check that this thread's autocast, default dtype and determinism are as now.

    This is torch.compile's own guard, which also checks grad mode and the number of threads.
    It takes a fifth of the time of reading them, and misses what autocast would cast to where
    it is off. Obsolete when torch has a public name.
    """
    is_same, read = _guards.GlobalStateGuard().check, torch.get_autocast_dtype
    devices = autocast_devices()
    dtypes = [*map(read, devices)]
    return lambda: is_same() and [*map(read, devices)] == dtypes
