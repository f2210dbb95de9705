"""`torch.while_loop`, with a derivative that holds no value of an iteration.

torch's own derivative stacks what every iteration starts from, and no trace knows of how many
there are. Here the derivative is a step of its own: it is given what the loop was given, runs
the loop again, and goes back through the iterations by torch's derivative of one. Obsolete when
a graph may hold values of a size that is known when it runs.
"""

# pyright: reportPrivateUsage=false
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._higher_order_ops import utils
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, track_tensor_tree

_utils: Any = utils
_operator: Any = torch.ops.higher_order.while_loop
_Tensors = Sequence[Tensor]
_Function = Callable[..., Any]
_CONTIGUOUS = torch.contiguous_format


def while_loop(
    condition: _Function, body: _Function, carried: Sequence[Any], given: _Tensors
) -> Any:
    """Calls the operator, with the derivative of this module."""
    if not all(isinstance(each, Tensor) for each in carried):
        raise NotImplementedError("The loop carries a number, which is not a tensor")
    tensors = (*carried, *given)
    wanted = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    call = _Loop.apply if wanted else _without_derivative
    return call(condition, body, len(carried), *tensors)


def shapes_of(
    condition: _Function, body: _Function, carried: _Tensors, given: _Tensors
) -> Any:
    """What it returns, of fake tensors: torch's rule wants an environment of symbols.

    Both functions run, so that what they reach is seen.
    """
    condition(*carried, *given)
    found = body(*carried, *given)
    names = ("carried_inputs", "body_output")
    _utils.check_meta_consistency(carried, found, *names, include_contiguity=False)
    return found


def _without_derivative(
    condition: _Function, body: _Function, num_carried: int, *tensors: Tensor
) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return _operator(condition, body, tensors[:num_carried], tensors[num_carried:])


def _has_derivative(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _differentiated(tensors: _Tensors) -> list[Tensor]:
    return list(filter(_has_derivative, tensors))


@final
class _Loop(torch.autograd.Function):
    """The loop, and `gradients` in its backward."""

    @staticmethod
    def forward(
        ctx: Any, condition: _Function, body: _Function, num_carried: int, *tensors: Any
    ) -> Any:
        ctx.functions, ctx.num_carried = (condition, body), num_carried
        # The body is traced in the backward as if it were called here.
        ctx.keys = (
            torch._C._dispatch_tls_local_include_set(),
            torch._C._dispatch_tls_local_exclude_set(),
        )
        ctx.save_for_backward(*tensors)
        return _without_derivative(condition, body, num_carried, *tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        tensors = ctx.saved_tensors
        carried, given = tensors[: ctx.num_carried], tensors[ctx.num_carried :]
        pairs = zip(carried, grad_outputs, strict=True)
        cotangents = [grad for each, grad in pairs if _has_derivative(each)]

        def graph(function: _Function, *args: Tensor) -> fx.GraphModule:
            return _utils.materialize_as_graph(
                function, args, *ctx.keys, force_enable_grad=True
            )

        condition, body = (graph(each, *tensors) for each in ctx.functions)
        pullback = _utils.create_bw_fn(ctx.functions[1], tensors)
        step = graph(pullback, *tensors, *cotangents)
        found = iter(gradients((condition, body, step), carried, given, cotangents))
        own = [next(found) if _has_derivative(each) else None for each in tensors]
        return None, None, None, *own


@final
class _Gradients(HigherOrderOperator):
    """(functions, carried, given, cotangents) -> the gradients of a loop.

    Of those of `carried`, from which the first iteration starts, and `given`, which each is given
    beside, that have some. The functions are what the loop asks, an iteration, and what goes from
    an iteration's start, `given` and cotangents to gradients of the first two.
    """

    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


gradients: Any = _Gradients("while_loop_gradients")


@gradients.py_impl(DispatchKey.CompositeExplicitAutograd)
def _run_gradients(
    functions: Any, carried: _Tensors, given: _Tensors, cotangents: _Tensors
) -> Any:
    condition, body, step = functions
    starts, state = list[_Tensors](), carried
    while condition(*state, *given):
        starts.append(state)
        state = body(*state, *given)
    sums = [torch.zeros_like(each) for each in _differentiated(given)]
    kept = [_has_derivative(each) for each in (*carried, *given)]
    while starts:
        found = step(*starts.pop(), *given, *cotangents)
        own = [each for each, has in zip(found, kept, strict=True) if has]
        cotangents = own[: len(cotangents)]
        added = own[len(cotangents) :]
        sums = [new + before for new, before in zip(added, sums, strict=True)]
    return tuple(each.clone(memory_format=_CONTIGUOUS) for each in (*cotangents, *sums))


@gradients.py_impl(FakeTensorMode)
def _shapes_of_gradients(
    mode: FakeTensorMode, _: Any, carried: _Tensors, given: _Tensors, __: Any
) -> Any:
    own = _differentiated([*carried, *given])
    with mode:
        return tuple(torch.empty_like(x, memory_format=_CONTIGUOUS) for x in own)


@gradients.py_functionalize_impl
def _refuse_in_a_graph(*args: Any) -> Any:
    """Refuses what Inductor could not lower."""
    raise NotImplementedError("Its backward cannot be in a graph of torch.compile")


@gradients.py_impl(ProxyTorchDispatchMode)
def _record_gradients(mode: Any, *args: Any) -> Any:
    tracer = mode.tracer
    for function in args[0]:
        _, name = _utils.unique_graph_id(mode, "while_loop_part")
        tracer.root.register_module(name, function)
    operands = _utils.pytree.tree_map(tracer.unwrap_proxy, args)
    node = tracer.create_proxy("call_function", gradients, operands, {})
    return track_tensor_tree(gradients(*args), node, constant=None, tracer=tracer)


@final
class _FirstOrder(torch.autograd.Function):
    """`gradients`, whose own derivative raises.

    What torch has for this, `autograd_not_implemented`, does not lead back to the operands: a
    derivative with respect to these leaves its part out.
    """

    @staticmethod
    def forward(
        ctx: Any, functions: Any, num_carried: int, num: int, *tensors: Tensor
    ) -> Any:
        carried, given = tensors[:num_carried], tensors[num_carried:num]
        with torch._C._AutoDispatchBelowAutograd():
            return gradients(functions, carried, given, tensors[num:])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        raise NotImplementedError(f"derivative for {gradients.name()} is missing")


@gradients.py_autograd_impl
def _differentiate_once(
    functions: Any, carried: _Tensors, given: _Tensors, cotangents: _Tensors
) -> Any:
    num_carried, num = len(carried), len(carried) + len(given)
    return _FirstOrder.apply(functions, num_carried, num, *carried, *given, *cotangents)
