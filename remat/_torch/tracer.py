"""`make_fx`: a function -> the operators that it runs, and what a running trace can be asked.

Obsolete when one public call traces a function and its backward, captured tensors and
symbols included.
"""

# pyright: reportPrivateUsage=false
import contextlib
import functools
import importlib
import threading
import types
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from remat._torch import dropout, levels
from remat._torch.attributes import attributes_as
from remat._torch.dynamo import dynamo_as_before, whole_graphs_in_parts
from remat._torch.modes import DispatchMode, is_watched
from remat._torch.tensors import AS_SUBCLASS

_torch: Any = torch
MULTI_HEAD: Any = torch.nn.functional.multi_head_attention_forward
_DEVICE: Any = _torch.ops.prim.device.default
_LU_SOLVE: Any = torch.ops.aten.linalg_lu_solve.default
_tracing = threading.RLock()
# () -> a context whose body is not recorded in the trace being made.
unrecorded: Callable[[], contextlib.AbstractContextManager[Any]] = (
    proxy_tensor.disable_proxy_modes_tracing
)
#: Whether `torch.jit.trace` records; a call of torch.jit.is_tracing costs a frame more. Obsolete
#: when torch has no TorchScript.
is_in_torchscript: Callable[[], bool] = torch._C._is_tracing


def load_tracer() -> None:
    """Imports what torch's tracer imports when it is first used, about a second of it."""
    importlib.import_module("torch._dynamo")


def traceable(func: Any) -> Any:
    """The function itself, or one that does the same in a trace."""
    return _TRACEABLE[func] if func in _TRACEABLE else dropout.drawn_alike(func)


def _traceable_requires_grad(tensor: Tensor, requires_grad: bool = True) -> Tensor:
    """What `nn.Parameter` calls of fake tensors alone; every level of torch.func refuses it.

    Obsolete when it makes all parameters in one way.
    """
    is_own = levels.is_wrapped(tensor)
    with contextlib.nullcontext() if is_own else levels.leave_functorch():
        return tensor.requires_grad_(requires_grad)


def _traceable_as_plain(tensor: Tensor, cls: type[Tensor]) -> Tensor:
    """What `as_subclass(torch.Tensor)` is of a plain tensor; torch would unmake a fake one."""
    assert cls is Tensor, "a trace has no other class"
    return torch.ops.aten.alias.default(tensor)


