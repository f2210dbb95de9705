"""The errors of functions and tensors that cannot be traced, wherever a region meets them.

A function that returns one is named for what is refused, and the text of the error says the rest;
`where` or `line` is the user's line.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from remat._errors import CapturedTensorError, MutationError, RematError, TraceError
from remat._graph.meta import TensorMeta
from remat._torch import (
    fakes,
    levels,
    schemas,
    taking_functions,
    tensors,
    tracer,
    trees,
)
from remat._tracing import refused_writes
from remat._tracing.refused_kinds import RERUN
from remat._user_lines import (
    came_through,
    is_asked_by_user,
    is_called_by_torch,
    line_of,
    user_line,
    warn,
)

_STRIDED = torch.strided  # the look-up in `torch` takes longer than the comparison
_TORCHS_CHECKPOINT = torch.__path__[0] + "/utils/checkpoint.py"
_TAKE_FUNCTIONS = (torch.__path__[0] + "/_higher_order_ops/", taking_functions.__file__)
_TORCHS_DISTRIBUTIONS = torch.__path__[0] + "/distributions/"
_TORCHS_HOOKS = torch.__path__[0] + "/utils/hooks.py"
_TORCHS_NESTED = torch.__path__[0] + "/nested/"
_TAKES_MEMORY = "argument of type: <class 'torch.storage.UntypedStorage'>"


def advises_rerun(error: RematError) -> bool:
    """Whether an error of a trace says that a function may run again instead."""
    return 'engine="rerun"' in str(error)


def is_strided(tensor: Tensor) -> bool:
    """Whether strides lay out its numbers; an older nested and a quantized one only claim so."""
    is_other = tensor.is_nested or tensor.is_quantized
    return tensor.layout is _STRIDED and not is_other


def unstrided(where: str, tensor: Tensor) -> TraceError:
    if tensor.is_nested:
        kind, do = "nested tensor", "Pass its values and offsets, or a padded tensor"
    elif tensor.is_quantized:
        kind, do = f"{tensor.dtype} tensor", "Pass x.dequantize(), or quantize inside"
    else:
        kind, do = "tensor", "Make it sparse inside the function"
    if tensor.layout is not _STRIDED or tensor.is_quantized:
        do += f", or use {RERUN}"
    return TraceError.of(
        where=where,
        what=f"is a {kind} of layout {tensor.layout}, which cannot be traced.",
        why="A trace lays out its inputs by their strides, which do not describe it.",
        do=f"{do}.",
    )


def of_open_sizes(where: str, tensor: Tensor) -> TraceError:
    shape = ", ".join(map(str, tensor.shape))
    return TraceError.of(
        where=where,
        what=f"has sizes that a trace around leaves open, [{shape}].",
        why="A region is traced and cut for sizes that are numbers.",
        do='Trace for one size (make_fx with tracing_mode="fake"), make the trace inside '
        f"`with remat.disabled():`, or use {RERUN}.",
    )


def require_answers(reached: Iterable[Tensor]) -> None:
    """Refuses tensors of a class that answers for no tensor, as torch's ExpandedWeight."""
    for kind, each in {type(each): each for each in reached}.items():
        try:
            _ = tensors.overrides_functions(kind) and each.requires_grad
        except (RuntimeError, TypeError) as error:
            raise TraceError.of(
                where=f"a tensor of the class {kind.__qualname__}",
                what=f"does not say whether it requires grad ({error}).",
                why="A region runs its function on stand-ins for the tensors that it reaches.",
                do="Call the model without regions (remat.disabled()). For gradients of each "
                "example, map the gradient: torch.func.vmap(torch.func.grad(loss)).",
            ) from error


def unknown_class(tensor: Tensor) -> TraceError:
    described = f"tensor of layout {tensor.layout}"
    if is_strided(tensor):
        described = f"{type(tensor).__name__} {TensorMeta.of(tensor)}"
    return TraceError.of(
        where=f"a {described}",
        what="is made inside the region and returned.",
        why="A program can return only plain tensors and DTensors.",
        do=f"Return plain tensors, or use {RERUN}.",
    )


class LazyModuleError(TraceError):
    """The error for a lazy module in front of its first call."""


def uninitialized(which: str) -> TraceError:
    return LazyModuleError.of(
        where=f"a lazy module's parameter, {which}",
        what="has no shape yet.",
        why="A lazy module makes its parameters in its first call, but a trace "
        "has no real tensors for that.",
        do="Call the model once first, inside `with remat.disabled():`.",
    )


