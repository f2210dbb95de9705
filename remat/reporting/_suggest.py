"""What to try next: other decisions, each evaluated on the traced programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import final

from remat.policies._sizes import show_size
from remat.reporting._records import FrontierPoint, HeldValue, Suggestion
from remat.reporting._traced import Alternative, Traced

_LEAST_FRACTION = 0.05  # below that, a suggestion is not worth a change


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """A traced region and how often the step called it.

    Attributes:
        name: its name.
        calls: how many calls.
        traced: its trace.
    """

    name: str
    calls: int
    traced: Traced


def suggest(
    groups: Sequence[Group],
    held_bytes: int,
    outside_bytes: int,
    outside: Sequence[HeldValue],
) -> Suggestion:
    """The change that is likely to be worth most.

    Args:
        groups: the regions.
        held_bytes: all that waits for the backward.
        outside_bytes: what of it plain autograd holds.
        outside: the values that plain autograd holds, the largest first.
    """
    if outside and outside_bytes > held_bytes / 2:
        return _wrap(outside, outside_bytes)
    found = _save(groups) or _drop(groups)
    if found is None and outside and outside_bytes > 0:
        return _wrap(outside, outside_bytes)
    return found or Suggestion(
        "none", "", "", 0, 0.0, "Nothing to change: no single value is worth it."
    )


def _wrap(outside: Sequence[HeldValue], outside_bytes: int) -> Suggestion:
    lines: dict[str, int] = {}
    for value in outside:
        lines[value.source] = lines.get(value.source, 0) + value.size_bytes
    source = max(lines, key=lambda line: lines[line])
    text = f"{show_size(outside_bytes)} are held outside of any region"
    text += (
        f", most of it ({show_size(lines[source])}) made at {source}: put the function "
        "around that line in @remat."
        if source
        else ", by a backward inside of the function: put what it differentiates in @remat."
    )
    return Suggestion("wrap", outside[0].op, source, -outside_bytes, 0.0, text)


def _save(groups: Sequence[Group]) -> Suggestion | None:
    """Of the values that spare much, the one that spares most for its bytes."""
    total = sum(group.calls * group.traced.recompute_work for group in groups)
    found = [
        (group.calls * (group.traced.recompute_work - other.work) / total, group, other)
        for group in groups
        for other in group.traced.saving()
        if other.work < group.traced.recompute_work
    ]
    most = max((fraction for fraction, *_ in found), default=0.0)
    if most < _LEAST_FRACTION:
        return None

    def price(row: tuple[float, Group, Alternative]) -> float:
        fraction, group, other = row
        return _more(group, other) / fraction

    # Half of what the best one spares: small values are cheap, and change little.
    worthy = [row for row in found if row[0] >= most / 2]
    least = min(map(price, worthy))
    near = [row for row in worthy if price(row) <= max(1.1 * least, least)]
    # Of those that cost about the same, one that has a name needs the smallest change.
    fraction, group, other = max(near, key=lambda row: (bool(row[2].names), row[0]))
    return _as_saving(group, other, _more(group, other), fraction)


def _more(group: Group, other: Alternative) -> int:
    return group.calls * (other.saved_bytes - group.traced.saved_bytes)


def _as_saving(
    group: Group, other: Alternative, more: int, fraction: float
) -> Suggestion:
    value = describe(other)
    cost = f"costs {show_size(more)}" if more > 0 else f"frees {show_size(-more)}"
    how = "" if other.names else " Name it with checkpoint_name, and permit the name."
    text = (
        f"Saving {value} in {group.name} {cost} and cuts {fraction:.0%} of the "
        f"recomputation.{how}"
    )
    return Suggestion("save", value, other.source, more, -fraction, text)


def _drop(groups: Sequence[Group]) -> Suggestion | None:
    """The saved value whose recomputation is cheapest for its bytes."""
    everything = sum(group.traced.forward_work * group.calls for group in groups)
    best: tuple[float, Suggestion] | None = None
    for group in groups:
        before = group.traced.saved_bytes, group.traced.recompute_work
        for other in group.traced.dropping():
            less = group.calls * (before[0] - other.saved_bytes)
            work = group.calls * (other.work - before[1])
            fraction = work / everything if everything else 0.0
            if less <= 0:
                continue
            price = less / (work + 1)
            if best is None or price > best[0]:
                value = describe(other)
                text = (
                    f"Not saving {value} in {group.name} frees {show_size(less)} for "
                    f"{fraction:.0%} of the regions' forward."
                )
                best = (
                    price,
                    Suggestion("drop", value, other.source, -less, fraction, text),
                )
    return None if best is None else best[1]


def describe(value: Alternative) -> str:
    """A value in a sentence: its name, or its operator and line."""
    if value.names:
        return f"`{', '.join(value.names)}`"
    return f"{value.op} at {value.source}" if value.source else value.op


def frontier(groups: Sequence[Group]) -> tuple[FrontierPoint, ...]:
    """From saving nothing to saving all that spares work, the best value for its bytes first.

    The order is that of each value's own worth where nothing else is saved (a heuristic);
    each point is evaluated on the programs.
    """
    saved: list[set[int]] = [set() for _ in groups]
    now = [group.traced.at(set()) for group in groups]
    order = sorted(
        (
            (_price(group, number, now[place]), place, number)
            for place, group in enumerate(groups)
            for number in group.traced.choices
        ),
        reverse=True,
    )
    points = [_point("", groups, now)]
    for price, place, number in order:
        if price <= 0:
            continue
        traced = groups[place].traced
        saved[place].add(number)
        found = traced.at(saved[place])
        if found[1] >= now[place][1]:
            saved[place].discard(number)
            continue
        now[place] = found
        points.append(_point(describe(traced.described(number)), groups, now))
    # Some values spare nothing unless others are saved as well.
    whole = [group.traced.at(set(group.traced.choices)) for group in groups]
    last = _point("all that is left", groups, whole)
    return (
        (*points, last)
        if last.recompute_work < points[-1].recompute_work
        else tuple(points)
    )


def _price(group: Group, number: int, nothing: tuple[int, int]) -> float:
    size, work = group.traced.at({number})
    return (nothing[1] - work) / max(size, 1)


def _point(
    added: str, groups: Sequence[Group], now: Sequence[tuple[int, int]]
) -> FrontierPoint:
    size = sum(each.calls * found[0] for each, found in zip(groups, now, strict=True))
    work = sum(each.calls * found[1] for each, found in zip(groups, now, strict=True))
    return FrontierPoint(added, size, work)
