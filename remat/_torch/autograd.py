"""The engine, the nodes and the functions of autograd.

Obsolete when torch annotates `backward`, has a class for each error that is told here by its
text, and gives the rest public names; a function that says so itself has an end of its own.
"""

# pyright: reportPrivateUsage=false
import contextlib
import dataclasses
import functools
import inspect
import operator
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from types import FrameType
from typing import Any, final

import torch
import torch._C._functorch as functorch_c
from torch import Tensor
from torch._functorch import eager_transforms, vmap
from torch.overrides import handle_torch_function

from remat._torch.attributes import attributes_as
from remat._torch.levels import dual_levels, functorch
from remat._torch.tracer import proxy_is_active
from remat._torch.trees import map_tensors, tensor_leaves

_c_autograd: Any = vars(torch._C)["_autograd"]
_engine: Any = torch.autograd.Variable._execution_engine


def untracked_alias(tensor: Tensor) -> Tensor:
    """An alias of a tensor that autograd does not take for a view.

    `autograd.Function` forbids in-place changes of outputs that are views. Obsolete when a
    Function can declare that nothing else holds their base.
    """
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return torch.ops.aten.alias.default(tensor)


def plain_apply(function: Any) -> Callable[..., Any]:
    """`function.apply` for calls without a transform and without dead wrappers.

    It skips the Python code that looks for them. Obsolete when `Function.apply` is in C.
    """
    above: Any = super(torch.autograd.Function, function)
    return above.apply


# Whether `torch.autograd.grad(is_grads_batched=True)` maps over a tensor. Obsolete when that
# maps as torch.func does.
is_batched_by_autograd: Callable[[Tensor], bool] = functorch_c.is_legacy_batchedtensor
# Whether it maps on this thread.
is_mapping: Callable[[], bool] = functools.partial(
    torch._C._dispatch_tls_is_dispatch_key_included,
    torch._C._dispatch_key_parse("VmapMode"),
)
_add_batch_dim: Callable[[Tensor, int, int], Tensor] = vars(torch)["_add_batch_dim"]
_remove_batch_dim: Callable[..., Tensor] = vars(torch)["_remove_batch_dim"]


def maps_over(tensors: Sequence[Tensor]) -> bool:
    """Whether `torch.autograd.grad(is_grads_batched=True)` maps over one of these tensors."""
    return is_mapping() and any(map(is_batched_by_autograd, tensors))


def maps_twice() -> bool:
    """Whether one `torch.autograd.grad(is_grads_batched=True)` runs inside of another."""
    try:
        return torch._C._vmapmode_decrement_nesting() > 0
    finally:
        torch._C._vmapmode_increment_nesting()


def mapped_by_func(
    function: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor]
) -> Any:
    """What a function returns, a pytree, for tensors over which `is_grads_batched=True` maps.

    torch.func maps in its place: it has rules for regions, and records what is to be
    differentiated again, where the older vmap leaves the record on a wrapper that it discards.
    Obsolete when `torch.autograd.grad` maps as torch.func does.
    """
    level = torch._C._vmapmode_decrement_nesting() + 1
    structure: Any = None

    def mapped(*given: Tensor) -> list[Tensor]:
        nonlocal structure
        structure = function(given)
        return tensor_leaves(structure)

    try:
        dims = [0 if is_batched_by_autograd(each) else None for each in tensors]
        given = [
            each if dim is None else _remove_batch_dim(each, level, 0, 0)
            for each, dim in zip(tensors, dims, strict=True)
        ]
        found = torch.func.vmap(mapped, (*dims,))(*given)
    finally:
        torch._C._vmapmode_increment_nesting()
    made = iter([_add_batch_dim(each, 0, level) for each in found])
    return map_tensors(lambda _: next(made), structure)


# The number of the run of autograd on this thread, -1 outside of any.
graph_task: Callable[[], int] = torch._C._current_graph_task_id
# Whether the backward that is under way on this thread runs a node of autograd's.
will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node


# The latest run of autograd that went on to every operand of some node: it is taken for one that
# computes all gradients, as `.backward()` does. To ask for each node takes longer than many checks.
whole_tasks = [-1]


def are_asked_for(nodes: Sequence[Any]) -> bool:
    """Whether the backward that is under way goes on to all of these nodes."""
    try:
        is_whole = all(map(will_execute, nodes))
    except RuntimeError:
        return False
    if is_whole and len(nodes) > 1:
        whole_tasks[0] = graph_task()
    return is_whole


