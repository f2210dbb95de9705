"""Selective checkpointing: torch's policies of operators, as policies of this package.

torch runs the function under two dispatch modes, one that caches the outputs of
operators and one that returns them. Here there are no modes: the policy is asked once
about each value while the function is traced, and the region follows its answers.
"""

import contextlib
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Hashable
from typing import Any, Self, TypeAlias, cast, final

import torch
from torch.utils.checkpoint import SelectiveCheckpointContext

from remat._captures.library import mentions
from remat._errors import PolicyError, refusal
from remat._torch import isolation, schemas
from remat.policies import AbstractPolicy, Operand, Recompute, Save, Value
from remat.policies._as_policy import is_policy
from remat.storage import Offload

_OVERLOADS = (schemas.OpOverload, type(torch.ops.higher_order.flex_attention))

# By what follows `MUST_` or `PREFER_`, which torch tells apart for compilers alone. Outputs to
# offload wait in host memory here; torch (2.15) silently recomputes them.
_DECISIONS = {
    "SAVE": Save(),
    "RECOMPUTE": Recompute(),
    "CPU_OFFLOAD": Save(Offload()),
}

PolicyFn: TypeAlias = Callable[..., object]


@final
@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Selective(AbstractPolicy):
    """A policy of torch's, `(ctx, op, *args, **kwargs)`, as one of this package.

    Two are equal if they run the same code over equal closures and globals. In torch the
    policy is usually made anew for each call, and an equal one reuses the last trace.
    """

    function: PolicyFn = dataclasses.field(compare=False)
    #: Its code and what it reads, as it was when this was made.
    meaning: Hashable

    @classmethod
    def of(cls, function: PolicyFn) -> Self:
        return cls(function, _meaning_of_policy(function, frozenset()))

    def __call__(self, value: Value, /) -> Save | Recompute:
        """Decides about one value; inputs are saved in any case."""
        if value.op is None:
            return Recompute()
        with isolation.isolated():  # a tracer of the caller's would record these
            output = torch.empty(value.shape, dtype=value.dtype, device="meta")
            args, kwargs = _on_meta(value.args), dict(_on_meta(value.kwargs))
        context = SelectiveCheckpointContext(is_recompute=False, op_output=output)
        answer = self.function(context, value.op, *args, **kwargs)
        if isinstance(answer, bool):
            word = "PREFER_SAVE" if answer else "PREFER_RECOMPUTE"
        else:
            word = answer.name if isinstance(answer, enum.Enum) else ""
        decision = _DECISIONS.get(word.removeprefix("MUST_").removeprefix("PREFER_"))
        if decision is None:
            raise PolicyError.of(
                where=f"the policy {self!r}",
                what=f"answered {answer!r} about {value}.",
                why="A policy of torch's must return a bool or a CheckpointPolicy.",
                do="Return CheckpointPolicy.MUST_SAVE or PREFER_RECOMPUTE, for example.",
            )
        # As in torch 2.15: what an operator has done in an order is not done once more.
        is_kept = word == "PREFER_RECOMPUTE" and schemas.has_ordered_effect(value.op)
        return Save() if is_kept else decision

    def __repr__(self) -> str:
        """Names torch's policy."""
        name = getattr(self.function, "__name__", None) or repr(self.function)
        return f"create_selective_checkpoint_contexts({name})"


def _on_meta(tree: Any) -> Any:
    """What a selective policy is asked with: an operator's arguments on the device meta."""
    if isinstance(tree, Operand):
        return torch.empty(tree.shape, dtype=tree.dtype, device="meta")
    if isinstance(tree, tuple):
        return tuple(map(_on_meta, cast("tuple[Any, ...]", tree)))
    return tree


def _meaning_of_policy(thing: Any, seen: frozenset[int]) -> Hashable:
    """A key that is equal for policies that answer alike; contents as they are now.

    Of a function: its code, what it closes over, and which globals it reads, through functions
    of its module too. What these hold is not looked into, and one that it assigns is left out,
    as policies note there what they were asked.
    """
    if id(thing) in seen:
        return "itself"
    seen |= {id(thing)}

    def inside(things: Any) -> Hashable:
        return tuple(_meaning_of_policy(each, seen) for each in things)

    match thing:
        case types.FunctionType():
            code, home = thing.__code__, thing.__globals__
            named = mentions(code)
            cells = tuple(cell.cell_contents for cell in thing.__closure__ or ())
            names = sorted((named.globals - named.assigned) & home.keys())
            read = tuple(
                _meaning_of_policy(home[name], seen)
                if getattr(home[name], "__globals__", None) is home
                else _itself(home[name])
                for name in names
            )
            return code, read, inside([cells, thing.__defaults__, thing.__kwdefaults__])
        case types.MethodType():
            return inside([thing.__func__, thing.__self__])
        case functools.partial():
            return inside([thing.func, thing.args, thing.keywords])  # pyright: ignore[reportUnknownMemberType]
        case dict():
            return (dict, inside(thing.items()))  # pyright: ignore[reportUnknownMemberType]
        case list() | tuple():
            kind: Hashable = type(cast("object", thing))
            return (kind, inside(thing))
        case set() | frozenset():
            return frozenset(thing)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        case Hashable():
            return thing
        case _:
            return _itself(thing)


