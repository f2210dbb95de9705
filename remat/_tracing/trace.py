"""Pure function and metadata -> joint graph of its forward and its backward.

The function runs once, on fake tensors, outside every transform and mode of the caller (`make_fx`
under `FakeTensorMode`, and `torch.autograd.grad` inside it, as AOTAutograd does), so that users'
`autograd.Function`s, `no_grad` blocks and `detach` mean in the graph what they mean outside. Fakes
have the exact strides of inputs and cotangents. In-place operators are then replaced.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, fx

from remat._errors import RematError, TraceError
from remat._generators import streams
from remat._graph.joint import Joint, View, view_path
from remat._graph.meta import TensorMeta
from remat._graph.values import Graph, Ref, Value, check
from remat._graph.zeros import without_zeros
from remat._switches.numerics import Numerics
from remat._torch import autocast, autograd, dtensor, isolation, tracer
from remat._torch.attributes import attributes_as
from remat._torch.fakes import fake_mode, forget_operators, wraps_fakes
from remat._torch.modules import converting_by, untracked
from remat._torch.sizes import OpenSizes, shape_env_of
from remat._tracing import (
    arrays,
    collectives,
    engines,
    importing,
    in_place_operators,
    refusals,
)
from remat._tracing.aliases import (
    choose_outputs,
    copy_custom_aliases,
    without_false_gradients,
)
from remat._tracing.importing import Note
from remat._tracing.once_more import OF_TORCH
from remat._tracing.refused_writes import RefusedInBackward
from remat._tracing.side_effects import on_error, take_out
from remat._tracing.thread import (
    Running,
    UserCalls,
    converter,
    current,
    entered,
    fake_of,
    lift,
    placeholder,
)

Flat = Callable[[Sequence[Tensor]], Sequence[Tensor | None]]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    function: Flat  # tensors in, tensors (or None) out
    operands: tuple[TensorMeta, ...]  # the metadata of what goes in
    #: The metadata of each output's cotangent, None where none comes; the whole is None for
    #: "like the outputs".
    cotangents: tuple[TensorMeta | None, ...] | None = None
    changed: tuple[
        int, ...
    ] = ()  # the operands of which the last outputs are new values
    #: Whether a captured tensor may become a further operand.
    find: Callable[[Tensor], bool] = lambda _: False
    is_in_parts: bool = False  # whether a tensor in parts, taken whole, goes in
    #: The switches under which the backward half runs; None means the forward's, without autocast.
    backward_numerics: Numerics | None = None
    #: Whether cotangents of no other layout than the outputs' are to be expected.
    like_outputs: bool = False
    gradients: bool = True  # whether to trace a backward at all
    #: Whether the backward is to be differentiated: torch has other formulas for some.
    is_recorded: bool = False
    #: Whether the function runs a program, which leaves no tensor anywhere.
    is_program: bool = False
    sizes: OpenSizes | None = None  # the symbols in what goes in, where some are open


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """Joint graphs and what was met on the way."""

    #: One for each layout of cotangents, the usual one first; they share all but their gradients.
    joints: tuple[Joint, ...]
    captured: tuple[Tensor, ...]  # which are the operands after the given ones
    stand_ins: list[Tensor]  # the operand that stood for each of these in the trace
    fakes: tuple[weakref.ref[Tensor], ...]  # to what the user's code held while it ran


def trace(request: Request) -> Traced:
    """Traces a function and its backward.

    Raises:
        TraceError: if it cannot be traced: it branches on values, say.
        CapturedTensorError: if it reaches a tensor that `request.find` does not know.
    """
    shape_env = _shape_env(request, current())
    mode = fake_mode(_home_device(request.operands), shape_env)
    running = Running(mode, request.find, shape_env)
    if request.is_in_parts:
        running.in_parts.add("given")
    devices = [torch.device("cpu"), *(each.device for each in request.operands)]
    with (
        tracer.one_trace_at_a_time(),
        entered(running),
        streams.standing_in(devices),
        isolation.isolated(),
        torch.enable_grad(),
        engines.refused(),
        tracer.own_parametrizations(),
        tracer.parameters_seen(lift),
        tracer.arrays_seen(),
        tracer.zeros_viewed(),
        untracked(),
        converting_by(converter),
        running.mode,
    ):
        run = _TraceRun(request, running)
        with on_error(forget_operators), on_error(lambda: take_out(running.fakes)):
            module = _record_run(run)
            return _finish_trace(run, module)


def _shape_env(request: Request, outer: Running | None) -> Any:
    """A region inside a trace with open sizes is traced among the same symbols."""
    if request.sizes is not None:
        return request.sizes.env
    if outer is not None and outer.shape_env is not None:
        return outer.shape_env
    return shape_env_of(sizes_of(request.operands))


def sizes_of(metas: Sequence[TensorMeta]) -> list[int]:
    """The sizes and strides of tensors in a row."""
    return [number for meta in metas for number in (*meta.shape, *meta.stride)]


_NOTHING = contextlib.nullcontext()


class _TraceRun:
    """One execution of the function and its backward under `make_fx`."""

    def __init__(self, request: Request, running: Running) -> None:
        self.request, self.running = request, running
        self.differentiable: list[bool] = []
        self.layouts: list[tuple[TensorMeta | None, ...]] = []
        self.detached: list[bool] = []
        self.cut: tuple[bool, ...] = ()
        self.chosen: tuple[int, ...] = ()
        self.same: dict[int, tuple[str, int]] = {}
        self.placements: list[Any] = []
        self.spread: list[Any] = []
        self.num_returned = 0
        self.keeps_casts = torch.is_autocast_cache_enabled()

    def __call__(self, *fakes: Tensor) -> list[Tensor | None]:
        with autocast.autocast_cache(self.keeps_casts):
            pairs = zip(self.request.operands, fakes, strict=True)
            return self._run([meta.stand_in(each) for meta, each in pairs])

    def _run(self, operands: list[Tensor]) -> list[Tensor | None]:
        running, request = self.running, self.request
        running.operands = operands
        with (
            running.raised.refused_if_caught(),
            UserCalls(running),
            autograd.lifted_past_modes(lift) as lifting,
        ):
            results = request.function(tuple(operands))
        running.is_custom |= lifting.has_functions
        running.rules |= {"forward"} if lifting.has_rules else set()
        if not request.is_program:
            refusals.require_no_gradients([*operands, *running.leaves])
        running.look_ups.require_unchanged()
        arrays.require_unchanged(running.shared)
        # Outside the mode, which would take the lift's own work for the user's.
        returned = [out if out is None else lift(out) for out in results]
        for out in returned:
            if out is None or dtensor.placement(out) is not None:
                continue
            if wraps_fakes(out) or not refusals.is_strided(out):
                raise refusals.unknown_class(out)
        running.is_custom |= autograd.has_own_rule(returned)
        self.num_returned = len(returned)
        given = [*operands, *running.leaves]
        returned = copy_custom_aliases(given, without_false_gradients(given, returned))
        self.chosen, self.same = choose_outputs(given, returned)
        outputs = [out for index in self.chosen if (out := returned[index]) is not None]
        self.placements = list(map(dtensor.placement, outputs))
        self.differentiable = [out.requires_grad for out in outputs]
        self.detached = [out is not None and not out.requires_grad for out in returned]
        _note_forward(tracer.active_graph())
        layout = request.cotangents
        self.layouts = _usual_layouts(outputs) if layout is None else [layout]
        if request.like_outputs or not request.gradients:
            self.layouts = self.layouts[: request.gradients]
        gradients: list[Tensor | None] = []
        # Users call .backward() outside autocast, as torch recommends.
        numerics = request.backward_numerics
        numerics = numerics or Numerics.current()._replace(autocast=())
        # A hook of the user's may keep what it is given.
        kept = None if request.is_program else running.fakes
        is_given = running.is_in_given_memory
        with (
            numerics.applied(),
            attributes_as(running.mode, made=kept),
            autograd.lifted_past_modes(lambda each: each) as lifting,
            _NOTHING if request.is_program else RefusedInBackward(is_given),
        ):
            for layout in self.layouts:
                gradients += self._gradients(given, outputs, layout)
        running.rules |= {"backward"} if lifting.has_rules else set()
        self.spread = [
            each if each is None else dtensor.placement(each) for each in gradients
        ]
        results = [*returned, *gradients]
        return [each if each is None else dtensor.local_part(each) for each in results]

    def _gradients(
        self,
        operands: list[Tensor],
        chosen: list[Tensor],
        layout: tuple[TensorMeta | None, ...],
    ) -> list[Tensor | None]:
        outputs: list[Tensor] = []
        cotangents: list[Tensor] = []
        for output, meta in zip(chosen, layout, strict=True):
            if meta is None:
                continue
            # A given cotangent is an input even where no gradient comes of it.
            number = len(tracer.active_graph().nodes)
            cotangent = placeholder(meta, f"cotangent_{number}")
            if output.requires_grad:
                outputs.append(output)
                cotangents.append(cotangent)
        wanted = [operand for operand in operands if operand.requires_grad]
        if not wanted or not outputs:
            return [None] * len(operands)
        # The last backward frees the graph: torch 2.15 would keep it for good.
        how = {
            "allow_unused": True,
            "retain_graph": layout is not self.layouts[-1],
            "create_graph": self.request.is_recorded,
        }
        found = iter(torch.autograd.grad(outputs, wanted, cotangents, **how))
        return [next(found) if each.requires_grad else None for each in operands]


def _usual_layouts(outputs: list[Tensor]) -> list[tuple[TensorMeta | None, ...]]:
    """Cotangents laid out like the outputs, and like those of `.sum()`: one number.

    Both are traced at once, so that the commonest backwards need no second trace.
    """
    like = tuple(
        TensorMeta.of(output, requires_grad=False) if output.requires_grad else None
        for output in outputs
    )
    if any(meta is not None and meta.placement is not None for meta in like):
        # How the cotangent of a sum would be spread, torch decides.
        return [like]
    expanded = tuple(
        meta and dataclasses.replace(meta, stride=(0,) * len(meta.shape))
        for meta in like
    )
    return [like] if expanded == like else [like, expanded]


def _home_device(operands: Sequence[TensorMeta]) -> torch.device:
    return operands[0].device if operands else torch.get_default_device()


def _note_forward(graph: fx.Graph) -> None:
    for node in graph.nodes:
        note = node.meta.get("remat", Note("", ""))
        node.meta["remat"] = dataclasses.replace(note, is_backward=False)


def _record_run(run: _TraceRun) -> fx.GraphModule:
    try:
        return _recorded(run)
    except (RematError, Warning):
        raise
    except Exception as error:
        found = _refusal_of(run, error)
        if found is None:
            raise
        raise found from error


def _recorded(run: _TraceRun) -> fx.GraphModule:
    running = run.running
    operands = [fake_of(meta) for meta in run.request.operands]
    if not run.request.is_program:
        running.fakes.extend(map(weakref.ref, operands))
    module = tracer.make_fx(run, operands, collectives.functional_twins())
    # What was detached and has a gradient was written to since.
    cuts = zip(importing.cut_outputs(module.graph), run.detached, strict=False)
    run.cut = tuple(is_cut and is_detached for is_cut, is_detached in cuts)
    if running.reshapes and in_place_operators.writes_to_reshaped(module.graph):
        raise refusals.reshapes_in_place(running.reshapes)
    return importing.functionalize(module, operands)


def _refusal_of(run: _TraceRun, error: Exception) -> RematError | None:
    """What an error that is raised in a trace says of the user's function, if anything."""
    running, is_backward = run.running, bool(run.layouts)
    in_its_trace = refusals.raises_in_its_trace(error)
    if not isinstance(error, OF_TORCH):
        if refusals.is_of_a_stand_in(error):
            return in_its_trace
        if is_backward:
            # A hook, or the backward of an `autograd.Function`, may count on being called once.
            error.add_note(str(in_its_trace))
        return None
    found = running.refused or refusals.of_the_users(error, is_backward=is_backward)
    found = found or refusals.of_torchs_own(error)
    if found is None and running.reshapes and is_backward:
        found = refusals.reshapes_in_place(running.reshapes)
    if found is None and refusals.is_of_a_stand_in(error):
        found = in_its_trace
    if found is None and is_backward and autograd.has_no_formula(error):
        error.add_note(refusals.LACKS_DERIVATIVE)
    return found


