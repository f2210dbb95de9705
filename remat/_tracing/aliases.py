"""Which of the tensors that a function returned are outputs of its region, and which aliases.

Outputs share no memory. A returned tensor that shares the memory of an operand or of another
returned tensor is an alias: the caller makes it again, as a view, and its derivative is
then a view's. A user's `autograd.Function` or hook may define another derivative, even for
an argument that it returns (to reverse a gradient, or to add that of an auxiliary loss).
Such a custom alias is copied. The words are those of AOTAutograd, which sorts outputs alike.
"""

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from remat._torch import dtensor
from remat._torch.tensors import is_view, storage_key

_T = TypeVar("_T", Tensor, Tensor | None)


def without_false_gradients(
    operands: Sequence[Tensor], returned: Sequence[_T]
) -> list[_T]:
    """Detaches views made under `no_grad`: they say that they require grad, and lead to nothing."""
    known, found = set(map(id, operands)), list(returned)
    for index, each in enumerate(returned):
        if each is None or id(each) in known or not is_view(each):
            continue
        if each.requires_grad and each.grad_fn is None:
            found[index] = each.detach()
    return found


def copy_custom_aliases(
    operands: Sequence[Tensor], returned: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Copies returned aliases whose derivative is not that of a view.

    A tensor is left alone if nothing but view operators lies between it and the owner of
    its memory, and if it is the owner itself or there is none.
    """
    plain = [each for each in operands if dtensor.placement(each) is None]
    nodes = {storage_key(each): each.grad_fn for each in plain}
    hooked = {storage_key(each) for each in plain if _is_hooked(each)}
    without_grad = {storage_key(each) for each in plain if not each.requires_grad}
    found = list(returned)
    for index, tensor in _owners_first(returned):
        if dtensor.placement(tensor) is not None:
            continue
        key = storage_key(tensor)
        if key not in nodes:
            if not _is_aliasing(tensor):
                nodes[key] = tensor.grad_fn
        elif (
            key in hooked
            or _is_hooked(tensor)
            # A gradient was written to an alias that is detached from what it lies in.
            or (key in without_grad and tensor.requires_grad)
            or _has_own_derivative(tensor, nodes[key])
        ):
            found[index] = tensor.clone()
    return found


def _is_hooked(tensor: Tensor) -> bool:
    """Whether `register_hook` was called on what is returned, in the trace, where all is new."""
    return bool(getattr(tensor, "_backward_hooks", None))


def _has_own_derivative(tensor: Tensor, base: Any) -> bool:
    """Whether a user's `autograd.Function` stands between a view's node and its base's.

    Or whether the one does not lead to the other: an alias was detached, and written to since.
    """
    node = tensor.grad_fn
    while node is not None and node is not base:
        if isinstance(node, BackwardCFunction):
            return True
        node = node.next_functions[0][0] if node.next_functions else None
    return tensor.requires_grad and base is not None and node is None


def is_view_of(tensor: Tensor, owner: Tensor) -> bool:
    """Whether an alias has the numbers, and the derivative, of a view by strides of its owner.

    Both may be views of what is not returned: then what leads from it to each is torch's own.
    """
    bits, others = ((each.is_conj(), each.is_neg()) for each in (tensor, owner))
    if bits != others or _is_hooked(tensor) or _is_hooked(owner):
        return False
    if not (tensor.requires_grad and owner.requires_grad):
        return True
    own, known = (_first_edges(each) for each in (tensor, owner))
    apart = itertools.chain(
        itertools.takewhile(lambda node: node not in known, own),
        itertools.takewhile(lambda node: node not in own, known),
    )
    is_custom = any(isinstance(node, BackwardCFunction) for node in apart)
    return not is_custom and any(node in known for node in own)


def _first_edges(tensor: Tensor) -> dict[Any, None]:
    """The nodes from a tensor's own along the first edge of each, in order."""
    node: Any = get_gradient_edge(tensor).node
    found: dict[Any, None] = {}
    while node is not None:
        found[node] = None
        node = node.next_functions[0][0] if node.next_functions else None
    return found


def _owners_first(returned: Sequence[Tensor | None]) -> list[tuple[int, Tensor]]:
    """Sorts owners of memory before views, and owners before their detached aliases."""
    tensors = [(index, each) for index, each in enumerate(returned) if each is not None]
    tensors.sort(key=lambda pair: (_is_aliasing(pair[1]), not pair[1].requires_grad))
    return tensors


def choose_outputs(
    operands: list[Tensor], returned: list[Tensor | None]
) -> tuple[tuple[int, ...], dict[int, tuple[str, int]]]:
    """The places of the outputs among what is returned, and for each place of a DTensor its origin.

    A DTensor has no storage of its own. It is an operand, ("operand", its number), or an
    output, ("output", the place where it is returned first).
    """
    places = {id(each): ("operand", k) for k, each in enumerate(operands)}
    same: dict[int, tuple[str, int]] = {}
    for index, each in enumerate(returned):
        if each is not None and dtensor.placement(each) is not None:
            same[index] = places.setdefault(id(each), ("output", index))
    chosen = {place for kind, place in same.values() if kind == "output"}
    owned = {storage_key(each) for each in operands if dtensor.placement(each) is None}
    # What is detached cannot stand for an alias of it that has a gradient.
    with_gradient = {
        storage_key(each)
        for index, each in enumerate(returned)
        if each is not None and index not in same and each.requires_grad
    }
    taken: set[int] = set()
    for index, tensor in _owners_first(returned):
        if index in same or id(tensor) in taken or storage_key(tensor) in owned:
            continue
        taken.add(id(tensor))
        chosen.add(index)
        key = storage_key(tensor)
        if not _is_aliasing(tensor) and tensor.requires_grad >= (key in with_gradient):
            owned.add(key)
    return tuple(sorted(chosen)), same


def _is_aliasing(tensor: Tensor) -> bool:
    # An inner region returns the parts of a split as separate tensors. None of them is the
    # owner, although no one is a view: the other parts cannot be made from it.
    size = tensor.numel() * tensor.element_size()
    return bool(is_view(tensor) or size < tensor.untyped_storage().nbytes())
