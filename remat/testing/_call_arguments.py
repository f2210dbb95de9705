"""One call that can be repeated, on copies, or as a function of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from remat._calls.signature import labels
from remat._torch import trees
from remat._torch.tensors import storage_key
from remat.testing._named_transforms import is_differentiable


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
@dataclasses.dataclass(frozen=True)
class CallArguments:
    """The arguments of a call.

    Attributes:
        leaves: the leaves of (args, kwargs).
        spec: how they are put together.
        labels: what messages call them.
        wanted: which leaves are differentiated: those that require grad if any does,
            else every floating one; of one tensor given twice, the first.
    """

    leaves: tuple[Any, ...]
    spec: Any
    labels: tuple[str, ...]
    wanted: tuple[int, ...]

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> CallArguments:
        """Takes a call of `function` apart."""
        leaves, spec = trees.flatten((args, dict(kwargs)))
        tensors = [k for k, leaf in enumerate(leaves) if is_differentiable(leaf)]
        explicit = [k for k in tensors if leaves[k].requires_grad]
        firsts = {id(leaves[k]): k for k in reversed(explicit or tensors)}
        names = labels(function, args, kwargs)
        return cls(tuple(leaves), spec, names, tuple(sorted(firsts.values())))

    def copied(self) -> tuple[Any, ...]:
        """The leaves with copies of the tensors; a tensor given twice is one copy."""
        storages: dict[int, torch.UntypedStorage] = {}
        copies = {
            id(leaf): _copied_leaf(leaf, storages)
            for leaf in self.leaves
            if isinstance(leaf, Tensor)
        }
        return tuple(copies.get(id(leaf), leaf) for leaf in self.leaves)

    def seen(self, leaves: Sequence[Any]) -> dict[str, Tensor]:
        """What copies of the leaves are now, by what messages call them."""
        return {
            f"argument `{label}`": leaf.detach().clone()
            for label, leaf in zip(self.labels, leaves, strict=True)
            if isinstance(leaf, Tensor)
        }

    def bound(
        self, leaves: Sequence[Any], tensors: Sequence[Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's (args, kwargs) with these tensors as the wanted leaves."""
        replaced = {
            id(leaves[place]): tensor
            for place, tensor in zip(self.wanted, tensors, strict=True)
        }
        filled = [replaced.get(id(leaf), leaf) for leaf in leaves]
        return trees.unflatten(filled, self.spec)

    @property
    def wanted_labels(self) -> tuple[str, ...]:
        """The labels of the leaves that are differentiated."""
        return tuple(f"argument `{self.labels[place]}`" for place in self.wanted)


@final
class FlatFunction:
    """A function as tensors in, tensors out; remembers what it returned last."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: CallArguments,
        leaves: Sequence[Any],
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.leaves = leaves
        self.spec: Any = None
        self.statics: tuple[Any, ...] = ()
        self.labels: tuple[str, ...] = ()

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Calls the function with these tensors as the leaves to differentiate."""
        args, kwargs = self.arguments.bound(self.leaves, tensors)
        return self._apart(self.function(*args, **kwargs))

    def with_parameters(self, names: Sequence[str]) -> Callable[..., Any]:
        """The function of these parameters of the module, then of the tensors."""
        module = self.function
        assert isinstance(module, nn.Module)

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            given = dict(zip(names, tensors, strict=False))
            args, kwargs = self.arguments.bound(self.leaves, tensors[len(names) :])
            return self._apart(torch.func.functional_call(module, given, args, kwargs))

        return run

    def _apart(self, result: Any) -> tuple[Tensor, ...]:
        pairs = trees.leaves_with_path(result)
        self.spec = trees.flatten(result)[1]
        self.statics = tuple(leaf for _, leaf in pairs if not isinstance(leaf, Tensor))
        self.labels = tuple(
            f"output `{'.'.join(path)}`" if path else "the output"
            for path, leaf in pairs
            if isinstance(leaf, Tensor)
        )
        return tuple(leaf for _, leaf in pairs if isinstance(leaf, Tensor))
