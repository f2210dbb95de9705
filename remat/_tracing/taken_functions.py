"""Operators that take functions, in a trace: one step each, and what the functions reach.

A function of `torch.cond` may use any tensor in its sight. The operator's own derivative knows
only the tensors that the operator is given, so the others become operands of it. To find these,
the operator runs once on tensors that no trace records. Then torch's rules record the operator, each
function as a graph of its own, and its backward likewise.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, fx

from remat._errors import ImplicitRandomnessError
from remat._graph import operators
from remat._graph.meta import TensorMeta
from remat._graph.values import Ref, Value
from remat._torch import autograd, levels, taking_functions, tracer, trees
from remat._torch.fakes import is_fake, is_fake_of
from remat._torch.taking_functions import Applied
from remat._tracing import in_place_operators, refusals
from remat._user_lines import user_line, warn

StandIn = Callable[[Tensor], Tensor]


@final
@dataclasses.dataclass(frozen=True)
class Within:
    """The running trace, as an operator that takes functions sees it."""

    mode: Any  # under which tensors are fakes
    lift: StandIn  # gives what stands for a tensor that the function around reaches
    #: Around a call of a function that the operator takes, in which others stand for tensors.
    calls: Callable[[StandIn], contextlib.AbstractContextManager[None]]


@final
@dataclasses.dataclass(eq=False)
class _TakenFunction:
    function: Callable[..., Any]
    within: Within
    #: What the operator was given for the last of its own tensors.
    operands: list[Tensor]
    #: Whether it returns what the operator does.
    returns_results: bool
    #: The tensors that it reaches, which come after its own.
    captured: tuple[Tensor, ...] = ()
    stand_in: StandIn | None = None  # gives what stands for others
    returned: Any = None  # the pytree that it returned, without its leaves

    def __call__(self, *given: Any) -> Any:
        outside = [*self.operands, *self.captured]
        last = given[len(given) - len(outside) :]
        own = {id(each): inner for each, inner in zip(outside, last, strict=True)}

        def stand_in(tensor: Tensor) -> Tensor:
            if id(tensor) in own or self.stand_in is None:
                return own.get(id(tensor), tensor)
            return self.stand_in(tensor)

        with tracer.Uncompiled(), self.within.calls(stand_in):
            found = self.function(*given[: len(given) - len(self.captured)])
        if not self.returns_results:
            return found
        leaves, self.returned = trees.flatten(found)
        return tuple(leaves)


@final
class _CapturedFinder:
    """Collects the tensors that functions reach while they run unrecorded."""

    def __init__(self, within: Within) -> None:
        self._mode, self._tracer = within.mode, tracer.active_tracer()
        self.tensors: dict[int, Tensor] = {}
        self._fakes: dict[int, Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        if not is_fake_of(tensor, self._mode):
            if id(tensor) not in self.tensors:
                whole = TensorMeta.of_whole(tensor, requires_grad=False)
                self._fakes[id(tensor)] = whole.empty()
            self.tensors[id(tensor)] = tensor
            return self._fakes[id(tensor)]
        if taking_functions.is_recorded(tensor, self._tracer):
            self.tensors[id(tensor)] = tensor
        return tensor


def call(
    within: Within, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Calls an operator that takes functions in the running trace."""
    taking, run = taking_functions.taking(op), taking_functions.callable_for(op)
    taking_functions.require_rule(op)
    args = list(args)
    groups: dict[int, list[_TakenFunction]] = {}
    for place, functions in taking.functions.items():
        args += [()] * (place + 1 - len(args))
        groups[place] = []
        for each in functions:
            # A switch has several, flex attention's mask comes after tensors.
            is_one, is_result = callable(args[each]), each in taking.returning
            parts = [args[each]] if is_one else list(args[each])
            for k, part in enumerate(parts):
                if callable(part):
                    given = list(args[place])
                    parts[k] = _TakenFunction(part, within, given, is_result)
                    groups[place].append(parts[k])
            args[each] = parts[0] if is_one else tuple(parts)
    taken = [each for group in groups.values() for each in group]
    if tracer.proxy_is_active():
        _find_captured(within, op, args, kwargs, groups.values())
        for place, group in groups.items():
            args[place] = (*args[place], *map(within.lift, group[0].captured))
    else:  # it runs to be looked at, on what stands for other tensors already
        for each in taken:
            each.stand_in = within.lift
    return _unflattened_results(run(*args, **kwargs), taken)


def _find_captured(
    within: Within,
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    groups: Iterable[Sequence[_TakenFunction]],
) -> None:
    """Tells the functions of an operator, group by group, which tensors they reach, by a run."""
    found = [(_CapturedFinder(within), group) for group in groups]
    for tensors, group in found:
        for each in group:
            each.stand_in = tensors
    with tracer.unrecorded(), torch.no_grad():
        # Others than the operands: a function may reach an operand, too.
        taking_functions.look_at(op, trees.map_tensors(torch.detach, args), kwargs)
    for tensors, group in found:
        for each in group:
            each.captured, each.stand_in = tuple(tensors.tensors.values()), None