def _finish_trace(run: _TraceRun, module: fx.GraphModule) -> Traced:
    is_template = run.request.sizes is not None
    imported = importing.Imported(module, is_template=is_template)
    mutations = tuple(sorted(imported.mutations.items()))
    running, count = run.running, run.num_returned
    returned = imported.outputs[:count]
    outputs = tuple(ref for index in run.chosen if (ref := returned[index]) is not None)
    forward = [*outputs, *(new for _, new in mutations), *imported.states]
    steps = without_zeros(imported.values, [*imported.outputs, *forward])
    values = _settle_phases(steps, {ref.index for ref in forward})
    graph = check(Graph(values, len(imported.inputs), imported.outputs))
    first = Joint(
        graph=graph,
        cotangents=(),
        layout=(),
        num_operands=len(run.request.operands) + len(running.captured),
        chosen=run.chosen,
        outputs=outputs,
        placements=tuple(run.placements),
        differentiable=tuple(run.differentiable),
        views=tuple(_views_of_returned(run, graph, returned, outputs, mutations)),
        gradients=(),
        spread=(),
        mutations=mutations,
        changed=run.request.changed,
        states=tuple(imported.states),
        is_custom=running.is_custom,
        rules=running.rules,
        policies=running.policies,
    )
    joints = tuple(_for_each_layout(first, run, imported.outputs[count:]))
    captured, fakes = tuple(running.captured), tuple(running.fakes)
    return Traced(joints, captured, list(running.leaves), fakes)


