"""A training step on tensors without data: what lives in it, with stand-ins for its regions.

The step runs once, forward and backward, on fake tensors under torch's own autograd, while each
byte of their storages is counted. A region in it computes nothing: it holds its inputs and gives
outputs and gradients of the right sizes. So what is around regions (embeddings, the loss, the
optimizer) is counted as it is, and what regions hold and make is added later, for any plans.
"""

import collections
import contextlib
import copy
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor

from remat._errors import TraceError, refusal, shown
from remat._graph.meta import TensorMeta
from remat._graph.values import Ref, Value
from remat._partition.costs import Workspace, workspace_of
from remat._torch import autograd, fakes, isolation, levels, modes, trees
from remat._torch.attributes import attributes_as
from remat._torch.tensors import memory_of
from remat._user_lines import line_of, user_line
from remat.policies._sizes import parse_size

_Key = weakref.ref[torch.UntypedStorage]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a step: a region's forward or backward, or what runs between two of these."""

    half: str  # "forward" or "backward" of a region; "" around regions
    #: Which region; around regions the last one that ran, -1 before the first.
    region: int
    before: int  # the bytes that live when it begins, without what regions save
    peak: int  # the most that live in it, likewise; of a region's half as many as `before`
    gradients: int  # of `before`, those of the gradients of parameters
    #: The regions whose forward ran, and whose last backward did not.
    waiting: frozenset[int]
    returned: frozenset[int]  # of these, those of which an output lives throughout
    #: Whether it is a backward that frees nothing of what was saved.
    is_retained: bool = False


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """What a step was seen to do, on one device; sizes in bytes."""

    stretches: tuple[Stretch, ...]  # its parts, in order
    parameters: int  # of the parameters
    others: int  # of buffers and of what the step was given
    state: int  # that the optimizer keeps from step to step
    #: Of gradients and of the rest that live when the optimizer begins, and the most that it
    #: makes beside its state.
    update: tuple[int, int, int]


@final
class _LiveBytes(modes.DispatchMode):
    """Counts the bytes of the storages that operators make, of tensors without data, too."""

    def __init__(self, workspace: Workspace) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._workspace = workspace
        self.is_paused = False
        self._sizes: dict[_Key, int] = {}

    def _hear(self, op: Any, args: Any, kwargs: Any) -> Any:
        for tensor in trees.tensor_leaves((args, kwargs)):
            self._count(tensor, is_new=False)
        result = modes.run_in_mode(op, args, kwargs)
        for tensor in trees.tensor_leaves(result):
            self._count(tensor, is_new=not self.is_paused)
        if not self.is_paused:
            inside = self._workspace(*_as_values(op, args, kwargs, result))
            self.peak = max(self.peak, self.now + inside)
        return result

    def _count(self, tensor: Tensor, *, is_new: bool) -> None:
        storage = tensor.untyped_storage()
        key = weakref.ref(storage, self._subtract)
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes() if is_new else 0
            self.now += self._sizes[key]
            self.peak = max(self.peak, self.now)

    def _subtract(self, key: _Key) -> None:
        self.now -= self._sizes.pop(key)


def _as_values(
    op: Any, args: Any, kwargs: Any, result: Any
) -> tuple[Value, list[Value]]:
    """A call of an operator as a value of a graph, and those that it refers to."""
    operands: list[Value] = []

    def operand(tensor: Tensor) -> Any:
        operands.append(Value(None, meta=TensorMeta.of(tensor)))
        return Ref(len(operands) - 1)

    args, kwargs = trees.map_tensors(operand, (args, kwargs))
    metas = tuple(map(TensorMeta.of, trees.tensor_leaves(result)))
    meta = metas[0] if len(metas) == 1 else metas
    return Value(op, tuple(args), tuple(kwargs.items()), meta), operands


