"""What a function asks of a tensor and no stand-in can tell: refused with its line."""

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils._expanded_weights import ExpandedWeight
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

from remat import CapturedTensorError, RematWarning, TraceError, remat
from tests.support import assert_bitwise, seeded

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("engine", ["trace", "rerun", "auto"])
@pytest.mark.parametrize("where", ["argument", "captured"])
def test_the_gradient_of_a_tensor_from_outside_is_refused(
    where: str, engine: Any
) -> None:
    """With its line; those of the function's own leaves may be read."""
    x = seeded(4).requires_grad_()
    asked = x if where == "captured" else None

    def fun(y: Tensor) -> Tensor:
        given = y if asked is None else asked
        return y if given.grad is None else y * given.grad

    def own(y: Tensor) -> Tensor:
        leaf = y.detach().requires_grad_()
        leaf.sin().sum().backward()
        assert leaf.grad is not None
        return y * leaf.grad

    with pytest.raises(
        TraceError, match=r"`\.grad` of .*test_asked_of_tensors\.py:\d+"
    ):
        remat(fun, engine=engine)(x)
    assert_bitwise(remat(own, engine="rerun")(x), own(x))


PLACES: list[Callable[[Tensor], Any]] = [
    lambda x: x.data_ptr(),
    lambda x: x.untyped_storage().data_ptr(),
    lambda x: (x * 2).data_ptr(),
]


def test_memory_is_no_argument_of_an_operator() -> None:
    """As the kernels of recurrent layers on an accelerator would have it."""
    memory = seeded(4).untyped_storage()

    def fun(x: Tensor) -> Tensor:
        return x * torch.empty(0, dtype=x.dtype).set_(memory)

    x = seeded(4).requires_grad_()
    with pytest.raises(
        TraceError,
        match=r"test_asked.*\.py:\d+: an operator takes the memory .*nn\.LSTM",
    ):
        remat(fun)(x)
    assert_bitwise(remat(fun, engine="rerun")(x), fun(x))


@pytest.mark.parametrize("place", PLACES)
def test_where_memory_is_cannot_be_told(place: Any) -> None:
    """It is refused with its line; a run again can tell."""

    def fun(x: Tensor) -> Tensor:
        return x * 2 if place(x) else x * 3

    x = seeded(4).requires_grad_()
    with pytest.raises(
        TraceError, match=r"test_asked_of_tensors\.py:\d+: asks where .* is"
    ):
        remat(fun)(x)
    assert_bitwise(remat(fun, engine="rerun")(x), fun(x))


HANDED_OUT: list[Callable[[Tensor], Any]] = [
    lambda x: pickle.dumps(x),
    lambda x: copy.copy(x),
    lambda x: torch.save(x * 2, io.BytesIO()),
    lambda x: x.share_memory_(),
    lambda x: x.storage(),
    lambda x: x.__dlpack__(),
    lambda x: x.clone().apply_(abs),
    lambda x: x.clone().map_(x, max),
]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("read", HANDED_OUT)
def test_memory_that_is_read_past_all_operators_is_refused(read: Any) -> None:
    """Also where the function catches whatever goes wrong; a run again can read it."""

    def fun(x: Tensor) -> Tensor:
        try:
            read(x.detach())
        except Exception:  # noqa: BLE001
            return x.tanh()
        return x.sin()

    x = seeded(4).requires_grad_()
    with pytest.raises(
        TraceError, match=r"test_asked_of_tensors\.py:\d+: reads or hands out a tensor"
    ):
        remat(fun)(x)
    assert_bitwise(remat(fun, engine="rerun")(x), fun(x))


ASKING: list[Callable[[Any], Tensor]] = [
    lambda x: x * 2 if hasattr(x, "flag") else x * 3,
    lambda x: x * getattr(x, "flag", 5),
    lambda x: x * 2 if isinstance(x, nn.Parameter) else x * 3,
]


@pytest.mark.parametrize("fun", ASKING)
def test_a_run_again_knows_the_attributes_of_arguments(fun: Any) -> None:
    """And whether they are parameters."""
    x: Any = nn.Parameter(seeded(4))
    x.flag = 7

    assert_bitwise(remat(fun, engine="rerun")(x), fun(x))


HISTORY: dict[str, Callable[[Tensor], Any]] = {
    "is_leaf": lambda x: x.is_leaf,
    "grad_fn": lambda x: x.grad_fn is None,
    "_version": lambda x: x._version == 0,
    "storage_offset": lambda x: x.storage_offset() == 0,
    "is_conj": lambda x: x.is_conj(),
    "is_neg": lambda x: x.is_neg(),
}


