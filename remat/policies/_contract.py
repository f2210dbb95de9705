"""The contract of policies: which values of the forward are saved for the backward.

A policy is a function from a value to a decision. It is an immutable object itself: it compares,
hashes and pickles, and its repr is the code that makes it. It may be asked about a value any
number of times, in any order, and must answer the same each time; it never sees a tensor.
"""

import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NoReturn, Protocol, final

import torch

from remat._errors import PolicyError, require_hash, show_type, shown
from remat._graph.operators import short_name
from remat.policies._sizes import show_size
from remat.storage import AbstractStorage, Keep


@final
@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that an operator took, as a policy sees it.

    Args:
        shape: the sizes of its dimensions.
        dtype: its dtype.
        device: where it is.
        stride: its strides, which are 0 where a dimension is expanded.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Value:
    """What a policy sees of one value of a traced function.

    Args:
        op: the operator that makes the value, an overload of `torch.ops` such as
            `torch.ops.aten.mm.default`; None for an input.
        names: the names that `checkpoint_name` gave to the value or to an alias of it.
        shape: the sizes of the value's dimensions.
        dtype: the value's dtype.
        size_bytes: the bytes that it takes to keep the value as it is.
        flops: the floating-point operations of the operator that makes the value.
        source: the user's line that makes the value, as in `"model.py:41"`, or `""`.
        function: the outermost torch function that the user called to make the value, as
            in `"scaled_dot_product_attention"` or `"linear"`, or `""` if unknown.
        args: the operator's positional arguments: an `Operand` for each tensor, a tuple
            for each list, anything else unchanged.
        kwargs: its keyword arguments in the same form, as pairs.
        is_result: whether it is returned, or read outside of the call of `function`; False
            for what a function that is made of several operators makes on its way.

    Example:
        >>> import torch
        >>> from remat import policies
        >>> op = torch.ops.aten.mm.default
        >>> value = policies.Value(op, ("mlp",), (8, 1024), torch.float32, 32768)
        >>> print(value)
        the value "mlp" (float32[8, 1024], 32.0 KiB, made by aten.mm)
    """

    op: Callable[..., Any] | None
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    size_bytes: int
    flops: int = 0
    source: str = ""
    function: str = ""
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    is_result: bool = True

    def __str__(self) -> str:
        """The value as messages and reports name it."""
        names = ", ".join(f'"{name}"' for name in self.names)
        maker = "an input" if self.op is None else f"made by {short_name(self.op)}"
        source = f" at {self.source}" if self.source else ""
        title = f"the value {names}" if names else "an unnamed value"
        form, size = show_type(self.dtype, self.shape), show_size(self.size_bytes)
        return f"{title} ({form}, {size}, {maker}{source})"


@final
@dataclass(frozen=True, slots=True)
class Save:
    """The decision to save a value for the backward.

    Args:
        storage: how the value waits; the default keeps it as it is.

    Raises:
        PolicyError: `storage` is not a storage value.

    Example:
        >>> from remat import policies
        >>> policies.Save()
        Save(storage=Keep())
    """

    storage: AbstractStorage = field(default_factory=Keep)

    def __post_init__(self) -> None:
        require_storage(self.storage, where="Save(storage=...)")


@final
@dataclass(frozen=True, slots=True)
class Recompute:
    """The decision to drop a value and to recompute it in the backward.

    Example:
        >>> from remat import policies
        >>> policies.Recompute()
        Recompute()
    """


class AnyValues(Protocol):
    """All values of a program: what a policy of each kind saves of them, by number."""

    def one_by_one(self, policy: "AbstractPolicy") -> dict[int, Save]: ...
    def within(self, budget: Any) -> dict[int, Save]: ...
    def replayed(self, plan: Any) -> dict[int, Save]: ...