def is_asked_for(node: Any) -> bool:
    """Whether the backward that is under way goes on to a node; None is that of a constant.

    Torch raises for a leaf by which `torch.autograd.grad` differentiates.
    """
    try:
        return node is not None and will_execute(node)
    except RuntimeError:
        return True


# Whether the backward that runs may run once more: `retain_graph=True`.
keeps_graph: Callable[[], bool] = _c_autograd._get_current_graph_task_keep_graph
# Calls a function when the run of autograd that is under way ends without an error.
at_end_of_task: Callable[[Callable[[], None]], None] = _engine.queue_callback
# The number of a node of autograd; of two nodes of one thread the later one's is larger.
node_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")


def changed_since_saved(node: Any) -> list[tuple[int, Tensor]]:
    """The tensors that were written to after a node saved them: their places, and as they are.

    Reading all saved tensors raises for the first such tensor without saying which one it
    is. Obsolete when torch's error says so.
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
    """Whether autograd raised an error because a saved tensor was written to."""
    return "modified by an inplace operation" in str(error)


def has_no_formula(error: Exception) -> bool:
    """Whether autograd raised for a derivative that is missing, or lost by a write in place."""
    told = (
        "derivative for ",
        "does not support automatic differentiation",
        "forward AD with ",
        "modified by an inplace operation",
    )
    return any(part in str(error) for part in told)


def takes_for_constant(error: RuntimeError, op: Any, place: int) -> bool:
    """Whether autograd raised because it has no derivative by this argument of an operator."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return False
    name = schema.name.partition("::")[2]
    return f"derivative for '{name} {schema.arguments[place].name}'" in str(error)


def must_be_constant(error: RuntimeError) -> bool:
    """Whether autograd raised for an operand with a gradient that must have none."""
    return "is not differentiable with respect to argument" in str(error)


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        run, tensor = args
        ctx.set_materialize_grads(False)  # what no gradient reaches has none
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[None, Tensor]:
        return None, grad_outputs[0]


# A function of a tensor, and the tensor -> what it returns; gradients flow through as if that were
# the tensor itself.
apply_through: Callable[[Callable[[Any], Tensor], Tensor], Tensor] = _Through.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def leaf_of(tensor: Tensor) -> Tensor:
    """`tensor.detach()`, or a copy of an inference tensor, which autograd cannot record."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def in_backward() -> bool:
    return graph_task() != -1


def next_nodes(node: Any) -> list[Any]:
    """The nodes of autograd to which the gradients of a node flow."""
    return [each for each, _ in node.next_functions if each is not None]


def nodes_behind(roots: Sequence[Any]) -> list[Any]:
    """These nodes of autograd and those behind them, each before those it leads to."""
    ended: list[Any] = []
    seen: set[Any] = {None}
    pending = [(node, False) for node in roots]
    while pending:
        node, has_led = pending.pop()
        if has_led:
            ended.append(node)
        elif node not in seen:
            seen.add(node)
            pending.append((node, True))
            pending.extend((each, False) for each in next_nodes(node))
    return ended[::-1]


# Where an `autograd.Function` is this package's own, or torch's for an operator.
_NOT_OF_USERS = ("remat.", "torch._higher_order_ops.")
# Its `vmap` where the class has no rule of its own.
_NO_RULE: Any = vars(torch.autograd.Function)["vmap"].__func__


def has_own_rule(tensors: Sequence[Tensor | None]) -> bool:
    """Whether an `autograd.Function` of the user's made some tensors.

    Obsolete when a node of autograd tells its `Function`.
    """
    nodes = nodes_behind([each.grad_fn for each in tensors if each is not None])
    homes = filter(None, map(_home_of_function, nodes))
    return not all(home.startswith(_NOT_OF_USERS) for home in homes)


def before_backward(tensor: Tensor, check: Callable[[Any], None]) -> None:
    """Calls `check` before the backward of torch's own `autograd.Function` that made a tensor."""
    node: Any = tensor.grad_fn
    if _home_of_function(node).startswith(_NOT_OF_USERS):
        node.register_prehook(check)


def _home_of_function(node: Any) -> str:
    """The module of the `autograd.Function` that made a node of autograd; "" if none has."""
    return getattr(getattr(node, "_forward_cls", None), "__module__", "")


def backward(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor]
) -> None:
    """`torch.autograd.backward`, which torch has not annotated."""
    function: Any = torch.autograd.backward
    function(outputs, cotangents, inputs=inputs)