@pytest.mark.parametrize("asked", HISTORY)
def test_how_a_tensor_from_outside_came_to_be_is_told_of_another(asked: str) -> None:
    """A warning names the line; a run again knows where the tensor lies in its memory."""

    def fun(x: Tensor) -> Tensor:
        return x * 2 if HISTORY[asked](x) else x * 3

    x = torch.stack([seeded(4), seeded(4)]).requires_grad_().sin()
    x += 1
    line = r"test_asked_of_tensors\.py:\d+"
    with pytest.warns(RematWarning, match=line):
        remat(fun)(x[1])
    again = remat(fun, engine="rerun")
    if asked not in {"is_leaf", "grad_fn"}:
        assert_bitwise(again(x[1]), fun(x[1]))
    else:
        with pytest.warns(RematWarning, match=line):
            again(x[1])


def _captured(x: Tensor, w: Tensor) -> Tensor:
    return x * w.as_strided((2, 1), (1, 2), 2)


COUNTED: dict[str, Callable[[Tensor], Tensor]] = {
    "an argument": lambda x: x.as_strided((3,), (1,), 2).sin(),
    "a part of it": lambda x: x[1:].as_strided((3,), (1,), storage_offset=2).sin(),
    "a function": lambda x: torch.as_strided(x, (3,), (1,), 2).sin(),
    "a copy": lambda x: torch.as_strided_copy(x, (3,), (1,), 2).sin(),
    "a write": lambda x: x.as_strided_scatter(x[:2].sin(), (2,), (1,), 3),
    "captured": functools.partial(_captured, w=seeded(8)[3:]),
}


@pytest.mark.parametrize("fun", COUNTED.values(), ids=COUNTED)
def test_where_a_tensor_from_outside_begins_in_its_memory_is_not_known(fun: Any):
    """Its gradient would be put where that of another call is; a run again puts it right."""
    whole = seeded(9)
    line = r"test_asked_of_tensors\.py:\d+"
    region: Any = remat(fun)
    again: Any = remat(fun, engine="rerun")

    with pytest.raises(TraceError, match=f"(?s){line}.*Leave out storage_offset"):
        region(whole.requires_grad_()[2:])
    found = torch.func.grad(lambda x: again(x[2:]).sum())(whole)
    assert_bitwise(found, torch.func.grad(lambda x: fun(x[2:]).sum())(whole))


def test_counting_from_the_first_element_or_in_memory_of_its_own():
    """Needs no place in the memory of another."""

    def fun(x: Tensor) -> Tensor:
        return x[1:].as_strided((3,), (1,)) * (x * 2).as_strided((3,), (1,), 2)

    whole = seeded(9)
    region: Any = remat(fun)

    found = torch.func.grad(lambda x: region(x[2:]).sum())(whole)
    assert_bitwise(found, torch.func.grad(lambda x: fun(x[2:]).sum())(whole))


def test_what_is_asked_by_the_package_itself_is_not_told():
    """As autocast's casts are, of a region inside another one."""
    w = seeded(4, 4).float().requires_grad_()
    inner = remat(lambda x: x @ w)

    with torch.autocast("cpu", torch.bfloat16):
        assert_bitwise(remat(lambda x: inner(x).sin())(w), inner(w).sin())


def _held(x: Tensor) -> Tensor:
    x.retain_grad()
    return x.sin()


def _cleared(x: Tensor) -> Tensor:
    x.grad = None
    return x.sin()


def _deleted(x: Tensor) -> Tensor:
    del x.grad
    return x.sin()


def _frozen(x: Tensor) -> Tensor:
    x.requires_grad_(False)
    return x.sin()


def _turned_off(x: Tensor) -> Tensor:
    x.requires_grad = False
    return x.sin()


@pytest.mark.parametrize("engine", ["trace", "rerun", "auto"])
@pytest.mark.parametrize("is_captured", [False, True], ids=["argument", "captured"])
@pytest.mark.parametrize("fun", [_held, _cleared, _deleted, _frozen, _turned_off])
def test_what_autograd_is_told_of_a_tensor_from_outside_is_refused(
    fun: Any, is_captured: bool, engine: Any
) -> None:
    """It would be told of a stand-in; that which is so already may be said."""
    x, w = seeded(4).requires_grad_(), seeded(4).requires_grad_()

    def captured(y: Tensor) -> Tensor:
        return y * fun(w)

    with pytest.raises(TraceError, match=r"test_asked_of_tensors\.py:\d+: is written"):
        remat(captured if is_captured else fun, engine=engine)(x)
    assert_bitwise(remat(lambda x: x.requires_grad_().sin())(x), x.sin())


