"""The dispatch modes and torch-function modes of a thread.

Obsolete when torch makes the stacks of modes public.
"""

# pyright: reportPrivateUsage=false
import abc
import contextlib
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch.overrides import (
    _pop_mode,  # pyright: ignore[reportUnknownVariableType]
    _push_mode,  # pyright: ignore[reportUnknownVariableType]
)
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)

_torch: Any = torch


class DispatchMode(TorchDispatchMode, abc.ABC):
    """The base of dispatch modes. Obsolete when torch annotates its own."""

    supports_higher_order_operators = True
    #: Whether names are to be marked for it, outside traces too.
    hears_names: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self._hear(func, args, kwargs or {})

    @abc.abstractmethod
    def _hear(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator, or something in its place, and returns the result."""


# Runs the body below autograd: nothing is recorded, no view knows its base, and tensors that share
# memory do not share a version counter. It is cheaper than `torch.no_grad` by a tenth of an
# operator's overhead; tensors of inference mode could not be saved for a backward. Obsolete when
# torch has a public name for it.
below_autograd: Callable[[], contextlib.AbstractContextManager[Any]] = (
    torch._C._AutoDispatchBelowADInplaceOrView
)
# The dispatch modes of this thread, the innermost last.
dispatch_modes: Callable[[], Sequence[Any]] = _get_current_dispatch_mode_stack
# () -> a context whose body is hidden from the torch-function modes, such as a trace's: it would
# take what the body asks of tensors for the user's own. Obsolete when torch makes public the
# switch that leaves subclasses enabled.
unseen_by_traces: Callable[[], contextlib.AbstractContextManager[Any]] = (
    torch._C.DisableTorchFunction
)
# Whether subclasses and modes handle functions of torch on this thread.
torch_function_state: Callable[[], Any] = _torch._C._get_torch_function_state
#: How many torch-function modes this thread has; a default device is one of them.
num_function_modes: Callable[[], int] = _torch._C._len_torch_function_stack
_BY_SCALAR = frozenset({torch.ops.aten.mul.Scalar, torch.ops.aten.add.Scalar})


def is_watched() -> bool:
    """Whether a dispatch mode hears each operator on this thread."""
    return torch._C._len_torch_dispatch_stack() > 0


def hear_names() -> bool:
    """Whether a mode wants names marked; autograd takes modes along to its own threads."""
    return is_watched() and any(
        getattr(mode, "hears_names", False) for mode in dispatch_modes()
    )


def run_in_mode(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operator that a dispatch mode of ours was given.

    Forward mode has zeros without memory, for which torch has special kernels that run before
    a mode. Those of `_BY_SCALAR` pass such zeros on, and the next kernel reads memory that is
    not there: a segmentation fault. Obsolete when `aten.mul.Scalar` of
    `torch._efficientzerotensor` works under a mode that only runs it (not in torch 2.15).
    """
    if op in _BY_SCALAR and args[0]._is_zerotensor():
        given = args[0]
        zero = torch.zeros((), dtype=given.dtype, device=given.device)
        args = (zero.expand(given.shape), *args[1:])
    return op(*args, **kwargs)


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


class FunctionModes(NamedTuple):
    """What changes the functions of torch that a thread calls."""

    #: The device of tensors that name none (`set_default_device`, `with device:`); None without.
    #: The public name takes ten times as long, and answers "cpu" where there is none, which is
    #: not the same: under a default device, `torch.as_tensor` moves a tensor there.
    device: torch.device | None = None
    #: How the torch-function modes of users are entered, the outermost first; such methods
    #: compare by the identity of their object, which need not have a hash.
    entries: tuple[types.MethodType, ...] = ()

    @contextlib.contextmanager
    def applied(self) -> Generator[None]:
        """Runs the body under these, and under the modes of torch and of this package."""
        if self == function_modes():
            yield
            return
        found: list[Any] = [_pop_mode() for _ in range(num_function_modes())][::-1]
        users = [enter.__self__ for enter in self.entries]
        own = [mode for mode in found if _is_torchs(mode)]
        for mode in [*users, *own]:
            _push_mode(mode)
        try:
            with self.device or contextlib.nullcontext():
                yield
        finally:
            for _ in [*users, *own]:
                _pop_mode()
            for mode in found:
                _push_mode(mode)


def function_modes() -> FunctionModes:
    """Those of this thread."""
    if not num_function_modes():
        return _NO_MODES
    device, entries = None, list[types.MethodType]()
    for place in range(num_function_modes()):
        mode = _torch._C._get_function_stack_at(place)
        if isinstance(mode, DeviceContext):
            device = mode.device
        elif not _is_torchs(mode):
            entries.append(mode.__enter__)
    return FunctionModes(device, tuple(entries))


_NO_MODES = FunctionModes()


def _is_torchs(mode: Any) -> bool:
    """Whether a mode is torch's or this package's; those set a default device, too."""
    own = ("torch.", f"{__name__.partition('.')[0]}.")
    is_own = f"{type(mode).__module__}.".startswith(own)
    return is_own and not isinstance(mode, DeviceContext)


def is_heard_by_users() -> bool:
    """Whether a torch-function mode of a user's hears the functions that this thread calls."""
    return bool(function_modes().entries)


def unheard_by_users() -> contextlib.AbstractContextManager[Any]:
    """A context in which no torch-function mode of a user's changes what a program computes."""
    return unseen_by_traces() if is_heard_by_users() else contextlib.nullcontext()


def is_below_autograd() -> bool:
    """Whether a mode that is asked now is below autograd, which records nothing of it.

    A mode meets operators that C++ calls (TorchScript's interpreter) only there. Obsolete
    when such calls are torch functions.
    """
    key = torch._C.DispatchKey.AutogradFunctionality
    return torch._C._dispatch_tls_is_dispatch_key_excluded(key)
