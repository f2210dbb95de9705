"""In-place operators in a traced graph -> pure ones.

Most of them write to a tensor that nothing else has seen yet, such as dropout's mask or an
activation's fresh input. Then a change of names is enough. The others (writes to operands,
through views, under an alias) go through torch's functionalization, which is a second trace.
It knows torch's own operators. An operator of a library (`torch.library.custom_op`,
`mutates_args=...`) is called on copies there, by an operator that returns the copies.
"""

import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from remat._graph import operators, statistics
from remat._graph.meta import TensorMeta
from remat._torch import levels, schemas, sizes, tracer
from remat._torch.schemas import told_apart_by

_aten = torch.ops.aten


def has_mutations(graph: fx.Graph) -> bool:
    return any(operators.is_mutable(node.target) for node in graph.nodes)


def writes_to_reshaped(graph: fx.Graph) -> bool:
    """Whether memory is written to of which a view was reshaped in place before.

    For its gradient, torch would make the view again, in a trace, in the shape that it had. Obsolete
    when autograd replays what reshaped it.
    """
    roots: dict[fx.Node, fx.Node] = {}
    reshaped: set[fx.Node] = set()
    for node in graph.nodes:
        op, given = node.target, node.args[0] if node.args else None
        is_written = operators.is_mutable(op)
        is_part = is_written or operators.returns_view(op) or op is operator.getitem
        if not (is_part and isinstance(given, fx.Node)):
            continue
        root = roots[node] = roots.get(given, given)
        if is_written and torch.Tag.inplace_view in op.tags:
            reshaped.add(root)
        elif is_written and root in reshaped:
            return True
    return False


def writes_that_do_not_invert(graph: fx.Graph) -> Iterator[fx.Node]:
    """Writes through `unfold`, or to elements that lie in one place, as after `expand`.

    Functionalization would lose what the windows leave out, and add up what lies in one place.
    Obsolete when it refuses these itself.
    """
    for node in graph.nodes:
        for given in written(node) if operators.is_mutable(node.target) else ():
            views = [*_views_behind(given)]
            is_repeated = levels.repeats_itself(given.meta["val"])
            if _aten.unfold.default in views or (views and is_repeated):
                yield node


def _views_behind(node: Any) -> Iterator[Any]:
    """The view operators between a tensor and the owner of its memory."""
    while isinstance(node, fx.Node) and node.args:
        op = node.target
        if operators.returns_view(op):
            yield op
        elif op is not operator.getitem and not operators.is_mutable(op):
            return
        node = node.args[0]


def count_from_owners(graph: fx.Graph) -> None:
    """Has `as_strided` of a view count from the start of the memory behind it, as it does.

    Functionalization makes such a view anew only where it is the first one, and under vmap the
    view tells nothing of where an example lies. What an operand lies in is not known. Obsolete
    when functionalization counts so.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.as_strided.default):
        owner, offset = _owner(node.args[0]), node.meta["val"].storage_offset()
        is_known = owner.op == "call_function" and isinstance(offset, int)
        if is_known and owner is not node.args[0]:
            node.args, node.kwargs = (owner, *node.args[1:3], offset), {}


def _owner(node: fx.Node) -> fx.Node:
    """What made the memory that a tensor is in, counted in elements as large as the tensor's."""
    while node.op == "call_function":
        op, given = node.target, node.args[0] if node.args else None
        if not isinstance(given, fx.Node):
            break
        is_part = op is operator.getitem and _owner(given) is not given
        made = given.meta["val"]
        if isinstance(made, Tensor) and made.dtype != node.meta["val"].dtype:
            break
        if not (is_part or operators.returns_view(op) or written(node) == [given]):
            break
        node = given
    return node


def take_parts_for_views(graph: fx.Graph) -> None:
    """Has a write to a part of `unsafe_split` or `unsafe_chunk` reach the whole, as it does.

    Their schemas say that the parts are new, so that autograd lets them be written to.
    """
    for node in graph.nodes:
        node.target = operators.DECLARED_SPLIT.get(node.target, node.target)


