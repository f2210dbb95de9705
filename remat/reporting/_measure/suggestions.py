"""Suggests other decisions, each evaluated on the traced programs."""

import dataclasses
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import final

from remat.policies._sizes import show_size
from remat.reporting._measure.traced import Described, Effect, RegionTrace
from remat.reporting._records import HeldValue, SavingPoint, Suggestion

# A heuristic: a value is worth its bytes if its recomputation takes at least this part
# of the regions' forward.
_LEAST_FRACTION = 0.05


def suggest(
    traces: Sequence[RegionTrace], held_bytes: int, outside: Sequence[HeldValue]
) -> Suggestion:
    """The change that is likely to be worth most.

    Saving and dropping a value are judged by the same limit, so that following one
    suggestion never leads to the opposite one. `outside` has the values that plain
    autograd makes and holds, the largest first.
    """
    outside_bytes = sum(value.size_bytes for value in outside)
    found = None
    if outside_bytes <= held_bytes / 2:
        found = _suggest_saving(traces) or _suggest_dropping(traces)
    if found is None and outside_bytes > _LEAST_FRACTION * held_bytes:
        return _suggest_wrapping(outside, outside_bytes)
    nothing = "Nothing to change: no single value is worth it."
    return found or Suggestion("none", "", "", 0, 0.0, nothing)


def _suggest_wrapping(outside: Sequence[HeldValue], outside_bytes: int) -> Suggestion:
    lines: Counter[str] = Counter()
    for value in outside:
        lines[value.source] += value.size_bytes
    [(source, most_bytes)] = lines.most_common(1)
    size = show_size(outside_bytes)
    text = f"{size} that no region makes are held outside any region"
    text += (
        f", most of it ({show_size(most_bytes)}) made at {source}: put the function "
        "around that line in @remat or, if it calls a model, its layers (modules.apply)."
        if source
        else ", by a backward inside the function: put what it differentiates in @remat."
    )
    return Suggestion("wrap", outside[0].op, source, -outside_bytes, 0.0, text)


@final
@dataclasses.dataclass(slots=True)
class _Change:
    """What one line of code would change, in all traces of a function."""

    region: str  # the function
    value: Described  # one of the values that it is about
    size_bytes: int = 0  # by how much it changes what is held
    work: int = 0  # by how much it changes what is recomputed, see `work_of`


def _possible_changes(traces: Sequence[RegionTrace], *, saves: bool) -> list[_Change]:
    """What other decisions would change; code cannot tell values of one key apart."""
    found: dict[Hashable, _Change] = {}
    for trace in traces:
        name, now = trace.calls[0].name, trace.outcome
        for value, then in trace.changes(saves=saves):
            change = found.setdefault((name, value.key), _Change(name, value))
            change.size_bytes += then.saved_bytes - now.saved_bytes
            change.work += then.work - now.work
    return list(found.values())


def _suggest_saving(traces: Sequence[RegionTrace]) -> Suggestion | None:
    """Of the values that save much work, the one that saves most per byte."""
    found = _possible_changes(traces, saves=True)
    most = max((-each.work for each in found), default=0)
    everything = sum(trace.forward_work for trace in traces)
    if most <= 0 or most < _LEAST_FRACTION * everything:
        return None
    # Half of what the best one spares: small values are cheap, and change little.
    prices = [(e.size_bytes / -e.work, e) for e in found if -e.work >= most / 2]
    least = min(price for price, _ in prices)
    near = [each for price, each in prices if price <= max(1.1 * least, least)]
    # Of those that cost about the same, one that has a name needs the smallest change.
    best = max(near, key=lambda each: (bool(each.value.names), -each.work))
    fraction = -best.work / sum(trace.outcome.work for trace in traces)
    value, more = str(best.value), best.size_bytes
    cost = f"frees {show_size(-more)}" if more < 0 else f"costs {show_size(more)}"
    cuts = f"cuts {fraction:.0%} of the recomputation"
    text = f"Saving {value} in {best.region} {cost} and {cuts}."
    if not best.value.names:
        text += (
            " Name it with checkpoint_name, and permit the name (in code that is not "
            "yours, the operator: policies.by_op)."
        )
    return Suggestion("save", value, best.value.source, more, -fraction, text)


def _suggest_dropping(traces: Sequence[RegionTrace]) -> Suggestion | None:
    """The saved value whose recomputation is cheapest for its bytes."""
    everything = sum(trace.forward_work for trace in traces)
    limit = _LEAST_FRACTION * everything
    changes = _possible_changes(traces, saves=False)
    found = [each for each in changes if each.size_bytes < 0 and each.work < limit]
    if not found:
        return None
    best = max(found, key=lambda each: -each.size_bytes / (each.work + 1))
    value, less = str(best.value), -best.size_bytes
    fraction = best.work / everything
    frees = f"frees {show_size(less)} for {fraction:.0%} of the regions' forward"
    text = f"Not saving {value} in {best.region} {frees}."
    return Suggestion("drop", value, best.value.source, -less, fraction, text)


def frontier(traces: Sequence[RegionTrace]) -> tuple[SavingPoint, ...]:
    """From saving nothing to saving all that is useful, the best value per byte first.

    The order is by the work that each spares for a byte if nothing else is saved (a
    heuristic); each point is evaluated on the programs.
    """
    saved: list[set[int]] = [set() for _ in traces]
    now = [trace.at(set()) for trace in traces]
    order: list[tuple[float, int, int]] = []
    for place, trace in enumerate(traces):
        for number in trace.choices:
            alone = trace.at({number})
            spared = now[place].work - alone.work
            worth = spared / max(alone.saved_bytes, len(trace.calls))
            order.append((worth, place, number))
    points = [_saving_point("", now)]
    for worth, place, number in sorted(order, reverse=True):
        if worth <= 0:
            break
        trace = traces[place]
        saved[place].add(number)
        found = trace.at(saved[place])
        if found.work >= now[place].work:
            saved[place].discard(number)
            continue
        now[place] = found
        points.append(_saving_point(str(trace.described(number)), now))
    # Some values save nothing unless others are saved too.
    whole = [trace.at(set(trace.choices)) for trace in traces]
    last = _saving_point("all that is left", whole)
    if last.recompute_work < points[-1].recompute_work:
        points.append(last)
    return tuple(points)


def _saving_point(added: str, now: Sequence[Effect]) -> SavingPoint:
    size_bytes, work = map(sum, zip(Effect(0, 0), *now, strict=True))
    return SavingPoint(added, size_bytes, work)
