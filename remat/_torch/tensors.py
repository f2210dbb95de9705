"""What torch knows of a tensor by names that it has not made public.

Obsolete when it does.
"""

# pyright: reportPrivateUsage=false
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from remat._torch.levels import is_wrapped, unwrapped

_torch: Any = torch
_Tensor: Any = Tensor

# The function that a torch-function mode sees for `x.data = y`.
SET_DATA: Any = cast("Any", Tensor.data).__set__
# For `x.as_subclass(kind)`, which modes hear while functions run, and not otherwise.
AS_SUBCLASS: Any = Tensor.as_subclass
# For `x.grad`.
GET_GRAD: Any = cast("Any", Tensor.grad).__get__
#: What changes what autograd does with a tensor, and no number, by what a user writes.
SET_FOR_AUTOGRAD: dict[Any, str] = {
    cast("Any", Tensor.grad).__set__: ".grad = ...",
    cast("Any", Tensor.grad).__delete__: "del .grad",
    cast("Any", Tensor.requires_grad).__set__: ".requires_grad = ...",
    Tensor.requires_grad_: ".requires_grad_(...)",
    Tensor.retain_grad: ".retain_grad()",
}
#: What changes a tensor's shape or strides and no number, by what gives a new tensor instead.
RESHAPES: dict[Any, str] = {
    Tensor.t_: "t",
    Tensor.transpose_: "transpose",
    Tensor.swapaxes_: "swapaxes",
    Tensor.swapdims_: "swapdims",
    Tensor.squeeze_: "squeeze",
    Tensor.unsqueeze_: "unsqueeze",
    Tensor.as_strided_: "as_strided",
    Tensor.resize_: "reshape",
    Tensor.resize_as_: "reshape",
}
# What tells where a tensor's memory is.
ASK_FOR_MEMORY = (Tensor.data_ptr, Tensor.untyped_storage)
# What reads it past all operators or hands it out: pickles, shared memory, DLPack, Python's numbers.
READ_MEMORY: tuple[Any, ...] = (
    _Tensor.storage, _Tensor._typed_storage, _Tensor.__reduce_ex__, _Tensor.share_memory_,
    _Tensor.__dlpack__, _Tensor.apply_, _Tensor.map_, _Tensor.map2_,
)  # fmt: skip
#: What asks a sparse tensor for the tensors that it is made of, or how long these are.
_SPARSE_PARTS: frozenset[Any] = frozenset(
    {_Tensor._nnz, _Tensor._indices, _Tensor._values, _Tensor.indices, _Tensor.values}
    | {_Tensor.crow_indices, _Tensor.ccol_indices}
    | {_Tensor.row_indices, _Tensor.col_indices}
)
#: What asks how a tensor came to be, by the name of each: what stands for it is another one.
ASK_FOR_HISTORY: dict[Any, str] = {
    cast("Any", Tensor.is_leaf).__get__: "is_leaf",
    cast("Any", Tensor.grad_fn).__get__: "grad_fn",
    cast("Any", Tensor._version).__get__: "_version",
    Tensor.storage_offset: "storage_offset()",
    Tensor.is_conj: "is_conj()",
    Tensor.is_neg: "is_neg()",
}
#: What may count from where the memory of its first argument begins, and which argument says so.
COUNT_IN_MEMORY: dict[Any, int] = {
    torch.as_strided: 3,
    torch.as_strided_copy: 3,
    torch.as_strided_scatter: 4,
    Tensor.as_strided: 3,
    Tensor.as_strided_scatter: 4,
}
# Whether autograd takes a tensor for a view.
is_view: Callable[[Tensor], bool] = Tensor._is_view
# Whether a tensor is zero everywhere and has no memory, as forward mode makes them.
is_without_memory: Callable[[Tensor], bool] = _Tensor._is_zerotensor
# A number that no other living storage has.
key_of: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")


