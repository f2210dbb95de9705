"""Who competes: a unit without remat, under this package's policies, and under the peers."""

import contextlib
import importlib.util
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from remat import policies, remat
from tests.benchmarks.work import Params, Unit

PLAIN = "no remat"
SELECTIVE = "selective, matmuls"
WITH_ATTENTION = "matmuls and attention"
POLICIES = {
    "nothing": policies.nothing_saveable,
    "matmuls": policies.save_matmul_outputs,
    WITH_ATTENTION: policies.save_matmul_outputs | policies.save_attention_outputs,
    "everything": policies.everything_saveable,
}


@dataclass(frozen=True)
class Contender:
    """One way to run a unit.

    Attributes:
        name: of its line in the tables.
        wrap: the unit, run that way.
        kind: "plain", "own", "eager" for a peer that runs operator by operator, "compiled".
        keeps: the policy of this package that it corresponds to, whose limit is its own.
        settings: what must hold while its first steps run.
    """

    name: str
    wrap: Callable[[Unit], Unit]
    kind: str
    keeps: str
    settings: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext


def _own(keeps: str, backend: str | None) -> Contender:
    suffix = "" if backend is None else f", {backend}"
    options: dict[str, Any] = {"policy": POLICIES[keeps], "backend": backend}
    return Contender(
        f"remat, {keeps}{suffix}",
        lambda unit: remat(unit, **options),
        "own" if backend is None else "compiled",
        keeps,
    )


def _matmuls_saved(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    aten = torch.ops.aten
    matmuls = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution)
    return (
        CheckpointPolicy.MUST_SAVE
        if getattr(op, "overloadpacket", op) in matmuls
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def selective(unit: Unit) -> Unit:
    """A unit under torch's selective checkpointing, which saves what matmuls give."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(_matmuls_saved)

    return lambda p, x: checkpoint(unit, p, x, use_reentrant=False, context_fn=contexts)


def _reentrant(unit: Unit) -> Unit:
    def run(p: Params, x: Any) -> Any:
        # Reentrant mode differentiates only what hangs on its tensor arguments.
        return checkpoint(
            lambda x, *rest: unit(dict(zip(p, rest, strict=True)), x),
            x,
            *p.values(),
            use_reentrant=True,
        )

    return run


def _torch_remat(unit: Unit) -> Unit:
    import torch_remat

    return torch_remat.checkpoint()(unit)


def _compiled(name: str, keeps: str, budget: float) -> Contender:
    from torch._functorch import config

    def wrap(unit: Unit) -> Unit:
        # Dynamo keeps what it compiled with the code, of which each budget needs its own.
        function: Any = unit
        copy = types.FunctionType(
            function.__code__.replace(),
            function.__globals__,
            function.__name__,
            function.__defaults__,
        )
        return torch.compile(copy)

    return Contender(
        name,
        wrap,
        "compiled",
        keeps,
        lambda: config.patch(activation_memory_budget=budget),
    )


def contenders(quick: bool = False, attends: bool = False) -> list[Contender]:
    """All of them, the one without remat first.

    Args:
        quick: whether to leave out those that compile.
        attends: whether the unit has attention for a policy to save.
    """
    plain = Contender(PLAIN, lambda unit: unit, "plain", "everything")
    own = [
        _own(keeps, None) for keeps in POLICIES if attends or keeps != WITH_ATTENTION
    ]
    found = [plain, *own, *_eager_peers()]
    return found if quick else [*found, *_compilers()]


def _eager_peers() -> list[Contender]:
    peers: dict[str, tuple[str, Callable[[Unit], Unit]]] = {
        "torch.utils.checkpoint": (
            "nothing",
            lambda unit: lambda p, x: checkpoint(unit, p, x, use_reentrant=False),
        ),
        "torch.utils.checkpoint, reentrant": ("nothing", _reentrant),
        SELECTIVE: ("matmuls", selective),
        "torch_remat": ("nothing", _torch_remat),
    }
    return [
        Contender(name, wrap, "eager", keeps) for name, (keeps, wrap) in peers.items()
    ]


def _compilers() -> list[Contender]:
    return [
        _own("nothing", "inductor"),
        _own("matmuls", "inductor"),
        _compiled("torch.compile", "everything", 1.0),
        _compiled("torch.compile, budget 0.5", "matmuls", 0.5),
        _compiled("torch.compile, budget 0", "nothing", 0.0),
    ]


def is_installed(module: str) -> bool:
    """Whether an optional peer can be imported."""
    return importlib.util.find_spec(module) is not None
