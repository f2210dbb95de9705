"""A graph -> one straight-line Python function that frees each value at its last use.

The text of the function is kept, and `.programs()` prints it. What is printed is what runs: as
Python, by torch's own interpreter (`_programs.interpreted`), or compiled (`_programs.compiled`).
Where no dispatch mode listens, some steps are one call (`_programs.bindings`) and some write over
what is no longer read (`_programs.overwriting`). A dispatch mode hears every operator that runs on a
thread, but not on whose behalf: a `Watcher` is one to which the same function reports each step
before it runs, for reports and checklists. Inside an outer trace, the graph is interpreted instead, so that each operator
keeps its name and its line there.
"""

import abc
import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from remat._generators import device_states, streams
from remat._graph import operators
from remat._graph.meta import device_of
from remat._graph.values import (
    Graph,
    Value,
    comment,
    last_uses,
    read_as_real,
    refs,
    roots,
)
from remat._programs import compiled, interpreted
from remat._programs.barriers import with_barriers
from remat._programs.bindings import bindings_of, fold_products
from remat._programs.inside_traces import interpret
from remat._programs.lending import Lender
from remat._programs.narrowing import narrowed
from remat._programs.overwriting import with_overwriting
from remat._torch import guards, modes, schemas, tracer
from remat._tracing.thread import current

# About this many operators save what a call of the interpreter costs: a heuristic.
_FOR_INTERPRETER = 32

_SIMPLE = (bool, int, str, type(None))


class Quiet(NamedTuple):
    """A program in two parts, which a caller combines itself to save a call."""

    #: Makes the context in which it runs.
    around: Callable[[], contextlib.AbstractContextManager[Any]]
    #: Empties a list of inputs and gives the outputs.
    run: Callable[[list[Tensor]], list[Any]]


class Watcher(modes.DispatchMode):
    """Hears operators as any dispatch mode does, and which step of a program makes each."""

    @abc.abstractmethod
    def following(
        self, graph: Graph, inputs: Sequence[Tensor], /
    ) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        """Around a run of the program of a graph on these inputs.

        Yields:
            What the run calls before each step, with the step's index in its graph.
        """


