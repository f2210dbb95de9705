"""What makes one function be traced again and again, told at its tenth trace."""

import collections
from typing import final

from remat._calls.entry import Entry
from remat._calls.signature import STATIC, CallSite
from remat._user_lines import warn

_MANY = 10  # a heuristic: train and eval, with and without a gradient, make fewer

_SIZE = "Pass dynamic_shapes=True, or pad to one of a few sizes."
_STRIDES = "Lay it out alike at each call, by x.contiguous()."
_VALUE = "Pass a number that changes as a 0-d tensor: torch.tensor(value)."
_CALL = "Make each call alike."

# What calls can differ in, and what helps if they do.
_Topic = tuple[str, str]
_Described = dict[str, tuple[dict[_Topic, object], ...]]


@final
class History:
    """The traces of one function, or of one module."""

    def __init__(self) -> None:
        self._count = 0
        self._latest: _Described = {}
        self._changes: collections.Counter[_Topic] = collections.Counter()
        self._last: dict[_Topic, str] = {}  # both values

    def add(self, site: CallSite, known: Entry | None) -> bool:
        """Adds a trace; says whether it is the tenth.

        `known`: the latest trace of such a call, which does not hold for what it reaches.
        """
        self._count += 1
        before, self._latest = self._latest, _described(site)
        if known is not None:
            label, text = known.covered.difference(site.roots)
            changes = {(label, _VALUE): text}
        else:
            changes = _changes(before, self._latest)
        self._changes.update(changes.keys())
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


def _described(site: CallSite) -> _Described:
    """What two calls can differ in, by name; of several groups the first says it."""
    signature, found = site.signature, _Described()
    for name, meta in zip(site.tensor_names, signature.metas, strict=True):
        sizes = enumerate(meta.shape)
        kind = f"{meta.dtype} of {len(meta.shape)} dimensions on {meta.device}"
        wanted = f"with{'' if meta.requires_grad else 'out'} a gradient"
        found[name] = (
            {(f"`{name}`", _CALL): f"{kind}, {wanted}"},
            {(f"the size of dimension {k} of `{name}`", _SIZE): n for k, n in sizes},
            {(f"the strides of `{name}`", _STRIDES): meta.stride},
        )
    for name, (kind, value) in zip(site.names, signature.layout.leaves, strict=True):
        if kind == STATIC:
            found[name] = ({(f"the value of `{name}`", _VALUE): repr(value)},)
    for name, value in site.numerics._asdict().items():
        found[f"the switch {name}"] = ({(f"the switch {name}", _CALL): value},)
    return found


def _changes(was: _Described, now: _Described) -> dict[_Topic, str]:
    """What differs, with both values."""
    found: dict[_Topic, str] = {}
    for name in [name for name in was if name in now]:
        for old, new in zip(was[name], now[name], strict=False):
            changed = [each for each in old if old[each] != new.get(each, old[each])]
            if changed:
                found |= {
                    each: f"from {old[each]!s:.60} to {new[each]!s:.60}"
                    for each in changed
                }
                break
    return found
