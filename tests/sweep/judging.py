"""How one cell is judged: a region beside the plain function, under one transform.

A cell is "equal" where both give the same: the same bits under `.backward()` and
`torch.func.grad`, the same to rounding under other transforms. It is "close" where bits
were asked for and agree to rounding, "excused" where the plain function itself raises, and
"FAILED" otherwise.
"""

import contextlib
import signal
import warnings
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from tests.support import assert_bitwise, assert_close, fresh, run, scalar_loss
from tests.sweep.catalog import Case, seed_all

#: Seconds of processor time for one function under one transform.
TIME_LIMIT_S = 60

#: Transforms whose results are the plain function's to the bit.
BITWISE = {"backward", "grad"}

Fun = Callable[..., Any]


class Cell(NamedTuple):
    """What became of one transform of one call: an outcome and its reason."""

    outcome: str
    reason: str = ""


def backward(fun: Fun, tensors: tuple[Tensor, ...]) -> Any:
    """Outputs and gradients under `.backward()`."""
    outputs, gradients = run(fun, tensors)
    return outputs, [None if g is None else dense(g) for g in gradients]


def loss_backward(fun: Fun, tensors: tuple[Tensor, ...]) -> Any:
    """What `torch.func.grad` should give, by `.backward()`: zeros where it gives None."""
    leaves = fresh(tensors)
    scalar_loss(fun)(*leaves).backward()
    return [
        torch.zeros_like(leaf) if leaf.grad is None else dense(leaf.grad)
        for leaf in leaves
        if leaf.requires_grad
    ]


def func_grad(fun: Fun, tensors: tuple[Tensor, ...]) -> Any:
    """Gradients by `torch.func.grad`."""
    loss, wanted = on_wanted(fun, tensors)
    return [dense(each) for each in _gradient(loss, wanted)(*wanted)]


def vmap_grad(fun: Fun, tensors: tuple[Tensor, ...]) -> Any:
    """Gradients per example, of two examples that differ."""
    loss, wanted = on_wanted(fun, tensors)
    batches = [torch.stack([each, each * 0.75]) for each in wanted]
    return vmap(_gradient(loss, wanted), randomness="different")(*batches)


def func_jvp(fun: Fun, tensors: tuple[Tensor, ...]) -> Any:
    """Values and tangents along the cosine of the arguments."""
    flat, wanted = on_wanted(fun, tensors, as_loss=False)
    return jvp(lambda *each: tuple(flat(*each)), wanted, _directions(wanted))


def jvp_grad(fun: Fun, tensors: tuple[Tensor, ...]) -> Any:
    """Gradients and their tangents."""
    loss, wanted = on_wanted(fun, tensors)
    return jvp(_gradient(loss, wanted), wanted, _directions(wanted))


def grad_grad(fun: Fun, tensors: tuple[Tensor, ...]) -> Any:
    """The gradient of the sine of the gradients, weighted."""
    loss, wanted = on_wanted(fun, tensors)
    first = _gradient(loss, wanted)
    second = scalar_loss(lambda *each: [g.sin() for g in first(*each)])
    return _gradient(second, wanted)(*wanted)


def _gradient(loss: Fun, wanted: tuple[Tensor, ...]) -> Fun:
    return grad(loss, tuple(range(len(wanted))))


def _directions(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.cos() for tensor in tensors)


TRANSFORMS: dict[str, Fun] = {
    "backward": backward,
    "grad": func_grad,
    "vmap(grad)": vmap_grad,
    "jvp": func_jvp,
    "jvp(grad)": jvp_grad,
    "grad(grad)": grad_grad,
}


def dense(tensor: Tensor) -> Tensor:
    """A gradient as a dense tensor."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def on_wanted(
    fun: Fun, tensors: tuple[Tensor, ...], *, as_loss: bool = True
) -> tuple[Fun, tuple[Tensor, ...]]:
    """A function of the tensors to differentiate alone, and these."""
    of_all = scalar_loss(fun) if as_loss else fun
    copies = fresh(tensors)
    places = [place for place, each in enumerate(copies) if each.requires_grad]
    copies = [each.detach() for each in copies]

    def of_wanted(*wanted: Tensor) -> Any:
        filled = list(copies)
        for place, tensor in zip(places, wanted, strict=True):
            filled[place] = tensor
        return of_all(*filled)

    return of_wanted, tuple(copies[place] for place in places)


def expected(case: Case, transform: str) -> Any:
    """What the plain function gives, or the exception that it raises."""
    if transform != "grad":
        return attempt(TRANSFORMS[transform], case.call, case.tensors)
    # The law compares with plain `.backward()`; plain torch.func.grad must only work.
    found = attempt(func_grad, case.call, case.tensors)
    if isinstance(found, Exception):
        return found
    return attempt(loss_backward, case.call, case.tensors)


def judge(region: Fun, case: Case, transform: str, plain: Any) -> Cell:
    """Compares a region with what the plain function gave."""
    if isinstance(plain, Exception):
        return Cell("excused", describe(plain))
    attempt(TRANSFORMS[transform], region, case.tensors)
    # Later calls may take another way than the first one.
    found = attempt(TRANSFORMS[transform], region, case.tensors)
    if isinstance(found, Exception):
        return Cell("FAILED", describe(found))
    if transform not in BITWISE:
        return compare(assert_close, found, plain, "equal")
    cell = compare(assert_bitwise, found, plain, "equal")
    close = compare(assert_close, found, plain, "close")
    return close._replace(reason=cell.reason) if cell.outcome == "FAILED" else cell


def compare(same: Fun, found: Any, plain: Any, outcome: str) -> Cell:
    """The outcome where two results are the same in the sense of an assertion."""
    try:
        same(found, plain)
    except AssertionError as error:
        return Cell("FAILED", f"differs: {describe(error)}")
    return Cell(outcome)


def attempt(transformed: Fun, fun: Fun, tensors: tuple[Tensor, ...]) -> Any:
    """What a transformed function gives, or the exception that it raises."""
    seed_all()
    try:
        with _time_limit(TIME_LIMIT_S), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return transformed(fun, tensors)
    except Exception as error:  # noqa: BLE001 - whatever is raised is the outcome
        return error


def describe(error: Exception) -> str:
    """An exception on one line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:200]


@contextlib.contextmanager
def _time_limit(seconds: int) -> Generator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