@final
class Recorder:
    """Counts while a step runs; `call` stands in for a region, `workspace` knows kernels."""

    def __init__(self, parameters: Sequence[Tensor], workspace: Workspace) -> None:
        self.stretches: list[Stretch] = []
        self.live = _LiveBytes(workspace)
        self._parameters = parameters
        self._places = itertools.count()
        self._last = -1
        self._before = self._gradients = 0
        self._waiting: set[int] = set()
        self._outputs: dict[int, list[_Key]] = {}

    @property
    def gradients(self) -> int:
        """The bytes of the gradients that the parameters have."""
        return _bytes_of(p.grad for p in self._parameters if p.grad is not None)

    def end(self, half: str = "", region: int | None = None) -> None:
        """Ends what runs around regions; what follows is a region's half, or the end."""
        returned = {
            each
            for each in self._waiting
            if any(key() is not None for key in self._outputs[each])
        }
        regions = frozenset(self._waiting), frozenset(returned)
        sizes = self._before, self.live.peak, self._gradients
        self.stretches.append(Stretch("", self._last, *sizes, *regions))
        if region is not None:
            self._last, now = region, self.live.now
            is_retained = half == "backward" and autograd.keeps_graph()
            parts = now, now, self.gradients, *regions, is_retained
            self.stretches.append(Stretch(half, region, *parts))

    def begin(self) -> None:
        """Begins what runs around regions."""
        self._before = self.live.peak = self.live.now
        self._gradients = self.gradients

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        captured: Iterable[Tensor],
        stored: Mapping[int, int] = MappingProxyType({}),
    ) -> Any:
        """What a region gives, and what its gradients are, without computing either.

        `stored` has the bytes that wait in place of operands that their storages change, by
        the places of these among the tensors of the arguments and what is captured.
        """
        region, operands = next(self._places), trees.tensor_leaves((args, kwargs))
        operands += captured
        if not torch.is_grad_enabled() or not any(p.requires_grad for p in operands):
            return function(*args, **kwargs)
        forms = [_form_of(each, stored.get(k)) for k, each in enumerate(operands)]
        self.end("forward", region)
        with attributes_as(self.live, is_paused=True), torch.no_grad():
            leaves, spec = trees.flatten(function(*args, **kwargs))
        places = [k for k, each in enumerate(leaves) if isinstance(each, Tensor)]
        stand_in: Callable[..., tuple[Tensor, ...]] = _StandIn.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        made = stand_in(self, region, [leaves[k] for k in places], forms, *operands)
        for place, output in zip(places, made, strict=True):
            leaves[place] = output
        self._waiting.add(region)
        self._outputs[region] = [weakref.ref(each.untyped_storage()) for each in made]
        self.begin()
        return trees.unflatten(leaves, spec)

    def leave(self, region: int) -> None:
        """Notes that the backward of a region has run, for the last time or not."""
        if not autograd.keeps_graph():
            self._waiting.discard(region)
        self.begin()