class AbstractPolicy(abc.ABC):
    """The base of all policies that can be combined.

    A plain function of a value is a policy too; `from_callable` makes it one of these.

    Laws: with `saves(p)` the set of values that `p` saves, `saves(p | q)` is the union
    and `saves(p & q)` the intersection of both sets, `saves(~p)` is the complement, and
    `saves(p.stored(s))` is `saves(p)`. `|` and `&` are associative, storage included.

    Attributes:
        is_whole: whether it decides about all values of a program together.

    Example:
        >>> from remat import policies
        >>> policies.save_matmul_outputs | policies.save_only_these_names("attn")
        save_matmul_outputs | save_only_these_names('attn')
    """

    __slots__ = ()

    is_whole: ClassVar[bool] = False

    @abc.abstractmethod
    def __call__(self, value: Value, /) -> bool | Save | Recompute:
        """Decides about one value; True means `Save()`, False means `Recompute()`."""

    @property
    def globs(self) -> tuple[str, ...]:
        """The name globs that the policy mentions; each is meant to match some name.

        By default none: an operator's or a size's policy looks at no names.
        """
        return ()

    @abc.abstractmethod
    def __repr__(self) -> str:
        """The code that makes this policy."""

    @property
    def reason(self) -> str:
        """Why a value that it saves is held, in the words of `saved_residuals`."""
        return f"permitted by {self!r}"

    def decide_all(self, values: AnyValues) -> dict[int, Save]:
        """What it saves of a program: by default it is asked about each value alone."""
        return values.one_by_one(self)

    @staticmethod
    def glob_matches(glob: str, name: str) -> bool:
        """Returns whether a name fits a glob.

        Args:
            glob: a pattern of `fnmatch`: `*` any text, `?` one character, `[ab]` one of
                these. Case counts, and the whole name must fit. A name fits itself,
                whatever characters it has.
            name: a name that `checkpoint_name` gave.

        Returns:
            Whether the name fits.

        Example:
            >>> from remat import policies
            >>> policies.nothing_saveable.glob_matches("mlp_*", "mlp_1")
            True
        """
        return name == glob or fnmatchcase(name, glob)

    def stored(self, storage: AbstractStorage) -> "AbstractPolicy":
        """The policy that saves the same values, each of them in `storage`.

        Args:
            storage: how the saved values wait, whatever storage the policy named.

        Returns:
            The policy with that storage.

        Raises:
            PolicyError: `storage` is not a storage value.

        Example:
            >>> from remat import policies, storage
            >>> policies.save_matmul_outputs.stored(storage.Keep())
            save_matmul_outputs.stored(Keep())
        """
        _require_policies(".stored", self)
        require_storage(storage, where=f"{self!r}.stored(...)")
        return Stored(self, storage)

    def __or__(self, other: "AbstractPolicy") -> "AbstractPolicy":
        """Saves what either saves; where both do, in the left operand's storage."""
        _require_policies("|", self, other)
        return Union(self, other)

    def __and__(self, other: "AbstractPolicy") -> "AbstractPolicy":
        """Saves what both save, in the left operand's storage."""
        _require_policies("&", self, other)
        return Intersection(self, other)

    def __invert__(self) -> "AbstractPolicy":
        """Recomputes what this policy saves, and keeps what it recomputes."""
        _require_policies("~", self)
        return Complement(self)

    # The left operand is not a policy of this package.
    def __ror__(self, other: object) -> NoReturn:
        raise _not_combinable(other, "|")

    def __rand__(self, other: object) -> NoReturn:
        raise _not_combinable(other, "&")

    def __bool__(self) -> NoReturn:
        """Refuses: `p and q` would silently be `q`."""
        raise PolicyError.of(
            where=f"the policy {self!r}",
            what="was asked whether it is true.",
            why="`p or q` and `p and q` pick one operand, and `not p` is a bool; "
            "none of these combines policies.",
            do="Write `p | q`, `p & q` or `~p`; to test for None, write `p is None`.",
        )


class WholeProgram(AbstractPolicy):
    """The base of policies that decide about all values of a program together.

    They cannot be asked about a single value, and so cannot be combined.
    """

    __slots__ = ()

    is_whole: ClassVar[bool] = True

    def __call__(self, value: Value, /) -> NoReturn:
        """Refuses: whether one value is saved depends on the others."""
        raise PolicyError.of(
            where=str(value),
            what=f"the policy {self!r} was asked about it alone.",
            why="It decides over the whole program: whether one value is saved "
            "depends on all others.",
            do="Pass it as the policy of a region, by itself.",
        )


@dataclass(frozen=True, slots=True, repr=False)
class Pair(AbstractPolicy):
    """The base of policies that are made of two; the left one's storage counts first."""

    left: AbstractPolicy
    right: AbstractPolicy

    @property
    def globs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.left.globs + self.right.globs))


@final
@dataclass(frozen=True, slots=True, repr=False)
class Union(Pair):
    """Saves what either operand saves, in the left operand's storage if it saves."""

    def __call__(self, value: Value, /) -> Save | Recompute:
        left = decide(self.left, value)
        return left if isinstance(left, Save) else decide(self.right, value)

    def __repr__(self) -> str:
        # `|` binds weakest and to the left, so only a union at the right needs brackets.
        return f"{self.left!r} | {_bracketed_operand(self.right, Union)}"


@final
@dataclass(frozen=True, slots=True, repr=False)
class Intersection(Pair):
    """Saves what both operands save, in the left operand's storage."""

    def __call__(self, value: Value, /) -> Save | Recompute:
        left, right = decide(self.left, value), decide(self.right, value)
        return left if isinstance(right, Save) else right

    def __repr__(self) -> str:
        left = _bracketed_operand(self.left, Union)
        return f"{left} & {_bracketed_operand(self.right, Union, Intersection)}"


@dataclass(frozen=True, slots=True, repr=False)
class Changed(AbstractPolicy):
    """The base of policies of one: a misspelled glob is reported of a complement, too."""

    policy: AbstractPolicy

    @property
    def globs(self) -> tuple[str, ...]:
        return self.policy.globs


