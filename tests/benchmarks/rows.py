"""The rows of the suite: a work each, and the bounds that are stated for it."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.benchmarks import integration, limit, work
from tests.benchmarks.bounds import Bound
from tests.benchmarks.contenders import (
    PLAIN,
    SELECTIVE,
    WITH_ATTENTION,
    Contender,
    contenders,
)
from tests.benchmarks.work import Work

LIMIT = "the limit, {}"
OF_LIMIT = 1.03
BoundsOf = Callable[[list[Contender]], list[Bound]]


@dataclass(frozen=True)
class Limits:
    """What a row's limits are made of.

    Attributes:
        again: runs what must be computed again for what is kept.
        held_bytes: what must be held.
    """

    again: Callable[[Work, str], Callable[[], None]] = limit.recomputation
    held_bytes: Callable[[Work, str], int] = limit.held_bytes


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        name: that picks it on the command line.
        make: its work.
        make_quick: the same, small enough for a test.
        bounds: what is stated for these contenders.
        rivals: who competes, the one without remat first; in a hurry, none that compiles.
        limits: the least that they can come to.
    """

    name: str
    make: Callable[[], Work]
    make_quick: Callable[[], Work]
    bounds: BoundsOf
    rivals: Callable[[Work, bool], list[Contender]] = lambda _, quick: contenders(quick)
    limits: Limits = Limits()


def at_most(quantity: str, beside: str, **most: float) -> BoundsOf:
    """Policies of this package against one other; `_inductor` ends a compiled one."""

    def bounds(_: list[Contender]) -> list[Bound]:
        names = {key: f"remat, {key.replace('_', ', ')}" for key in most}
        return [Bound(names[key], quantity, beside, most[key]) for key in most]

    return bounds


def near_the_limit(contenders: list[Contender]) -> list[Bound]:
    """Every policy within 3 % of its limit."""
    return [
        Bound(own.name, "time", LIMIT.format(own.keeps), OF_LIMIT)
        for own in contenders
        if own.kind == "own"
    ]


def ahead_of_peers(contenders: list[Contender]) -> list[Bound]:
    """No slower than an eager peer that keeps the same, and no higher a peak."""
    return [
        Bound(f"remat, {peer.keeps}", quantity, peer.name, 1.0)
        for quantity in ("time", "peak bytes")
        for peer in contenders
        if peer.kind == "eager"
    ] + [Bound("remat, everything", "peak bytes", PLAIN, 1.0)]


def saving_attention_too(_: list[Contender]) -> list[Bound]:
    """Sooner than selective checkpointing of matmuls, and still no higher a peak."""
    return [
        Bound(f"remat, {WITH_ATTENTION}", quantity, SELECTIVE, 1.0)
        for quantity in ("time", "peak bytes")
    ]


def all_of(*rules: BoundsOf) -> BoundsOf:
    """The bounds of several rules."""
    return lambda contenders: [b for rule in rules for b in rule(contenders)]


AHEAD = all_of(ahead_of_peers, saving_attention_too)
TINY = all_of(
    at_most("time", PLAIN, nothing=1.12, matmuls=1.08),
    at_most("time", PLAIN, nothing_inductor=0.8, matmuls_inductor=0.8),
    AHEAD,
)
NEAR = all_of(near_the_limit, AHEAD)
NO_PEER_RUNS = all_of(
    at_most("peak bytes", PLAIN, nothing=0.25), at_most("time", PLAIN, nothing=1.4)
)


def _of_blocks(_: Work, quick: bool) -> list[Contender]:
    return contenders(quick, attends=True)


def _blocks(
    name: str, *sizes: int, transform: str = "backward", bounds: BoundsOf = NEAR
) -> Row:
    return Row(
        name,
        lambda: work.blocks(*sizes, transform=transform),
        lambda: work.blocks(2, 1, 4, 8, transform=transform),
        bounds,
        _of_blocks,
    )


def _mlps(name: str, transform: str) -> Row:
    return Row(
        name,
        lambda: work.mlps(transform, 8, 8, 512, 32, 256),
        lambda: work.mlps(transform, 2, 2, 4, 4, 8),
        NO_PEER_RUNS,
    )


def _gpt(layers: int) -> Row:
    return Row(
        f"gpt-{layers}",
        lambda: work.gpt(layers, 4, 64, 64),
        lambda: work.gpt(2, 1, 4, 8),
        AHEAD,
        _of_blocks,
    )


def scan_is_ahead(_: list[Contender]) -> list[Bound]:
    """Of torch's checkpoint around segments as long; and far below the plain loop."""
    own = integration.OWN.format("Sqrt()")
    peers = (integration.PEER, integration.REENTRANT)
    return [
        Bound(own, quantity, peer, 1.0)
        for quantity in ("time", "peak bytes")
        for peer in peers
    ]


ROWS = (
    _blocks("tiny", 8, 2, 16, 32, bounds=TINY),
    _blocks("tiny-grad", 8, 2, 16, 32, transform="grad", bounds=TINY),
    _blocks("middle", 4, 8, 256, 256),
    _blocks("middle-grad", 4, 8, 256, 256, transform="grad"),
    _blocks("large", 2, 2, 512, 768),
    _blocks("large-grad", 2, 2, 512, 768, transform="grad"),
    _gpt(12),
    _gpt(24),
    Row(
        "convolutions",
        lambda: work.conv_net(6, 8, 32, 32),
        lambda: work.conv_net(2, 1, 4, 4),
        ahead_of_peers,
    ),
    _mlps("per-example", "per example"),
    _mlps("hessian-vector", "hvp"),
    Row(
        "scan",
        lambda: work.ode(1000, 128, 32, 128),
        lambda: work.ode(10, 2, 4, 8),
        scan_is_ahead,
        lambda made, _: integration.contenders(made.num_steps),
        Limits(integration.again, integration.held_bytes),
    ),
)