@pytest.mark.parametrize("engine", ["trace", "rerun", "auto"])
def test_so_is_a_module_that_the_function_freezes(engine: Any) -> None:
    """Whose own code, torch's, tells autograd."""
    layer = nn.Linear(4, 4).double()

    def fun(x: Tensor) -> Tensor:
        return layer.requires_grad_(False)(x)

    with pytest.raises(TraceError, match="is written inside a region"):
        remat(fun, engine=engine)(seeded(2, 4).requires_grad_())
    assert layer.weight.requires_grad


def test_the_one_tensor_that_requires_grad_is_an_argument_that_was_told_to():
    """Nothing is traced there, and the text says what to do."""
    region = remat(lambda x: x.requires_grad_().sin().cos())

    with pytest.raises(
        CapturedTensorError,
        match=r"an argument float32\[3\].* before the region is called",
    ):
        region(torch.ones(3))


@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_an_argument_that_starts_to_need_a_gradient_is_told(engine: Any) -> None:
    """As of the coordinates in a PINN, whose derivatives the function takes itself."""
    w = seeded(4, 4).requires_grad_()

    def slope(x: Tensor) -> Tensor:
        x.requires_grad_()
        return torch.autograd.grad((x @ w).sin().sum(), x, create_graph=True)[0]

    with pytest.warns(RematWarning, match="Write it before the region is called"):
        found = remat(slope, engine=engine)(seeded(2, 4))
    assert_bitwise(found, slope(seeded(2, 4)))


@pytest.mark.parametrize(
    "backward",
    [Tensor.backward, lambda loss: torch.autograd.backward(loss)],
    ids=["method", "function"],
)
def test_gradients_that_a_backward_leaves_outside_are_refused(backward: Any) -> None:
    """Those of arguments and of captured tensors; the function's own leaves may have some."""
    w = seeded(4).requires_grad_()

    def fun(x: Tensor) -> Tensor:
        backward((x * w.detach()).square().sum())
        return x.sin()

    def of_captured(x: Tensor) -> Tensor:
        backward((x.detach() * w).square().sum())
        return x.sin()

    for each in (fun, of_captured):
        with pytest.raises(TraceError, match=r"Use torch\.autograd\.grad"):
            remat(each)(seeded(4).requires_grad_())
    assert w.grad is None


def test_another_default_dtype_inside_is_refused() -> None:
    """A recomputation has that of the call; a run again sets it anew."""

    def fun(x: Tensor) -> Tensor:
        own = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return x * torch.ones(4)
        finally:
            torch.set_default_dtype(own)

    x = seeded(4).float().requires_grad_()
    with pytest.raises(
        TraceError, match=r"test_asked.*:\d+: runs under torch\.float64"
    ):
        remat(fun)(x)
    assert_bitwise(remat(fun, engine="rerun")(x), fun(x))


def test_a_view_of_what_was_transposed_in_place_and_written_is_refused() -> None:
    """A run again returns it."""

    def fun(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.clone()
        y.t_()
        view = y.T
        view[0] = 1.0
        return y, view

    x = seeded(2, 3).requires_grad_()
    with pytest.raises(TraceError, match=r'transposed in place.*engine="rerun"'):
        remat(fun)(x)
    assert_bitwise(remat(fun, engine="rerun")(x), fun(x))


@pytest.mark.parametrize("engine", ["trace", "rerun", "auto"])
@pytest.mark.parametrize("wants", [False, True], ids=["weights alone", "input, too"])
def test_a_class_that_answers_no_question_is_refused(engine: Any, wants: bool) -> None:
    """As torch's for gradients of each example, captured or passed; vmap gives these."""
    layer = nn.Linear(4, 3).double()
    region: Any = remat(layer, engine=engine)
    x = seeded(2, 4).requires_grad_(wants)

    with pytest.raises(
        TraceError, match=r"ExpandedWeight: does not say .* map the grad"
    ):
        call_for_per_sample_grads(region)(x)
    weight = ExpandedWeight(layer.weight, 2, "sum")
    with pytest.raises(TraceError, match="ExpandedWeight: does not say"):
        remat(nn.functional.linear, engine=engine)(x, weight)
    call_for_per_sample_grads(layer)(x).sum().backward()
    each = torch.func.vmap(
        torch.func.grad(lambda w, x: remat(nn.functional.linear)(x, w).sum()), (None, 0)
    )
    expected: Any = layer.weight
    assert_bitwise(each(layer.weight.detach(), x.detach()), expected.grad_sample)
