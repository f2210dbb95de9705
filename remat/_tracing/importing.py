"""torch.fx graph -> this package's values.

What changes: of `detach` and `alias`, which autograd puts everywhere, those alone stay by which a
gradient ends in the user's function; marks become names, in-place operators become pure ones, a
write to an operand becomes a mutation, and the generator's state is recorded before each draw of
the forward. Everything else stays as it was traced.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, fx

from remat._errors import RematError
from remat._generators import device_states, streams
from remat._graph import operators, statistics
from remat._graph.meta import Meta, TensorMeta, device_of
from remat._graph.values import Ref, Value
from remat._switches.numerics import Numerics
from remat._torch import isolation, levels, sizes, taking_functions, tracer
from remat._tracing import in_place_operators, naming, refusals, taken_functions
from remat._tracing.draws import Draws

_aten = torch.ops.aten
_META = torch.device("meta")

# Operators that take a slice, and where among their arguments its start is.
_SLICES = {
    _aten.slice.Tensor: 2,
    _aten.slice_scatter.default: 3,
    _aten.slice_backward.default: 3,
}

# Operators that give their first argument with the second one's elements in a part of it.
_SCATTERS = frozenset(
    {_aten.select_scatter.default, _aten.slice_scatter.default}
    | {_aten.diagonal_scatter.default, _aten.as_strided_scatter.default}
)

# Derivatives of normalizations, which torch takes only in training mode.
_NORMS_OF_TRAINING = frozenset(
    {_aten.cudnn_batch_norm_backward.default, _aten.miopen_batch_norm_backward.default}
)


# What a note has for the function where a program that ran ends a gradient.
UNRECORDED = "no_grad"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """Where a node came from; kept in its `meta["remat"]`."""

    source: str  # the user's "file.py:line"
    function: str  # the torch function that was called
    is_backward: bool = True  # whether that was in the backward
    in_place: bool = False  # whether it wrote to an argument
    is_recorded: bool = True  # whether it was called outside of `no_grad`
    #: Whose numbers a draw takes; None is for the generator to say.
    stream: str | None = None
    rank: int = -1  # of a step that a backward program repeats, as in `Value`; else -1


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Computed:
    """A number that depends on sizes and is not made of whole numbers alone.

    Kept as it was computed: torch's own expression for it may round otherwise.
    """

    op: Any  # what computes it
    args: tuple[Any, ...]  # from these, other such numbers among them


def annotate(graph: fx.Graph, nodes_before: int, note: Note) -> None:
    """Notes on newly added nodes where they came from, unless they have a note."""
    num_new = len(graph.nodes) - nodes_before
    for node in itertools.islice(reversed(graph.nodes), num_new):
        if "remat" in node.meta:
            continue
        node.meta["remat"] = note
        if note.stream is None and operators.may_draw(node.target):
            draws = operators.draws_with(node.target, node.args, dict(node.kwargs))
            stream = streams.take(device_of(_meta_of_node(node)), draws=draws)
            node.meta["remat"] = dataclasses.replace(note, stream=stream)


class _NotingInterpreter(fx.Interpreter):
    """Runs a graph under a second trace and copies its notes to the new nodes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # an error says which line it is about

    def run_node(self, n: fx.Node) -> Any:
        graph = tracer.active_graph()
        before = len(graph.nodes)
        try:
            out = super().run_node(n)
        except (RuntimeError, IndexError) as error:
            if isinstance(error, RematError):
                raise
            why = str(error).partition(". ")[0]
            raise refusals.of_a_write(why, taken_functions.line_of(n)) from error
        for node in in_place_operators.written(n):
            in_place_operators.lay_out(self.env[node], node.meta["val"].stride())
        note = n.meta.get("remat")
        if note is not None:
            if operators.is_mutable(n.target):
                note = dataclasses.replace(note, in_place=True)
            if in_place_operators.runs_on_copies(n.target):
                name = operators.short_name(n.target)
                note = dataclasses.replace(note, function=name)
            annotate(graph, before, note)
        return out

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if in_place_operators.runs_on_copies(target):
            return in_place_operators.run_on_copies(target, args, kwargs)
        return super().call_function(target, args, kwargs)