def _unflattened_results(results: Any, taken: Sequence[_TakenFunction]) -> Any:
    """What the functions would have returned, from the operator's flat results."""
    require_first_order(results, user_line())
    specs = [each.returned for each in taken if each.returns_results]
    return trees.unflatten(list(results), specs[0]) if specs else results


def require_derivative(op: Applied, where: str) -> None:
    """Refuses an operator that is differentiated, of which a function has no derivative."""
    missing = op.without_derivative
    if missing is not None:
        why = f"It is differentiated twice, and torch has no derivative of {missing}"
        raise refusals.takes_functions(where, why)


def require_first_order(results: Any, where: str) -> None:
    """Refuses the backward of an operator, of these results, that will itself be differentiated.

    torch loses parts of such a derivative without a word: what its backward reads does not
    lead back to the operands.
    """

    def check(_: Any) -> None:
        if torch.is_grad_enabled():
            why = "It is differentiated twice, and torch has no second derivative of it"
            raise refusals.takes_functions(where, why)

    for each in trees.tensor_leaves(results):
        autograd.before_backward(levels.unwrapped(each), check)


def applied(
    node: fx.Node, args: Any, kwargs: Any, *, has_open_sizes: bool
) -> tuple[list[Ref], Applied]:
    """The operands of a call of an operator that takes functions, and the operator with these."""
    if has_open_sizes:
        raise refusals.takes_functions(
            line_of(node),
            "With dynamic_shapes=True sizes are filled into a graph, and not into the "
            "graphs of its functions",
        )
    for each in trees.flatten((args, kwargs))[0]:
        if isinstance(each, fx.GraphModule):
            is_result = taking_functions.returns_results(node.target)
            _prepare_taken_graph(each, line_of(node), returns_results=is_result)
    return Applied.to(node.target, args, kwargs, Ref)


def _prepare_taken_graph(
    module: fx.GraphModule, where: str, *, returns_results: bool
) -> None:
    """Brings the graph of a function that an operator takes into the form of a step of a graph."""
    # What torch makes, as `squeeze_` in a product with a vector, it makes otherwise elsewhere.
    list(in_place_operators.rename_fresh(module.graph, are_reshaped=True))
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            held: Any = getattr(module, str(node.target))
            if isinstance(held, fx.GraphModule):
                _prepare_taken_graph(held, where, returns_results=True)
            elif is_fake(held):
                why = "One of its functions reaches a tensor where no mode sees it"
                raise refusals.takes_functions(where, why)
        elif node.target in operators.TRANSPARENT:
            node.replace_all_uses_with(node.args[0])  # pyright: ignore[reportArgumentType]
        elif node.op == "call_function":
            _require_no_effect(node, where)
            node.target = taking_functions.callable_for(node.target)
        elif node.op == "output" and returns_results:
            results = tuple(trees.flatten(node.args[0])[0])
            _require_own_memory(results, where)
            if isinstance(node.args[0], list):
                node.args = (results,)  # torch differentiates no list
    for node in module.graph.nodes:
        node.meta.clear()  # its tensors would hold autograd's graph
    module.graph.eliminate_dead_code()  # the graph's names go on holding what is dead
    module.recompile()


def _require_no_effect(node: fx.Node, where: str) -> None:
    op: Any = node.target
    if operators.draws(Value(op, node.args, tuple(node.kwargs.items()))):
        raise ImplicitRandomnessError.of(
            where=f"{operators.short_name(op)} at {line_of(node)}",
            what="draws from a generator in a function that an operator takes.",
            why="A recomputation of the operator would draw other numbers.",
            do="Draw with a key (remat.random), or draw before the operator.",
        )
    if any(
        _node_viewed(each).op == "placeholder"
        for each in in_place_operators.written(node)
    ):
        why = "One of its functions writes to what it is given"
        raise refusals.takes_functions(where, why)


def _require_own_memory(results: Sequence[Any], where: str) -> None:
    bases = [_node_viewed(each) for each in results if isinstance(each, fx.Node)]
    is_own = all(base.op != "placeholder" for base in bases)
    if not is_own or len(set(bases)) < len(bases):
        raise refusals.takes_functions(
            where,
            "One of its functions returns what it is given, a view of that, or the same "
            "twice, where torch asks for a clone",
        )


def _node_viewed(node: fx.Node) -> fx.Node:
    """What a node of a graph is a view of, or is one of several views of."""
    maker: Any = node.args[0] if node.target is operator.getitem else node
    op: Any = maker.target
    return _node_viewed(maker.args[0]) if operators.returns_view(op) else node


def warn_of_name(name: str) -> None:
    """Warns of a name in a function that an operator takes, whose values are its own."""
    warn(
        where=f"the name {name!r} at {user_line()}",
        what="names nothing that a policy could save.",
        why="It stands in a function that an operator takes, which is one value.",
        do="Name what the operator returns.",
    )


def line_of(node: fx.Node) -> str:
    """The user's line behind a node of a graph that is traced."""
    note = node.meta.get("remat")
    return (note and note.source) or "the function"
