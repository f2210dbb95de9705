"""Runs a region under whatever transforms are active: the rules of differentiation.

`bind` walks down the stack of torch.func transforms itself, as JAX's `bind` does
("Autodidax", part 1). It does not leave that to `torch.autograd.Function`: there, forward
mode over forward mode is silently zero (pytorch #197867), saved values have to be outputs,
and the level at which reverse mode is taken is unknown.

At each level of reverse mode one `autograd.Function` keeps the operands and what the
forward saved. Its backward binds the region of the gradients, so that the transforms that
are active when a backward runs apply to it too.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from remat._graph.meta import TensorMeta
from remat._regions import out_of_memory, prefetch
from remat._regions.derived_forwards import dual, primal_of, unpack_dual, unpack_duals
from remat._regions.forwards import FastPath, Followed, Results, latest, make_views
from remat._regions.functions import Batch
from remat._regions.opening import opened_for, opened_for_autograd
from remat._regions.protocol import Call, Opened, Region
from remat._regions.run_backward import (
    by_operand,
    connected_below,
    explain_failure,
    let_go,
    pulled_back,
    read_saved,
    refuse_freed,
    require_one_map,
    resolved,
    run_freeing,
    wanted_of,
)
from remat._regions.waiting import Waiting, store_inputs
from remat._switches import blocks
from remat._switches.numerics import Numerics
from remat._torch import autograd, dynamo, guards, levels, sizes, tracer
from remat._torch.levels import dual_level_is_active


def bind(call: Call, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """What the region's function returns for these tensors; mutations are dropped."""
    return bind_all(call, tensors)[0]


def bind_all(
    call: Call, tensors: Sequence[Tensor]
) -> tuple[Sequence[Tensor | None], Sequence[Tensor]]:
    """What the region's function returns, and the new values of what it changed."""
    region, tensors = call.region, levels.unwrap_dead(tensors)
    if autograd.maps_over(tensors):
        require_one_map(call)
        return autograd.mapped_by_func(lambda given: bind_all(call, given), tensors)
    is_kept = region.keeps and not call.is_last and _is_differentiated(call, tensors)
    if is_kept and region.was_recorded:
        call, opened = opened_for_autograd(call, tensors)
        if opened is not None:
            outputs = [*_run_opened(call, opened, tensors).outputs]
            for place in opened.alone:
                outputs[place] = autograd.apply_through(Tensor.detach, outputs[place])
            return returned_by(call, outputs, tensors), ()
    if is_kept and guards.is_quiet():
        fast_path = region.fast_path(call.roots, call.numerics)
        if fast_path and (fast_path.reaches_all or _is_recorded(call, tensors)):
            call = call._replace(
                is_first_order=_wants_first_order(), fast_path=fast_path
            )
            return run_fast(call, tensors), ()
    results = run(call, tensors, save=False)
    return returned_by(call, results.outputs, tensors), results.mutations


def returned_by(
    call: Call, outputs: Sequence[Tensor], tensors: Sequence[Tensor]
) -> list[Tensor | None]:
    """What the region's function returns, made from the outputs for these tensors."""
    views = call.region.views
    if views is None:
        return [*outputs]
    return make_views(views, outputs, tensors[call.region.num_leading :])


