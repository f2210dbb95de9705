"""What makes one function be traced again and again, told at its tenth trace."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import final

from remat._calls.entry import Entry
from remat._calls.signature import STATIC, CallSite
from remat._graph.meta import TensorMeta
from remat._torch.sizes import hint
from remat._user_lines import warn

_MANY = 10  # a heuristic: train and eval, with and without a gradient, make fewer

_SIZE = "Pass dynamic_shapes=True, or pad to one of a few sizes."
_STRIDES = "Lay it out alike at each call, by x.contiguous()."
_VALUE = "Pass a number that changes as a 0-d tensor: torch.tensor(value)."
_CALL = "Make each call alike."

#: What has changed from one trace to the next, and what helps; and both values.
_Change = tuple[tuple[str, str], str]
_ARRANGED = (
    ("how arguments are nested", _CALL),
    "other containers, or other arguments are one tensor",
)


@final
class TraceHistory:
    """The traces of one function, or of one module."""

    def __init__(self) -> None:
        self._count = 0
        self._latest: dict[str, object] = {}
        self._changes: collections.Counter[tuple[str, str]] = collections.Counter()
        self._last: dict[tuple[str, str], str] = {}

    def add(self, site: CallSite, known: Entry | None) -> bool:
        """Adds a trace, for which the latest `known` did not hold; says whether it is the tenth."""
        self._count += 1
        before, self._latest = self._latest, _call_description(site)
        if known is not None:
            label, text = known.covered.difference(site.roots)
            changes = [((label, _VALUE), text)]
        elif before:
            changes = list(_changes(before, self._latest)) or [_ARRANGED]
        else:
            changes = []
        self._changes.update(what for what, _ in changes)
        self._last.update(changes)
        return self._count == _MANY

    def warn(self, where: str, cache_size: int) -> None:
        """Names what has changed most often, and what helps."""
        most = self._changes.most_common(3)
        each = [
            f"{what[0]} ({count} times, at last: {self._last[what]})"
            for what, count in most
        ]
        warn(
            where=where,
            what=f"was traced for a tenth time. From call to call changed {'; '.join(each)}.",
            why="Each trace holds for one set of sizes, strides, values and switches; it "
            "takes a tenth of a second or more, and host memory: the latest "
            f"{cache_size} are kept.",
            do=" ".join(dict.fromkeys(what[1] for what, _ in most)),
        )


def _call_description(site: CallSite) -> dict[str, object]:
    """What two calls can differ in, by name."""
    leaves = zip(site.names, site.layout.leaves, strict=True)
    found: dict[str, object] = {}
    for name, meta in zip(site.tensor_names, site.metas, strict=True):
        # A trace around has symbols in the place of open sizes, and would record comparisons.
        stride = tuple(map(hint, meta.stride))
        found[f"`{name}`"] = dataclasses.replace(meta, shape=meta.hints, stride=stride)
    found |= {
        f"`{name}`": repr(each) for name, (kind, each) in leaves if kind == STATIC
    }
    switches = site.numerics._asdict().items()
    return found | {f"the switch {name}": value for name, value in switches}


def _changes(was: Mapping[str, object], now: Mapping[str, object]) -> Iterator[_Change]:
    for name in dict.fromkeys((*was, *now)):
        old, new = was.get(name), now.get(name)
        if old == new:
            continue
        text = f"from {old!s:.60} to {new!s:.60}"
        if isinstance(old, TensorMeta) and isinstance(new, TensorMeta):
            yield from _changes_of_tensor(name, old, new)
        elif isinstance(old, str) and isinstance(new, str):
            yield (f"the value of {name}", _VALUE), text
        else:
            yield (name, _CALL), text


def _changes_of_tensor(
    name: str, old: TensorMeta, new: TensorMeta
) -> Iterator[_Change]:
    sizes = [*zip(old.shape, new.shape, strict=False)]
    if len(old.shape) == len(new.shape) and old.shape != new.shape:
        for dim, (size, other) in enumerate(sizes):
            if size != other:
                what = f"the size of dimension {dim} of {name}"
                yield (what, _SIZE), f"from {size} to {other}"
    elif old.shape == new.shape and old.stride != new.stride:
        what = f"the strides of {name}"
        yield (what, _STRIDES), f"from {old.stride} to {new.stride}"
    else:
        was, now = (
            f"{each} on {each.device}, with{'' if each.requires_grad else 'out'} a gradient"
            for each in (old, new)
        )
        yield (name, _CALL), f"from {was} to {now}"
