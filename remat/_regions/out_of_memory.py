"""Out of memory: reports what regions held when an operator of one of them failed.

Nothing is recorded in advance. When the error passes, the autograd graph below the region
that failed says which regions have not run their backward yet, and what each saved.
"""

import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from remat._graph.meta import TensorMeta
from remat._regions.protocol import Call
from remat._regions.traced import TracedRegion
from remat._regions.waiting import storages
from remat._torch import autograd, tensors
from remat.policies._sizes import show_size

_FIRST = "remat: out of memory"
_MOST_VALUES = 10


def note(error: RuntimeError, phase: str, call: Call, nodes: Iterable[Any]) -> None:
    """Adds to an out-of-memory error what regions held, unless it says so already."""
    is_noted = any(text.startswith(_FIRST) for text in getattr(error, "__notes__", ()))
    # On an accelerator, or the CPU.
    is_found = isinstance(error, torch.OutOfMemoryError)
    if (is_found or "can't allocate memory" in str(error)) and not is_noted:
        error.add_note(_shortage_text(phase, call, _held_values(nodes)))


def name_of(function: Any) -> str:
    """The qualified name of a function, or that of its type."""
    found = inspect.unwrap(function)
    if isinstance(found, functools.partial):
        return name_of(found.func)
    return getattr(found, "__qualname__", None) or type(found).__name__


# A tensor that a region held: by whom, what it is called, and its bytes.
_Held = tuple[str, str, int]


def _shortage_text(phase: str, call: Call, values: Iterable[_Held]) -> str:
    regions = Counter[str]()
    sizes: dict[tuple[str, str], list[int]] = {}
    for region, label, size in values:
        regions[region] += size
        sizes.setdefault((region, label), []).append(size)
    lines = [
        f"{_FIRST} in the {phase} of the region {name_of(call.roots[0])}. Regions whose "
        f"backward was still to come held {show_size(regions.total())} beyond parameters and "
        "data:",
        *(f"  {region}: {show_size(size)}" for region, size in regions.items()),
    ]
    rows = sorted(sizes.items(), key=lambda row: -sum(row[1]))
    lines += ["The largest values:"] if rows else []
    for (region, label), found in rows[:_MOST_VALUES]:
        count = f"{len(found)} x " if len(found) > 1 else ""
        lines.append(f"  {count}{show_size(found[0])}: {label}, in {region}")
    lines.append(
        "What is saved is decided by the policies of these regions; what one backward "
        "needs at once grows with the size of its region. See remat.report."
    )
    return "\n".join(lines)


def _held_values(nodes: Iterable[Any]) -> Iterator[_Held]:
    """What the calls of regions below these nodes hold, each storage once."""
    seen: set[int] = set()
    for node in autograd.nodes_behind([*nodes]):
        call = getattr(node, "call", None)
        if not isinstance(call, Call):
            continue
        labels = itertools.chain(labels_of(call), itertools.repeat(("a state", False)))
        for tensor, (label, is_operand) in zip(_saved(node), labels, strict=False):
            if is_operand and tensor.is_leaf:
                continue  # a parameter, or data: it lives anyway
            keys = tensors.sizes_of(storages(tensor))
            size = sum(each for key, each in keys.items() if key not in seen)
            seen |= keys.keys()
            if size:
                text = f"{label} {TensorMeta.of(tensor)}".strip()
                yield name_of(call.roots[0]), text, size


def _saved(node: Any) -> tuple[Tensor, ...]:
    """What a node saved; nothing if it has run already, or if it cannot be read."""
    try:
        return tuple(each for each in node.saved_tensors if each is not None)
    except RuntimeError:
        return ()


def labels_of(call: Call) -> list[tuple[str, bool]]:
    """What the tensors that a call saved are called, and whether each is an operand."""
    region = call.region
    labels: list[tuple[str, bool]] = []
    if isinstance(region, TracedRegion) and region.keeps:
        stages = region.stages(call.roots)
        analysis = stages.analysis
        for index in stages.cut.saved:
            view = analysis.views[analysis.numbers[analysis.roots[index]]]
            texts = [f'"{name}"' for name in view.names]
            texts += [f"({view.source})"] if view.source else []
            labels.append((" ".join(texts), False))
    quoted = (each if "`" in each else f"`{each}`" for each in call.labels)
    return labels + [(label, True) for label in quoted]
