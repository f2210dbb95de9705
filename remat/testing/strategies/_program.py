"""A random function that can be called, compared, and printed as Python."""

import dataclasses
import functools
import linecache
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from remat import _api, policies
from remat._tracing import naming
from remat.policies import AbstractPolicy
from remat.testing.strategies._operators import Statement
from remat.testing.strategies._tensors import TensorSpec, normal

_FILE = "program.py"
# What statements name besides variables and what is captured.
NAMESPACE: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "normal": normal,
    "checkpoint_name": naming.checkpoint_name,
}

# What a function may reach beyond its arguments: the name, and the code that makes it for
# rows of a given width. Modules begin with numbers that are not draws.
GLOBALS: dict[str, str] = {
    "SCALE": "normal(1, {width}, seed=101).requires_grad_()",
    "TABLE": '{{"w": normal({width}, seed=102).requires_grad_()}}',
    "ALPHA": "0.5",
    "LAYER": "torch.nn.LayerNorm({width}, eps=0.1, dtype=torch.float64)",
    "NORM": "torch.nn.BatchNorm1d({width}, eps=0.1, dtype=torch.float64)",
}
CELLS = {"shift": "normal(1, {width}, seed=103).requires_grad_()"}
CAPTURED_OPERANDS = ("SCALE", "shift", 'TABLE["w"]', "LAYER.weight")


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One statement with its operands, and the one or two variables that it makes."""

    statement: Statement
    operands: tuple[str, ...]
    makes: tuple[str, ...]
    name: str = ""  # what `checkpoint_name` calls the value

    @property
    def lines(self) -> list[str]:
        names = {"out": self.makes[0], "other": self.makes[-1], "name": self.name}
        return self.statement.text.format(*self.operands, **names).splitlines()


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Inner:
    """A region inside: the steps from `start` up to `stop`, under a policy of their own."""

    start: int
    stop: int
    policy: AbstractPolicy


@final
@dataclasses.dataclass(frozen=True, repr=False)
class Program:
    """A straight-line function of tensors; its `repr` is its source, and runs.

    Calling it runs it without any region. The lines that errors and residuals name are
    those of the `repr`, which is also what a failing test prints.

    Attributes:
        arguments: what it is called with.
        steps: its statements.
        outputs: the variables that it returns.
        inner: regions inside it, in order and apart.

    Example:
        >>> from remat import remat
        >>> from remat.testing.strategies import Program, TensorSpec
        >>> program = Program((TensorSpec((2, 2)),), (), ("x0",))
        >>> program
        def fun(x0):
            return x0
        <BLANKLINE>
        arguments = (normal(2, 2),)
        >>> [y] = program(*program.make_arguments()),
        >>> y.shape
        torch.Size([2, 2])
    """

    arguments: tuple[TensorSpec, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    inner: tuple[Inner, ...] = ()

    def __call__(self, *args: Any) -> Any:
        """Runs the function without its inner regions."""
        return self.plain(*args)

    @property
    def plain(self) -> Callable[..., Any]:
        """The function without its inner regions; it shares captures with `fun`."""
        return self._built["plain"]

    @property
    def fun(self) -> Callable[..., Any]:
        """The function with its inner regions, always the same object."""
        return self._built["fun"]

    def make_arguments(self) -> tuple[Tensor, ...]:
        """The arguments, fresh."""
        return tuple(spec.make() for spec in self.arguments)

    def change_globals(self) -> None:
        """Assigns other values to the globals that the function names."""
        scale = normal(1, self.arguments[0].shape[-1], seed=201).requires_grad_()
        others = {"ALPHA": 0.75, "SCALE": scale}
        self._built.update({name: others[name] for name in self._used(others)})

    @property
    def captures(self) -> tuple[str, ...]:
        """The names of the tensors, modules and numbers that it reaches."""
        return tuple(self._used([*GLOBALS, *CELLS]))

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of its statements; see `Statement`."""
        return frozenset(step.statement.kind for step in self.steps)

    def __repr__(self) -> str:
        """The source, with everything that it captures, and its arguments."""
        width = self.arguments[0].shape[-1]
        head = [f"{k} = {GLOBALS[k].format(width=width)}" for k in self._used(GLOBALS)]
        cells = self._used(CELLS)
        body = [*self._inner_source(), *self._fun_source()]
        if cells or self.inner:
            made = ", ".join(f"{k}={CELLS[k].format(width=width)}" for k in cells)
            body = [f"def make({', '.join(cells)}):", *_indented_source(body)]
            body += ["    return fun", "", f"fun = make({made})"]
        tail = f"arguments = {self.arguments!r}"
        return "\n".join([*head, *([""] if head else []), *body, "", tail])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # hypothesis prints values by this hook of IPython's.
        printer.text(repr(self))

    @functools.cached_property
    def _built(self) -> dict[str, Any]:
        namespace: dict[str, Any] = {
            **{name: getattr(policies, name) for name in policies.__all__},
            **NAMESPACE,
            "__name__": "program",
            "remat": _no_region,
        }
        source = repr(self)
        linecache.cache[_FILE] = (len(source), None, source.splitlines(True), _FILE)
        exec(compile(source, _FILE, "exec"), namespace)
        namespace["plain"] = namespace["fun"]
        if "make" in namespace:
            # Without regions inside and with them, over the same captures.
            width = self.arguments[0].shape[-1]
            cells = {k: CELLS[k].format(width=width) for k in self._used(CELLS)}
            made = {k: eval(code, namespace) for k, code in cells.items()}
            namespace["plain"] = namespace["make"](**made)
            namespace["remat"] = _api.remat
            namespace["fun"] = namespace["make"](**made)
        return namespace

    def _used(self, names: Iterable[str]) -> list[str]:
        text = "\n".join(line for step in self.steps for line in step.lines)
        return [name for name in names if re.search(rf"\b{name}\b", text)]

    def _inner_source(self) -> Iterator[str]:
        draws = ', rng="preserve"' if "draw" in self.kinds else ""
        for number, inner in enumerate(self.inner):
            yield f"@remat(policy={inner.policy!r}{draws})"
            takes, gives = self._takes_and_gives(inner)
            yield f"def inner{number}({', '.join(takes)}):"
            yield from _indented_source(self._lines(inner.start, inner.stop))
            yield from (f"    return {', '.join(gives)}", "")

    def _fun_source(self) -> Iterator[str]:
        parameters = ", ".join(f"x{place}" for place in range(len(self.arguments)))
        yield f"def fun({parameters}):"
        done = 0
        for number, inner in enumerate(self.inner):
            yield from _indented_source(self._lines(done, inner.start))
            takes, gives = map(", ".join, self._takes_and_gives(inner))
            yield f"    {gives} = inner{number}({takes})"
            done = inner.stop
        yield from _indented_source(self._lines(done, len(self.steps)))
        yield f"    return {', '.join(self.outputs)}"

    def _lines(self, start: int, stop: int) -> list[str]:
        return [line for step in self.steps[start:stop] for line in step.lines]

    def _takes_and_gives(self, inner: Inner) -> tuple[list[str], list[str]]:
        inside = self.steps[inner.start : inner.stop]
        after = self.steps[inner.stop :]
        made = {name for step in inside for name in step.makes}
        read = dict.fromkeys(name for step in inside for name in step.operands)
        wanted = {name for step in after for name in step.operands} | {*self.outputs}
        # An argument or a variable; what is captured has other first letters.
        takes = [name for name in read if name[0] in "xv" and name not in made]
        return takes, [k for step in inside for k in step.makes if k in wanted]

    def gives(self, inner: Inner) -> bool:
        """Whether anything outside reads what a region inside would make."""
        return bool(self._takes_and_gives(inner)[1])


def _no_region(**_: Any) -> Callable[[Any], Any]:
    return lambda fun: fun


def _indented_source(lines: Iterable[str]) -> list[str]:
    return [textwrap.indent(line, "    ") for line in lines]