def run_fast(call: Call, operands: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """What the region's function returns, for a call with a `fast_path`."""
    assert call.fast_path is not None, "the call needs more than one program"
    outputs: tuple[Tensor, ...] = _apply_fast(call, *operands)
    views = call.fast_path.views
    return outputs if views is None else make_views(views, outputs, operands)


def run(call: Call, tensors: Sequence[Tensor], save: bool) -> Results:
    """Runs the region's forward below all active transforms, and applies their rules."""
    tensors = levels.unwrap_dead(tensors)
    found = levels.current_interpreter()
    if found is None:
        return _run_plainly(call, tensors, save)
    kind, interpreter = found
    match kind:
        case "grad":
            return _run_under_grad(call, tensors, save, interpreter)
        case "jvp":
            with levels.dual_level_told():
                return _run_under_jvp(call, tensors, save, interpreter)
        case "vmap":
            return _run_under_vmap(call, tensors, save, interpreter)
        case _:
            assert kind == "functionalize", f"torch.func has a transform {kind}"
            return _run_functionalized(call, tensors, save, interpreter)


def _run_opened(call: Call, opened: Opened, tensors: Sequence[Tensor]) -> Results:
    count, below = opened.num_outputs, call.of(opened.region)
    below = below._replace(is_borrowing=True)
    if count is None:
        return run(below, tensors, save=False)
    found = without_none(bind(below, tensors))
    return Results(found[:count], saved=found[count:])


def _run_plainly(call: Call, tensors: Sequence[Tensor], save: bool) -> Results:
    is_differentiated = _is_recorded(call, tensors)
    pairs = unpack_duals(tensors) if dual_level_is_active() else []
    is_pushed = any(pair.tangent is not None for pair in pairs)
    tangents = [pair.tangent for pair in pairs]
    if is_pushed or (is_differentiated and not call.is_last):
        call, opened = opened_for(call, tensors, save, tangents)
        if opened is not None:
            return _run_opened(call, opened, tensors)
    if not is_pushed:
        return _run_quietly(call, tensors, save)
    primals = [pair.primal for pair in pairs]
    if not is_differentiated:
        return _with_duals(*_primal_and_tangents(call, primals, tangents, save))
    results = _run_quietly(call, tensors, save, is_pushed=True)
    flows = results.flows
    if flows is None or all(flows):
        return results
    # `autograd.Function` gives no tangents to outputs without a gradient, such as `x.detach()`.
    with torch.no_grad():
        _, moved = _primal_and_tangents(call, primals, tangents, save=False)
    return _with_duals(results, {k: moved[k] for k in moved if not flows[k]})


def _run_quietly(
    call: Call, tensors: Sequence[Tensor], save: bool, *, is_pushed: bool = False
) -> Results:
    """Runs the forward where the only rule left is to record a backward, if one is wanted."""
    if _is_recorded(call, tensors):
        skip = call.region.num_leading
        recording = _Recording(call, tensors[:skip], None)
        operands = list(tensors[skip:])
        if call.region.inputs and not tracer.proxy_is_active():
            with call.region.calls.inputs.next() as number:
                store_inputs(operands, call.region.inputs, number)
        recording.operands = tensors[skip:]
        if call.region.runs_first and not is_pushed:  # detaching would end tangents
            operands = recording.run_and_detach(operands)
        return recording.with_gradients(_apply_plainly(recording, *operands))
    return call.region.forward(call.roots, save)(tensors, call.numerics)


def _is_differentiated(call: Call, tensors: Sequence[Tensor]) -> bool:
    operands = tensors[call.region.num_leading :]
    return torch.is_grad_enabled() and any(map(guards.requires_grad, operands))


def _is_recorded(call: Call, tensors: Sequence[Tensor]) -> bool:
    """Whether plain autograd has a use for the backward: a gradient comes back to what it follows."""
    if not _is_differentiated(call, tensors):
        return False
    reached = call.region.reached(call.roots)
    operands = tensors[call.region.num_leading :]
    followed = operands if reached is None else itertools.compress(operands, reached)
    return any(map(guards.requires_grad, followed))


def _run_under_grad(
    call: Call, tensors: Sequence[Tensor], save: bool, interpreter: Any
) -> Results:
    level = interpreter.level()
    skip = call.region.num_leading
    leading = [levels.unwrap_at(tensor, level) for tensor in tensors[:skip]]
    operands = levels.all_wrapped_at(tensors[skip:], level)
    if torch.is_grad_enabled() and any(each.requires_grad for each in operands):
        call, opened = opened_for(call, tensors, save)
        if opened is not None:
            return _run_opened(call, opened, tensors)
        recording = _Recording(call, leading, interpreter)
        single: Any = _LevelFunction
        with levels.enable_single_level():
            outputs = single.apply(recording, *operands)
        return recording.with_gradients(outputs)
    below = [levels.unwrap_at(tensor, level) for tensor in operands]
    with levels.lowered(interpreter):
        results = run(call, [*leading, *below], save)
    outputs = [levels.wrap_at(tensor, level) for tensor in results.outputs]
    return results._replace(outputs=outputs)


def _run_under_jvp(
    call: Call, tensors: Sequence[Tensor], save: bool, interpreter: Any
) -> Results:
    level = interpreter.level()
    pairs = [
        unpack_dual(tensor) if levels.level_of(tensor) == level else (tensor, None)
        for tensor in tensors
    ]
    primals = [levels.unwrap_at(primal, level) for primal, _ in pairs]
    tangents = [
        None if tangent is None else levels.unwrap_at(tangent, level)
        for _, tangent in pairs
    ]
    if any(tangent is not None for tangent in tangents):
        call, opened = opened_for(call, tensors, save, tangents)
        if opened is not None:
            return _run_opened(call, opened, tensors)
    with levels.lowered(interpreter):
        results, moved = _primal_and_tangents(call, primals, tangents, save)
    outputs = [levels.wrap_at(tensor, level) for tensor in results.outputs]
    wrapped = {k: levels.wrap_at(tangent, level) for k, tangent in moved.items()}
    return _with_duals(results._replace(outputs=outputs), wrapped)


def _with_duals(results: Results, moved: Mapping[int, Tensor]) -> Results:
    outputs = list(results.outputs)
    for index, tangent in moved.items():
        outputs[index] = dual(outputs[index], tangent)
    return results._replace(outputs=outputs)


def _primal_and_tangents(
    call: Call, primals: Sequence[Tensor], tangents: Sequence[Tensor | None], save: bool
) -> tuple[Results, dict[int, Tensor]]:
    region, skip = call.region, call.region.num_leading
    has_tangent = tuple(tangent is not None for tangent in tangents[skip:])
    if not any(has_tangent):
        return run(call, primals, save), {}
    given = without_none(tangents[skip:])
    pushed = region.pushed(call.roots, has_tangent, save)
    if pushed is None:
        # The region cannot compute outputs and tangents in one run.
        results = run(call, primals, save)
        derived, _ = region.jvp(call.roots, has_tangent, 0)
        found = bind(call.of(derived), [*primals[skip:], *given])
        pairs = enumerate(zip(results.outputs, found, strict=False))
        return results, {
            index: tangent
            for index, (each, tangent) in pairs
            if tangent is not None and (each.is_floating_point() or each.is_complex())
        }
    if not pushed.moved:
        # The function returns views of operands alone, which carry their own tangents.
        return run(call, primals, save), {}
    below, tensors = call.of(pushed.region), [*primals, *given]
    if region.keeps and not save:
        returned, mutations = bind_all(below, tensors)
        results = Results((), mutations)
    else:
        results = run(below, tensors, save)
        returned = returned_by(below, results.outputs, tensors)
    count = len(returned) - len(pushed.moved)
    flows = results.flows and results.flows[:count]
    results = results._replace(outputs=without_none(returned[:count]), flows=flows)
    return results, dict(zip(pushed.moved, without_none(returned[count:]), strict=True))


def _run_under_vmap(
    call: Call, tensors: Sequence[Tensor], save: bool, interpreter: Any
) -> Results:
    level = interpreter.level()
    region, roots = call.region, call.roots
    physical, dims = levels.unwrap_batched(tensors, level)
    randomness, size = interpreter.randomness(), interpreter.batch_size()
    if tracer.is_in_compiler():
        # A graph of Dynamo's holds for these sizes, which a mapped argument has hidden.
        physical, size = tuple(map(sizes.settled, physical)), sizes.number(size)
    is_repeated = randomness == "error" and region.states
    if is_repeated or level >= call.drawn_below:
        # Nothing new is drawn: the draws repeat those made outside this level.
        randomness = "same"
    draws_apart = randomness != "same" and (region.num_draws > 0 or region.states)
    is_tracked = save
    is_wanted = any(map(levels.requires_grad_anywhere, tensors))
    if is_wanted or levels.is_pushed_below():
        call, opened = opened_for(call, tensors, save)
        if opened is not None and opened.region is not region:
            return _run_opened(call, opened, tensors)
        if opened is not None:
            # It saves nothing, and is opened as it is; the function still shows what is above.
            call, save = call._replace(is_borrowing=True), False
    with interpreter.lower():
        if all(dim is None for dim in dims) and not draws_apart:
            return run(call, physical, save)
        pairs = zip(physical, map(levels.requires_grad_anywhere, physical), strict=True)
        metas = tuple(TensorMeta.of_whole(t, requires_grad=wants) for t, wants in pairs)
        batch = Batch(size, randomness, dims, metas, is_tracked)
        batched = region.batched(roots, batch, save)
        below = call.of(batched.region)
        if region.keeps and not save:
            outputs, mutations = bind_all(below, physical)
            results = Results(without_none(outputs), mutations)
        else:
            results = run(below, physical, save)
    dims = [0] * len(results.flat) if batched.dims is None else batched.dims
    wrapped = levels.wrap_batched(results.flat, dims, level)
    return Results.of(results.shape, wrapped, results.flows)


def _run_functionalized(
    call: Call, tensors: Sequence[Tensor], save: bool, interpreter: Any
) -> Results:
    """Runs below `functionalize`, for which a region is functional already."""
    with levels.lowered(interpreter):
        results = run(call, levels.below_functionalize(tensors), save)
    wrapped = levels.wrap_functional(results.flat, interpreter.level())
    return Results.of(results.shape, wrapped, results.flows)


def without_none(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [each for each in tensors if each is not None]


@final
@dataclasses.dataclass(slots=True, eq=False)
class _Recording:
    """Carries a call into an `autograd.Function`, and its other results out of it."""

    call: Call
    leading: Sequence[Tensor]
    interpreter: Any
    #: The operands as the forward reads them: neither stored nor detached.
    operands: Sequence[Tensor] = ()
    results: Results | None = None

    def run(self, operands: Sequence[Tensor]) -> Results:
        """Runs the forward below the function's level."""
        interpreter = self.interpreter
        if interpreter is None:
            call = self.call
            forward = call.region.forward(call.roots, True)
            # A backward reads operands with their tangents; `_jvp` computes the outputs'.
            primals = map(primal_of, self.operands)
            self.results = forward([*self.leading, *primals], call.numerics)
        else:
            level = interpreter.level()
            below = [levels.unwrap_at(tensor, level) for tensor in operands]
            with levels.lowered(interpreter):
                self.results = run(self.call, [*self.leading, *below], save=True)
        return self.results

    def run_and_detach(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """Runs the forward, and detaches the operands that no output depends on.

        An edge of autograd to such an operand would delay the hooks that wait until its
        gradient is complete, as those of engines that reduce gradients do.
        """
        with torch.no_grad():
            reached = self.run(operands).reached
        if reached is None:
            return [*operands]
        return [
            operand if each else operand.detach()
            for operand, each in zip(operands, reached, strict=True)
        ]

    def with_gradients(self, outputs: Sequence[Tensor]) -> Results:
        """The results of the forward, with outputs that carry gradients."""
        assert self.results is not None
        return Results(outputs, *self.results[1:])


@dynamo.unseen_by_dynamo
def _forward(ctx: Any, recording: _Recording, *operands: Tensor) -> tuple[Tensor, ...]:
    call, interpreter = recording.call, recording.interpreter
    try:
        results = recording.results or recording.run(operands)
    except RuntimeError as error:
        if call.region.keeps:  # a backward adds its own note
            nodes = [operand.grad_fn for operand in operands]
            out_of_memory.note(error, "forward", call, nodes)
        raise
    level = 0 if interpreter is None else interpreter.level()
    outputs = results.outputs
    if interpreter is not None:
        outputs = [levels.wrap_at(tensor, level) for tensor in outputs]
    own = results.saved if call.region.keeps else ()
    kept = () if call.is_last else (*own, *operands)
    ctx.call, ctx.level = call._replace(is_first_order=_wants_first_order()), level
    ctx.num_states = len(results.states)
    waiting = [each.stored for each in kept if isinstance(each, Waiting)]
    ctx.waiting = prefetch.awaited(waiting)
    # Without a transform, and in a trace, autograd itself finds out what was changed.
    is_own = interpreter is None or tracer.proxy_is_active()
    ctx.versions = () if is_own else levels.versions_below(kept)
    ctx.save_for_backward(*kept, *(() if call.is_last else results.states))
    ctx.set_materialize_grads(False)
    if interpreter is None and dual_level_is_active():
        flows = results.flows or (True,) * len(outputs)
        ctx.for_jvp = (call, operands, results.states, flows)
    if results.flows is not None:
        ctx.mark_non_differentiable(
            *(out for out, each in zip(outputs, results.flows, strict=True) if not each)
        )
    return tuple(outputs)


def _wants_first_order() -> bool:
    """Whether second derivatives are refused; never in a trace, which serves later calls."""
    return blocks.is_first_order() and not tracer.proxy_is_active()


@dynamo.unseen_by_dynamo
def _backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    if ctx.call is None:
        refuse_freed(ctx)
    try:
        prefetch.start(ctx)
        cotangents = resolved(cotangents)
        return node_gradients(ctx, pulled_back(ctx, cotangents), cotangents)
    except BaseException:
        prefetch.drop()
        raise


def node_gradients(
    ctx: Any, derived: Region, cotangents: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Computes the gradients by a region: by its program alone where nothing maps or records."""
    present = without_none(cotangents)
    is_recorded = torch.is_grad_enabled() or not autograd.is_plain_autograd()
    is_alone = not is_recorded and not any(
        map(autograd.is_batched_by_autograd, present)
    )
    call: Call = ctx.call
    numerics = Numerics.current()
    forward = derived.one_program(call.roots, numerics) if is_alone else None
    if forward is not None:
        found = run_freeing(derived, forward.program, ctx, present)
        let_go(ctx)
        return found
    kept = read_saved(ctx)
    try:
        below = Call(
            *(derived, call.roots, numerics, call.labels),
            is_last=call.is_first_order,
            connected_below=connected_below(ctx, kept),
            drawn_below=min(call.drawn_below, ctx.level),
        )
        # A graph of Dynamo's calls the node itself, outside of what told the forward.
        with levels.dual_level_told():
            found = bind(below, [*kept, *present])
    except RuntimeError as error:
        out_of_memory.note(error, "backward", call, [ctx])
        raise
    if not is_recorded:
        let_go(ctx)
    return by_operand(ctx.wanted, found)


@dynamo.unseen_by_dynamo
def _jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """Forward mode of `torch.autograd.forward_ad` over what plain autograd records."""
    call, operands, states, flows = ctx.for_jvp
    del ctx.for_jvp
    has_tangent = tuple(tangent is not None for tangent in tangents)
    derived, moved = call.region.jvp(call.roots, has_tangent, len(states))
    primals = [unpack_dual(operand).primal for operand in operands]
    given = without_none(tangents)
    outputs: list[Tensor | None] = [None] * len(flows)
    if moved == ():
        return tuple(outputs)
    with torch.enable_grad():
        found = bind(call.of(derived), [*primals, *states, *given])
    places = range(len(flows)) if moved is None else moved
    for place, tangent in zip(places, found, strict=True):
        outputs[place] = tangent if flows[place] else None  # see `_run_plainly`
    return tuple(outputs)


class _PlainFunction(torch.autograd.Function):
    """Plain autograd, where no torch.func transform is active."""

    forward = staticmethod(_forward)
    backward = staticmethod(_backward)
    jvp = staticmethod(_jvp)


@dynamo.unseen_by_dynamo
def _forward_fast(ctx: Any, call: Call, *operands: Tensor) -> tuple[Tensor, ...]:
    """`_regions.forwards` for a call that needs no more than one program."""
    ctx.call = call
    fast_path: Any = call.fast_path
    around, run = fast_path.quiet
    try:
        with around():
            found = run([*operands])
    except RuntimeError as error:
        out_of_memory.note(error, "forward", call, [each.grad_fn for each in operands])
        raise
    first, last = fast_path.num_outputs, fast_path.num_kept
    ctx.save_for_backward(*found[first:last], *operands, *found[last:])
    ctx.set_materialize_grads(False)
    for index in fast_path.untracked:
        found[index] = autograd.untracked_alias(found[index])
    return tuple(found[:first])


@dynamo.unseen_by_dynamo
def _gradients_fast(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """`_gradients` after a fast forward: most often by the program of a backward before."""
    if ctx.call is None:
        refuse_freed(ctx)
    fast_path: FastPath = ctx.call.fast_path
    wanted: tuple[bool, ...] = ctx.needs_input_grad
    if autograd.graph_task() != autograd.whole_tasks[0]:
        wanted = wanted_of(ctx)
    for check, was_wanted, same_thread, _, path, _ in fast_path.followed:
        if check(*cotangents) and was_wanted == wanted and same_thread():
            quiet = path.quiet
            # Inlines `consumed`.
            try:
                read: list[Any] = [*ctx.saved_tensors, *cotangents]
                ctx.maybe_clear_saved_tensors()
                with quiet.around():
                    found = quiet.run(read)
            except RuntimeError as error:
                explain_failure(error, ctx)
                raise
            if not autograd.keeps_graph():
                ctx.call = None  # inlines `let_go`
            return by_operand(wanted, found) if False in wanted[1:] else (None, *found)
    ctx.level, ctx.num_states = 0, fast_path.num_states
    ctx.versions = ()  # autograd itself finds changed tensors here
    return look_up_gradients(ctx, cotangents)


def look_up_gradients(
    ctx: Any, cotangents: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients by a backward unlike all before; it is remembered for the next one."""
    cotangents = resolved(cotangents)
    fast_path: FastPath = ctx.call.fast_path
    numerics = Numerics.current()
    derived = pulled_back(ctx, cotangents)
    present = without_none(cotangents)
    forward = derived.one_program(ctx.call.roots, numerics)
    # Tracing may have run code of the user that sets a switch and leaves it set.
    is_as_asked = Numerics.current() == numerics and len(present) == len(cotangents)
    if forward is not None and is_as_asked and _is_told(ctx, derived, present):
        known = Followed(
            check=guards.tensor_guard(present),
            wanted=ctx.wanted,
            same_thread=guards.thread_guard(),
            region=derived,
            path=FastPath.of(forward),
            numerics=numerics,
        )
        if ctx.level:
            fast_path.followed_at_level = latest(known, fast_path.followed_at_level)
        else:
            fast_path.followed = latest(known, fast_path.followed)
    return node_gradients(ctx, derived, cotangents)


def _is_told(ctx: Any, derived: Region, cotangents: Sequence[Tensor]) -> bool:
    """Whether a guard tells a backward that is one program from all others."""
    if ctx.level:
        is_more = ctx.call.is_first_order or derived.views
        return not is_more and all(map(guards.is_told_by_wrapper, cotangents))
    is_recorded = torch.is_grad_enabled() or not guards.is_quiet()
    is_more = derived.views or is_recorded
    return not is_more and all(map(guards.is_plain, cotangents))


class _FastPathFunction(torch.autograd.Function):
    """Plain autograd over one program."""

    forward = staticmethod(_forward_fast)
    backward = staticmethod(_gradients_fast)


_apply_plainly = autograd.plain_apply(_PlainFunction)

# (a call with a `fast_path`, *operands) -> the outputs.
_apply_fast = autograd.plain_apply(_FastPathFunction)


class _LevelFunction(levels.SingleLevelFunction):
    """One level of torch.func reverse mode."""

    forward = staticmethod(_forward)
    backward = staticmethod(_backward)
