"""Calls that differ in nothing but sizes: what of them is traced once, and what is not.

At first every dimension is open. Where a later call finds that the trace has fixed the very
dimension that varies, because the function or an operator needed it as a number, the next
trace opens only the dimensions that were seen to vary, and leaves the fixed one fixed: that
one is traced for each size, as without `dynamic_shapes`, and costs no more.
"""

from collections.abc import Sequence
from typing import final

from remat._calls.cache_miss import Options, entry_for_sizes
from remat._calls.entry import Entry
from remat._calls.signature import CallSite
from remat._graph.meta import TensorMeta
from remat._tracing.open_sizes import Fixed, Template
from remat._user_lines import warn

_Dimension = tuple[int, int]
_MANY_TRACES = 5  # a heuristic: branches on sizes make fewer


@final
class Family:
    """The calls of one function that have one signature, the sizes of tensors aside."""

    def __init__(self, first: Sequence[TensorMeta]) -> None:
        self._first = first
        self._varied: set[_Dimension] = set()
        self._fixed: set[_Dimension] = set()
        self.entries: list[Entry] = []  # of the traces with open sizes
        self.is_static = False
        self._is_told = False

    def find(self, site: CallSite, options: Options) -> Entry | None:
        """The entry for the sizes of a call, if some trace holds for them."""
        for place, (was, now) in enumerate(zip(self._first, site.metas, strict=True)):
            sizes = enumerate(zip(was.shape, now.shape, strict=True))
            self._varied |= {(place, dim) for dim, (old, new) in sizes if old != new}
        for known in self.entries:
            found = entry_for_sizes(known, site, options)
            if found is not None:
                return found
        return None

    def keep_only(self, templates: Sequence[Template | None]) -> None:
        """Forgets the traces that no kept entry was made from."""
        ids = set(map(id, templates))
        self.entries = [each for each in self.entries if id(each.template) in ids]

    def fixed_for(self, site: CallSite, where: str) -> Fixed:
        """Which dimensions the next trace fixes, for a call that no trace holds for."""
        now = site.metas
        holding = [each for each in self.entries if each.gather(site.roots) is not None]
        found = {
            (place, dim)
            for each in holding
            for place, dim in (each.template.fixed if each.template else ())
            if each.region.operands[place].shape[dim] != now[place].shape[dim]
        }
        for place, dim in sorted(found - self._fixed):
            size = f"dimension {dim} of `{site.tensor_names[place]}`"
            _warn(where, f"for each size of {size}", _FIXED)
        if not found and not self._is_told and len(holding) + 1 == _MANY_TRACES:
            self._is_told = True
            _warn(where, "for a fifth time", _MANY)
        self._fixed |= found
        is_open = self._varied - self._fixed
        return tuple(
            tuple(
                bool(self._fixed) and (place, dim) not in is_open
                for dim in range(len(meta.shape))
            )
            for place, meta in enumerate(now)
        )

    def give_up(self, error: Exception, where: str) -> None:
        """Traces each size from now on: with symbols the function cannot be traced."""
        self.is_static = True
        first = str(error).partition("\n")[0].rstrip(". ")
        why = f"With symbols for sizes the trace fails: {first}."
        do = "or keep what needs a size as a number out of the function"
        _warn(where, "for each size", why, f"Leave `dynamic_shapes` out, {do}.")


_FIXED = (
    "The function, or an operator in it, needs that size as a number: a loop over "
    "range(size), int(size), or a string like f'{size}'."
)
_MANY = (
    "A trace is valid only for strides and sizes at which the function's comparisons have the "
    "same results, and at which each number that it computed from sizes, as in "
    "range(x.shape[0] * x.shape[1]), is the same."
)


_DO = "Compute with x.shape, or leave `dynamic_shapes` out."


def _warn(where: str, traced: str, why: str, do: str = _DO) -> None:
    what = f"is traced {traced}, in spite of dynamic_shapes=True."
    warn(where=where, what=what, why=why, do=do)