def out_of_sight(where: str) -> CapturedTensorError:
    return CapturedTensorError.of(
        where=where,
        what="is used by TorchScript, whose operators a trace cannot see.",
        why="Its gradient would be lost.",
        do="Use the module from before torch.jit.script.",
    )


def out_of_reach(where: str, why: str, *, instead: str = "") -> CapturedTensorError:
    """The error for a tensor to which nothing leads that the function names or is given."""
    return CapturedTensorError.of(
        where=where,
        what="is reached in a way that cannot be followed at the next call.",
        why=why,
        do="Pass it as an argument, or keep it in a closure, a global, a list, a dict or an "
        "attribute that the function names. If a function under functools.cache returned it, "
        "call that function outside, or call its `__wrapped__`, which makes the tensor anew."
        f"{instead}",
    )


def hidden(tensor: Tensor) -> CapturedTensorError:
    """The error for such a tensor in a trace; a constant is read anew if the function runs again."""
    where = f"a tensor {TensorMeta.of(tensor)}, used at {user_line()}"
    constant = "It would become a constant of the trace: "
    stale = "later changes would not be seen."
    lost = levels.lost_around(tensor)
    if lost is None and levels.unwrapped(tensor).requires_grad:
        lost = "gradient"
    if lost is not None:
        return out_of_reach(where, f"{constant}its {lost} would be lost, and {stale}")
    instead = f" Or use {RERUN}, with what it reads then."
    return out_of_reach(where, f"{constant}{stale}", instead=instead)


def distributed(tensor: Tensor) -> TraceError:
    return TraceError.of(
        where=f"a {type(tensor).__name__} {TensorMeta.of(tensor)}, used at {user_line()}",
        what="is combined with others in a region, where some are given and some "
        "are made inside.",
        why="Under vmap, and for subclasses other than DTensor, the trace replaces a given "
        "one by a plain tensor of the global shape, which cannot be combined with local parts.",
        do=f"Use {RERUN}, or pass local tensors and make all of them inside.",
    )


def from_large_array(where: str, num_bytes: int) -> CapturedTensorError:
    """The error for a torch function that makes a tensor from an array that is not compared."""
    return CapturedTensorError.of(
        where=where,
        what=f"makes a tensor from a numpy array of {num_bytes:,} bytes.",
        why="Arrays are compared at each call up to 64 KiB; of a larger one the tensor would "
        "become a constant of the trace, whatever the array holds later.",
        do=f"Make the tensor outside, and pass it as an argument or capture it, or use {RERUN}.",
    )


def changes_array(where: str) -> MutationError:
    return MutationError.of(
        where=where,
        what="makes a tensor in the memory of a numpy array, which the function then changes.",
        why="A trace has a copy of the array: what is written to one would be missing in the other.",
        do=f"Change it before, or use torch.tensor, which copies, or use {RERUN}.",
    )


def other_default_dtype(function: str) -> TraceError:
    return TraceError.of(
        where=f"torch.{function} at {user_line()}",
        what=f"runs under {torch.get_default_dtype()} as the default dtype, which the function "
        "has set.",
        why="A recomputation runs all operators under the one that the call found.",
        do=f"Pass dtype= to what makes tensors, set the default outside, or use {RERUN}.",
    )


def require_tellable(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_operand: Callable[[Tensor], bool],
) -> None:
    """Refuses a call that asks a tensor for what no stand-in can tell or hand on, or warns.

    `is_operand` says of a tensor whether it is from outside of the function.
    """
    setting = tensors.SET_FOR_AUTOGRAD.get(func)
    # Also where torch's code sets it, as `module.requires_grad_(False)` does.
    if setting and is_operand(args[0]):
        _require_no_setting(setting, args, kwargs)
    pure = tensors.RESHAPES.get(func)
    if pure and is_operand(args[0]):
        raise MutationError.of(
            where=f"`.{func.__name__}()` of {TensorMeta.of(args[0])} at {user_line()}",
            what="changes the shape of a tensor from outside.",
            why=_NO_SHAPE,
            do=f"Write x = x.{pure}(...) instead.",
        )
    if func in tensors.READ_MEMORY:
        raise _without_memory(func, args[0], "reads or hands out a tensor's memory.")
    history = tensors.ASK_FOR_HISTORY.get(func)
    is_asked = func == tensors.GET_GRAD or func in tensors.ASK_FOR_MEMORY or history
    if not is_asked or is_called_by_torch():
        return
    if history and is_operand(args[0]) and is_asked_by_user():
        warn(
            where=f"`.{history}` of {TensorMeta.of(args[0])} at {user_line()}",
            what="is read inside a region, of a tensor from outside.",
            why="It is that of what stands for the tensor there.",
            do="Read it outside of the region, and pass what it says as an argument.",
        )
    if func == tensors.GET_GRAD and is_operand(args[0]):
        raise TraceError.of(
            where=f"`.grad` of {TensorMeta.of(args[0])} at {user_line()}",
            what="is read inside a region, of a tensor from outside.",
            why="It is no part of what the function is given: what stands for the tensor has "
            "none, and at the next call, or in the recomputation, it may be another.",
            do="Pass it as an argument: f(x, x.grad).",
        )
    if func in tensors.ASK_FOR_MEMORY:
        raise _without_memory(func, args[0], "asks where a tensor's memory is.")