def counts_in_memory(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call counts from where the memory of its first argument begins."""
    place = COUNT_IN_MEMORY.get(func)
    if place is None:
        return False
    given = args[place] if len(args) > place else kwargs.get("storage_offset")
    return given is not None


def overrides_functions(kind: type[Tensor]) -> bool:
    """Whether a subclass of Tensor overrides functions of torch."""
    handler: Any = getattr(kind, "__torch_function__")  # noqa: B009
    plain: Any = getattr(Tensor, "__torch_function__")  # noqa: B009
    if handler is _torch._C._disabled_torch_function_impl:
        return False
    return getattr(handler, "__func__", handler) is not plain.__func__


def tensor_without_data(kind: type[Any], like: Tensor) -> Any:
    """A tensor of a subclass with the metadata of another and no memory."""
    return Tensor._make_wrapper_subclass(  # pyright: ignore[reportUnknownMemberType]
        kind, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
    )


def copy_attributes(
    tensor: Tensor, stand_in: Tensor, attributes: Mapping[str, Any] | None = None
) -> None:
    """Makes what stands for a tensor one of its class, with what users have set on that.

    It is a parameter then too, to `isinstance`. A class with other operators makes its own.
    `attributes` are what was set at another time. Obsolete when a copy of a tensor can be
    asked for.
    """
    if _has_own_operators(tensor):
        return
    if not _has_own_operators(stand_in):
        cast("Any", stand_in).__class__ = class_of(tensor)
    vars(stand_in).update(vars(tensor) if attributes is None else attributes)
    if isinstance(tensor, nn.Parameter):
        vars(stand_in)["_is_param"] = True


def class_of(tensor: Tensor) -> type[Tensor]:
    """The class of a tensor, if that has no other operators: a user's name for tensors."""
    is_plain = type(tensor) is nn.Parameter or _has_own_operators(tensor)
    return Tensor if is_plain else type(tensor)


def has_slots(kind: type[Tensor]) -> bool:
    """Whether a class has attributes beyond a tensor's `__dict__`: no other one can become of it."""
    return kind.__basicsize__ != Tensor.__basicsize__


def _has_own_operators(tensor: Tensor) -> bool:
    return cast("Any", tensor).__torch_dispatch__ is not _Tensor.__torch_dispatch__


def as_class(tensor: Tensor | None, kind: type[Tensor]) -> Tensor | None:
    """The tensor, if there is one, as one of such a class."""
    if kind is Tensor or type(tensor) is not Tensor or is_wrapped(tensor):
        return tensor
    return tensor.as_subclass(kind)


def is_own_data(tensor: Tensor, data: Tensor) -> bool:
    """Whether a tensor is assigned its own numbers, as in `x.data *= 2`."""
    is_laid_out_so = (tensor.shape, tensor.stride()) == (data.shape, data.stride())
    return is_laid_out_so and storage_key(tensor) == storage_key(data)


def storage_key(tensor: Tensor) -> int:
    """One number for all tensors that share memory, fake ones too."""
    return key_of(tensor.untyped_storage())


def is_in_parts(tensor: Tensor) -> bool:
    """Whether a tensor is of a subclass that is made of others, as DTensor is."""
    return hasattr(tensor, "__tensor_flatten__")


def parts_of(tensor: Any) -> list[Tensor]:
    """The tensors of which one `is_in_parts` is made; a DTensor names its mesh among them."""
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [each for each in parts if isinstance(each, Tensor)]


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages that a strided tensor of any class keeps alive; of a fake one, too."""
    if is_in_parts(tensor):
        for each in parts_of(tensor):
            yield from storages_of(each)
    elif tensor.layout == torch.strided:
        yield unwrapped(tensor).untyped_storage()


def sizes_of(storages: Iterable[torch.UntypedStorage]) -> dict[int, int]:
    """The bytes of storages, each once, by its key."""
    return {key_of(storage): storage.nbytes() for storage in storages}


def memory_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes that tensors keep alive: of all of each storage, once, by its key."""
    return sizes_of(each for tensor in tensors for each in storages_of(tensor))


def asks_for_unknown_parts(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call asks a sparse fake for what depends on numbers: it is said to hold none."""
    if func not in _SPARSE_PARTS or args[0].layout in (torch.strided, torch.jagged):
        return False
    return args[0]._nnz() == 0


def _parts_of(sparse: Tensor) -> list[Tensor]:
    """The tensors of which a sparse one is made, or a nested one of the jagged layout."""
    if sparse.layout is torch.jagged:
        # Its class is not typed.
        jagged: Any = sparse
        lengths = jagged.lengths()
        return [
            jagged.values(),
            jagged.offsets(),
            *([] if lengths is None else [lengths]),
        ]
    if sparse.layout is torch.sparse_coo:
        return [sparse._indices(), sparse._values()]
    by_rows = sparse.layout in (torch.sparse_csr, torch.sparse_bsr)
    kinds = ("crow", "col") if by_rows else ("ccol", "row")
    return [getattr(sparse, f"{kind}_indices")() for kind in kinds] + [sparse.values()]


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold the same bits: nan equals itself, -0.0 is not 0.0."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.layout is not torch.strided and first.layout is second.layout:
        return all(map(same_bits, *map(_parts_of, (first, second))))
    if first.is_meta and second.is_meta:
        return True  # they have none
    if first.is_quantized:  # which torch cannot view as bytes
        return torch.equal(first, second)
    bits = [
        # torch takes a column of one row for contiguous, whatever its stride.
        each.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)
        for each in (first, second)
        if each.numel()
    ]
    return not bits or torch.equal(*bits)
