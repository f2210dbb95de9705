"""Two functions under many transforms: the same numbers, gradients and state, or an error."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from remat._calls.decorated import is_region
from remat._errors import require_callable, require_type
from remat._torch.tensors import storage_key
from remat._user_lines import warn
from remat.testing._compare import (
    NotEquivalentError,
    require_numbers,
    require_same,
    same_rest,
)
from remat.testing._named_transforms import (
    USUAL,
    Cotangents,
    contiguous_cotangents,
    gradients,
    parse_transform,
    under_transforms,
)
from remat.testing._repeated_call import FlatFunction, RepeatedCall

# What torch raises if it has no rule for an operator under a transform; there is no
# separate class for that.
UNSUPPORTED = (RuntimeError, ValueError, TypeError, IndexError)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Excuse:
    """A transform that the first function does not support itself, and what it raised."""

    transform: str
    reason: str


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Equivalence:
    """What was compared.

    Attributes:
        compared: the transforms under which both functions agree.
        excused: those that the first function does not support.
    """

    compared: tuple[str, ...]
    excused: tuple[Excuse, ...]

    def __str__(self) -> str:
        """A line for what agrees, and one for each excuse."""
        lines = [f"equivalent under {', '.join(self.compared)}"]
        lines += [f"{each.transform} excused: {each.reason}" for each in self.excused]
        return "\n".join(lines)


def assert_equivalent(
    f: Callable[..., Any],
    g: Callable[..., Any],
    *,
    transforms: Iterable[str] | None = None,
    cotangents: Cotangents = contiguous_cotangents,
    exact: bool | None = None,
) -> Callable[..., Equivalence]:
    """Compares two functions, such as one and its region, under many transforms.

    Both are called with copies of the arguments (strides and shared memory kept), from
    one state of the generators and of the captured tensors, which is restored after
    each run. It compares outputs; gradients of every floating tensor argument, or of
    those that require grad if any does, and of captured tensors that require grad; and
    the arguments, captured tensors such as buffers, and the default generators of all
    devices in use after the call. A module and its copy are compared by what each holds.

    Laws: if the second function is a region, its outputs, and its gradients under
    "backward" and "grad", must equal those of the first under `.backward()` to the last
    bit, unless memory shared among arguments and outputs makes autograd sum outside the
    region (law 1). Everything else is compared by the defaults of
    `torch.testing.assert_close`.

    Args:
        f: the function to agree with; pytrees in, pytrees out.
        g: the function to check.
        transforms: names such as "backward", "grad", "vjp", "jvp", "vmap", "jacrev",
            "jacfwd", "hessian", "linearize", "functional_call" (modules only, innermost),
            and compositions of any depth: "vmap(grad)". None means the single ones and
            eleven compositions of two.
        cotangents: (index of an output, output) -> the cotangent of its shape under
            "backward", None for none; random and contiguous by default.
        exact: whether bits are compared where law 1 promises them; None means only if
            `g` is a region without a backend.

    Returns:
        A function of the arguments of a call, which returns an `Equivalence`: what was
        compared, and which transforms are excused because `f` itself raises there.

    Raises:
        NotEquivalentError: by the returned function, an AssertionError that names the
            transform, the output or argument, the first element that differs, both
            values, and the largest difference; also if only `g` raises, or if `f`
            supports none of the transforms.
        RematError: by the returned function, if a result is on the meta device.
        ValueError: if a name is not a transform.

    Example:
        >>> import torch
        >>> from remat import remat
        >>> from remat.testing import assert_equivalent
        >>> f = lambda x: {"y": x.sin().exp()}
        >>> check = assert_equivalent(f, remat(f), transforms=["backward", "vmap(grad)"])
        >>> print(check(torch.ones(3)))
        equivalent under backward, vmap(grad)
    """
    wanted = "a list of names, as in ['grad', 'vmap(grad)']"
    given = USUAL if transforms is None else transforms
    of_names = Iterable if not isinstance(given, str) else list  # not its letters
    require_type("assert_equivalent(transforms=...)", given, of_names, wanted=wanted)
    require_callable("assert_equivalent(cotangents=...)", cotangents)
    names = tuple(given)
    parsed = {name: parse_transform(name) for name in names}
    promised = is_region(g) and g.settings.backend is None
    is_exact = promised if exact is None else exact

    comparison = _Comparison()

    def compare(*args: Any, **kwargs: Any) -> Equivalence:
        comparison.is_made = True
        pair = _ComparedPair(
            f, g, RepeatedCall((f, g), args, kwargs), cotangents, is_exact
        )
        answers = {name: pair.compare(name, parts) for name, parts in parsed.items()}
        compared = [name for name, why in answers.items() if why is None]
        excused = [Excuse(name, why) for name, why in answers.items() if why]
        if not compared:
            reasons = "; ".join(f"{each.transform}: {each.reason}" for each in excused)
            raise NotEquivalentError.of(
                where="assert_equivalent",
                what="nothing was compared: the first function supports none of the "
                f"transforms ({reasons or 'there were none'}).",
                why="Without a comparison, nothing shows that two functions are "
                "equivalent.",
                do="Name a transform that the first function supports.",
            )
        return Equivalence(tuple(compared), tuple(excused))

    return compare


@final
@dataclasses.dataclass(slots=True)
class _Comparison:
    """What `compare` alone holds: it tells of one that was never made."""

    is_made: bool = False

    def __del__(self) -> None:
        if not self.is_made:
            warn(
                where="assert_equivalent(f, g)",
                what="has compared nothing: what it returns was not called.",
                why="It compares two calls, and needs their arguments.",
                do="Pass them: assert_equivalent(f, g)(x).",
            )


#: By what messages call it, a value, and whether its bits are compared.
_Rows = dict[str, tuple[Tensor | None, bool]]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Result:
    rows: _Rows
    #: The structure of the output, and its leaves that are not tensors.
    rest: tuple[Any, ...]
    #: Arguments and captured state after the call.
    after: dict[str, Tensor]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _ComparedPair:
    f: Callable[..., Any]
    g: Callable[..., Any]
    call: RepeatedCall
    cotangents: Cotangents
    exact: bool

    def compare(self, name: str, parts: tuple[str, ...]) -> str | None:
        """Compares under one transform; returns why not, if `f` does not support it."""
        try:
            expected = self._run(self.f, parts, self.cotangents)
            if self.exact and parts == ("grad",):
                expected = self._plain_gradients()
        except UNSUPPORTED as error:
            return f"{type(error).__name__}: {_first_line(error)}"
        try:
            found = self._run(self.g, parts, self.cotangents)
        except Exception as error:
            raise NotEquivalentError.of(
                where=f"under {name}",
                what=f"only the second function raises {type(error).__name__}: "
                f"{_first_line(error).rstrip('. ')}.",
                why="The first one gives a result there.",
                do="See the error from which this one is raised.",
            ) from error
        _require_equal_results(expected, found, f"under {name}")
        return None

    def _run(
        self, function: Callable[..., Any], parts: tuple[str, ...], given: Cotangents
    ) -> _Result:
        with self.call.run(function) as flat:
            if parts[0] == "backward":
                rows = self._backward(flat, parts[1:], given)
            else:
                rows = self._transformed(flat, parts)
        rest = flat.rest if parts == ("backward",) else ()
        return _Result(rows, rest, flat.after)

    def _plain_gradients(self) -> _Result:
        """What law 1 compares "grad" with: plain autograd's gradients, zeros for none."""
        found = self._run(self.f, ("backward",), contiguous_cotangents)
        rows = _Rows()
        pairs = zip(self.call.wanted, self.call.gradient_labels, strict=True)
        for place, label in pairs:
            each, exact = found.rows[label]
            zero = torch.zeros_like(self.call.leaves[place]).detach()
            rows[label] = zero if each is None else each, exact
        return _Result(rows, (), found.after)

    def _backward(
        self, flat: FlatFunction, inner: tuple[str, ...], cotangents: Cotangents
    ) -> _Rows:
        if inner:
            flat.leaves = self.call.copied()
        operands = self.call.operands(flat)
        outputs = under_transforms(inner, flat)(*flat.wanted)
        found = gradients(outputs, [*operands.values()], cotangents)
        bits = self.exact and not inner
        given = (*operands.values(), *outputs)
        keys = [storage_key(each) for each in given if each is not None]
        alone = bits and len({*keys}) == len(keys)  # no two share memory
        names = _numbered_labels(outputs) if inner else flat.labels
        return _rows(names, outputs, bits) | _rows([*operands], found, alone)

    def _transformed(self, flat: FlatFunction, parts: tuple[str, ...]) -> _Rows:
        function, tensors = flat, flat.wanted
        if parts[-1] == "functional_call":
            if not isinstance(flat.function, nn.Module):
                raise TypeError("functional_call takes modules")
            named = dict(flat.function.named_parameters())
            tensors = [*(each.detach().clone() for each in named.values()), *tensors]
            function, parts = flat.with_parameters(tuple(named)), parts[:-1]
        found = under_transforms(parts, function)(*tensors)
        if function is flat and parts == ("grad",):
            return _rows(self.call.gradient_labels, found, self.exact)
        return _rows(_numbered_labels(found), found, False)


def _rows(
    labels: Sequence[str], tensors: Sequence[Tensor | None], exact: bool
) -> _Rows:
    detached = [each if each is None else each.detach() for each in tensors]
    return {label: (each, exact) for label, each in zip(labels, detached, strict=True)}


def _numbered_labels(found: Sequence[Tensor | None]) -> list[str]:
    return [f"tensor {index} of the result" for index in range(len(found))]


def _require_equal_results(one: _Result, other: _Result, where: str) -> None:
    if not same_rest(one.rest, other.rest) or one.rows.keys() != other.rows.keys():
        raise NotEquivalentError.of(
            where=f"{where}, the structure of the outputs",
            what=f"is {one.rest} in the first function and {other.rest} in the second.",
            why="Both must return the same pytree, with equal leaves that are "
            "not tensors.",
            do="Return the same from both.",
        )
    for label, (expected, exact) in one.rows.items():
        found = other.rows[label][0]
        require_numbers(f"{where}, {label}", expected, found)
        require_same(expected, found, label, where, exact=exact)
    for label in filter(other.after.__contains__, one.after):
        require_same(one.after[label], other.after[label], label, where, exact=True)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