class _StandIn(torch.autograd.Function):
    """Holds what a region holds in any case, and gives what has the sizes of what it gives."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        ctx.recorder, ctx.region, like, forms, *operands = args
        pairs = [*zip(operands, forms, strict=True)]
        ctx.save_for_backward(*[x if form is None else form for x, form in pairs])
        ctx.metas = [None if form is None else TensorMeta.of(x) for x, form in pairs]
        outputs = tuple(map(_empty_like, like))
        fixed = [
            each
            for each in outputs
            if not (each.is_floating_point() or each.is_complex())
        ]
        ctx.mark_non_differentiable(*fixed)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        _require_no_graph()
        recorder: Recorder = ctx.recorder
        # All come back, and then the other forms are let go.
        operands = [
            each if meta is None else meta.empty()
            for each, meta in zip(ctx.saved_tensors, ctx.metas, strict=True)
        ]
        ctx.maybe_clear_saved_tensors()
        recorder.end("backward", ctx.region)
        wanted = ctx.needs_input_grad[4:]
        found = [
            _empty_like(each) if is_wanted else None
            for each, is_wanted in zip(operands, wanted, strict=True)
        ]
        recorder.leave(ctx.region)
        return (None, None, None, None, *found)


def _form_of(operand: Tensor, size_bytes: int | None) -> Tensor | None:
    """What an operand waits as, if it is not the operand itself."""
    if size_bytes is None:
        return None
    return torch.empty(size_bytes, dtype=torch.uint8, device=operand.device)


def _require_no_graph() -> None:
    """Refuses a backward that is differentiated again, of which a stand-in has no graph."""
    if torch.is_grad_enabled():
        line = user_line()
        raise TraceError.of(
            where=f"{_WHERE}, at {line}" if line else _WHERE,
            what="takes a gradient of a region with create_graph=True.",
            why="What the graph of such a gradient holds is not planned.",
            do="Take it without a graph, if it is not differentiated again. "
            + _BY_HAND,
        )


def _empty_like(like: Tensor) -> Tensor:
    return torch.empty_strided(
        like.shape, like.stride(), dtype=like.dtype, device=like.device
    )


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(memory_of(tensors).values())


Optimizer = Any
"""An optimizer, a function from parameters to one, or what its state takes."""

_Optimizer = Callable[[Sequence[Tensor]], Any] | int | float


def record(
    run: Callable[[Recorder], Tensor],
    leaves: Sequence[Tensor],
    parameters: Iterable[Tensor],
    others: Any,
    optimizer: _Optimizer,
    costs: str,
) -> Recording:
    """Runs a step on fake tensors, and its optimizer after it.

    The forward calls `Recorder.call` for regions, and returns the loss, which is differentiated
    by the leaves alone. `others` is a pytree of what else lives all the time. With "measured"
    costs, what kernels hold inside is measured, too.
    """
    recorder = Recorder(leaves, workspace_of(costs))
    with recorder.live:
        recorder.begin()
        # Of these alone: a tensor of the user's that the loss captures stays as it is.
        loss = run(recorder)
        _require_loss(loss)
        _differentiate(loss, leaves)
        del loss
        recorder.end()
        gradients = recorder.gradients
        rest = recorder.live.now - gradients
        state, working = _optimizer_bytes(optimizer, leaves, recorder.live)
    return Recording(
        tuple(recorder.stretches),
        _bytes_of(parameters),
        _bytes_of(trees.tensor_leaves(others)),
        state,
        (gradients, rest, working),
    )


def _require_loss(loss: object) -> None:
    """Refuses a step whose result is no number, or none that can be differentiated."""
    is_tensor = isinstance(loss, Tensor)
    if is_tensor and not loss.requires_grad:
        raise TraceError.of(
            where=_WHERE,
            what="the loss of the step has no gradient.",
            why="It depends on no parameter, or on gradients of regions that the step "
            "takes itself.",
            do=_BY_HAND,
        )
    if not is_tensor or loss.numel() != 1:
        got = str(TensorMeta.of(loss)) if is_tensor else f"a {type(loss).__name__}"
        raise refusal(
            ValueError,
            where=_WHERE,
            what=f"the loss of the step is {got}.",
            why="The step is differentiated, so its loss has to be a tensor of one number.",
            do="Return the loss alone, as in `lambda model, x: model(x).loss`.",
        )


def _differentiate(loss: Tensor, leaves: Sequence[Tensor]) -> None:
    is_done = any(each.grad is not None for each in leaves)
    try:
        torch.autograd.backward(loss, inputs=leaves)  # pyright: ignore[reportUnknownMemberType]
    except RuntimeError as error:
        if "torch.utils.checkpoint" in str(error):
            raise TraceError.of(
                where=_WHERE,
                what="torch.utils.checkpoint runs regions of the step once more.",
                why="They recompute by themselves, and what stands in for them in a plan holds "
                "other tensors in a second run.",
                do="Call them without it (`model.gradient_checkpointing_disable()`, in "
                "transformers).",
            ) from error
        if not is_done:
            raise
        raise TraceError.of(
            where=_WHERE,
            what="the step calls `.backward()` itself.",
            why="A step is planned as its loss, which is differentiated then, and by now "
            "its graph is freed.",
            do="Return the loss, and leave out what follows it: the optimizer's step is "
            "planned by `optimizer`.",
        ) from error


def optimizer_on(
    optimizer: Optimizer, fakes_of: Mapping[int, Tensor], where: str
) -> _Optimizer:
    """A function from fake parameters to an optimizer of them, or what its state takes.

    `fakes_of` has what stands for each parameter, by its identity.
    """
    if hasattr(optimizer, "param_groups"):
        _require_any_of(optimizer, fakes_of, where)
        return lambda _: _on_fakes(optimizer, fakes_of)
    if callable(optimizer):
        return optimizer
    if isinstance(optimizer, float) and optimizer >= 0:
        return optimizer
    try:
        return parse_size(optimizer, where)
    except (TypeError, ValueError) as error:
        raise refusal(
            ValueError,
            where=where,
            what=f"got {shown(optimizer)}.",
            why="It is an optimizer, what makes one of parameters, or what its state takes.",
            do="Pass torch.optim.AdamW, for example, 2.0 for twice the parameters, or a "
            'size such as "2GiB".',
        ) from error


def _require_any_of(optimizer: Any, fakes_of: Mapping[int, Tensor], where: str) -> None:
    own = [each for group in optimizer.param_groups for each in group["params"]]
    if not any(id(each) in fakes_of for each in own):
        raise refusal(
            ValueError,
            where=where,
            what=f"none of the parameters of this {type(optimizer).__name__} is one of "
            "the step.",
            why="Its state would be counted as no bytes.",
            do="Make it of the parameters that the step is planned on, or pass a function "
            "that makes one (torch.optim.AdamW).",
        )


def _on_fakes(optimizer: Any, fakes_of: Mapping[int, Tensor]) -> Any:
    """A copy of an optimizer without a state, of the parameters that it has fakes of."""
    found = copy.copy(optimizer)
    found.state = collections.defaultdict(dict)
    found.param_groups = [
        {
            **group,
            "params": [fakes_of[id(p)] for p in group["params"] if id(p) in fakes_of],
        }
        for group in optimizer.param_groups
    ]
    return found


def _optimizer_bytes(
    optimizer: _Optimizer, parameters: Sequence[Tensor], live: _LiveBytes
) -> tuple[int, int]:
    """The bytes of an optimizer's state, and the most that its step makes beside it."""
    if isinstance(optimizer, float):
        return int(optimizer * _bytes_of(parameters)), 0
    if not callable(optimizer):
        return optimizer, 0
    made = optimizer(parameters)
    before = live.peak = live.now
    try:
        with fakes.updated_as_real():
            made.step()
            state, first = live.now - before, live.peak - live.now
            again = live.peak = live.now
            made.step()
    except (AttributeError, RuntimeError, TypeError) as error:
        raise TraceError.of(
            where=f"the step of {type(made).__name__}, in fit or modules.plan",
            what="does not run on tensors without data.",
            why=f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".") + ".",
            do="State what its state takes: optimizer=2.0 for twice the parameters, or a "
            "size.",
        ) from error
    return state, max(first, live.peak - again)


