"""`engine="rerun"`: functions that cannot be traced run again, in Python, in the backward.

For branches on values, opaque kernels, shapes that depend on data. The same rules as for
traced regions hold (`_bind`): derivatives are regions again, made from the pullback, the
pushforward or the map of the function, and each runs the function anew from its operands.
Generators and module buffers are put back to where the forward found them meanwhile.

A run records a graph for autograd and throws it away, as the backward does, so that
kernels that look at `requires_grad` choose alike in both.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from remat import _captures, _compat, _rng
from remat._bind import Call, bind
from remat._derived import Batch, Pull, mapped, pullback, pushforward
from remat._errors import CapturedTensorError, explain
from remat._graph import TensorMeta
from remat._region import Batched, Results, Roots
from remat._trace import Flat, View


def call(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls `fun` as a region that runs again in its backward."""
    survey = _captures.survey((fun, args, dict(kwargs)))
    leaves, spec = _compat.flatten((args, dict(kwargs)))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    given = [leaves[place] for place in places]
    captured = _captured(survey, given)
    operands = [*given, *captured]
    if not any(map(_compat.requires_grad_anywhere, operands)):
        return fun(*args, **kwargs)
    result = _Result()

    def flat(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=False):
            filled[place] = tensor
        stand_ins = dict(zip(map(id, captured), tensors[len(given) :], strict=True))
        new_args, new_kwargs = _compat.unflatten(filled, spec)
        with _Substituted(stand_ins):
            return result.apart(fun(*new_args, **new_kwargs))

    state = _State(_buffers(survey), operands)
    region = _Rerun(flat, flat, len(operands), state)
    return result.tree(bind(Call(region, (fun,)), operands))


def _captured(survey: _captures.Survey, given: Sequence[Tensor]) -> list[Tensor]:
    """The reached tensors that some level of reverse mode wants, less the arguments."""
    known = set(map(id, given))
    return [
        tensor
        for tensor in survey.reached
        if id(tensor) not in known and _compat.requires_grad_anywhere(tensor)
    ]


def _buffers(survey: _captures.Survey) -> list[Tensor]:
    return [tensor for tensor in survey.reached if survey.is_buffer(id(tensor))]


@final
class _Result:
    """How what the function returned came apart, in its last run."""

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self.spec: Any = None

    def apart(self, result: Any) -> Sequence[Tensor]:
        self.leaves, self.spec = _compat.flatten(result)
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def tree(self, tensors: Sequence[Any]) -> Any:
        rest = iter(tensors)
        leaves = [
            next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves
        ]
        return _compat.unflatten(leaves, self.spec)


class _Substituted(TorchFunctionMode):
    """Puts operands in the place of captured tensors."""

    def __init__(self, stand_ins: Mapping[int, Tensor]) -> None:
        self._stand_ins = stand_ins

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = _compat.map_tensors(
            lambda tensor: self._stand_ins.get(id(tensor), tensor), (args, kwargs or {})
        )
        return func(*args, **kwargs)


@final
class _State:
    """What a run changes outside itself: generators and buffers, as the forward found them."""

    def __init__(self, buffers: Sequence[Tensor], operands: Sequence[Tensor]) -> None:
        self.buffers = buffers
        kinds = {tensor.device for tensor in operands}
        self.devices = {torch.device("cpu"), *(d for d in kinds if d.type == "cuda")}
        self.generators: dict[torch.device, Tensor] | None = None
        self.found: list[tuple[Tensor, Tensor]] = []

    @contextlib.contextmanager
    def around(self) -> Generator[None]:
        """The first run changes the state; each later one starts from the same."""
        if self.generators is None:
            with self._noted():
                yield
        else:
            with self._put_back(self.generators):
                yield

    @contextlib.contextmanager
    def _noted(self) -> Generator[None]:
        generators = {device: _rng.record(device) for device in self.devices}
        before = [(each, each._version, each.clone()) for each in self.buffers]
        yield
        self.generators = generators
        self.found = [
            (buffer, old) for buffer, version, old in before
            if buffer._version != version
        ]

    @contextlib.contextmanager
    def _put_back(self, generators: Mapping[torch.device, Tensor]) -> Generator[None]:
        with torch.no_grad():
            now = [(buffer, buffer.clone()) for buffer, _ in self.found]
            for buffer, old in self.found:
                buffer.copy_(old)
        ended = {
            device: _rng.swap(state, device) for device, state in generators.items()
        }
        try:
            yield
        finally:
            for device, state in ended.items():
                _rng.swap(state, device)
            with torch.no_grad():
                for buffer, value in now:
                    buffer.copy_(value)


