"""Spots -> one straight-line Python function that reads each common prefix once."""

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import Tensor

from remat._captures.places import KINDS
from remat._captures.reads import GENERATED
from remat._captures.spot_rules import ABSENT, Constants, SameAs, Spot, clause


@final
class _Writer:
    """Writes the lines of one function over `roots`."""

    def __init__(self, spots: Sequence[Spot]) -> None:
        self.constants = Constants()
        self.lines: list[str] = []
        self.line_reads: dict[int, tuple[str, ...]] = {}
        self._holders: dict[str, str] = {}
        self._reads: dict[int, list[str]] = {}
        for spot in spots:
            self._reads.setdefault(spot.parent, []).append(str(spot.step[1]))

    def require(self, clause: str) -> None:
        """Writes a condition on which the function goes on."""
        self.lines.append(f"if not ({clause}): return None")

    def place(self, spot: Spot) -> str:
        """The expression for the value at a spot."""
        holder = self.holder(spot)
        kind = KINDS[spot.step[0]]
        return holder if not kind.item else holder + kind.item.format(self.key(spot))

    def holder(self, spot: Spot) -> str:
        """The name of the object that holds the spot, which a line binds at its first use."""
        owner = "roots" if spot.parent < 0 else f"v{spot.parent}"
        kind = KINDS[spot.step[0]]
        text = kind.holder.format(owner)
        if text == owner or not kind.item:
            return text
        if text not in self._holders:
            name = self._holders[text] = f"h{len(self._holders)}"
            self.lines.append(f"{name} = {text}")
            # Line 1 is the `def`, line 2 the `try`.
            self.line_reads[len(self.lines) + 2] = tuple(self._reads[spot.parent])
        return self._holders[text]

    def key(self, spot: Spot) -> str:
        """The key of a spot's step, written out or as a constant."""
        kind, key = spot.step
        if kind in {"attr", "inherited"}:
            return str(key)
        return repr(key) if type(key) in {str, int} else self.constants.name(key)

    def absence(self, spot: Spot) -> str:
        """The condition that nothing stands at a spot."""
        if spot.step[0] in {"attr", "inherited"}:
            return f"not hasattr({self.holder(spot)}, {spot.step[1]!r})"
        return f"{self.key(spot)} not in {self.holder(spot)}"

    def function(self, result: str) -> Callable[[tuple[object, ...]], Any]:
        """The function that the lines make, which ends with `result`."""
        self.lines.append(f"return {result}")
        body = "".join(f"  {line}\n" for line in self.lines)
        text = f"def check(roots):\n try:\n{body} except NOT_THERE: return None\n"
        space = self.constants.space
        space["LINE_READS"] = self.line_reads
        exec(compile(text, GENERATED, "exec"), space)
        return space.pop("check")


def generate_check(
    spots: Sequence[Spot], fetched: Sequence[int]
) -> Callable[[tuple[object, ...]], tuple[Tensor, ...] | None]:
    """A function of the roots: the tensors at `fetched`, or None if a rule is broken."""
    writer = _Writer(spots)
    bound = {spot.parent for spot in spots} | set(fetched)
    bound |= {spot.rule.spot for spot in spots if isinstance(spot.rule, SameAs)}
    for index, spot in enumerate(spots):
        if spot.rule is ABSENT:
            writer.require(writer.absence(spot))
            continue
        place = writer.place(spot)
        if index in bound:
            writer.lines.append(f"v{index} = {place}")
            place = f"v{index}"
        writer.require(clause(spot.rule, place, writer.constants))
    return writer.function(f"({''.join(f'v{index}, ' for index in fetched)})")
