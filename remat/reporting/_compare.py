"""One function under several policies, and under peers that are installed, on this machine."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, final

from remat import policies
from remat._api import remat
from remat._calls.decorated import is_region
from remat._errors import (
    RematError,
    RematWarning,
    require_callable,
    require_count,
    require_type,
)
from remat._regions.out_of_memory import name_of
from remat._switches.blocks import disabled
from remat.policies._sizes import show_size
from remat.reporting._measure.step import MeasuredStep, leaves_of, median_and_spread
from remat.reporting._measure.watch import StepWatcher
from remat.reporting._records import to_json
from remat.reporting._show.figures import comparison_figure
from remat.reporting._show.progress import progress
from remat.reporting._show.text import show_flops, show_ratio, show_time, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PEER = "torch_remat"
_WITHOUT_PEERS = (
    "torch.utils.checkpoint rests on hooks, which this package never sets: name a wrapper "
    "that calls it, --peer peers.py:checkpointed."
)
_POLICIES = (
    policies.nothing_saveable,
    policies.save_attention_outputs,
    policies.save_matmul_outputs,
    # Of what is saved without remat: points between the policies.
    *map(policies.budget, (0.25, 0.5, 0.75)),
    policies.everything_saveable,
)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One way to run the function.

    Attributes:
        name: the policy as code, "no remat", or the peer.
        held_bytes: what lives between forward and backward, arguments apart.
        peak_bytes: the most that lives at one time in one step.
        recompute_flops: FLOPs of the step beyond those without remat.
        step_s: median time of one step, in seconds; None on the meta device.
        spread_s: half of what the quartiles of these times are apart; None like that.
        is_peer: whether another library runs it.
    """

    name: str
    held_bytes: int
    peak_bytes: int
    recompute_flops: int
    step_s: float | None
    spread_s: float | None
    is_peer: bool


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """What `python -m remat compare` prints.

    Attributes:
        function: the name of what ran.
        rows: the ways to run it, "no remat" first.
        without: peers that are not compared, and why.
    """

    function: str
    rows: tuple[Row, ...]
    without: tuple[str, ...]

    def __str__(self) -> str:
        """A table; ratios are to no remat."""
        plain = self.rows[0]
        rows = [
            (
                row.name,
                show_size(row.held_bytes),
                show_ratio(row.held_bytes, plain.held_bytes),
                show_size(row.peak_bytes),
                show_ratio(row.peak_bytes, plain.peak_bytes),
                show_flops(row.recompute_flops),
                show_time(row.step_s) if row.step_s else "",
                show_ratio(row.step_s, plain.step_s),
                "" if row.spread_s is None else f"+- {show_time(row.spread_s)}",
            )
            for row in self.rows
        ]
        heading = (self.function, "held", "", "peak", "", "again", "step", "", "")
        return "\n".join([*table(heading, rows), "", *self.without])

    def to_json(self) -> str:
        """The rows as JSON; the schema is "remat.comparison/1"."""
        return to_json("remat.comparison/1", self)

    def figure(self) -> Figure:
        """The frontier of bytes and time, with the peers' points; matplotlib's, not saved.

        Raises:
            RematError: matplotlib is not installed, or there are no times.
        """
        if self.rows[0].step_s is None:
            raise RematError.of(
                where=self.function,
                what="has no times to draw.",
                why="Nothing is computed on meta tensors.",
                do="Pass tensors on a real device.",
            )
        points: dict[bool, dict[str, tuple[int, float]]] = {False: {}, True: {}}
        for row in self.rows:
            points[row.is_peer][row.name] = (row.held_bytes, row.step_s or 0.0)
        spreads = {row.name: row.spread_s or 0.0 for row in self.rows}
        return comparison_figure(*points.values(), spreads=spreads, title=self.function)


