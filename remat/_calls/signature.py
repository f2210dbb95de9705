"""A call -> its tensors, the objects that must be looked into, and a key for the rest.

Tensors are dynamic: the key holds their metadata, and which of them are one and the same. Every
other leaf is static: the key holds its type and value, and 1, 1.0 and True, or 0.0 and -0.0, are
four different ones. An object that is neither is a *root*: what the function reads of it is found
while it is traced, and checked at each call like a closure.
"""

import contextlib
import dataclasses
import enum
import functools
import itertools
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor

from remat._captures.contents import hides_contents
from remat._captures.library import user_bases
from remat._captures.places import numpy_scalar
from remat._errors import StaticArgumentError
from remat._graph.meta import TensorMeta, is_open, layout_of
from remat._regions.functions import Roots
from remat._switches.numerics import Numerics
from remat._torch import dtensor, fakes, isolation, levels, trees
from remat._torch.tensors import overrides_functions
from remat._tracing.arguments import (
    labels,
    own_set,
    parameter_names,
    positional_parameters,
)
from remat._tracing.refusals import (
    is_strided,
    of_open_sizes,
    require_answers,
    unstrided,
)
from remat._tracing.refused_kinds import overriding

TENSOR, AGAIN, STATIC, ROOT = "tensor", "again", "static", "root"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Statics:
    """Which arguments are compared as a whole: `static_argnums`, `static_argnames`."""

    positions: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()

    @property
    def are_given(self) -> bool:
        return bool(self.positions or self.names)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How the leaves of a call are put together again."""

    spec: Any  # the pytree of (args, kwargs)
    #: For each leaf whether it is a tensor, a tensor that was there before, static, or a
    #: root; and which of the tensors or roots it is, or the static value.
    leaves: tuple[tuple[str, Any], ...]

    def arguments(
        self, tensors: Sequence[Tensor], roots: Sequence[object]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's (args, kwargs) with other tensors and objects."""
        given: dict[str, Sequence[Any]]
        given = {TENSOR: tensors, AGAIN: tensors, ROOT: roots}
        leaves: list[Any] = [
            each if kind == STATIC else given[kind][each] for kind, each in self.leaves
        ]
        return trees.unflatten(leaves, self.spec)