_WHERE = "fit, or modules.plan(step=...)"

_BY_HAND = (
    "A loss of gradients cannot be planned: give its regions policies.budget(size)."
)


@contextlib.contextmanager
def without_data(tree: Any, where: str) -> Generator[Any]:
    """A tree with fake tensors in place of its own, inside a mode that makes more of them.

    Raises:
        TraceError: what runs inside needs numbers; `where` is what the message calls it.
    """
    try:
        with isolation.isolated(), fakes.faked(tree) as faked:
            yield faked
    except RuntimeError as error:
        if not fakes.lacking(error):
            raise
        line, first = line_of(error), str(error).partition("\n")[0].rstrip(".")
        raise TraceError.of(
            where=f"{where}, at {line}" if line else where,
            what=f"needs the numbers of a tensor around its regions ({first}).",
            why="A step is planned on tensors without data.",
            do="Compute what decides by numbers before the step, or plan without the step.",
        ) from error


def require_no_transform() -> None:
    """Refuses a region under a transform of torch.func, where no stand-in can stand."""
    if levels.current_interpreter() is not None:
        raise TraceError.of(
            where=_WHERE,
            what="a region of the step is called under a transform of torch.func.",
            why="A step is planned as its loss, which autograd differentiates.",
            do="Pass the function that gives the loss, without torch.func.grad around it. "
            + _BY_HAND,
        )