def _for_each_layout(
    joint: Joint, run: _TraceRun, gradients: tuple[Ref | None, ...]
) -> Generator[Joint]:
    width, start = joint.num_operands, joint.num_operands
    if not run.layouts:
        none = (None,) * width
        yield dataclasses.replace(joint, gradients=none, spread=none)
    for place, layout in enumerate(run.layouts):
        own = slice(place * width, (place + 1) * width)
        count = sum(meta is not None for meta in layout)
        inputs = tuple(range(start, start + count))
        start += count
        yield dataclasses.replace(
            joint,
            cotangents=inputs,
            layout=layout,
            gradients=gradients[own],
            spread=tuple(run.spread[own]),
        )


def _settle_phases(values: Sequence[Value], forward: set[int]) -> tuple[Value, ...]:
    """Marks as forward all that a forward value or output needs, wherever it was recorded.

    The second pass updates views of changed tensors only when they are read.
    """
    settled = list(values)
    for index, value in reversed([*enumerate(values)]):
        if index in forward or not (value.op is None or value.is_backward):
            settled[index] = dataclasses.replace(value, is_backward=False)
            forward.update(value.uses)
    return tuple(settled)


def _views_of_returned(
    run: _TraceRun,
    graph: Graph,
    returned: Sequence[Ref | None],
    outputs: Sequence[Ref],
    mutations: Sequence[tuple[int, Ref]],
) -> Iterator[View]:
    """How to make each returned tensor from an output or an operand."""
    written = {new: operand for operand, new in mutations}
    pairs = zip(outputs, run.placements, strict=True)
    plain = [None if placement else ref for ref, placement in pairs]
    bases = [*filter(None, plain), *written]
    # Of the same value, detached or not, the one that has a gradient: the others are made of it.
    order = sorted(range(len(plain)), key=run.differentiable.__getitem__)
    places = {plain[index]: index for index in order}
    rows = enumerate(zip(returned, run.detached, run.cut, strict=False))
    for index, (ref, *cuts) in rows:
        if index in run.same:  # a DTensor, which is an operand or an output
            kind, place = run.same[index]
            is_operand = kind == "operand"
            made_of = (None, place) if is_operand else (run.chosen.index(place), None)
            yield View(*made_of, None, *cuts)
        elif ref is None:
            yield View(is_detached=True)
        else:
            path = view_path(graph, bases, ref)
            if path is None:
                raise refusals.view_of_unknown(graph.values[ref.index].source)
            base, steps = path
            output = places.get(base)
            operand = written.get(base, base.index) if output is None else None
            yield View(output, operand, steps, *cuts)


