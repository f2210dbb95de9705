"""Operators: what torch knows of them, and how this package makes its own.

Obsolete when overloads show their schemas and torch annotates torch.library.
"""

# pyright: reportPrivateUsage=false
import functools
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import (
    decomposition_table,  # pyright: ignore[reportUnknownVariableType]
)
from torch._higher_order_ops.effects import (
    has_effects,  # pyright: ignore[reportUnknownVariableType]
)
from torch._subclasses.functional_tensor import FunctionalTensorMode

OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
# The schema of an operator of `torch.ops`.
schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
# Whether an operator has a kernel of its own for a dispatch key, both by their names.
has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
_OF_AUTOGRAD = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")
_STRUCTURED = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.Meta)
FUSED_NORM_BACKWARD: OpOverload = torch.ops.aten._fused_rms_norm_backward.default
# Backwards without a derivative, and what they compute.
DECOMPOSED: dict[Any, Callable[..., Any]] = {
    op: decomposition_table[op]
    for op in (torch.ops.aten.native_group_norm_backward.default, FUSED_NORM_BACKWARD)
}


def bindings(op: Any) -> Iterator[Callable[..., Any]]:
    """The functions in C by which Python may reach an operator, public ones first.

    A call takes a third of the time of a call by `torch.ops`. Which operator it reaches
    depends on the arguments. Obsolete when calls of overloads are as cheap.
    """
    name, inner = op.overloadpacket.__name__, vars(torch._C)
    for home in (torch, Tensor, inner["_nn"]):
        found = getattr(home, name, None)
        if isinstance(found, (types.BuiltinFunctionType, types.MethodDescriptorType)):
            yield found


@functools.cache
def out_variant(op: Any) -> tuple[OpOverload, str] | None:
    """The operator that writes what `op` returns into a tensor, and that argument's name.

    Only where both forms are one kernel, as torch's "structured" operators are: of others
    the writing form has no kernel for meta tensors, or copies what the first form returns.
    Obsolete when torch has a public name for the pair.
    """
    for name in op.overloadpacket.overloads():
        found: OpOverload = getattr(op.overloadpacket, name)
        *given, written = schema_of(found).arguments or (None,)
        if written is None or not written.is_out:
            continue
        is_alike = told_apart_by(given) == told_apart_by(schema_of(op).arguments)
        if is_alike and all(map(found.has_kernel_for_dispatch_key, _STRUCTURED)):
            return found, written.name
    return None


def told_apart_by(arguments: Sequence[Any]) -> list[tuple[str, str, bool]]:
    """What overloads are told apart by: names and types of arguments, and which need a keyword."""
    return [(each.name, str(each.type), each.kwarg_only) for each in arguments]


def is_composite(op: Any) -> bool:
    """Whether an operator is made of other operators, on every device.

    The dispatcher raises for overloads that only TorchScript has, as for `mul` of two numbers.
    """
    is_known = torch._C._dispatch_has_kernel(op.name())
    return is_known and has_kernel(op.name(), "CompositeImplicitAutograd")


def made_of_others(op: Any) -> Callable[..., Any] | None:
    """What an operator without a derivative is made of, None if it has one or that is unknown.

    Such as the backward of silu: torch takes another formula for a gradient that is to be
    differentiated. Obsolete when torch gives `_decomp` a public name.
    """
    if op in DECOMPOSED:
        return DECOMPOSED[op]
    # A graph has this one only where the device has a kernel, whose derivative torch knows.
    has_formula = op is torch.ops.aten._fused_rms_norm.default
    is_made = isinstance(op, OpOverload) and is_composite(op) and not has_formula
    return op.decompose if is_made else None


def has_first_order_formula(op: Any) -> bool:
    """Whether torch's formula for a gradient is wrong once that is differentiated itself.

    That of `cumprod` splits its input where it is zero, and takes a factor there for a
    constant; under `create_graph` torch uses another. Obsolete when it has one formula.
    """
    return op is torch.ops.aten.cumprod.default


def has_ordered_effect(op: Any) -> bool:
    """Whether an operator is registered to have an effect, and gives values of its own.

    A collective of `c10d` writes into its arguments: what it returns is a handle. Obsolete
    when torch gives `torch._higher_order_ops.effects` a public name.
    """
    return has_effects(op) and op.namespace != "c10d"


def has_kernel_on(device_type: str, name: str) -> bool:
    """Whether an operator has a kernel of its own for a kind of device."""
    return has_kernel(name, torch._C._dispatch_key_for_device(device_type))


def is_differentiated_inside(func: Any) -> bool:
    """Whether torch differentiates what the Python kernels of an operator call.

    It does where they are registered without one for autograd. Obsolete when that raises, as
    torch's warning says that it will.
    """
    packet: Any = getattr(func, "overloadpacket", func)
    if type(packet) is not OpOverloadPacket:
        return False
    ops: list[OpOverload] = [getattr(packet, name) for name in packet.overloads()]
    if any(has_kernel(op.name(), key) for op in ops for key in _OF_AUTOGRAD):
        return False
    if not any(op._schema.returns or op._schema.is_mutable for op in ops):
        return False
    kernels = torch.library._impls
    home = packet._qualified_op_name.replace("::", "/")
    return any(each.startswith((f"{home}/", f"{home}.")) for each in kernels)


def needs_grad_mode(op: Any) -> bool:
    """Whether a kernel looks at grad mode to learn if a backward will follow.

    mkldnn's recurrent layers return no workspace without grad mode. Obsolete when they look
    at their argument `train` instead.
    """
    return op is torch.ops.aten.mkldnn_rnn_layer.default


def with_grad_mode(op: Any) -> Callable[..., Any]:
    """The operator below autograd, with grad mode on."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
            return op(*args, **kwargs)

    return run


#: The library of this package's own operators; torch has no good types for it.
LIBRARY: Any = torch.library.Library("remat", "DEF")


def define(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    tags: tuple[torch.Tag, ...] = (),
) -> Any:
    """Makes an operator of this package, the same for every device."""
    LIBRARY.define(name + schema, tags=tags)
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    api: Any = torch.library
    api.register_fake(f"remat::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.remat, name).default


def define_composite(
    like: Any, more: Sequence[str], function: Callable[..., Any]
) -> Any:
    """Makes an operator of other operators: the arguments of one, and more results behind its own.

    The types of results are named as in a schema. Torch differentiates and maps the parts.
    """
    name = like.overloadpacket.__name__
    given, _, returned = str(schema_of(like)).partition(" -> ")
    results = ", ".join((returned.strip("()"), *more))
    LIBRARY.define(f"{name}({given.partition('(')[2]} -> ({results})")
    LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.remat, name).default


def register_vmap(name: str, function: Callable[..., Any]) -> None:
    api: Any = torch.library
    api.register_vmap(f"remat::{name}", function, lib=LIBRARY)


def leave_out_of_compilers(op: Any) -> None:
    """Lets AOTAutograd drop an operator that returns nothing.

    Obsolete when it drops operators that only Dynamo's graphs should hold.
    """

    def dropped(*_: Any) -> None: ...

    op.py_impl(FunctionalTensorMode)(dropped)
