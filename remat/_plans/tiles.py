"""More tiles for what a step runs tile by tile, where its limit wants them."""

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar, final

from remat._captures.contents import code_key
from remat._errors import RematError
from remat._plans.shares import Search
from remat._switches.blocks import noting_tiled
from remat._torch.attributes import attributes_as

_T = TypeVar("_T")
_Found = tuple[Search, _T]


@final
@dataclasses.dataclass(frozen=True)
class TilesRow:
    """In how many tiles a function is to run, and its equals in other modules.

    Attributes:
        name: its qualified name.
        tiles: the number that was chosen.
        before: the number that it had.
        functions: what has the number as its `tiles`.
    """

    name: str
    tiles: int
    before: int
    functions: tuple[Any, ...] = dataclasses.field(repr=False)

    def apply(self) -> None:
        """Has the functions run in so many tiles from now on."""
        for each in self.functions:
            each.tiles = self.tiles

    def __str__(self) -> str:
        """A line: its tiles, and how many there were."""
        return f"{self.name}: {self.tiles} tiles instead of {self.before}"


def with_tiles(
    attempt: Callable[[bool, int | None], _Found[_T]],
) -> tuple[_Found[_T], tuple[TilesRow, ...]]:
    """What an attempt at a plan finds with as many more tiles as help it, and these.

    The tiles of a function, or else those of all, are doubled while that lowers a peak that is
    above the limit, or lets clearly less be recomputed within it. A size in bytes stays:
    whoever gave it has said what a tile may take. An attempt plans the step, roughly if told so,
    within the limit that the first one finds, and calls the same functions each time.
    """
    with noting_tiled() as noted:
        best = attempt(False, None)
    rows = _rows_of(noted.values())
    if not rows or (best[0].fits and best[0].cost == 0):
        return best, ()
    limit = best[0].limit
    rough, _ = attempt(True, limit)
    while (better := _with_more(rows, rough, attempt)) is not None:
        rows, rough = better
    more = tuple(each for each in rows if each.tiles > each.before)
    with run_in(more):
        found = attempt(False, limit)
    return (found, more) if found[0].is_better_than(best[0]) else (best, ())


def _with_more(
    rows: list[TilesRow],
    best: Search,
    attempt: Callable[[bool, int | None], _Found[Any]],
) -> tuple[list[TilesRow], Search] | None:
    """The first doubling that helps, those that helped before first; None if none does."""
    several = [rows] if len(rows) > 1 else []
    for doubled in [*([each] for each in rows), *several]:
        more = [dataclasses.replace(each, tiles=2 * each.tiles) for each in doubled]
        more += [each for each in rows if each not in doubled]
        try:
            with noting_tiled() as noted, run_in(more):
                found, _ = attempt(True, best.limit)
        except RematError:  # as of a function that is not independent along the axis
            continue
        if found.is_better_than(best):
            # What the step itself makes is another function each time.
            return [r for r in more if all(id(f) in noted for f in r.functions)], found
    return None


@contextlib.contextmanager
def run_in(rows: Iterable[TilesRow]) -> Generator[None]:
    """Has the functions run in so many tiles inside."""
    with contextlib.ExitStack() as stack:
        for row in rows:
            for each in row.functions:
                stack.enter_context(attributes_as(each, tiles=row.tiles))
        yield


def _rows_of(functions: Iterable[Any]) -> list[TilesRow]:
    """A row for those that are alike."""
    alike: dict[Any, list[Any]] = {}
    for each in functions:
        if isinstance(each.tiles, int):
            name = getattr(each, "__qualname__", repr(each))
            code = code_key(getattr(each, "__wrapped__", None))
            alike.setdefault((name, each.tiles, code), []).append(each)
    return [
        TilesRow(name, tiles, tiles, tuple(found))
        for (name, tiles, _), found in alike.items()
    ]