def grad_in_modes(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    *,
    create_graph: bool,
    allow_unused: bool,
) -> Sequence[Tensor | None]:
    """`torch.autograd.grad`, in whose backward Python code stays in the modes around.

    torch's own is a torch function, for which the innermost mode is off. Obsolete when it is none.
    """
    # The third says whether the graph is kept.
    given = tuple(outputs), tuple(cotangents), create_graph, create_graph, tuple(inputs)
    how = {"allow_unreachable": allow_unused, "accumulate_grad": False}
    return _engine.run_backward(*given, **how)


def is_in_users_backward() -> bool:
    """Whether the backward of a user's `autograd.Function` runs, under `grad_in_modes`.

    It stands on this thread, between that and here; on a thread of a device it stands alone.
    """
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code is not grad_in_modes.__code__:
        if frame.f_code is _BACKWARD:
            return True
        frame = frame.f_back
    return False


_BACKWARD: Any = vars(torch.autograd.function.BackwardCFunction)["apply"].__code__


def is_plain_autograd() -> bool:
    """Whether this thread has no transform, no forward mode and no trace by `make_fx`."""
    return (
        functorch.peek_interpreter_stack() is None
        and dual_levels._current_level < 0
        and not proxy_is_active()
    )


@final
@dataclasses.dataclass(slots=True)
class Lifting:
    """How tensors are lifted inside a block."""

    lift: Callable[[Tensor], Tensor]  # gives what stands for a tensor
    has_functions: bool = False  # whether an `autograd.Function` was applied inside
    has_rules: bool = False  # whether such a one has a rule of its own for vmap


class _Liftings(threading.local):
    stack: tuple[Lifting, ...] = ()  # of the open blocks, the innermost last


_liftings = _Liftings()
_lock = threading.Lock()


def _lifting_entrance(original: Any) -> Callable[..., Any]:
    """An entrance while some thread lifts; a thread that does not passes by."""

    def enter(*args: Any, **kwargs: Any) -> Any:
        for each in reversed(_liftings.stack):
            args, kwargs = map_tensors(each.lift, (args, kwargs))
        return original(*args, **kwargs)

    return enter


def _lifting_apply(original: Any) -> Any:
    """`Function.apply`, in the same way."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith(_NOT_OF_USERS):
            for each in _liftings.stack:
                each.has_functions = True
                each.has_rules |= cls.vmap is not _NO_RULE
        return _lifting_entrance(original.__get__(None, cls))(*args, **kwargs)

    return classmethod(apply)


def _heard_entrance(original: Any) -> Callable[..., Any]:
    """A method that modes hear on a thread that lifts, which lift by themselves."""

    def enter(*args: Any, **kwargs: Any) -> Any:
        if not (
            _liftings.stack and vars(torch._C)["_is_torch_function_mode_enabled"]()
        ):
            return original(*args, **kwargs)
        return handle_torch_function(original, (), *args, **kwargs)

    return enter


#: What takes tensors past every mode, and what replaces it: `autograd.Function`s, functions of
#: TorchScript, levels of torch.func that differentiate, those that map, and another class.
_ENTRANCES: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (torch.autograd.Function, "apply", _lifting_apply),
    (torch.jit.ScriptFunction, "__call__", _lifting_entrance),
    (eager_transforms, "_wrap_for_grad", _lifting_entrance),
    (vmap, "_add_batch_dim", _lifting_entrance),
    (Tensor, "as_subclass", _heard_entrance),
)
# How to put back what stood there, once for each block that is open on any thread.
_open_blocks: list[contextlib.ExitStack] = []


@contextlib.contextmanager
def lifted_past_modes(lift: Callable[[Tensor], Tensor]) -> Generator[Lifting]:
    """Lifts what this thread gives to `autograd.Function`s, TorchScript and levels of torch.func.

    No mode sees it there. Obsolete when these are torch functions.
    """
    with _lock:
        _open_blocks.append(contextlib.ExitStack())
        for owner, name, replace in () if len(_open_blocks) > 1 else _ENTRANCES:
            instead = {name: replace(inspect.getattr_static(owner, name))}
            _open_blocks[0].enter_context(attributes_as(owner, **instead))
    lifting = Lifting(lift)
    try:
        with attributes_as(_liftings, stack=(*_liftings.stack, lifting)):
            yield lifting
    finally:
        with _lock:
            _open_blocks.pop().close()


def without_lifting() -> contextlib.AbstractContextManager[None]:
    """Lifts nothing of this thread's inside: what runs there is not the user's."""
    return attributes_as(_liftings, stack=())