class CallSite(NamedTuple):
    """One call, taken apart, and what a trace of it depends on."""

    function: Callable[..., Any]  # the user's function
    args: tuple[Any, ...]  # positional arguments
    kwargs: Mapping[str, Any]  # keyword arguments
    #: Both, static ones kept from being walked.
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    #: What must be equal for a trace to be used again, switches and captured state aside.
    signature: Hashable
    tensors: tuple[Tensor, ...]  # the dynamic leaves, each once
    #: What must be looked into: leaves, then parts of contexts.
    objects: tuple[object, ...]
    wants_gradient: bool  # whether some level of reverse mode wants one of the tensors
    is_traceable: bool  # whether all tensors can be traced
    numerics: Numerics  # the switches in force

    def with_all_wanted(self) -> "CallSite":
        """The call as it is looked at, every floating tensor to be differentiated."""

        @functools.cache  # a tensor that is given twice stays one
        def leaf(tensor: Tensor) -> Tensor:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                return tensor
            # A stand-in was made outside the transforms and the trace around this call.
            is_fake = fakes.is_fake(tensor)
            with isolation.isolated() if is_fake else contextlib.nullcontext():
                return tensor.detach().requires_grad_()

        args, kwargs = trees.map_tensors(leaf, self.arguments)
        return call_site(self.function, args, kwargs, Statics())

    def require_traceable(self) -> None:
        """Refuses sparse and nested tensors, and those of classes with functions of their own."""
        if self.is_traceable:  # which a plain run may take
            return
        for name, tensor in zip(self.tensor_names, self.tensors, strict=True):
            if not is_strided(tensor):
                raise unstrided(f"the argument `{name}`", tensor)
            if overrides_functions(type(tensor)):
                raise overriding(type(tensor))

    def require_numbers(self) -> None:
        """Refuses tensors with open sizes, outside of a trace of ours."""
        for name, tensor, meta in zip(
            self.tensor_names, self.tensors, self.metas, strict=True
        ):
            if is_open(meta):
                raise of_open_sizes(f"the argument `{name}`", tensor)

    @property
    def layout(self) -> Layout:
        """How the arguments are put together; needed only where a call is traced."""
        leaves, spec = trees.flatten(self.arguments)
        places: dict[int, int] = {}
        roots = itertools.count()
        described: list[tuple[str, Any]] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                kind = AGAIN if id(leaf) in places else TENSOR
                described.append((kind, places.setdefault(id(leaf), len(places))))
            elif static_key(leaf) is None:
                described.append((ROOT, next(roots)))
            else:
                # A set may change after the call.
                value = leaf.value if isinstance(leaf, _Static) else leaf
                described.append((STATIC, own_set(value)))
        return Layout(spec, tuple(described))

    @property
    def metas(self) -> tuple[TensorMeta, ...]:
        return tuple(map(TensorMeta.of_operand, self.tensors))

    @property
    def roots(self) -> Roots:
        """The function and the objects among its arguments."""
        return (self.function, *self.objects)

    @property
    def key(self) -> Hashable:
        """What calls that may share a trace have in common."""
        return (self.signature, self.numerics)

    @property
    def general_key(self) -> Hashable:
        """The key without the sizes of tensors, but with their number of dimensions."""
        return (_KeyReader(keeps_sizes=False).read(self.arguments), self.numerics)

    @property
    def names(self) -> tuple[str, ...]:
        """What messages call the leaves of the arguments."""
        return labels(self.function, *self.arguments)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The names of the leaves that are tensors, each once."""
        pairs = zip(self.names, self.layout.leaves, strict=True)
        return tuple(name for name, (kind, _) in pairs if kind == TENSOR)

    @property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        """For tensors that are passed more than once: the further names, by the first."""
        firsts = self.tensor_names
        further: dict[str, tuple[str, ...]] = {}
        for name, (kind, place) in zip(self.names, self.layout.leaves, strict=True):
            if kind == AGAIN:
                first = firsts[int(place)]
                further[first] = (*further.get(first, ()), name)
        return further


def call_site(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    statics: Statics,
) -> CallSite:
    """Takes a call apart; refuses leaves that can be neither traced nor compared."""
    arguments = (args, dict(kwargs))
    if statics.are_given:
        arguments = _with_wrapped_statics(function, args, kwargs, statics)
    leaves = _KeyReader()
    signature = leaves.read(arguments)
    for leaf in leaves.objects:
        is_array = trees.is_array(leaf)
        if is_array or hides_contents(leaf):
            flat = trees.flatten(arguments)[0]
            index = next(index for index, each in enumerate(flat) if each is leaf)
            refused = _numpy_argument if is_array else _hidden_argument
            raise refused(leaf, labels(function, *arguments)[index])
    return CallSite(
        function,
        args,
        kwargs,
        arguments,
        signature,
        tuple(leaves.tensors),
        (*leaves.objects, *leaves.around),
        leaves.wants_gradient,
        leaves.is_traceable,
        Numerics.current(),
    )


@final
class _Static:
    """Keeps an argument from being walked."""

    def __init__(self, value: Any) -> None:
        self.value = value


@final
class _KeyReader:
    """Collects the tensors and the objects of a pytree, in the order of its leaves."""

    def __init__(self, *, keeps_sizes: bool = True) -> None:
        self._keeps_sizes = keeps_sizes
        self._places: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        self.objects: list[object] = []
        #: The parts of contexts that must be looked into.
        self.around: list[object] = []
        self.is_traceable = True
        self.wants_gradient = False

    def read(self, tree: Any) -> Hashable:
        """A key that is equal for two pytrees that differ only in the numbers of tensors.

        The most common containers are walked here, in a third of the time that torch's
        pytree takes; torch walks the others.
        """
        if isinstance(tree, Tensor):
            # A tensor that is passed twice is one operand: the function may ask if `q is k`.
            place = self._places.setdefault(id(tree), len(self.tensors))
            if place < len(self.tensors):
                return (AGAIN, place)
            if dtensor.is_under_way(tree):
                tree = dtensor.arrived(tree)
            self.tensors.append(tree)
            kind = cast("type[Tensor]", type(tree))
            if kind is not Tensor and overrides_functions(kind):
                self.is_traceable = False
                require_answers([tree])
            if not is_strided(tree):
                self.is_traceable = False
                self.wants_gradient |= levels.requires_grad_anywhere(tree)
                return Tensor
            layout = layout_of(tree)
            if layout[4]:
                self.wants_gradient = True
            if self._keeps_sizes:
                return layout
            return (tree.dim(), tree.dtype, tree.device, layout[4])
        kind = cast("type[Any]", type(tree))
        if kind is tuple or kind is list:
            return (kind, *map(self.read, tree))
        if kind is dict:
            return (dict, tuple(tree), *map(self.read, tree.values()))
        key = static_key(tree)
        return self._read_other(tree) if key is None else key

    def _read_other(self, tree: Any) -> Hashable:
        leaves, spec = trees.flatten(tree)
        if len(leaves) == 1 and leaves[0] is tree:
            self.objects.append(tree)
            kind = cast("type[object]", type(tree))
            return (kind, tree) if isinstance(tree, type) else kind
        return (trees.structure(spec, self._read_part), *map(self.read, leaves))

    def _read_part(self, part: object) -> Hashable:
        """What stands for a part of a context in the key."""
        key = static_key(part)
        if key is not None:
            return key
        self.around.append(part)
        try:
            hash(part)
        except TypeError:
            return (type(part), id(part))
        return (type(part), part)


def require_static(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    statics: Statics,
) -> None:
    """Refuses static arguments that could not be compared, where nothing compares them."""
    if statics.are_given:
        _with_wrapped_statics(function, args, kwargs, statics)


def _with_wrapped_statics(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    statics: Statics,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    names = parameter_names(function, len(args))
    positions = {
        index + len(args) if index < 0 else index for index in statics.positions
    }
    # A parameter that is static by name is so by position too, and the other way round.
    by_position = {
        parameter.name
        for index, parameter in enumerate(positional_parameters(function))
        if index in positions
    }
    chosen = statics.names | by_position
    wrapped = [
        _static_argument(arg, name) if index in positions or name in chosen else arg
        for index, (arg, name) in enumerate(zip(args, names, strict=True))
    ]
    return tuple(wrapped), {
        name: _static_argument(arg, name) if name in chosen else arg
        for name, arg in kwargs.items()
    }


def _static_argument(value: Any, name: str) -> _Static:
    if isinstance(value, Tensor):
        raise StaticArgumentError.of(
            where=f"the static argument `{name}`",
            what=f"is a tensor, {TensorMeta.of(value)}.",
            why="Static arguments are compared by == and hash; a tensor would "
            "become a constant of the trace and lose its gradient.",
            do="Take it out of static_argnums and static_argnames.",
        )
    try:
        hash(value)
    except TypeError as error:
        raise StaticArgumentError.of(
            where=f"the static argument `{name}` of type {type(value).__name__}",
            what=f"cannot be hashed ({error}).",
            why="Static arguments are compared by == and hash at each call.",
            do="Pass a tuple instead of a list, a frozen dataclass instead of a "
            "dict, or leave it out of static_argnums and static_argnames.",
        ) from error
    return _Static(value)


_BY_VALUE = frozenset(
    (
        *(bool, int, str, bytes, range),
        *(type(None), types.EllipsisType, type(NotImplemented)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)


def static_key(leaf: object) -> Hashable | None:
    """What stands for a static leaf in the key; None if it must be looked into."""
    is_whole = isinstance(leaf, _Static)
    leaf = leaf.value if is_whole else leaf
    kind = type(leaf)
    if kind in (float, complex):
        # The text tells -0.0 from 0.0 and lets nan equal itself.
        return (kind, repr(leaf))
    if is_whole or kind in _BY_VALUE:
        return (kind, leaf)
    if isinstance(leaf, type):
        # A class of the user may change.
        return None if user_bases(leaf) else (kind, leaf)
    if isinstance(leaf, (enum.Enum, torch.Generator)):
        return (kind, leaf)
    if kind is set or kind is frozenset:
        items = cast("set[object] | frozenset[object]", leaf)
        found = frozenset(map(static_key, items))
        return None if None in found else (kind, found)
    if isinstance(leaf, slice):
        whole = cast("slice[Any, Any, Any]", leaf)
        parts = (whole.start, whole.stop, whole.step)
        keys = [static_key(part) for part in parts]
        return None if None in keys else (kind, *keys)
    return numpy_scalar(leaf)


def _numpy_argument(leaf: Any, label: str) -> StaticArgumentError:
    return StaticArgumentError.of(
        where=f"the argument `{label}`",
        what=f"is a numpy {type(leaf).__name__}.",
        why="It is not a tensor and cannot be compared at each call, so its contents would "
        "become constants of the trace.",
        do="Pass torch.from_numpy(array) or torch.as_tensor(array); for a constant, pass a "
        "Python number or a tuple of numbers.",
    )


def _hidden_argument(leaf: Any, label: str) -> StaticArgumentError:
    return StaticArgumentError.of(
        where=f"the argument `{label}`",
        what=f"is a {type(leaf).__name__}, which hides its contents.",
        why="Its contents can be neither traced nor compared at each call: gradients would "
        "be lost, and changes would not be seen.",
        do="Pass its contents as a tuple, a list or a dict.",
    )