@final
@dataclass(frozen=True, slots=True, repr=False)
class Complement(Changed):
    """Recomputes what the operand saves, and keeps what it recomputes, by `Keep()`."""

    def __call__(self, value: Value, /) -> Save | Recompute:
        saves = isinstance(decide(self.policy, value), Save)
        return Recompute() if saves else Save()

    def __repr__(self) -> str:
        return f"~{_bracketed_operand(self.policy, Union, Intersection)}"


@final
@dataclass(frozen=True, slots=True, repr=False)
class Stored(Changed):
    """Saves what the operand saves, in a given storage."""

    storage: AbstractStorage

    def __call__(self, value: Value, /) -> Save | Recompute:
        decision = decide(self.policy, value)
        return Save(self.storage) if isinstance(decision, Save) else decision

    def __repr__(self) -> str:
        policy = _bracketed_operand(self.policy, Union, Intersection, Complement)
        return f"{policy}.stored({self.storage!r})"


def decide(policy: Callable[[Value], object], value: Value) -> Save | Recompute:
    """Asks a policy about a value, and checks its answer.

    Args:
        policy: any callable of a value.
        value: the value that is decided about.

    Returns:
        The decision; True has become `Save()`, and False `Recompute()`.

    Raises:
        PolicyError: the policy answered anything but a bool, a `Save` or a `Recompute`. What
            it raises itself gets a note of the value.

    Example:
        >>> import torch
        >>> from remat import policies
        >>> value = policies.Value(None, ("x",), (2,), torch.float32, 8)
        >>> policies.decide(lambda value: value.size_bytes < 16, value)
        Save(storage=Keep())
    """
    try:
        answer = policy(value)
    except Exception as error:
        if not hasattr(error, "__notes__"):  # of the operand that raised
            error.add_note(
                f"{value}: the policy {policy_name(policy)} was asked about it."
            )
        raise
    match answer:
        case True:
            return Save()
        case False:
            return Recompute()
        case Save() | Recompute():
            return answer
        case _:
            why, do = _diagnose_decision(answer)
            kind = type(answer).__name__
            what = f"the policy {policy_name(policy)} answered {shown(answer)}, of type {kind}."
            raise PolicyError.of(where=str(value), what=what, why=why, do=do)


def policy_name(policy: object) -> str:
    """Returns how messages name a policy: its repr, or a plain function's name."""
    if isinstance(policy, AbstractPolicy):
        return repr(policy)
    return str(getattr(policy, "__name__", None) or repr(policy))


def require_storage(storage: object, where: str) -> None:
    """Raises unless `storage` is a storage value that hashes."""
    if isinstance(storage, AbstractStorage):
        require_hash(where, storage)
        return
    do, what = "Pass `storage.Keep()`, for example.", shown(storage)
    if isinstance(storage, type) and issubclass(storage, AbstractStorage):
        do = f"Pass `storage.{storage.__name__}()`."
    raise PolicyError.of(
        where=where,
        what=f"got {what}, which is not a storage value.",
        why="A storage is an instance of a class of `storage`.",
        do=do,
    )


def _diagnose_decision(answer: object) -> tuple[str, str]:
    """Returns why an answer is not a decision, and what to return instead."""
    do = "Return `Save()`, `Recompute()`, True or False; of an array `bool(...)` of it."
    match answer:
        case None:
            return "The function ended without a `return`, or a branch of it did.", do
        case type():
            is_storage = issubclass(answer, AbstractStorage)
            made = f"Save(storage.{answer.__name__}())" if is_storage else "Save()"
            return "A decision is an instance, not a class.", f"Return `{made}`."
        case AbstractStorage():
            why = "A storage says how a value is kept, not that it is saved."
            return why, f"Return `Save({answer!r})`."
        case AbstractPolicy():
            why = "A policy is asked, and a function that makes one is called first."
            return why, "Pass that policy itself, or return its answer for the value."
        case _:
            return "A decision is a bool, a `Save` or a `Recompute`.", do


def _require_policies(symbol: str, *operands: object) -> None:
    for operand in operands:
        if not isinstance(operand, AbstractPolicy) or isinstance(operand, WholeProgram):
            raise _not_combinable(operand, symbol)


def _not_combinable(operand: object, symbol: str) -> PolicyError:
    if isinstance(operand, WholeProgram):
        why = "It decides over the whole program, not value by value."
        do = "Say what it may save, and how, with `budget(size, allow=policy)`."
    elif callable(operand) and not isinstance(operand, type):
        why = "A plain callable does not say how it combines, compares or prints."
        do = f"Write `policies.from_callable({policy_name(operand)})` for it."
    else:
        why = "It is not a policy."
        do = "Combine policies only; `p.stored(storage)` says how values wait."
    return PolicyError.of(
        where=f"an operand of `{symbol}` between policies",
        what=f"got {shown(operand)}.",
        why=why,
        do=do,
    )


def _bracketed_operand(policy: AbstractPolicy, *weaker: type[AbstractPolicy]) -> str:
    return f"({policy!r})" if isinstance(policy, weaker) else repr(policy)