def _traceable_one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Checks no class by value, as `F.one_hot` does unless it sees that a tensor is a fake one.

    It does not if a level of torch.func inside the trace (as of `jvp(grad)`) wraps the fake.
    Obsolete when it does.
    """
    if num_classes < 0 or tensor.dtype != torch.int64:
        return torch.nn.functional.one_hot(tensor, num_classes)
    # What torch itself computes for a fake tensor.
    classes = torch.arange(num_classes, device=tensor.device)
    return torch.eq(tensor.unsqueeze(-1), classes).to(torch.int64)


_TRACEABLE: dict[Any, Any] = {
    torch.Tensor.requires_grad_: _traceable_requires_grad,
    AS_SUBCLASS: _traceable_as_plain,
    torch.nn.functional.one_hot: _traceable_one_hot,
}


def multi_head_under(mode: TorchFunctionMode) -> Callable[..., Any]:
    """`MULTI_HEAD`, whose call of `scaled_dot_product_attention` a mode sees.

    Once a mode has seen a function of torch, it does not see what that calls. Obsolete when
    torch has one operator for attention, with dropout and on every device.
    """
    known = dict(MULTI_HEAD.__globals__)
    own = known["scaled_dot_product_attention"]

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        with mode:
            return own(*args, **kwargs)

    def never(_: Any) -> bool:
        return False

    known |= {"scaled_dot_product_attention": attend, "has_torch_function": never}
    name, defaults = MULTI_HEAD.__name__, MULTI_HEAD.__defaults__
    found = types.FunctionType(MULTI_HEAD.__code__, known, name, defaults)
    found.__kwdefaults__ = MULTI_HEAD.__kwdefaults__
    return found


@contextlib.contextmanager
def one_trace_at_a_time() -> Generator[None]:
    """Inside, no other thread traces or compiles, and a backward stays on this thread.

    Torch's tracer patches `nn.Module`, and all threads share the record of what to put back; ours
    patches the classes that it watches. A backward would use autograd's own threads for devices,
    which must not be waited for here: what they run may itself wait to trace. Obsolete when traces
    patch nothing.
    """
    with _tracing, torch.autograd.set_multithreading_enabled(False):
        yield


def make_fx(
    function: Callable[..., Any],
    args: Sequence[Tensor],
    twins: Mapping[Any, Callable[..., Any]] | None = None,
) -> fx.GraphModule:
    """The operators below autograd that `function` runs on the fake tensors `args`.

    An operator that has a twin is recorded as the operators that its twin runs. The module must
    not be called: no Python code is generated for it, which an argument named `from` would break.
    """

    def run(*inputs: Tensor) -> Any:
        with Uncompiled(), proxy_tensor.maybe_enable_thunkify():
            return function(*inputs)

    load_tracer()
    # Compiled functions refuse to be traced. Obsolete when they run uncompiled in a trace.
    unrefused = _torch._dynamo.config.patch(error_on_nested_fx_trace=False)
    lazily = _use_lazy_graph_module(True)
    with lazily, unrefused, dynamo_as_before(), whole_graphs_in_parts():
        known = {_LU_SOLVE: _solve_of_one_batch, **(twins or {})}
        return proxy_tensor.make_fx(run, known, tracing_mode="real")(*args)


def _solve_of_one_batch(
    factors: Tensor, pivots: Tensor, right: Tensor, **options: bool
) -> Any:
    """Gives each right side its own factors, in one batch.

    Where some dimensions of a batch are spread, left out or of size one, as those of two maps
    are, torch takes the factors of others. Obsolete when `vmap(vmap(torch.linalg.lu_solve))` is
    right, and `lu_solve` of a batch to which `unsqueeze` gave a last dimension.
    """
    matrices = factors.shape[:-2]
    batch: Any = _torch.broadcast_shapes(matrices, right.shape[:-2])
    # One matrix for all right sides stays one.
    own = (1,) * len(batch) if matrices.numel() == 1 else batch
    if len(batch) < 2 and matrices == own and right.shape[:-2] == batch:
        return NotImplemented
    spread = factors.mT.expand(*own, *factors.shape[-2:]).flatten(0, -3).mT
    swaps = pivots.expand(*own, pivots.shape[-1]).flatten(0, -2)
    sides = right.expand(*batch, *right.shape[-2:])
    return _LU_SOLVE(spread, swaps, sides.flatten(0, -3), **options).view_as(sides)


def functionalized(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its in-place operators replaced, its views kept.

    It does what torch.func.functionalize does, but is not a transform. Under a transform
    torch decomposes some operators (binary_cross_entropy_with_logits), which changes bits.
    Obsolete when torch.func.functionalize leaves them whole.
    """

    def run(*args: Tensor) -> list[Tensor | None]:
        with _functionalization_active():
            wrapped = [_torch._to_functional_tensor(each) for each in args]
            outputs = [
                None if each is None else value_of(each) for each in function(*wrapped)
            ]
            for given, each in zip(args, wrapped, strict=True):
                changed = value_of(each)
                if changed is not given:
                    given.copy_(changed)
            return outputs

    return run


def put_for(tensor: Tensor, new: Tensor) -> None:
    """Writes `new` to a tensor inside of `functionalized`, as `copy_` does by a copy."""
    _torch._functionalize_replace(tensor, value_of(new))
    _torch._functionalize_commit_update(tensor)
    _torch._sync(tensor)