def counts_in_given_memory(func: Any, tensor: Tensor) -> TraceError:
    return TraceError.of(
        where=f"`{func.__name__}()` of {TensorMeta.of(tensor)} at {user_line()}",
        what="counts a storage_offset in the memory of a tensor from outside.",
        why="Where in it the tensor begins is no part of what the function is given.",
        do="Leave out storage_offset, which counts from the tensor's first element "
        f"(x[2:].as_strided(size, stride)), or use {RERUN}.",
    )


def _without_memory(func: Any, tensor: Tensor, what: str) -> TraceError:
    return TraceError.of(
        where=f"`.{func.__name__}()` of {TensorMeta.of(tensor)} at {user_line()}",
        what=what,
        why="A trace runs on tensors that have none.",
        do=f"Do it outside, or use {RERUN}.",
    )


_NO_SHAPE = "A region hands back new numbers of what it is given, and no new shape."


@contextlib.contextmanager
def out_keeps_its_shape(
    kwargs: Mapping[str, Any], is_operand: Callable[[Tensor], bool]
) -> Generator[None]:
    """Refuses a call inside that resizes a tensor from outside, given as `out`."""
    found = trees.tensor_leaves(kwargs.get("out"))
    before = [(each, each.shape) for each in found if is_operand(each)]
    yield
    for tensor, shape in before:
        now = tensor.shape
        if now != shape:
            tensor.resize_(shape)
            raise MutationError.of(
                where=f"`out=` at {user_line()}",
                what=f"resizes a tensor from outside, from {list(shape)} to {list(now)}.",
                why=_NO_SHAPE,
                do="Give a tensor of that shape, or return the result instead.",
            )


