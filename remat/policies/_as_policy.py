"""Turns what a user passes as a policy into one, or says why that is not possible."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard, cast, final

from remat._errors import PolicyError, shown, takes
from remat.policies._by_kind import nothing_saveable
from remat.policies._by_op import by_op, is_target
from remat.policies._contract import AbstractPolicy, Recompute, Save, Value, policy_name
from remat.storage import AbstractStorage


@final
@dataclass(frozen=True, slots=True, repr=False)
class FromCallable(AbstractPolicy):
    """A plain function as a policy; two are equal when their functions are."""

    function: Callable[[Value], bool | Save | Recompute]

    def __call__(self, value: Value, /) -> bool | Save | Recompute:
        return self.function(value)

    def __repr__(self) -> str:
        return f"from_callable({policy_name(self.function)})"


def from_callable(
    function: Callable[[Value], bool | Save | Recompute],
) -> AbstractPolicy:
    """Makes a policy that can be combined from a function of a value.

    Laws: `from_callable(f) == from_callable(g)` exactly if `f == g`; the policy pickles
    where the function does.

    Args:
        function: takes a `Value`; returns a bool, a `Save` or a `Recompute`, always the
            same for equal values.

    Returns:
        The policy; `function` itself if it is an `AbstractPolicy` already.

    Raises:
        PolicyError: `function` cannot be called with a value or hashed, or is a class or
            a function that makes policies.

    Example:
        >>> from remat import policies
        >>> def small(value):
        ...     return value.size_bytes < 1024
        >>> ~policies.from_callable(small)
        ~from_callable(small)
    """
    return _policy_of(function, where="from_callable(function)")


def is_policy(candidate: object) -> TypeGuard[AbstractPolicy]:
    """Whether this is a policy, where it may stand in the place of something else."""
    return isinstance(candidate, AbstractPolicy)


def is_of_users(policy: AbstractPolicy) -> bool:
    """Whether a policy is a user's function, which may look at values and save none."""
    return isinstance(policy, FromCallable)


def as_policy(policy: object, where: str = "policy") -> AbstractPolicy:
    """Makes a policy from what a user passed as one.

    Args:
        policy: None for `nothing_saveable`, a policy, or a function of a value.
        where: the argument that it was passed as, for the message.

    Returns:
        The policy.

    Raises:
        PolicyError: it is none of these; the message says what was probably meant.

    Example:
        >>> from remat import policies
        >>> policies.as_policy(None)
        nothing_saveable
    """
    return nothing_saveable if policy is None else _policy_of(policy, where)


def _policy_of(candidate: object, where: str) -> AbstractPolicy:
    if isinstance(candidate, AbstractPolicy):
        return candidate
    found = _diagnose_policy(candidate)
    if found is not None:
        (why, do), is_maker = found, _makes_policies(candidate)
        name = policy_name(candidate) if is_maker else shown(candidate)
        raise PolicyError.of(where=where, what=f"got {name}.", why=why, do=do)
    return FromCallable(cast("Callable[[Value], bool]", candidate))


def _diagnose_policy(candidate: Any) -> tuple[str, str] | None:
    """Why this is not a function of a value, and what to do; None where it is one."""
    match candidate:
        case str() | list() | tuple() | set() | frozenset():
            why = "Names are not a policy."
            do = "Pass `policies.save_only_these_names(*names)`, or a policy, unquoted."
        case bool() | Save() | Recompute():
            why = "That is a decision about one value, not a policy."
            do = (
                "Pass `policies.everything_saveable` or `policies.nothing_saveable`, "
                "or a function of a value that returns the decision."
            )
        case AbstractStorage():
            why = "A storage says how values are kept, not which."
            do = f"Pass `policies.everything_saveable.stored({candidate!r})`."
        case _ if _makes_policies(candidate):
            why = f"`{policy_name(candidate)}` makes a policy and is not one itself."
            do = f"Call it: `{policy_name(candidate)}(...)`."
        case _ if is_target(candidate):
            why = "An operator makes values; a policy says which are saved."
            do = f"Pass `policies.{by_op(candidate)!r}` to save what it makes."
        case _ if isinstance(candidate, type) or not callable(candidate):
            why = (
                "A policy is a function of a value, or an instance that can be called."
            )
            do = "Pass one of `policies`, or such a function; of a plan its `.policy`."
        case _ if not takes(candidate, 1):
            why = "A policy is called with one `Value` and nothing else."
            do = (
                "Write it as `def policy(value)`, of `value.op`, `value.names`, "
                "`value.shape` and so on. One of torch's, `(ctx, op, *args, **kwargs)`, "
                "goes into `create_selective_checkpoint_contexts` of "
                "`remat.interop.torch`."
            )
        case _ if not _is_hashable_policy(candidate):
            why = "It cannot be hashed, but traced programs are looked up by their policy."
            do = "Give its class `__hash__`, or pass a function."
        case _:
            return None
    return why, do


def _makes_policies(candidate: object) -> bool:
    """Whether this is a policy's class, or a function annotated to return a policy."""
    kind: object = candidate
    if not isinstance(candidate, type):
        try:
            kind = getattr(candidate, "__annotations__", {}).get("return")
        except NameError:  # from Python 3.14 on, annotations are evaluated when read
            return False
    if isinstance(kind, type):
        return issubclass(kind, AbstractPolicy)
    return kind == AbstractPolicy.__name__  # under `from __future__ import annotations`


def _is_hashable_policy(candidate: object) -> bool:
    try:
        hash(candidate)
    except TypeError:
        return False
    return True