def require_states(count: int, joint: Joint) -> None:
    """Refuses a derivative of draws, of which a forward has recorded so many states, or fewer."""
    if count != len(joint.states):
        raise TraceError.of(
            where="a derivative of a region",
            what="has random numbers that a backward of the user's draws, or that vmap draws by an "
            "operator for each example, as torch.randperm.",
            why="A program repeats the draws of the forward, and no others.",
            do="Draw in the forward and save what the backward reads (a permutation by "
            'torch.rand(n).argsort()), or use engine="rerun".',
        )


def with_states(joint: Joint, operands: tuple[int, ...]) -> Joint:
    """The joint graph whose draws read their generator states from these operands."""
    if not operands:
        return joint
    require_states(len(operands), joint)
    given = {state: Ref(k) for state, k in zip(joint.states, operands, strict=True)}
    values = list(joint.graph.values)
    for index, value in enumerate(values):
        if value.state in given:
            state = given[value.state]
            values[index] = dataclasses.replace(value, state=state, is_redraw=True)
    graph = dataclasses.replace(joint.graph, values=tuple(values))
    return dataclasses.replace(joint, graph=check(graph), states=())


def record(function: Flat, operands: Sequence[TensorMeta]) -> Graph:
    """The graph of a function without a backward, such as a mapped program.

    Of a backward program, the steps that repeat the forward are still known as such.
    """
    metas = [dataclasses.replace(meta, requires_grad=False) for meta in operands]
    mode = fake_mode(_home_device(metas), shape_env_of(sizes_of(metas)))
    # An outer trace would take the calls here for calls of the user. Autocast would add casts
    # to those that a program holds.
    with entered(None), tracer.one_trace_at_a_time(), Numerics.current().settled():
        with isolation.isolated(), mode, torch.no_grad():
            fakes = [fake_of(meta) for meta in metas]
            module = tracer.make_fx(lambda *tensors: list(function(tensors)), fakes)
            module = importing.functionalize(module, fakes)
        imported = importing.Imported(module)
    repeats = any(value.rank >= 0 for value in imported.values)
    values = tuple(
        dataclasses.replace(value, is_backward=repeats) for value in imported.values
    )
    return check(Graph(values, len(imported.inputs), imported.outputs))
