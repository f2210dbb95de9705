"""The checklist: what to check before trusting a step's recomputation."""

import dataclasses
import inspect
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from remat._errors import RematError
from remat._graph import operators
from remat._switches.blocks import disabled
from remat._torch import fakes, modes, tensors
from remat.policies._sizes import show_size
from remat.reporting._make_report import report
from remat.reporting._measure.step import (
    MeasuredStep,
    graph_of,
    leaves_of,
    storage_sizes,
)
from remat.reporting._measure.watch import StepWatcher
from remat.reporting._records import Facts, to_json
from remat.reporting._report import Report
from remat.reporting._show.text import table

PASS, FAIL = "pass", "fail"
NOT_APPLICABLE, NOT_MEASURED = "not applicable", "not measured"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One row of the checklist.

    Attributes:
        question: what is asked.
        verdict: "pass", "fail", "not applicable", or "not measured" for a figure that
            cannot be known here.
        figure: the measurement, and what it is compared with.
    """

    question: str
    verdict: str
    figure: str


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Checklist:
    """What `checklist` found, one row for each question.

    Attributes:
        function: the name of what ran.
        checks: the rows.
    """

    function: str
    checks: tuple[Check, ...]

    @property
    def is_passed(self) -> bool:
        """Whether no row failed."""
        return all(check.verdict != FAIL for check in self.checks)

    def __str__(self) -> str:
        """A table: verdict, question, figure."""
        rows = [(each.verdict, each.question, each.figure) for each in self.checks]
        return "\n".join(table(("verdict", self.function, "measured"), rows))

    def to_json(self) -> str:
        """The rows as JSON; the schema is "remat.checklist/2"."""
        return to_json("remat.checklist/2", self)


def checklist(
    f: Callable[..., Any], *args: Any, tokens_of: str | None = None, **kwargs: Any
) -> Checklist:
    """Measures what reviewers of activation recomputation ask about.

    Seven rows, each "pass", "fail", "not applicable" or "not measured":

    - activation bytes by layer: regions hold less than the same step without remat;
    - parameters apart: no copy of a parameter (a cast, a transposed copy) is held as an
      activation;
    - recompute overhead: at most one forward's FLOPs are computed again;
    - determinism: two backwards of one forward give the same bits;
    - attention once: no region computes an attention again in its backward;
    - throughput and largest batch: with remat more fits into the device's memory; both
      that batch, extrapolated from this one, and the examples or tokens per second are
      given;
    - gradients: those of the undecorated function, to the last bit, or to rounding where
      sums are taken in another order, such as those of a weight that two calls share.

    The step runs about ten times. The caller's state does not change.

    Args:
        f: a loss, a module or a region, as in `report`.
        *args: its arguments. The batch is the largest tensor that needs no gradient, or,
            where all do, the last one; its first dimension counts examples.
        tokens_of: the name of the argument that holds tokens, if these are to be counted
            instead of examples: whole numbers are one each, other numbers one for each
            vector along the last axis.
        **kwargs: likewise.

    Returns:
        The rows, which print as a table.

    Raises:
        RematError: `f` returns nothing that requires grad, or has no tensor of the name
            `tokens_of`.

    Example:
        >>> import torch
        >>> from remat import checklist, remat
        >>> found = checklist(remat(lambda x: x.sin().sin().sin()), torch.ones(64, 64))
        >>> found.checks[0].verdict
        'pass'
    """
    step = MeasuredStep(f, args, kwargs)
    tokens = None if tokens_of is None else _argument_named(f, tokens_of, args, kwargs)
    with disabled():
        plain = report(f, *args, **kwargs)
    found = report(f, *args, **kwargs)
    # Why some of the questions have no answer.
    no_region = None if found.regions else (NOT_APPLICABLE, "no region ran")
    no_batch = None if step.data else (NOT_APPLICABLE, "there is no batch")
    no_numbers = no_region
    if found.device == "meta":
        no_numbers = no_region or (NOT_MEASURED, "nothing is computed on meta tensors")
    answers = {
        "activation bytes by layer": no_region or _bytes_by_layer(found, plain),
        "parameters apart": _parameters_apart(step, found),
        "recompute overhead": no_region or _recompute_overhead(found),
        "determinism": no_numbers or _determinism(step),
        "attention not run twice": _attention_once(step),
        "throughput, and largest batch": no_batch
        or no_numbers
        or _throughput(step, tokens, found, plain),
        "gradients equal to undecorated": no_numbers or _gradients(step, plain),
    }
    checks = [Check(question, *answer) for question, answer in answers.items()]
    return Checklist(step.name, tuple(checks))


def _argument_named(
    f: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    call = inspect.signature(getattr(f, "forward", f)).bind(*args, **kwargs)
    given = {**call.arguments, **kwargs}
    if isinstance(given.get(name), Tensor):
        return given[name]
    raise RematError.of(
        where=f"checklist(tokens_of={name!r})",
        what=f"the call gives no tensor of this name, but {', '.join(given) or 'nothing'}.",
        why="Tokens are counted in one argument.",
        do="Name the argument that holds them, or leave `tokens_of` out.",
    )


_Answer = tuple[str, str]  # the verdict, and the figure


def _bytes_by_layer(found: Report, plain: Report) -> _Answer:
    layers = ", ".join(
        f"{region.name}: {layer.count} x {show_size(layer.held_bytes)}"
        for region in found.regions
        for layer in region.layers
    )
    held, without = show_size(found.held_bytes), show_size(plain.held_bytes)
    figure = f"{layers}; all {held}, without remat {without}"
    return _pass_or_fail(found.held_bytes < plain.held_bytes), figure


def _pass_or_fail(is_good: bool) -> str:
    return PASS if is_good else FAIL


@final
class _CopyWatcher(modes.DispatchMode):
    """Remembers the storages that are copies of parameters: casts, clones, transposes."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self._parameters = {tensors.storage_key(each) for each in parameters}
        self.copies: dict[int, Tensor] = {}

    def _hear(self, op: Any, args: Any, kwargs: Any) -> Any:
        result = modes.run_in_mode(op, args, kwargs)
        if operators.short_name(op) in _COPIES and not fakes.is_fake(args[0]):
            key = tensors.storage_key(result)
            if tensors.storage_key(args[0]) in self._parameters | self.copies.keys():
                # Held, so that no other storage can have its key.
                self.copies[key] = result
        return result