@final
@dataclasses.dataclass(frozen=True)
class _Rerun:
    """A region without programs.

    Attributes:
        run: what the forward runs.
        function: the same, differentiable: derivatives are made from it.
        num_operands: how many tensors it takes.
        state: what is put back around each run.
        flows: filled in by a run: which outputs have a gradient.
    """

    run: Flat
    function: Flat
    num_operands: int
    state: _State
    num_leading: int = 0

    def views(self, roots: Roots) -> tuple[View, ...] | None:
        """Every returned tensor is an output."""
        return None

    def num_draws(self, roots: Roots) -> int:
        """Generator states are kept aside."""
        return 0

    @property
    def keeps(self) -> bool:
        """Whether the backward reads what the forward saved: nothing is."""
        return False

    def forward(self, roots: Roots, save: bool) -> Callable[[Sequence[Tensor]], Results]:
        """Runs the function on tensors that no transform has wrapped."""

        def run(tensors: Sequence[Tensor]) -> Results:
            leaves = [
                each.detach().requires_grad_(each.is_floating_point() or each.is_complex())
                for each in tensors
            ]
            with self.state.around(), torch.enable_grad():
                outputs = list(self.run(leaves))
            _require_no_others(outputs, leaves)
            flows = tuple(each.requires_grad for each in outputs)
            return Results([each.detach() for each in outputs], flows=flows)

        return run

    def vjp(
        self,
        roots: Roots,
        layout: tuple[TensorMeta | None, ...],
        wanted: tuple[bool, ...],
        num_states: int,
    ) -> _Rerun:
        """The region of the gradients."""
        pull = Pull(
            tuple(index for index, meta in enumerate(layout) if meta is not None),
            tuple(index for index, each in enumerate(wanted) if each),
            self.num_operands,
        )
        # Under create_graph torch uses other formulas, which are not the same to the bit.
        first = pullback(self.function, pull, create_graph=False)
        count = self.num_operands + len(pull.outputs)
        again = pullback(self.function, pull)
        return _Rerun(_zeros_for_none(first, pull), _zeros_for_none(again, pull),
                      count, self.state)

    def jvp(
        self, roots: Roots, has_tangent: tuple[bool, ...], num_states: int
    ) -> tuple[_Rerun, None]:
        """The region of the outputs' tangents."""
        pushed = pushforward(self.function, None, has_tangent)
        count = self.num_operands + sum(has_tangent)
        return _Rerun(pushed, pushed, count, self.state), None

    def batched(self, roots: Roots, batch: Batch, save: bool) -> Batched:
        """The region of the mapped function."""
        over = mapped(self.function, None, batch, 0)
        return Batched(_Rerun(over, over, self.num_operands, self.state), None)


def _zeros_for_none(function: Flat, pull: Pull) -> Flat:
    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        found = function(tensors)
        return [
            torch.zeros_like(tensors[index]) if gradient is None else gradient
            for index, gradient in zip(pull.wanted, found, strict=True)
        ]

    return run


def _require_no_others(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    known = set(map(id, leaves))
    pending = [each.grad_fn for each in outputs if each.grad_fn is not None]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and id(variable) not in known:
            raise CapturedTensorError(
                explain(
                    where=f"a tensor {TensorMeta.of(variable)} that requires grad",
                    what="is reached by a way that cannot be followed at the next run.",
                    why="Its gradient would be lost.",
                    do="Pass it as an argument, or keep it in a closure, a global, a "
                    "list, a dict or an attribute that the function names.",
                )
            )
        pending.extend(edge for edge, _ in node.next_functions if edge is not None)