def compare(
    f: Callable[..., Any],
    kwargs: Mapping[str, Any],
    num_steps: int = 10,
    *,
    peers: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]
    | None = None,
) -> Comparison:
    """Measures a function as one region under several policies, and under peers.

    All run the same step on this machine, one after the other in each round.
    torch_remat is included if it is installed.

    Args:
        f: a function, a module, or a region, whose own policy is then one of the rows.
        kwargs: its arguments.
        num_steps: how many steps of each are timed; they take turns. None on the meta
            device, where the bytes are those of a real run.
        peers: by name, callables that wrap the function as another library runs it.

    Returns:
        One row for each way; they print as a table, "no remat" first.

    Raises:
        RematError: `f` returns nothing that requires grad.

    Example:
        >>> import torch
        >>> from remat.reporting import compare
        >>> x = torch.ones(64, 64)
        >>> found = compare(lambda x: x.sin().sin().sin(), {"x": x}, num_steps=1)
        >>> found.rows[1].name, found.rows[1].held_bytes < found.rows[0].held_bytes
        ('nothing_saveable', True)
    """
    require_callable("compare(f)", f)
    wanted = "a mapping from the names of arguments to their values: {'x': x}"
    require_type("compare(kwargs)", kwargs, Mapping, wanted=wanted)
    require_count("compare(num_steps=...)", num_steps, at_least=0)
    wanted = "a mapping from names to callables that wrap the function"
    require_type(
        "compare(peers=...)", {} if peers is None else peers, Mapping, wanted=wanted
    )
    plain = getattr(f, "__wrapped__", f)
    own = _ways(f, plain)
    wrappers, left_out = dict(peers or {}), list[str]()
    if importlib.util.find_spec(_PEER) is None:
        left_out.append(f"{_PEER} is not installed; it comes with the extra `bench`.")
    else:
        wrappers = {_PEER: importlib.import_module(_PEER).checkpoint(), **wrappers}
    if not peers:
        left_out.append(_WITHOUT_PEERS)
    others = {name: wrap(plain) for name, wrap in wrappers.items()}
    steps = {k: MeasuredStep(each, (), kwargs) for k, each in (own | others).items()}
    watched: dict[str, tuple[int, int, int]] = {}
    times: dict[str, list[float]] = {name: [] for name in steps}
    with (
        progress("comparing", len(steps) + num_steps, sys.stderr) as advance,
        warnings.catch_warnings(),
    ):
        # The rows say which policy of those that all functions are run under saves nothing.
        warnings.filterwarnings(
            "ignore", ".*(permits no value|saves no memory)", RematWarning
        )
        for name, step in steps.items():
            step.seconds()  # it traces
            watched[name] = _watch_compared(step)
            advance(name)
        for _ in range(num_steps):
            for name, step in steps.items():
                if "meta" not in {each.type for each in step.devices}:
                    times[name].append(step.seconds())
            advance("timed")
    plain_flops = watched["no remat"][2]
    rows: list[Row] = []
    for name, (held, peak, flops) in watched.items():
        time_s = median_and_spread(times[name]) if times[name] else (None, None)
        rows.append(Row(name, held, peak, flops - plain_flops, *time_s, name in others))
    return Comparison(name_of(f), tuple(rows), tuple(left_out))


def _ways(f: Any, plain: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """What is compared: no remat, policies, and budgets between them."""

    @functools.wraps(plain, updated=())  # its tensors are looked for in what it wraps
    def without(*args: Any, **kwargs: Any) -> Any:
        with disabled():
            return plain(*args, **kwargs)

    ways: dict[str, Callable[..., Any]] = {"no remat": without}
    ways |= {repr(policy): remat(plain, policy=policy) for policy in _POLICIES}
    if is_region(f):
        ways.setdefault(repr(f.settings.policy), f)
    return ways


def _watch_compared(step: MeasuredStep) -> tuple[int, int, int]:
    """What is compared of one step: bytes held, peak bytes, and FLOPs."""
    with step.kept(), StepWatcher() as watch:
        outputs = step.forward()
        held_bytes = watch.live_bytes
        watch.phase = "backward"
        gradients = step.backward(outputs, leaves_of(outputs))
    del outputs, gradients
    return held_bytes, watch.peak_bytes, sum(watch.flops.values())