@functools.cache
def _fills_shares(device: torch.device) -> bool:
    """Whether torch fills, on a device, the gradient that the largest elements share.

    Its `evenly_distribute_backward` (torch/csrc/autograd/FunctionsManual.cpp) returns
    `mask * (grad / mask.sum())` `if (any_tensor_subclass_like || input.is_cuda())`, else zeros
    in which the share is filled. A negative share times 0 is -0.0, which shows what it did.
    A device that is not here computes nothing either way. Obsolete when it has one formula.
    """
    here = torch.accelerator.current_accelerator(check_available=True)
    if device.type not in ("cpu", here and here.type):
        return False
    # From the source alone: no test runs where it multiplies.
    with isolation.isolated(), torch.enable_grad():
        x = torch.tensor([0.0, 1.0], device=device, requires_grad=True)
        (gradient,) = torch.autograd.grad(x.max().neg(), x)
        return not gradient[0].signbit().item()


def functionalize(module: fx.GraphModule, operands: Sequence[Tensor]) -> fx.GraphModule:
    """Replaces the in-place operators of a graph to be imported; its views are kept."""
    graph = module.graph
    # The graph holds its casts: autocast would add others around them.
    with Numerics.current().settled(), torch.no_grad(), levels.no_dual_level():
        for old, new in in_place_operators.rename_fresh(graph):
            if "remat" in old.meta:
                note = dataclasses.replace(old.meta["remat"], in_place=True)
                new.meta["remat"] = note
        if not in_place_operators.has_mutations(graph):
            return module
        for node in in_place_operators.writes_that_do_not_invert(graph):
            why = "it repeats or leaves out elements"
            raise refusals.of_a_write(why, taken_functions.line_of(node))
        in_place_operators.take_parts_for_views(graph)
        in_place_operators.count_from_owners(graph)
        inputs = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
        inputs[: len(operands)] = operands
        detached = [each.detach() for each in inputs]
        pure = tracer.functionalized(_NotingInterpreter(module).run)
        return tracer.make_fx(pure, detached)


def _imported_slice_end(bound: int, size: int) -> int:
    """Where a slice starts or ends, counted from the front."""
    return min(bound, size) if bound >= 0 else max(bound + size, 0)


