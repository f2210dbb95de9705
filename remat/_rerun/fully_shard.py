"""Regions around modules of `fully_shard`, by `engine="rerun"`.

Such a module gathers its parameters in front of its forward, lets go of them after it, and gathers
them again when autograd reaches what it returned; it reduces the gradients that autograd leaves on
the gathered parameters. These stand in the graph of one call alone, so that no edge of a region's
node can lead to them. The region throws the graph of its forward away, and with it nothing of the
engine's is left waiting. Its backward calls the module again, hooks and all, and runs a backward
of that call which accumulates, as `torch.utils.checkpoint(use_reentrant=True)` does. Parameters
are so gathered as often as without a region, and the engine's own hooks do all that they do there.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Generator, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from remat._captures.walk import Survey
from remat._errors import SecondDerivativeError, TraceError
from remat._torch import autograd, distributed
from remat._torch.attributes import attributes_as
from remat._tracing import engines
from remat._tracing.refusals import driven


@final
class Engine:
    """The modules of `fully_shard` that a region may call, and the parameters they gather."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = set(map(id, modules))
        # As they stand on the modules between two calls.
        self.managed = [
            p for each in modules for p in distributed.sharded_parameters(each)
        ]
        # An operand that stands for the gathered parameters, which no edge of the region's
        # node can lead to: they are there only while the region runs.
        self.anchor = torch.empty(0, requires_grad=True)
        self._node = torch.autograd.graph.get_gradient_edge(self.anchor).node
        self.called = False  # whether a run has called one of the modules
        self._gathered: dict[int, Tensor] = {}
        for engine in _running.engines:
            engine.add(self.anchor)

    @classmethod
    def reached(cls, survey: Survey) -> Engine | None:
        """The engine of the modules that a function reaches and that are not running.

        A module that is running has gathered its parameters, which are plain operands.
        """
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        if not (fsdp and engines.is_distributed() and autograd.is_plain_autograd()):
            return None
        values = [node.value for node in survey.nodes.values()]
        modules = [each for each in values if isinstance(each, fsdp.FSDPModule)]
        idle = [each for each in modules if distributed.is_fsdp_idle(each)]
        return cls(idle) if idle else None

    def add(self, variable: Tensor) -> None:
        """Permits the current run to depend on a tensor that is not an operand."""
        self._gathered[id(variable)] = variable

    def stands_for(self, variable: Tensor) -> bool:
        """Whether the anchor is the operand that stands for this tensor."""
        return id(variable) in self._gathered

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Notes the parameters that the modules gather; refuses all other such modules.

        Raises:
            TraceError: in front of the engine's own hooks, which so find all as it was; or
                after them, where they still wait for other modules of a group.
        """
        self._gathered.clear()
        called: list[nn.Module] = []

        def enter(module: nn.Module) -> None:
            if id(module) not in self._modules:
                raise driven(module)
            if not autograd.is_plain_autograd():
                raise _called_under_transform(type(module).__name__)
            self.called = True
            called.append(module)
            if autograd.in_backward():
                again.enter_context(distributed.called_again(module))

        def leave(module: nn.Module) -> None:
            for parameter in distributed.sharded_parameters(module):
                self.add(parameter)

        within = attributes_as(_running, engines=(*_running.engines, self))
        hooked = engines.around_driven(enter, leave)
        with within, contextlib.ExitStack() as again, hooked:
            yield
        for module in called:
            if not distributed.is_fsdp_idle(module):
                raise TraceError.of(
                    where=f"a {type(module).__name__}",
                    what="is called inside a region, but others of its group are not.",
                    why="fully_shard gathers and reduces a group of modules together.",
                    do="Put the region around all of them, or regions inside each. Call "
                    "reset_iter_state() of the root to restore the modules.",
                )

    def accumulates(self, cotangents: Iterable[Tensor]) -> bool:
        """Whether the backward that is under way leaves gradients on parameters.

        `torch.autograd.grad`, or a backward with `inputs`, does not.

        Raises:
            TraceError: none is under way that could, or one of many cotangents at once.
        """
        batched = any(map(autograd.is_batched_by_autograd, cotangents))
        if batched or not autograd.in_backward():
            raise _called_under_transform("module of fully_shard")
        return autograd.will_execute(self._node)


def refuse_second_derivative(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Refuses to differentiate or map a gradient of a region that calls `fully_shard`."""
    raise SecondDerivativeError.of(
        where=f"the gradient of a region with {len(tensors)} operands",
        what="is differentiated or mapped, and the region calls a module of "
        "fully_shard.",
        why="Its parameters are gathered for a single backward, which records no "
        "graph.",
        do="Put the region inside: remat.modules.apply to the module's blocks.",
    )


class _Running(threading.local):
    engines: tuple[Engine, ...] = ()  # whose regions this thread runs, outermost first


_running = _Running()


def _called_under_transform(name: str) -> TraceError:
    return TraceError.of(
        where=f"a {name}",
        what="is called inside a region that is transformed, or whose backward is "
        "not one of .backward() or torch.autograd.grad.",
        why="Its hooks reduce only the gradients that plain autograd leaves on "
        "gathered parameters.",
        do="Put the regions inside, or call .backward().",
    )
