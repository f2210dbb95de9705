"""Operators that take functions, such as `torch.cond`: which are known, and what they give them.

Obsolete when such an operator tells which of its arguments are functions, which tensors these
are given, and for which transforms it has a rule.
"""

# pyright: reportPrivateUsage=false
import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor, fx
from torch._functorch.autograd_function import custom_function_call
from torch.fx.experimental import proxy_tensor
from torch.overrides import _get_current_function_mode_stack

from remat._torch import loops, schemas
from remat._torch.levels import functorch, unwrapped
from remat._torch.trees import Frame


class Taking(NamedTuple):
    """Where an operator that takes functions has them among its positional arguments."""

    #: By the place of the tensors that come last to them, the places of functions, or of
    #: tuples that hold some.
    functions: Mapping[int, tuple[int, ...]]
    #: The functions that return what the operator does.
    returning: tuple[int, ...] = (0,)


_KNOWN: dict[str, Taking] = {
    "cond": Taking({3: (1, 2)}, returning=(1, 2)),
    "switch": Taking({2: (1,)}, returning=(1,)),
    "while_loop": Taking({3: (0, 1)}, returning=(1,)),
    "scan": Taking({3: (0,)}),
    "map_impl": Taking({2: (0,)}),
    "associative_scan": Taking({2: (0,)}),
    "flex_attention": Taking({7: (3,), 8: (4,)}, returning=()),
}
# A mode of flex attention's. Its module imports Dynamo, which takes a second.
_BY_TENSORS = "torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex"


def takes_functions(op: Any) -> bool:
    """Whether an operator takes functions, known or not.

    By `custom_function_call` torch.func calls an `autograd.Function`, whose own rules apply.
    """
    is_operator = isinstance(op, torch._ops.HigherOrderOperator)
    return is_operator and op is not custom_function_call


def taking(op: Any) -> Taking:
    """How an operator takes functions; a `NotImplementedError` if a trace does not know it."""
    if op.name() not in _KNOWN:
        raise NotImplementedError(f"A trace does not know `{op}`")
    return _KNOWN[op.name()]


def returns_results(op: Any) -> bool:
    """Whether what functions return becomes results of an operator, whose memory is its own."""
    return op.name() in _KNOWN and bool(_KNOWN[op.name()].returning)


def require_rule(op: Any) -> None:
    """Raises a `NotImplementedError` if an operator has no rule for the innermost transform."""
    top = functorch.peek_interpreter_stack()
    if top is not None and top.key() not in op.functorch_table:
        transform = top.key().name.lower()
        raise NotImplementedError(f"torch has no rule for `{op}` under {transform}")


def is_recorded(tensor: Tensor, tracer: Any) -> bool:
    """Whether a tensor is a value of the graph that this tracer fills."""
    return proxy_tensor.get_proxy_slot(unwrapped(tensor), tracer, None) is not None


