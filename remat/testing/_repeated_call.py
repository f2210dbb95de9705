"""One call that can be repeated: on copies of its arguments, from one state."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from remat._captures.walk import Survey
from remat._errors import require_callable
from remat._generators import device_states
from remat._torch import trees
from remat._torch.modules import called_with
from remat._torch.tensors import same_bits, storage_key
from remat._tracing.arguments import labels
from remat.testing._named_transforms import is_differentiable

AFTER = " after the call"
_GRADIENT = "the gradient of"


def _told_apart(labels: Iterable[str]) -> tuple[str, ...]:
    """Labels, each with its number where it comes again: two closures of one function."""
    counts: Counter[str] = Counter()
    found: list[str] = []
    for label in labels:
        counts[label] += 1
        found.append(f"{label} ({counts[label]})" if counts[label] > 1 else label)
    return tuple(found)


def _captured(function: Callable[..., Any]) -> dict[str, Tensor]:
    """The tensors that a function reaches, by their path in words."""
    nodes = [node for node, *_ in Survey((function,)).tensors.values()]
    names = _told_apart(str(node.label) for node in nodes)
    return {name: node.value for name, node in zip(names, nodes, strict=True)}


def _paired(
    one: Mapping[str, Tensor], two: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Each tensor of one function with what it is in the other: itself, or its namesake there.

    A namesake that only one of the two has a gradient for is none.
    """
    shared = {*map(id, one.values())} & {*map(id, two.values())}
    own = {(k, t.requires_grad): t for k, t in two.items() if id(t) not in shared}
    return {
        k: (t, t if id(t) in shared else own.get((k, t.requires_grad), t))
        for k, t in one.items()
    }


def _is_copy(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.device == other.device and same_bits(one, other))