@contextlib.contextmanager
def _functionalization_active() -> Generator[None]:
    # AOTAutograd switches this key off around all that it calls.
    excluded: Any = _torch._C._dispatch_tls_local_exclude_set()
    permitted = excluded.remove(torch._C.DispatchKey.Functionalize)
    included = _torch._C._dispatch_tls_local_include_set()
    with _torch._C._ForceDispatchKeyGuard(included, permitted):
        _torch._enable_functionalization(reapply_views=True)
        try:
            yield
        finally:
            _torch._disable_functionalization()


def value_of(tensor: Tensor) -> Tensor:
    """What a tensor inside of `functionalized` stands for now."""
    if not _torch._is_functional_tensor(tensor):
        return tensor
    _torch._sync(tensor)
    return _torch._from_functional_tensor(tensor)


class Uncompiled(DispatchMode):
    """Runs operators as they are: Dynamo compiles no function under a mode that is not torch's own."""

    def _hear(self, op: Any, args: Any, kwargs: Any) -> Any:
        if op is _DEVICE:  # a fake tensor's; autograd asks for it often
            return args[0].device
        return op(*args, **kwargs)


@contextlib.contextmanager
def zeros_viewed() -> Generator[None]:
    """Inside, views of fake zeros without memory are fake, too.

    For such zeros torch has kernels of these operators by themselves, ahead of those of fake
    tensors: what they return is no subclass any more, and lies on "meta". Below, they have the
    same kernels. Obsolete when torch lets these fall through, as it does other views.
    """
    _hear_of_overrides()
    with _views_falling_through():
        yield


@contextlib.contextmanager
def _views_falling_through() -> Generator[None]:
    through: Any = torch.library.fallthrough_kernel
    with _torch.library._scoped_library("aten", "IMPL") as library:
        for name in ("view", "as_strided", "_reshape_alias"):
            library.impl(name, through, "ZeroTensor", allow_override=True)
        yield


@functools.cache
def _hear_of_overrides() -> None:
    """Has torch 2.13 warn here of what another kernel replaces, as it does once in a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with _views_falling_through():
            pass


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
    return active_tracer().graph


def active_tracer() -> Any:
    mode: Any = proxy_tensor.get_proxy_mode()
    assert mode is not None, "no trace is running"
    return mode.tracer


def add_placeholder(tensor: Tensor, name: str) -> None:
    """Adds an input, found while the trace runs, to the graph being filled."""
    tracer = active_tracer()
    graph: fx.Graph = tracer.graph
    calls = (node for node in graph.nodes if node.op != "placeholder")
    # The nodes are a ring: what stands before its root is the last of them.
    with graph.inserting_before(next(calls, graph._root)):
        proxy = tracer.create_proxy("placeholder", name, (), {})
    proxy_tensor.track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)


def parameters_seen(
    lift: Callable[[Tensor], Tensor],
) -> contextlib.AbstractContextManager[None]:
    """Inside, a trace sees what `nn.Parameter` makes of captured tensors and under torch.func.

    It detaches a plain tensor, and one of a level of torch.func, past all modes. `lift` gives
    what stands for one. Obsolete when it makes all parameters in one way.
    """
    own: Any = torch.Tensor._make_subclass

    def made(cls: Any, data: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = lift(data) if cls is torch.nn.Parameter else data
        is_met = given is not data or levels.is_wrapped(data)
        if not (issubclass(cls, torch.nn.Parameter) and is_met):
            return own(cls, data, *args, **kwargs)
        found: Any = given.detach()
        with levels.leave_functorch():
            found.requires_grad_(*args, **kwargs)
        found._is_param = True  # by which torch's class knows its instances
        return found

    return attributes_as(torch.Tensor, _make_subclass=staticmethod(made))


def arrays_seen() -> contextlib.AbstractContextManager[None]:
    """Inside, a trace sees `torch.from_numpy`. Obsolete when it is a torch function for modes."""
    return attributes_as(torch, from_numpy=torch.as_tensor)


def own_parametrizations() -> contextlib.AbstractContextManager[None]:
    """Inside, `torch.nn.utils.parametrize.cached()` has an empty cache of its own.

    What it caches there comes from stand-ins. Obsolete when the cache is public.
    """
    return attributes_as(parametrize, _cache={})