_COPIES = ("aten._to_copy", "aten.clone", "aten.copy")


def _parameters_apart(step: MeasuredStep, found: Report) -> _Answer:
    with step.kept():
        data = set(map(id, step.data))
        leaves = [each for each in leaves_of(step.forward()) if id(each) not in data]
        with _CopyWatcher(leaves) as watcher:
            outputs = step.forward()
            nodes, _ = graph_of(outputs)
    held = storage_sizes(tensor for node in nodes for tensor in node.saved)
    copies = [each for key, each in watcher.copies.items() if key in held]
    size = sum(each.untyped_storage().nbytes() for each in copies)
    copied = f"copies of them among the activations {show_size(size)}"
    figure = f"parameters {show_size(found.parameter_bytes)}; {copied}"
    return _pass_or_fail(size == 0), figure


def _recompute_overhead(found: Facts) -> _Answer:
    if found.recompute_flops is None:
        return NOT_MEASURED, "some region does not tell"
    if not found.forward_flops:
        return NOT_MEASURED, "torch has no formula for the FLOPs of these operators"
    forward, whole = found.forward_flops, found.forward_flops + found.backward_flops
    once = whole - found.recompute_flops
    share, part = found.recompute_flops / forward, found.recompute_flops / once
    figure = f"{share:.0%} of a forward, {part:.0%} of the step without it, in FLOPs"
    return _pass_or_fail(share <= 1.0), figure