def _require_no_setting(
    setting: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    tensor = args[0]
    where = f"`{setting}` of {TensorMeta.of(tensor)} at {user_line()}"
    if setting.startswith(".requires_grad"):
        wanted = [*args[1:], *kwargs.values(), True][0]
        if wanted == tensor.requires_grad:
            return
        if wanted:
            if tracer.proxy_is_active() and not fakes.is_fake(tensor):
                return  # a captured one, which is followed: the region is traced again
            warn(
                where=where,
                what="is written inside a region, of a tensor from outside.",
                why="What this call of the region returns leads no gradient to the tensor.",
                do="Write it before the region is called.",
            )
            return
    raise TraceError.of(
        where=where,
        what="is written inside a region, of a tensor from outside.",
        why="It would be written to what stands for the tensor there, and be lost.",
        do="Write it outside of the region.",
    )


def require_no_gradients(operands: Sequence[Tensor]) -> None:
    """Refuses a function that has put gradients into tensors from outside, by a backward."""
    for tensor in operands:
        if tensor.is_leaf and tensor.grad is not None:
            raise TraceError.of(
                where=f"the `.grad` of {TensorMeta.of(tensor)}",
                what="is written inside a region, of a tensor from outside, by `.backward()`.",
                why="It would be written to what stands for the tensor there, and be lost.",
                do="Use torch.autograd.grad, and return the gradients, or call `.backward()` "
                "outside of the region.",
            )


def sets_data(tensor: Tensor) -> TraceError:
    return TraceError.of(
        where=f"`.data = ...` of {TensorMeta.of(tensor)} at {user_line()}",
        what="replaces a tensor's data, which neither autograd nor a trace sees.",
        why="The trace would go on with the old data.",
        do="Write them in place (x.copy_(y) under torch.no_grad()), or use "
        'engine="rerun".',
    )


def converts(module: nn.Module) -> TraceError:
    return TraceError.of(
        where=f"a {type(module).__name__}, converted at {user_line()}",
        what="gets other parameters or buffers inside a region.",
        why="The trace would leave its own tensors, which have no data, in their place.",
        do="Convert the module outside, or what it is given (x.to(self.weight.dtype)).",
    )


def driven(module: nn.Module) -> TraceError:
    return TraceError.of(
        where=f"a {type(module).__name__}",
        what="is called inside a region.",
        why="It gathers parameters or reduces gradients around its forward. A "
        "region would not see this, and gradients would be lost.",
        do="Put the regions inside: use remat.modules.apply on it, or on its "
        'blocks. engine="rerun" works around a module of fully_shard, without a '
        "transform.",
    )


def view_of_unknown(line: str) -> TraceError:
    return TraceError.of(
        where=line or "a tensor that the function returns",
        what="is a view of a tensor that was transposed in place, and written to since.",
        why="The written tensor has another layout in the trace, in which the view is none.",
        do=f"Write x = x.mT instead of x.t_(), or use {RERUN}.",
    )


def reshapes_in_place(line: str) -> TraceError:
    return TraceError.of(
        where=line,
        what="reshapes a view in place (`t_`, `squeeze_` and their kind), and a write follows.",
        why="In a trace, torch gives the view its gradient in the shape that it had.",
        do=f"Write y = y.t() instead of y.t_(), or use {RERUN}.",
    )


def of_a_write(why: str, line: str) -> TraceError:
    return TraceError.of(
        where=line or "the function",
        what="reads or writes memory that is written to in a way that cannot be traced.",
        why=f"torch cannot make the write anew: {why}.",
        do=f"Write a new tensor instead (torch.where, torch.cat, torch.complex), or use {RERUN}.",
    )


def caught(error: RematError, goes_on: str) -> RematError:
    """The error for a function that catches this one, and is next at that line, if known."""
    how = "goes on after this error"
    if goes_on:
        how = f"catches this error, and goes on at {goes_on}"
    return type(error)(
        f"{error} The function {how}; on numbers it would go another way."
    )


def on_another_thread() -> TraceError:
    return TraceError.of(
        where=user_line() or "the function",
        what="the function computes on another thread.",
        why="A trace follows the thread that calls the region, and no other.",
        do=f"Compute on that thread, or use {RERUN}.",
    )


def of_the_users(
    error: Exception, *, is_backward: bool, where: str = ""
) -> RematError | None:
    """What an error of torch's, raised in a trace, says of the user's function, if anything.

    `where` is the line that raised, for an error that has lost its own.
    """
    text = str(error)
    where = line_of(error) or where or "the function"
    if "Variable that requires grad is being used in an in-place" in text:
        return refused_writes.mutates(where)
    if is_backward and "through the graph a second time" in text:
        return TraceError.of(
            where=where,
            what="an autograd.Function differentiates a graph that its forward has kept.",
            why="A trace runs the backward for several layouts of cotangents, and the first "
            "run frees that graph.",
            do=f"Pass retain_graph=True there, or use {RERUN}.",
        )
    if came_through(error, _TORCHS_NESTED):
        return TraceError.of(
            where=where,
            what="the function makes a nested tensor, which cannot be traced.",
            why="Its sizes are values of another tensor, and a trace sees shapes alone.",
            do=f"Work on its values and offsets, or on a padded tensor, or use {RERUN}.",
        )
    if came_through(error, _TORCHS_HOOKS) and "setup_context" in text:
        return TraceError.of(
            where=where,
            what="a module in the function has a full backward hook.",
            why="torch.func, which differentiates the function here, takes none.",
            do="Remove it, or give the module a region of its own: hooks run around it.",
        )
    if _TAKES_MEMORY in text:
        return TraceError.of(
            where=where,
            what="an operator takes the memory of a tensor, not its numbers.",
            why="A trace runs on tensors that have none. So do nn.LSTM, nn.GRU and nn.RNN on "
            "an accelerator, whose kernels look whether all weights lie in one piece.",
            do=f"Use {RERUN}.",
        )
    if came_through(error, _TORCHS_CHECKPOINT):
        return TraceError.of(
            where=where,
            what="the function calls torch.utils.checkpoint, which cannot be traced here.",
            why="Its backward runs the Python function again, on the real tensors "
            "instead of those of the trace.",
            do="Remove it (for a model of transformers, by "
            "model.gradient_checkpointing_disable()), because the region recomputes "
            "anyway; or import checkpoint from remat.interop.torch, which makes a "
            f"region inside the region; or use {RERUN}.",
        )
    if is_backward and fakes.lacking(error) == "tensor outside":
        return CapturedTensorError.of(
            where=where,
            what="the backward of an autograd.Function uses a tensor that its "
            "forward did not save, or a hook one that it captures.",
            why="It would be stale, or lose its gradient, at the next call.",
            do="Pass it to the forward, and save it with ctx.save_for_backward; pass "
            f"a hook's to the region; or use {RERUN}.",
        )
    return of_a_step(error, where)


#: What torch raises where a transform inside of a function is differentiated once more than it can,
#: and in the backward of a sparse tensor that is made of values.
_OF_TORCHS_OWN = (
    *("INTERNAL ASSERT FAILED", "requires special handling", "but got meta"),
    "expected device meta",
    "SparseCooTensorWithDimsAndTensorsBackward0 returned an invalid gradient",
)


def is_of_a_stand_in(error: Exception) -> bool:
    """Whether an error speaks of the class of what stands for a tensor in a trace."""
    return fakes.FakeTensor.__name__ in str(error)


def of_torchs_own(error: Exception) -> TraceError | None:
    """The error for a function, or a derivative of it, that torch's own transforms fail to trace."""
    text = str(error).partition("\n")[0]
    if not any(part in text for part in _OF_TORCHS_OWN):
        return None
    return TraceError.of(
        where=line_of(error) or "the function",
        what="it, or its derivative of this order, cannot be traced.",
        why=f"torch fails in it: {text}",
        do=f"Use {RERUN}.",
    )


LACKS_DERIVATIVE = (
    "A region is traced with its backward. Detach what nobody differentiates, or use "
    f"{RERUN}."
)


def of_a_step(error: Exception, where: str) -> RematError | None:
    """The error for a step of a program that cannot be traced again, made by this line."""
    if came_through(error, _TAKE_FUNCTIONS):
        return takes_functions(where or "the function", str(error))
    return of_values(error, where) if fakes.lacking(error) else None


def of_an_object(found: object, where: str) -> TraceError:
    """An operator takes an object of a class in C++, such as the packed weights of quantization."""
    return TraceError.of(
        where=where,
        what=f"an operator takes a {type(found).__name__}.",
        why="A trace cannot tell one such object from another, nor see what it holds.",
        do=f"Use {RERUN}.",
    )


def require_no_gradient_inside(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Refuses an operator through which plain torch differentiates, and a trace cannot."""
    if not (torch.is_grad_enabled() and schemas.is_differentiated_inside(func)):
        return
    is_wanted = any(each.requires_grad for each in trees.tensor_leaves((args, kwargs)))
    made = trees.tensor_leaves(out)
    is_of_numbers = any(each.is_floating_point() or each.is_complex() for each in made)
    if is_wanted and (is_of_numbers or not made):
        raise TraceError.of(
            where=f"{func} at {user_line()}",
            what="is an operator without a kernel for autograd.",
            why="Plain torch differentiates what its kernel calls, which a trace does not see.",
            do="Register a derivative (torch.library.register_autograd), pass x.detach() if "
            f"there is none, or use {RERUN}.",
        )


def takes_functions(where: str, why: str) -> TraceError:
    return TraceError.of(
        where=where,
        what="an operator that takes functions, as torch.cond does, cannot be traced here.",
        why=why.strip().partition("\n")[0].rstrip(".") + ".",
        do="Use torch.where for a branch, call the operator between two regions, or "
        f"use {RERUN}.",
    )


def raises_in_its_trace(error: Exception) -> TraceError:
    first = str(error).partition("\n")[0].rstrip(". ")
    return TraceError.of(
        where=line_of(error) or "the function",
        what=f"the function raises in its trace ({type(error).__name__}: {first}).",
        why="A trace runs it on tensors that have no values.",
        do=f"Use {RERUN}.",
    )


def of_values(error: Exception, where: str = "") -> TraceError:
    lacking = fakes.lacking(error)
    if lacking == "fake implementation":
        instead = "torch.library.register_fake, which tells the operator's shapes"
    elif came_through(error, _TORCHS_DISTRIBUTIONS):
        instead = "validate_args=False for the distribution"
    elif "_ctc_loss" in str(error):
        instead = "F.ctc_loss outside of the region"
    elif lacking == "shape":
        instead = (
            "torch.where(mask, a, b), x.masked_fill or torch.nonzero_static, which fix "
            "the shape"
        )
    else:
        instead = "torch.where"
    return TraceError.of(
        where=where or line_of(error) or "the function",
        what=f"the function cannot be traced ({str(error).splitlines()[0]}).",
        why="A trace sees shapes and types, not values: it cannot branch on a "
        "tensor's values, call .item(), or run a kernel that hides its work.",
        do=f"Use {instead}, or {RERUN}.",
    )