def _itself(thing: Any) -> Hashable:
    """A method keeps its object alive, and is equal to one of the same object alone."""
    return None if thing is None else types.MethodType(_itself, thing)


@final
class SelectiveContext(contextlib.AbstractContextManager[None]):
    """One of the two contexts: it carries the policy to `checkpoint`, and does nothing."""

    def __init__(self, policy: AbstractPolicy) -> None:
        self.policy = policy

    def __enter__(self) -> None:
        """Refuses, because no other checkpoint can use this context."""
        raise refusal(
            RuntimeError,
            where="a context of interop.torch.create_selective_checkpoint_contexts",
            what="was entered.",
            why="It only carries a policy to interop.torch.checkpoint, which "
            "does not enter it.",
            do="Pass the function that makes it as `context_fn` of that checkpoint.",
        )

    def __exit__(self, *details: object) -> None:
        """Nothing was entered."""


def create_selective_checkpoint_contexts(
    policy_fn_or_list: PolicyFn | list[Any], allow_cache_entry_mutation: bool = False
) -> tuple[SelectiveContext, SelectiveContext]:
    """Selects by operator the outputs that a checkpointed function saves, as in torch.

    The policy is asked once per value, while the function is traced, in the order of
    the function. It sees ATen operators without in-place variants (`mul` for `mul_`),
    with tensors without data as inputs and outputs. Of the values that it selects,
    those that a backward step reads are saved; torch saves all of them.

    Args:
        policy_fn_or_list: a list of overloads, `torch.ops.aten.mm.default`, whose outputs are
            saved; or a function `(ctx, op, *args, **kwargs)` that answers a
            `CheckpointPolicy`, or a bool. It must answer alike when asked alike.
        allow_cache_entry_mutation: in torch, lets the function change a saved output in
            place. Here this is always allowed: the saved value is what the operator
            made.

    Returns:
        Two contexts, for `checkpoint(..., context_fn=...)`.

    Raises:
        ValueError: the list holds something that is not an overload.
        TypeError: it is neither a list nor a function.

    Example:
        >>> import functools, torch
        >>> from remat.interop import torch as drop_in
        >>> save_mm = functools.partial(
        ...     drop_in.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
        ... )
        >>> x = torch.ones(2, 2, requires_grad=True)
        >>> drop_in.checkpoint(lambda x: (x @ x).sin().sin(), x, context_fn=save_mm).shape
        torch.Size([2, 2])
    """
    del allow_cache_entry_mutation
    if isinstance(policy_fn_or_list, list):
        listed = _selected_operators(cast("list[Any]", policy_fn_or_list))
        policy = Selective.of(functools.partial(_is_selected, listed))
    elif callable(policy_fn_or_list) and not is_policy(policy_fn_or_list):
        policy = Selective.of(policy_fn_or_list)
    else:
        raise TypeError(
            "create_selective_checkpoint_contexts takes either a function or a list of "
            f"operators, not {policy_fn_or_list!r}. A policy of remat goes to "
            "remat(function, policy=...)."
        )
    return SelectiveContext(policy), SelectiveContext(policy)


def _is_selected(operators: tuple[object, ...], *given: Any, **_: Any) -> bool:
    return given[1] in operators  # after the context


def _selected_operators(operators: list[Any]) -> tuple[object, ...]:
    for each in operators:
        if isinstance(each, _OVERLOADS):
            continue
        why = f"It is a {type(each).__name__}."
        do = "Pass torch.ops.aten.mm.default, for example."
        if isinstance(each, schemas.OpOverloadPacket):
            why = "It is an operator with all its overloads."
            do = f"Pass torch.ops.{each}.default, or another of its overloads."
        raise refusal(
            ValueError,  # as in torch
            where="create_selective_checkpoint_contexts([...])",
            what=f"expected an overload of an operator, and got {each!r}.",
            why=why,
            do=do,
        )
    return tuple(operators)