@final
@dataclasses.dataclass(frozen=True, repr=False)
class Program:
    """A graph that can be run on tensors."""

    graph: Graph  # what it runs
    title: str  # the name of the function in its printed form
    backend: str | None = None  # "inductor", or None to run operator by operator
    num_saved: int = 0  # of a backward, how many of its first inputs are saved values
    num_cotangents: int = 0  # of a backward, how many of its last inputs are cotangents
    #: Whether it takes what the program before it in a backward has recomputed.
    is_borrowing: bool = False
    #: Whether a user's `autograd.Function` or hook says how to differentiate a part of it.
    is_custom: bool = False
    #: Where one of the function's has a rule of its own for vmap, as in `Joint`.
    rules: frozenset[str] = frozenset()
    #: Of a forward, the policy of its region and those of the regions inside.
    policies: frozenset[Any] = frozenset()

    def __call__(self, inputs: Sequence[Tensor]) -> list[Any]:
        """The outputs for these inputs; no gradient is recorded."""
        return self.consume(list(inputs))

    def consume(self, inputs: list[Tensor]) -> list[Any]:
        """The outputs; empties the list, and frees each input after its last use."""
        if self._lender is not None and not tracer.proxy_is_active():
            return self._lender.consume(inputs)
        # Outputs that share memory must stay views: an in-place change shows in all.
        below = torch.no_grad() if self._shares_memory else modes.below_autograd()
        with below, modes.unheard_by_users():
            is_short = self.is_compiled or not self._shares_memory
            if is_short and not modes.is_watched():
                return self._short(inputs)
            return self.consume_with_gradient(inputs)

    def consume_with_gradient(self, inputs: list[Tensor]) -> list[Any]:
        """`consume`, differentiable operator by operator if the caller wants that."""
        if tracer.proxy_is_active():
            outer = current()
            if outer is not None:
                outer.is_custom |= self.is_custom
                outer.rules |= self.rules
                outer.policies |= self.policies
            in_compiler = tracer.is_in_compiler()
            return interpret(self._with_barriers if in_compiler else self.graph, inputs)
        with self._followed(inputs) as at:
            return self._watched(at, inputs) if at else self._run(inputs)

    def in_turns(
        self, inputs: Sequence[Tensor], turn: Callable[[bool], None]
    ) -> list[Any]:
        """`__call__`, where a backward's own steps run under other switches than what it repeats.

        `turn` is told of each step, before it runs, whether it repeats one of the forward.
        """
        values = self.graph.values
        has_own = any(each.is_backward and each.rank < 0 for each in values)
        if not has_own or tracer.proxy_is_active():
            return self(inputs)
        with (
            torch.no_grad(),
            modes.unheard_by_users(),
            self._followed(inputs) as at,
        ):

            def before(index: int) -> None:
                turn(values[index].is_repeat)
                if at is not None:
                    at(index)

            return self._watched(before, [*inputs])

    def _followed(
        self, inputs: Sequence[Tensor]
    ) -> contextlib.AbstractContextManager[Callable[[int], None] | None]:
        """`Watcher.following` of the innermost watcher of this thread; None without one."""
        for mode in reversed(modes.dispatch_modes() if modes.is_watched() else ()):
            if isinstance(mode, Watcher):
                return mode.following(self.graph, inputs)
        return contextlib.nullcontext()

    @functools.cached_property
    def _lender(self) -> Lender | None:
        # Of a compiled program each variant would be compiled, which takes seconds.
        if not self.is_borrowing or self.backend is not None:
            return None
        # Ranks that hold other sizes would lend other values, and then not communicate alike.
        if any(name.startswith("_c10d") for name in self.graph.operators):
            return None
        alone = functools.partial(dataclasses.replace, self, is_borrowing=False)
        return Lender(self.graph, lambda graph: alone(graph=graph).consume)

    @functools.cached_property
    def is_compiled(self) -> bool:
        """Whether the backend runs it when no mode listens for single operators."""
        return self.backend is not None and compiled.can_compile(self.graph)

    @functools.cached_property
    def _with_barriers(self) -> Graph:
        """The graph for a compiler that sees forward and backward together: see `_programs.barriers`."""
        if not self.num_cotangents:
            return self._steps
        return with_barriers(self._steps, self.num_saved, self.num_cotangents)

    @functools.cached_property
    def _steps(self) -> Graph:
        """The graph as it runs: see `_programs.narrowing`."""
        return narrowed(self.graph)

    @functools.cached_property
    def _shares_memory(self) -> bool:
        """Whether an output is a view of an input or of another output."""
        owners = roots(self.graph)
        outputs = {ref.index for ref in self.graph.outputs if ref is not None}
        known = [owners[index] for index in outputs]
        return any(
            owner != index and (owner < self.graph.num_inputs or known.count(owner) > 1)
            for index, owner in zip(outputs, known, strict=True)
        )

    def __repr__(self) -> str:
        return _ProgramWriter(self._steps, self.title, {}).text

    @functools.cached_property
    def _run(self) -> Callable[[list[Tensor]], list[Any]]:
        return self._compiled(self._steps)

    @functools.cached_property
    def quiet(self) -> Quiet:
        """`consume` where no dispatch mode listens and no gradient is recorded, in parts."""
        if self._shares_memory or self.is_borrowing:
            return Quiet(contextlib.nullcontext, self.consume)
        return Quiet(modes.below_autograd, self._short)

    @functools.cached_property
    def _short(self) -> Callable[[list[Tensor]], list[Any]]:
        """The program as it runs fastest, if no mode listens for single operators."""
        if self.is_compiled:
            return compiled.compiled_function(self._steps)
        folded = fold_products(self._steps)
        if interpreted.overhead_dominates(folded, fewest_steps=_FOR_INTERPRETER):
            return interpreted.interpreted_function(folded) or self._compiled(folded)
        reused = with_overwriting(folded)
        if reused is folded:
            return self._compiled(folded)
        sparing = self._compiled(reused)

        def run(inputs: list[Tensor]) -> list[Any]:
            # What a subclass returns may have no memory to write over.
            return (sparing if guards.are_plain(inputs) else self._run)(inputs)

        return run

    @functools.cached_property
    def _watched(self) -> Callable[..., list[Any]]:
        """The program as a `Watcher` hears it: calls its first argument before each step."""
        return self._compiled(self._steps, is_watched=True)

    def _compiled(
        self, graph: Graph, *, is_watched: bool = False
    ) -> Callable[..., list[Any]]:
        # A dispatch mode gets overloads, whichever binding calls them.
        bindings = {} if is_watched else bindings_of(graph)
        writer = _ProgramWriter(graph, self.title, bindings, is_watched=is_watched)
        namespace = dict(writer.bound)
        exec(compile(writer.consuming, f"<remat {self.title}>", "exec"), namespace)
        return namespace[self.title]

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators that a run executes, in order."""
        return self.graph.operators


class _ProgramWriter:
    """Writes the function and collects the objects that its text names.

    Attributes:
        text: the function, as it is printed.
        consuming: the same for one list of all inputs, which it empties. A caller holds the
            arguments of a call until it returns, but not the contents of such a list.
        bound: the objects by their names.
    """

    def __init__(
        self,
        graph: Graph,
        title: str,
        bindings: Mapping[int, Callable[..., Any]],
        *,
        is_watched: bool = False,
    ) -> None:
        self.graph = graph
        self._bindings = bindings
        self.bound: dict[str, Any] = {
            "rng_swap": device_states.swap,
            "stream_enter": streams.enter,
            "stream_leave": streams.leave,
        }
        self._names: dict[int, str] = {}
        inputs = ", ".join(f"v{index}" for index in range(graph.num_inputs))
        lines: list[str] = []
        last = last_uses(graph)
        for index in range(graph.num_inputs, len(graph.values)):
            value = graph.values[index]
            lines += [f"    at({index})"] if is_watched else []
            lines += [f"    {line}" for line in self._lines(index, value)]
            freed = [f"v{use}" for use in last.get(index, ())]
            if freed:
                lines.append(f"    del {', '.join(freed)}")
        outputs = ", ".join(
            "None" if ref is None else f"v{ref.index}" for ref in graph.outputs
        )
        lines.append(f"    return [{outputs}]")
        read = {ref.index for ref in graph.outputs if ref is not None}
        read.update(*last.values())
        unread = [f"v{index}" for index in range(graph.num_inputs) if index not in read]
        opening = [f"    {inputs}, = given", "    given.clear()"] if inputs else []
        opening += [f"    del {', '.join(unread)}"] if unread else []
        opening += [f"    v{k} = v{k}.resolve_conj()" for k in read_as_real(graph)]
        self.text = "\n".join([f"def {title}({inputs}):", *lines]) + "\n"
        given = "at, given" if is_watched else "given"
        self.consuming = "\n".join([f"def {title}({given}):", *opening, *lines]) + "\n"

    def _lines(self, index: int, value: Value) -> list[str]:
        call = f"v{index} = {self._call(index, value)}{comment(value)}"
        if not value.is_redraw and not value.stream:
            return [call]
        assert value.state is not None
        state = f"v{value.state.index}"
        device = self._bind("device", device_of(value.meta))
        begin, end = f"rng_swap({state}, {device})", f"rng_swap(found, {device})"
        if not value.is_redraw:
            begin = f"stream_enter({value.stream!r}, {device})"
            end = f"stream_leave({value.stream!r}, found, {device})"
        after = [f"    {end}", "    del found"]
        return [f"found = {begin}", "try:", f"    {call}", "finally:", *after]

    def _call(self, index: int, value: Value) -> str:
        if value.op is operator.getitem:
            return f"v{value.args[0].index}[{value.args[1]}]"
        if value.op is operators.constant:
            return self._bind("constant", value.args[0])
        if operators.ends_gradient(value):
            return f"v{value.args[0].index}"
        arguments = [self._literal(argument) for argument in value.args]
        arguments += [f"{key}={self._literal(each)}" for key, each in value.kwargs]
        op = self._bindings.get(index, value.op)
        if value.in_place:
            op = operators.IN_PLACE_OF[value.op]
            empty_like = self._bind("empty_like", torch.empty_like)
            arguments[0] = f"{empty_like}({arguments[0]})"
        elif schemas.needs_grad_mode(value.op):
            op = schemas.with_grad_mode(value.op)
        name = operators.short_name(value.op).replace(".", "_")
        return f"{self._bind(name, op)}({', '.join(arguments)})"

    def _literal(self, tree: Any) -> str:
        if isinstance(tree, (tuple, list)):
            items = [self._literal(item) for item in tree]  # pyright: ignore[reportUnknownVariableType]
            return f"[{', '.join(items)}]"
        is_finite = type(tree) is float and tree - tree == 0.0
        if is_finite or type(tree) in _SIMPLE:
            return repr(tree)
        for index in refs(tree):
            return f"v{index}"
        return self._bind("literal", tree)

    def _bind(self, name: str, thing: Any) -> str:
        if id(thing) not in self._names:
            unique, count = name, 2
            while unique in self.bound:
                unique, count = f"{name}_{count}", count + 1
            self.bound[unique] = thing
            self._names[id(thing)] = unique
        return self._names[id(thing)]