def rename_fresh(
    graph: fx.Graph, *, are_reshaped: bool = False
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Replaces writes to tensors that nothing else has seen; each, and its replacement.

    Or where these are reshaped in place alone.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        pure = _pure_variant(node.target)
        written = node.args[0] if node.args else None
        if pure is None or not isinstance(written, fx.Node):
            continue
        if are_reshaped and torch.Tag.inplace_view not in node.target.tags:
            continue
        # Fresh is memory that its node has made, and that has no alias yet.
        seen = [user for user in written.users if order[user] < order[node]]
        is_fresh = all(map(_owns_memory, [written, *seen]))
        value = _pure_result(pure, node) if is_fresh else None
        if value is None:
            continue
        with graph.inserting_after(node):
            new = graph.call_function(pure, _given_for(pure, node), node.kwargs)
        new.meta["val"] = value
        order[new] = order[node]
        yield node, new
        for user in [*written.users]:
            if order[user] > order[node]:
                user.replace_input_with(written, new)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _pure_variant(op: Any) -> Any | None:
    """aten.div.Scalar for aten.div_.Scalar, where it writes its first argument alone.

    Overloads are told by their arguments: aten.pow_.Scalar is aten.pow.Tensor_Scalar.
    """
    if not operators.is_mutable(op):
        return None
    schema = schemas.schema_of(op)
    written = [each.name for each in _declared_written(op)]
    name = op.overloadpacket.__name__
    writes_first = written == [schema.arguments[0].name] and len(schema.returns) == 1
    if not writes_first or not name.endswith("_"):
        return None
    if op in operators.PURE_OF:
        return operators.PURE_OF[op]
    packet, own = getattr(_aten, name[:-1], None), told_apart_by(schema.arguments)
    for key in packet.overloads() if packet else ():
        overload: Any = getattr(packet, key)
        if told_apart_by(schemas.schema_of(overload).arguments) == own:
            return overload
    return None


def _given_for(pure: Any, node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments; with defaults, if those of the pure operator differ."""
    further, others = (
        schemas.schema_of(op).arguments[len(node.args) :] for op in (node.target, pure)
    )
    pairs = zip(further, others, strict=True)
    if all(one.default_value == other.default_value for one, other in pairs):
        return node.args
    defaults = itertools.takewhile(
        lambda each: not each.kwarg_only and each.name not in node.kwargs, further
    )
    return (*node.args, *(each.default_value for each in defaults))


def _owns_memory(node: fx.Node) -> bool:
    """Whether what a node returns is one tensor that shares memory with no other."""
    op: Any = node.target
    if not isinstance(op, schemas.OpOverload) or op.namespace != "aten":
        return False
    aliases = [each.alias_info for each in schemas.schema_of(op).returns]
    is_tensor = aliases == [None] and isinstance(node.meta.get("val"), torch.Tensor)
    return is_tensor and not operators.returns_view(op)


def _pure_result(pure: Any, node: fx.Node) -> torch.Tensor | None:
    """The result of the pure operator, in the layout that the write would have left."""
    written = node.meta["val"]
    if operators.may_draw(pure):
        # A program draws into a tensor like the argument, whatever the pure operator does.
        return written
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    with torch.no_grad():
        found = pure(*args, **kwargs)
    is_alike = TensorMeta.of(found) == TensorMeta.of(written, requires_grad=False)
    return found if is_alike else None


def runs_on_copies(op: Any) -> bool:
    """Whether an operator writes to single tensors, and torch has no pure form of it."""
    if not operators.is_mutable(op) or schemas.has_kernel(op.name(), "Functionalize"):
        return False
    return all("List" not in str(each.type) for each in _declared_written(op))


def run_on_copies(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls such an operator on copies of what it writes to, and then writes these back."""
    given = operators.arguments(op, args, kwargs)
    names = [each.name for each in _declared_written(op)]
    written = tuple(name for name in names if given.get(name) is not None)
    made = _on_copies(op, written)(**given)
    returned: list[Any] = [made] if isinstance(made, torch.Tensor) else [*made]
    for name in reversed(written):
        tracer.put_for(given[name], returned.pop())
    results = [
        returned.pop(0)
        if each.alias_info is None
        else given[_argument_returned(op, each)]
        for each in schemas.schema_of(op).returns
    ]
    return results[0] if len(results) == 1 else (tuple(results) or None)


@functools.cache
def _on_copies(op: Any, written: tuple[str, ...]) -> Callable[..., Any]:
    """The operator that copies, writes to the copies, and returns them; defined when met."""
    schema = schemas.schema_of(op)
    own = [k for k, each in enumerate(schema.returns) if each.alias_info is None]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = operators.arguments(op, args, kwargs)
        given |= {name: given[name].clone() for name in written}
        made = op(**given)
        made = made if len(schema.returns) > 1 else (made,)
        found = [*(made[k] for k in own), *(given[name] for name in written)]
        return found[0] if len(found) == 1 else tuple(found)

    given = re.sub(r"Tensor\(\w+!?\)", "Tensor", str(schema).partition("(")[2])
    returns = [str(schema.returns[k].type) for k in own] + ["Tensor"] * len(written)
    name = "_".join(("copied", *re.findall(r"\w+", operators.full_name(op)), *written))
    declared = f"({given.rpartition(') -> ')[0]}) -> ({', '.join(returns)})"
    return schemas.define(name, declared, kernel=run, fake=run)


def written(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node writes to, if it leaves their sizes and strides alone."""
    op: Any = node.target
    found: list[fx.Node] = []
    if torch.Tag.inplace_view not in getattr(op, "tags", ()):
        given = written_arguments(op, node.args, dict(node.kwargs))
        fx.map_arg(given, found.append)
    return found


def written_arguments(op: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """What an operator writes to."""
    if not operators.is_mutable(op):
        return []
    given = operators.arguments(op, args, kwargs)
    return [given.get(each.name) for each in _declared_written(op)]


def written_inputs(graph: fx.Graph, num_before: int) -> Iterator[fx.Node]:
    """The nodes after the first ones that write to an input of the graph, statistics included."""
    for node in itertools.islice(reversed(graph.nodes), len(graph.nodes) - num_before):
        given = written(node)
        if statistics.writes(node.target, node.args):
            given += [node.args[place] for place in statistics.PLACES]
        if any(_owner(each).op == "placeholder" for each in given):
            yield node


def lay_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> None:
    """Gives a tensor, inside of `functionalized`, the strides that it has outside.

    A pure operator chooses the strides of its result. The operator in place leaves those of
    the tensor that it writes to, and what reads the tensor next may depend on them.
    """
    found = tracer.value_of(tensor)
    is_resized = found.dim() != len(stride)  # as the empty tensor of an `out=` is
    if sizes.is_open(found) or is_resized or found.stride() == stride:
        return
    order = sorted(range(found.dim()), key=lambda dim: -stride[dim])
    dense = tensor.permute(order).contiguous()
    laid = dense.permute([order.index(dim) for dim in range(found.dim())])
    if laid.stride() == stride:
        tracer.put_for(tensor, laid)


def _declared_written(op: Any) -> list[Any]:
    declared = schemas.schema_of(op).arguments
    return [each for each in declared if each.alias_info and each.alias_info.is_write]


def _argument_returned(op: Any, returned: Any) -> str:
    names = returned.alias_info.before_set
    return next(
        each.name
        for each in schemas.schema_of(op).arguments
        if each.alias_info is not None and each.alias_info.before_set & names
    )