def _copied_leaf(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """A detached copy with the same strides; what shares memory, shares it in the copy."""
    if tensor.layout != torch.strided:
        return tensor.detach().clone()
    tensor = tensor.detach().resolve_conj().resolve_neg()
    key = storage_key(tensor)
    storage = storages.setdefault(key, tensor.untyped_storage().clone())
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


@final
class RepeatedCall:
    """A call of two functions, and the state from which every run of one starts.

    The state is the generators and what the functions reach. It is found by the same
    walk by which a region finds its captured state, so it leaves out what that does.
    """

    def __init__(
        self,
        functions: tuple[Callable[..., Any], Callable[..., Any]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        for each in functions:
            require_callable("the functions to compare", each)
        self.leaves, self.spec = trees.flatten((args, dict(kwargs)))
        names = labels(functions[0], args, kwargs)
        self.labels = _told_apart(f"argument `{name}`" for name in names)
        places = [k for k, leaf in enumerate(self.leaves) if is_differentiable(leaf)]
        # Differentiated is what requires grad if anything does, else every floating leaf;
        # of one tensor given twice, the first.
        explicit = [k for k in places if self.leaves[k].requires_grad]
        firsts = {id(self.leaves[k]): k for k in reversed(explicit or places)}
        self.wanted = tuple(sorted(firsts.values()))
        self.gradient_labels = [f"{_GRADIENT} {self.labels[k]}" for k in self.wanted]
        self._tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self._second = functions[1]
        self._functions = tuple(map(inspect.unwrap, functions))
        one, two = map(_captured, self._functions)
        self._pairs = _paired(one, two)
        # Under these labels both hold one tensor or, as copies of a module, equal ones.
        self._common = {
            label
            for label, pair in self._pairs.items()
            if two.get(label) is pair[1] and _is_copy(*pair)
        }
        self._survey = Survey(self._functions)
        self._numbers = [(each, each.detach().clone()) for each in self._survey.reached]
        homes = {each.device for each in (*self._tensors, *self._survey.reached)}
        self._devices = {torch.get_default_device(), *homes}
        self._cpu = torch.get_rng_state()

    def copied(self) -> list[Any]:
        """The leaves with copies of the tensors; a tensor given twice is one copy."""
        storages: dict[int, torch.UntypedStorage] = {}
        copies = {id(each): _copied_leaf(each, storages) for each in self._tensors}
        return [copies.get(id(leaf), leaf) for leaf in self.leaves]

    def operands(self, flat: FlatFunction) -> dict[str, Tensor]:
        """What plain autograd differentiates, leaves and captured tensors, by its gradient."""
        leaves = [leaf.requires_grad_() for leaf in flat.wanted]
        found = dict(zip(self.gradient_labels, leaves, strict=True))
        for label, pair in self._pairs.items():
            if pair[0].requires_grad:
                found[f"{_GRADIENT} {label}"] = pair[flat.function is self._second]
        return found

    @contextlib.contextmanager
    def run(self, function: Callable[..., Any]) -> Generator[FlatFunction]:
        """Inside, the state may change; afterwards it is restored, and noted as it was."""
        flat = FlatFunction(function, self)
        leaves = flat.leaves
        with device_states.put_back(self._devices):
            torch.set_rng_state(self._cpu)
            try:
                yield flat
                flat.after = self._state_after(function, leaves)
            finally:
                self._survey.restore(self._numbers)

    def _state_after(
        self, function: Callable[..., Any], leaves: Sequence[Any]
    ) -> dict[str, Tensor]:
        """What is now in the tensors that either function reaches, and in the generators.

        Under a label that both have in common, it is what the one holds that has run.
        """
        one, two = map(_captured, self._functions)
        of_second = {
            label if label in self._common else f"{label} of the second function": each
            for label, each in two.items()
        }
        found = one | of_second if function is self._second else of_second | one
        found["the default generator"] = torch.get_rng_state()
        for device in filter(device_states.has, self._devices):
            if device.type != "cpu":
                state = device_states.get(device)
                found[f"the default generator of {device}"] = state
        arguments = zip(self.labels, leaves, strict=True)
        found |= {name: leaf for name, leaf in arguments if isinstance(leaf, Tensor)}
        return {f"{k}{AFTER}": each.detach().clone() for k, each in found.items()}


@final
class FlatFunction:
    """A function as tensors in, tensors out; remembers what it returned last."""

    def __init__(self, function: Callable[..., Any], call: RepeatedCall) -> None:
        self.function = function
        self.leaves = call.copied()
        self._call = call
        # The structure of what it returned, and the leaves of that which are not tensors.
        self.rest: tuple[Any, ...] = ()
        self.labels: tuple[str, ...] = ()  # what messages call those that are
        self.after: dict[str, Tensor] = {}  # arguments and captured state after its run

    @property
    def wanted(self) -> list[Tensor]:
        """The leaves to differentiate."""
        return [self.leaves[place] for place in self._call.wanted]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Calls the function with these tensors as the leaves to differentiate."""
        args, kwargs = self._bound_arguments(tensors)
        return self._tensors_of(self.function(*args, **kwargs))

    def with_parameters(self, names: Sequence[str]) -> Callable[..., Any]:
        """The function of these parameters of the module, then of the tensors."""
        module = self.function
        assert isinstance(module, nn.Module)

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            own = dict(module.named_parameters())
            given = zip(names, tensors, strict=False)
            instead = {id(own[name]): tensor for name, tensor in given}
            args, kwargs = self._bound_arguments(tensors[len(names) :])
            return self._tensors_of(called_with(module, instead, args, kwargs))

        return run

    def _bound_arguments(
        self, tensors: Sequence[Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        pairs = zip(self.wanted, tensors, strict=True)
        replaced = {id(leaf): tensor for leaf, tensor in pairs}
        filled = [replaced.get(id(leaf), leaf) for leaf in self.leaves]
        return trees.unflatten(filled, self._call.spec)

    def _tensors_of(self, result: Any) -> tuple[Tensor, ...]:
        tensors, frame = trees.Frame.of(result)
        self.rest = frame.spec, frame.statics
        pairs = trees.leaves_with_path(result)
        paths = [path for path, leaf in pairs if isinstance(leaf, Tensor)]
        self.labels = _told_apart(
            f"output `{'.'.join(path)}`" if path else "the output" for path in paths
        )
        return tuple(tensors)