def _determinism(step: MeasuredStep) -> _Answer:
    with step.kept():
        outputs = step.forward()
        leaves = leaves_of(outputs)
        first = step.backward(outputs, leaves, keep=True)
        second = step.backward(outputs, leaves)
    differing = len(_gaps(first, second))
    figure = f"{differing} of {len(leaves)} gradients differ in a second recomputation"
    return _pass_or_fail(differing == 0), figure


def _attention_once(step: MeasuredStep) -> _Answer:
    with step.kept(), StepWatcher() as watch:
        outputs = step.forward()
        ran = _fused_attentions(watch.counts)
        step.backward(outputs, leaves_of(outputs))
    whole = _fused_attentions(watch.counts)
    if ran == 0:
        return NOT_APPLICABLE, "no fused attention ran"
    figure = f"{ran} in the forward, {whole - ran} again in the backward"
    return _pass_or_fail(whole == ran), figure


def _fused_attentions(counts: Counter[str]) -> int:
    names = [name for name in counts if "scaled_dot_product" in name]
    return sum(counts[name] for name in names if not name.endswith("backward"))


def _throughput(
    step: MeasuredStep, tokens: Tensor | None, found: Report, plain: Report
) -> _Answer:
    data = max(step.data, key=lambda each: each.nbytes)
    if data.numel() == 0:
        return NOT_APPLICABLE, "the batch is empty"
    count, unit = data.shape[0], "examples"
    if tokens is not None:
        is_embedded = tokens.is_floating_point()
        count = tokens[..., 0].numel() if is_embedded else tokens.numel()
        unit = "tokens"
    rate = count / _second_time_s(step)
    with disabled():
        plain_rate = count / _second_time_s(step)
    memory = memory_bytes(data.device)
    most, plain_most = (_largest_batch(each, data, memory) for each in (found, plain))
    without = f"without remat {plain_rate:.0f} and {plain_most}"
    figure = f"{rate:.0f} {unit}/s, largest batch {most}; {without}"
    return _pass_or_fail(most > plain_most), figure


def memory_bytes(device: torch.device) -> int:
    """The memory that a device has, for the checklist's largest batch."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.get_device_module(device).mem_get_info(device)[1])


def _largest_batch(facts: Facts, data: Tensor, memory: int) -> int:
    """The largest batch, if all but parameters and their gradients grows with it."""
    own = 2 * data.nbytes if data.requires_grad else 0
    fixed = facts.parameter_bytes + facts.gradient_bytes - own
    moving = facts.peak.size_bytes - facts.gradient_bytes + facts.argument_bytes + own
    return max(memory - fixed, 0) * data.shape[0] // max(moving, 1)


def _second_time_s(step: MeasuredStep) -> float:
    step.seconds()
    return step.seconds()


# A heuristic: how far apart sums in another order may be, by the largest element.
_ROUNDING = {
    torch.float64: 1e-12,
    torch.float32: 1e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}


def _gradients(step: MeasuredStep, plain_report: Report) -> _Answer:
    with disabled():
        leaves, plain = step.gradients()
    _, region = step.gradients(leaves)
    gaps = _gaps(plain, region)
    if not gaps:
        return PASS, f"all {len(plain)} to the last bit"
    # The coarsest dtype of what waits without remat tells what they may differ by.
    dtypes = {value.dtype for value in plain_report.values}
    dtypes |= {each.dtype for each in plain if each is not None}
    allowed = max(_ROUNDING.get(dtype.to_real(), 0.0) for dtype in dtypes)
    gap = max(gaps)
    most = f"relatively by at most {gap:.2g} (rounding: {allowed:.0e})"
    figure = f"{len(gaps)} of {len(plain)} differ, {most}"
    return _pass_or_fail(gap <= allowed), figure


def _gaps(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> list[float]:
    """For each pair that differs, its largest difference relative to its largest element."""
    found: list[float] = []
    for a, b in zip(one, other, strict=True):
        if a is None or b is None:
            found += [] if a is b else [float("inf")]
        elif not tensors.same_bits(a, b):
            scale = a.abs().max().double().clamp_min(torch.finfo(torch.float32).tiny)
            found.append(float((a - b).abs().max().double() / scale))
    return found
