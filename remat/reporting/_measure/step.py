"""One step of a function: its forward, the graph behind it, the backward of what it returns.

The caller's tensors do not change: detached aliases are differentiated, no `.grad` is
written, and what the function changes in place is restored afterwards.
"""

import contextlib
import dataclasses
import inspect
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from remat._captures.walk import Survey
from remat._errors import RematError, require_callable, show_type
from remat._generators import device_states
from remat._partition.costs import finish_work
from remat._regions.out_of_memory import name_of
from remat._regions.protocol import Call
from remat._regions.waiting import storages
from remat._torch import autograd, fakes, levels, tracer, trees
from remat._torch.tensors import sizes_of


@final
class MeasuredStep:
    """A call that can be run again and again from one state."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        require_callable("the function to measure", function)
        self.function = function
        self.name = name_of(function)  # what reports call it
        if tracer.proxy_is_active() or levels.interpreter_is_active():
            raise RematError.of(
                where=self.name,
                what="cannot be measured inside a trace or a transform of torch.func.",
                why="A step is run, forward and backward, on tensors with numbers, and what "
                "is around has stand-ins for them.",
                do="Measure it outside, with the arguments that it has there.",
            )
        leaves, self._spec = trees.flatten((args, dict(kwargs)))
        given = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self._survey = Survey((inspect.unwrap(function), *others))
        reached = self._survey.reached
        explicit = any(each.requires_grad for each in (*given.values(), *reached))
        aliases = {key: _measured_leaf(each, explicit) for key, each in given.items()}
        # The tensors by the names of what takes them.
        self.described = tuple(
            f"{'.'.join(path[1:])}: {show_type(leaf.dtype, leaf.shape)}"
            for path, leaf in trees.leaves_with_path((args, dict(kwargs)))
            if isinstance(leaf, Tensor)
        )
        # The path of each module in the nearest model that is reached.
        self.paths = {
            id(module): path
            for node in reversed(self._survey.nodes.values())
            if isinstance(node.value, nn.Module)
            for path, module in cast("Any", node.value).named_modules()
        }
        self._leaves = [aliases.get(id(leaf), leaf) for leaf in leaves]
        self.arguments = tuple(aliases.values())  # the tensors, each once
        changeable = [*self.arguments, *reached]
        self.devices = frozenset(each.device for each in changeable)
        self._numbers = [
            (each, each.detach().clone())
            for each in changeable
            if not each.requires_grad and not fakes.is_fake(each)
        ]

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """Inside, gradients are on, and state may change; it is put back afterwards."""
        states = device_states.put_back(self.devices)
        with torch.inference_mode(False), torch.enable_grad(), states:
            try:
                yield
            finally:
                self._survey.restore(self._numbers)

    def forward(self) -> tuple[Tensor, ...]:
        """Calls the function: the tensors that it returns and through which gradients flow."""
        args, kwargs = trees.unflatten(self._leaves, self._spec)
        returned = self.function(*args, **kwargs)
        leaves, _ = trees.flatten(returned)
        outputs = tuple(
            each for each in leaves if isinstance(each, Tensor) and each.requires_grad
        )
        if outputs:
            return outputs
        found = [type(each).__name__ for each in leaves if not isinstance(each, Tensor)]
        unknown = f" (it returned {', '.join(dict.fromkeys(found))})" if found else ""
        raise RematError.of(
            where=self.name,
            what=f"returned no tensor that requires grad{unknown}.",
            why="A report measures a forward and its backward. It finds tensors "
            "only in containers that torch's pytree knows.",
            do="Pass floating tensors and return a tensor that depends on them "
            "(if f returns an object of your own, return its loss: lambda *a: "
            "f(*a).loss). Take no gradient inside: report the loss, not its "
            "torch.func.grad, whose bytes `remat.reporting.LiveBytes` counts.",
        )

    @property
    def data(self) -> tuple[Tensor, ...]:
        """The batch: what needs no gradient and is not a key, else the last argument."""
        found = [
            each
            for each in self.arguments
            if not each.requires_grad and each.dtype is not torch.uint64 and each.dim()
        ]
        return tuple(found or [each for each in self.arguments if each.dim()][-1:])

    @staticmethod
    def backward(
        outputs: Sequence[Tensor], wanted: Sequence[Tensor], *, keep: bool = False
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the sum of the outputs by some leaves."""
        ones = [
            torch.ones((), dtype=each.dtype, device=each.device).expand_as(each)
            for each in outputs
        ]
        return torch.autograd.grad(
            outputs, wanted, ones, allow_unused=True, retain_graph=keep
        )

    def gradients(
        self, wanted: Sequence[Tensor] | None = None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Runs the whole step: the leaves that are wanted, by default all, and theirs."""
        with self.kept():
            outputs = self.forward()
            leaves = leaves_of(outputs) if wanted is None else wanted
            return leaves, self.backward(outputs, leaves)

    def seconds(self) -> float:
        """The time of one step, until an accelerator has finished it."""
        with self.kept():
            finish_work(self.devices)
            started = time.perf_counter()
            outputs = self.forward()
            self.backward(outputs, leaves_of(outputs))
            finish_work(self.devices)
            return time.perf_counter() - started


def median_and_spread(times_s: Sequence[float]) -> tuple[float, float]:
    """The median of some times, and half of what their quartiles are apart."""
    low, median, high = statistics.quantiles([*times_s] * 2, n=4, method="inclusive")
    return median, (high - low) / 2


def _measured_leaf(tensor: Tensor, explicit: bool) -> Tensor:
    """The tensor as a leaf of the step's own, which shares its memory if autograd may have it."""
    wanted = tensor.is_floating_point() or tensor.is_complex()
    wanted = tensor.requires_grad if explicit else wanted
    with torch.inference_mode(False):
        own = tensor.clone() if tensor.is_inference() else tensor.detach()
        return own.requires_grad_(wanted)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One node of autograd's graph, with what it saved."""

    raw: Any  # autograd's object, whose `name()` is that of the backward operator
    call: Call | None  # the call of a region that it is; None for an operator of torch
    # the tensors that it saved, by the order or the name in which it did, and what a
    # scheduled stack holds apart from its node
    saved: tuple[Tensor, ...]


def graph_of(outputs: Sequence[Tensor]) -> tuple[tuple[Node, ...], tuple[Tensor, ...]]:
    """The nodes behind some outputs in the order of the forward, and the leaves.

    Reading a saved tensor unpacks what saved-tensor hooks of others packed.
    """
    nodes: list[Node] = []
    for raw in sorted(_raw_nodes(outputs), key=autograd.node_number):
        if not hasattr(raw, "variable"):
            call = getattr(raw, "call", None)
            call = call if isinstance(call, Call) else None
            apart = () if call is None else call.region.held_apart
            nodes.append(Node(raw, call, (*_saved_tensors_of(raw), *apart)))
    return tuple(nodes), leaves_of(outputs)


def storage_sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of what some tensors are stored in, each storage once, by its key."""
    return sizes_of(storage for tensor in tensors for storage in storages(tensor))


def leaves_of(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The leaves of autograd's graph behind some outputs."""
    raws = _raw_nodes(outputs)
    return tuple(raw.variable for raw in raws if hasattr(raw, "variable"))


def _raw_nodes(outputs: Sequence[Tensor]) -> list[Any]:
    return autograd.nodes_behind([get_gradient_edge(each).node for each in outputs])


def _saved_tensors_of(raw: Any) -> Iterator[Tensor]:
    """What a region's node has in `saved_tensors`, and one of torch's in `_saved_...`."""
    if hasattr(raw, "saved_tensors"):
        yield from (each for each in raw.saved_tensors if each is not None)
        return
    for name in dir(raw):
        if name.startswith("_saved_"):
            yield from trees.tensor_leaves(getattr(raw, name))