@final
class Imported:
    """A traced module in parts; of a template the sizes are open, and filled in later."""

    def __init__(self, module: fx.GraphModule, *, is_template: bool = False) -> None:
        self.is_template = is_template
        self.values: list[Value] = []  # the steps
        self.env: dict[fx.Node, Any] = {}
        self.inputs: dict[fx.Node, int] = {}  # the first steps
        self.mutations: dict[int, Ref] = {}  # by input, what is written to it
        self.states: list[Ref] = []  # of generators, before the forward's draws
        self.sources: dict[Ref, Ref] = {}  # by each copy, what has its elements
        self.draws = Draws()
        self.outputs: tuple[Ref | None, ...] = ()  # what the function returned
        in_place_operators.count_from_owners(module.graph)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                ref = self._add_value(Value(None, meta=_meta_of_node(node)))
                self.env[node], self.inputs[node] = ref, ref.index
            elif node.op == "get_attr":
                found: Any = getattr(module, node.target)
                if isinstance(found, fx.GraphModule):
                    self.env[node] = found
                elif isinstance(found, torch.ScriptObject):
                    where = taken_functions.line_of(next(iter(node.users)))
                    raise refusals.of_an_object(found, where)
                else:
                    self._add(node, operators.constant, (found,), {})
            elif node.op == "output":
                self.outputs = tuple(map(self._output, self._resolve(node.args[0])))
            else:
                self._call(node)

    def _output(self, ref: Ref | None) -> Ref | None:
        ref = self._followed(ref)
        if ref is None:
            return None
        # Zeros without memory get some: forward mode cannot give them a tangent.
        value = self.values[ref.index]
        if operators.short_name(value.op) != "aten._efficientzerotensor":
            return ref
        return self._add_value(dataclasses.replace(value, op=_aten.zeros.default))

    def _add_value(self, value: Value) -> Ref:
        self.values.append(value)
        return Ref(len(self.values) - 1)

    def _call(self, node: fx.Node) -> None:
        target, kwargs = node.target, node.kwargs
        args = cast("tuple[Any, ...]", node.args)
        number = node.meta.get("val")
        if isinstance(number, sizes.SYMBOLIC):
            is_exact = not self.is_template or sizes.is_exact(number)
            self.env[node] = (
                number if is_exact else Computed(target, self._resolve(args))
            )
        elif target in operators.TRANSPARENT or _is_end(node):
            self.env[node] = self.env[args[0]]
            self._end_gradient(node)
        elif target is naming.MARK:
            self._name(self._followed(self.env[args[0]]), args[1])
        elif target is _aten.copy_.default and args[0] in self.inputs:
            new = self._followed(self.env[args[1]])
            self.mutations[self.inputs[args[0]]] = self.env[node] = new
        elif target is device_states.SWAP or operators.is_rng_state(target):
            self._set_state(node, args)
        else:
            self._operator(node, self._resolve(args), dict(self._resolve(kwargs)))
            self._end_gradient(node)

    def _end_gradient(self, node: fx.Node) -> None:
        """Has what reads a node's value see no gradient, where the function's do not."""
        op, ref = _end_of_gradient(node), self.env.get(node)
        meta = self.values[ref.index].meta if op and isinstance(ref, Ref) else None
        if isinstance(meta, TensorMeta) and meta.is_differentiable:
            self._add(node, op, (self._followed(ref),), {})

    def _followed(self, ref: Any) -> Any:
        """The value itself where a gradient ends: it has the name, is written and is returned."""
        while isinstance(ref, Ref) and operators.ends_gradient(self.values[ref.index]):
            ref = self.values[ref.index].args[0]
        return ref

    def _operator(
        self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        target: Any = node.target
        if statistics.writes(target, args):
            self._with_statistics(node, args)
            return
        if kwargs.get("device") == _META:
            # See `fakes.fake_mode`: the fake knows better.
            kwargs["device"] = node.meta["val"].device
        if taking_functions.takes_functions(target):
            refs, target = taken_functions.applied(
                node, args, kwargs, has_open_sizes=self.is_template
            )
            args, kwargs = tuple(refs), {}
        args = self._args_that_count(target, args)
        if target is _aten.mul.Tensor and self._shares_evenly(*args):
            target, args = _aten.where.ScalarOther, (*args, 0.0)
        if target is _aten.copy.default and self._is_like(node, args[1]):
            self.sources[Ref(len(self.values))] = args[1]
            made = node.meta["val"]
            is_plain = made.is_contiguous() and made.is_floating_point()
            if not self.is_template and is_plain:
                # Unlike `copy` it has a derivative.
                target, args = _aten.clone.default, args[1:2]
                kwargs = {"memory_format": torch.contiguous_format}
        self._add(node, target, args, kwargs)

    def _args_that_count(self, target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments in one form of those that come to the same."""
        if target in _NORMS_OF_TRAINING or (
            target is _aten.native_batch_norm_backward.default and args[7]
        ):
            # In training mode the kernel does not read the running statistics, which have
            # changed since.
            return (*args[:3], None, None, *args[5:])
        if target is _aten.convolution_backward.default and args[3] == [0]:
            # What torch's own calls tell where there is no bias.
            return (*args[:3], None, *args[4:])
        if target in _SLICES:
            args = self._bounded_slice(target, args)
        if target in _SCATTERS:
            # Only the elements of what is written count. torch's pure `copy` clones all the
            # memory behind a view to keep its strides.
            args = (args[0], self.sources.get(args[1], args[1]), *args[2:])
        return args

    def _bounded_slice(self, target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # x[1:] ends at the largest integer, and x[:-1] before the end. torch's vmap of
        # slice_scatter counts from start to end as they are (2.13 and 2.15).
        place = _SLICES[target]
        if len(args) <= place:
            return args
        sliced: Ref = args[0]
        meta = self.values[sliced.index].meta
        assert isinstance(meta, TensorMeta)
        is_backward = target is _aten.slice_backward.default
        sizes: Sequence[int] = args[1] if is_backward else meta.shape
        dim: int = args[place - 1]
        size = sizes[dim]
        start, end, *rest = *args[place:], *(None,) * (place + 2 - len(args))
        first = _imported_slice_end(0 if start is None else start, size)
        last = _imported_slice_end(size if end is None else end, size)
        return (*args[:place], first, max(first, last), *rest)

    def _is_like(self, node: fx.Node, ref: Ref) -> bool:
        """Whether what a node returns differs from a value only in how it lies in memory."""
        one, other = _meta_of_node(node), self.values[ref.index].meta
        if not (isinstance(one, TensorMeta) and isinstance(other, TensorMeta)):
            return False
        return (one.shape, one.dtype, one.device) == (
            other.shape, other.dtype, other.device,
        )  # fmt: skip

    def _shares_evenly(self, mask: Any, share: Any) -> bool:
        """Whether this derivative of max() or of a median is filled where it will run.

        In a trace torch writes mask * (gradient / mask.sum()), the mask being where an element is
        the result, or both are NaN. For plain tensors of most devices it fills zeros where the
        mask is set: other zeros, where the gradient is negative, and no NaN, where it is infinite.
        """
        divided = self._arguments_of(share, _aten.div.Tensor)
        counted = self._arguments_of(divided[-1], _aten.sum.default) if divided else ()
        either = self._arguments_of(mask, _aten.logical_or.default)
        equal = self._arguments_of(either[0], _aten.eq.Tensor) if either else ()
        if counted != (mask,) or not equal:
            return False
        largest: Ref = equal[1]
        meta = self.values[largest.index].meta
        assert isinstance(meta, TensorMeta), "max returns one tensor"
        return _fills_shares(meta.device)

    def _arguments_of(self, ref: Any, op: Any) -> tuple[Any, ...]:
        """The arguments of an operator, if a value is its result; else none."""
        value = self.values[ref.index] if isinstance(ref, Ref) else None
        return value.args if value is not None and value.op is op else ()

    def _name(self, ref: Ref, name: str) -> None:
        value = self.values[ref.index]
        if name not in value.names:
            names = (*value.names, name)
            self.values[ref.index] = dataclasses.replace(value, names=names)

    def _set_state(self, node: fx.Node, args: tuple[Any, ...]) -> None:
        if node.target is device_states.SWAP:
            self.env[node] = self.draws.set_to(self.env[args[0]], args[1])
            return
        again = self.draws.state_again(args[0])
        if again is not None:
            self.env[node] = again
            return
        self._add(node, node.target, args, {})
        self.draws.ask(args[0], self.env[node])

    def _with_statistics(self, node: fx.Node, args: tuple[Any, ...]) -> None:
        self._add(node, statistics.FUNCTIONAL_OF[node.target], args, {})
        made: Ref = self.env[node]
        given = [self._followed(args[place]) for place in statistics.PLACES]
        written: tuple[Ref, ...] = tuple(given)
        metas = tuple(self.values[old.index].meta for old in written)
        value = self.values[made.index]
        assert isinstance(value.meta, tuple), "an operator with several outputs"
        own = len(value.meta)
        self.values[made.index] = dataclasses.replace(value, meta=(*value.meta, *metas))
        for position, (old, meta) in enumerate(zip(written, metas, strict=True), own):
            part = dataclasses.replace(value, op=operator.getitem, meta=meta)
            part = dataclasses.replace(part, args=(made, position))
            self._overwrite(old, self._add_value(part))

    def _overwrite(self, old: Ref, new: Ref) -> None:
        # What is overwritten again was the operand's new value until now.
        operands = [k for k, latest in self.mutations.items() if latest == old]
        if old.index < len(self.inputs):
            operands.append(old.index)
        self.mutations |= dict.fromkeys(operands, new)
        for node, ref in self.env.items():
            if self._followed(ref) == old:
                self.env[node] = new

    def _add(self, node: fx.Node, target: Any, args: Any, kwargs: Any) -> None:
        note = node.meta.get("remat", Note("", ""))
        value = Value(
            op=target,
            args=args,
            kwargs=tuple(kwargs.items()),
            meta=_meta_of_node(node),
            is_backward=note.is_backward,
            source=note.source,
            function=note.function,
            in_place=note.in_place and target in operators.IN_PLACE_OF,
            rank=note.rank,
        )
        if operators.draws(value):
            value = self._draw(value, note.stream or "")
        self.env[node] = self._add_value(value)

    def _draw(self, value: Value, stream: str) -> Value:
        device = device_of(value.meta)
        again = self.draws.repeat(device)
        if again is not None:
            return dataclasses.replace(value, state=again, is_redraw=True)
        source = device if stream in ("", streams.UNKNOWN) else stream
        state = self.draws.unread(source)
        if state is None or self.values[state.index].is_backward != value.is_backward:
            size = device_states.size_bytes(device)
            state = self._add_value(
                Value(
                    op=device_states.STATE if source is device else streams.STATE,
                    args=(source,),
                    meta=TensorMeta((size,), (1,), torch.uint8, torch.device("cpu")),
                    is_backward=value.is_backward,
                    source=value.source,
                )
            )
        self.draws.add(device, source, state)
        if not value.is_backward:
            self.states.append(state)
        return dataclasses.replace(value, state=state, stream=stream)

    def _resolve(self, tree: Any) -> Any:
        return fx.map_arg(tree, self.env.__getitem__)


def _detaches(node: fx.Node) -> bool:
    """Whether a node is a user's `detach`, which is an alias below autograd on torch 2.15.

    An inner region detaches its results too, but gradients flow through them. So it does in
    its backward, which runs inside of a user's `torch.autograd.grad`, or `torch.func.grad`.
    """
    note: Note | None = node.meta.get("remat")
    function = "" if note is None else note.function
    if node.target is _aten.detach.default:
        return function not in ("", "grad")
    return node.target is _aten.alias.default and function == "detach"


def _is_end(node: fx.Node) -> bool:
    """Whether a node is an end of a program that was run (see `inside_traces`)."""
    return "remat" in node.meta and node.meta["remat"].function == UNRECORDED


def _end_of_gradient(node: fx.Node) -> Any:
    """The operator by which a gradient ends at a node; None where it goes on."""
    note: Note | None = node.meta.get("remat")
    if note is None:
        return None
    # Autograd detaches the results that it saves, as part of what makes them.
    if note.function == "detach" and node.target in operators.TRANSPARENT:
        return operators.DETACHED
    return None if note.is_recorded else operators.UNRECORDED


def cut_outputs(graph: fx.Graph) -> tuple[bool, ...]:
    """For each output whether a `detach` lies between it and what it is a view of.

    The graph must be the one that was traced: when torch replaces in-place operators, it
    makes views again and forgets which were detached.
    """
    (output,) = graph.find_nodes(op="output")
    return tuple(map(_is_cut_output, output.args[0]))


def _is_cut_output(node: Any) -> bool:
    while isinstance(node, fx.Node) and node.op == "call_function":
        if _detaches(node):
            return True
        op: Any = node.target
        is_part = op is operator.getitem or op in operators.TRANSPARENT
        if not (is_part or operators.returns_view(op)):
            return False
        node = node.args[0]
    return False


def _meta_of_node(node: fx.Node) -> Meta:
    val = node.meta.get("val")
    if isinstance(val, (tuple, list)):
        return tuple(map(_imported_meta, cast("Sequence[object]", val)))
    return _imported_meta(val)


def _imported_meta(val: object) -> TensorMeta | None:
    # What a sparse tensor holds shows when it is made: it is neither counted nor saved.
    if isinstance(val, Tensor) and val.layout == torch.strided:
        return TensorMeta.of(val)
    return None