def look_at(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Runs an operator without data, so that each function that it takes runs.

    Of flex attention no function would run. Obsolete when one does.
    """
    if op is not torch.ops.higher_order.flex_attention:
        callable_for(op)(*args, **kwargs)
        return
    query, _, _, score, (*_, mask) = args[:5]
    places = [query.new_zeros((), dtype=torch.int) for _ in range(4)]
    module = importlib.import_module(_BY_TENSORS.rpartition(".")[0])
    with module.TransformGetItemToIndex():
        score(query.new_zeros(()), *places, *args[7])
        mask(*places, *args[8])


def indexes_by_tensors() -> bool:
    """Whether a mode has `x[i]` read no number of a tensor `i`."""
    kinds = map(type, _get_current_function_mode_stack())
    return _BY_TENSORS in [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]


def callable_for(op: Any) -> Any:
    """What to call for an operator: itself, or what does the same where torch's rules fail."""
    return _CALLED_BY.get(op, op)


def _cond_of_batches(mask: Any, yes: Any, no: Any, operands: Sequence[Any]) -> Any:
    """`cond`, whose rule in torch gives one result alone where vmap maps the predicate.

    Obsolete when it gives all.
    """
    if not functorch.is_batchedtensor(mask):
        op: Any = torch.ops.higher_order.cond
        return op(mask, yes, no, operands)
    pairs: Any = zip(yes(*operands), no(*operands), strict=True)
    return tuple(torch.where(mask, one, other) for one, other in pairs)


def _scan_by_steps(
    combine: Any, leaves: Sequence[Tensor], given: Sequence[Any] = ()
) -> Any:
    """`associative_scan`, or the operators of its steps where torch's rules fail.

    Its derivative takes what the function gives for a leaf to depend on this leaf alone, which
    is sure of a single one; a map puts the graph of the function, which is of one row, around
    several. Obsolete when it does not.
    """
    wanted = torch.is_grad_enabled() and any(each.requires_grad for each in leaves)
    if any(map(functorch.is_batchedtensor, leaves)) or (wanted and len(leaves) > 1):
        module = importlib.import_module("torch._higher_order_ops.associative_scan")
        return module.generic_associative_scan(combine, leaves, additional_inputs=given)
    op: Any = torch.ops.higher_order.associative_scan
    return op(combine, leaves, given)


_LOOPS = {torch.ops.higher_order.while_loop, loops.while_loop, loops.gradients}
_CALLED_BY: dict[Any, Any] = {
    torch.ops.higher_order.cond: _cond_of_batches,
    torch.ops.higher_order.while_loop: loops.while_loop,
    torch.ops.higher_order.associative_scan: _scan_by_steps,
}


@final
@dataclasses.dataclass(frozen=True)
class Applied:
    """An operator that takes functions, with those that it was given: one step of a graph.

    Two are equal if they do the same to the tensors that they are called with.
    """

    operator: Any
    #: The arguments around the tensors, the functions among them: graphs.
    frame: Frame = dataclasses.field(compare=False)
    #: What else tells it from others.
    described: tuple[Any, ...]

    @classmethod
    def to(
        cls, op: Any, args: Any, kwargs: Any, tensor: type
    ) -> tuple[list[Any], Self]:
        """What stands for tensors among arguments, and the operator around these."""
        tensors, frame = Frame.of((args, kwargs), tensor)
        described = (str(frame.spec), *map(_described_static, frame.statics))
        return tensors, cls(op, frame, described)

    @property
    def loops(self) -> bool:
        """Whether it runs a loop whose number of iterations depends on numbers."""
        return not _LOOPS.isdisjoint(self._operators)

    @property
    def without_derivative(self) -> str | None:
        """An operator that it runs and torch has no derivative of; None if there is none.

        Of what is made of others, as the backward of silu, a graph of torch's takes no parts.
        """
        for each in self._operators:
            if each is loops.gradients or schemas.made_of_others(each):
                return str(each)
        return None

    @property
    def _operators(self) -> set[Any]:
        """The operator, and those that its functions call."""
        taken = [
            each for each in self.frame.statics if isinstance(each, fx.GraphModule)
        ]
        parts = [part for each in taken for part in each.modules()]
        graphs = [each.graph for each in parts if isinstance(each, fx.GraphModule)]
        return {self.operator, *(node.target for each in graphs for node in each.nodes)}

    def __call__(self, *tensors: Tensor) -> Any:
        """Runs the operator."""
        require_rule(self.operator)
        args, kwargs = self.frame.around(tensors)
        return callable_for(self.operator)(*args, **kwargs)

    def __str__(self) -> str:
        return str(self.operator)


def _described_static(static: Any) -> Any:
    """What tells an argument that is no tensor from others."""
    if not isinstance(static, fx.GraphModule):
        return (type(static), repr(static))
    names = [str(node.target) for node in static.graph.find_nodes(op="get_attr")]
    held = [_described_static(getattr(static, name)) for name in names]
    return (*_described_graph(static.graph), *held)


def _described_graph(graph: fx.Graph) -> list[Any]:
    """What tells a graph from others, whatever its values are called."""
    names = {node: f"%{place}" for place, node in enumerate(graph.nodes)}
    return [
        (
            node.target if node.op == "call_function" else node.op,
            repr(fx.map_arg((node.args, node.kwargs), names.__getitem__)),
        )
        for node in graph.nodes
    ]
