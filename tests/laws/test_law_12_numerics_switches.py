"""Law 12, numerics switches.

"Autocast and other numerics switches are part of the signature, and recomputation runs
under the forward's."
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from remat import chain, policies, remat, scan, schedules
from remat._torch import modes
from tests.laws.switches import HERE, arguments, bfloat16, mlp
from tests.support import assert_bitwise, deterministic, pairwise, seeded


def tied(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """One weight used twice: under autocast's cache it is cast once."""
    return torch.sin((torch.tanh(x @ w1) @ w2) @ w1) * 2


def autocast_inside(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Switches autocast on, and in a part of it off, by itself."""
    with torch.autocast(HERE, dtype=torch.bfloat16):
        h = torch.sin(x @ w1)
        with torch.autocast(HERE, enabled=False):
            h = torch.sin(h.float() @ w2)
        return torch.sin(h)


def written_in_place(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Writes through a view, which takes a second trace, beside a part without autocast."""
    h = x @ w1
    h.view(-1).mul_(2)
    with torch.autocast(HERE, enabled=False):
        h = torch.sin(h.float() @ w2)
    return torch.sin(h)


def autocast_off(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Computes in single precision whatever is around it."""
    with torch.autocast(HERE, enabled=False):
        return torch.sin(torch.tanh(x @ w1) @ w2)


def makes_constants(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Makes tensors of the default dtype, whose derivative depends on it."""
    ones = torch.full((4,), 0.1)
    return torch.sin(torch.sin(x @ w1 * ones) @ w2.to(torch.result_type(ones, x)) * 0.3)


@contextlib.contextmanager
def switched(
    read: Callable[[], Any], put: Callable[[Any], None], value: Any
) -> Iterator[None]:
    """Another value of a switch, for a while."""
    before = read()
    put(value)
    try:
        yield
    finally:
        put(before)


def default_dtype(dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    """Another default dtype, for a while."""
    return switched(torch.get_default_dtype, torch.set_default_dtype, dtype)


def matmul_precision(value: str) -> contextlib.AbstractContextManager[None]:
    """Another precision of float32 matmuls, for a while."""
    return switched(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, value
    )


Around = Callable[[], contextlib.AbstractContextManager[Any]]
SWITCHES: dict[str, Around] = {
    "autocast": lambda: torch.autocast(HERE, dtype=torch.bfloat16),
    "autocast_float16": lambda: torch.autocast(HERE, dtype=torch.float16),
    "autocast_no_cache": lambda: torch.autocast(
        HERE, dtype=torch.bfloat16, cache_enabled=False
    ),
    "default_dtype": lambda: default_dtype(torch.float64),
    "matmul_precision": lambda: matmul_precision("medium"),
    "deterministic": deterministic,
}
FUNS = {
    "mlp": mlp,
    "tied": tied,
    "autocast_inside": autocast_inside,
    "in_place": written_in_place,
    "constants": makes_constants,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "names": {"policy": policies.save_only_these_names("h*")},
    "everything": {"policy": policies.everything_saveable},
    "rerun": {"engine": "rerun"},
}


def value_and_gradients(
    fun: Any, around: Around, around_backward: Around = contextlib.nullcontext
) -> list[Tensor]:
    """The forward under one switch, the backward under another one."""
    leaves = arguments()
    with around():
        y = fun(*leaves)
    with around_backward():
        gradients = torch.autograd.grad(y, leaves, torch.cos(y.detach()))
    return [y.detach(), *gradients]


@pytest.mark.contract
@pytest.mark.parametrize(("name", "switch", "how"), pairwise(FUNS, SWITCHES, OPTIONS))
@pytest.mark.filterwarnings("ignore::remat.RematWarning")
def test_the_backward_recomputes_under_the_forwards_switch(
    name: str, switch: str, how: str
) -> None:
    """Forward under the switch, backward outside: bitwise plain's."""
    fun, around = FUNS[name], SWITCHES[switch]
    expected = value_and_gradients(fun, around)

    assert_bitwise(value_and_gradients(remat(fun, **OPTIONS[how]), around), expected)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("name", "switch", "engine"), pairwise(FUNS, SWITCHES, ["trace", "rerun"])
)
def test_a_switch_is_part_of_the_signature(name: str, switch: str, engine: Any) -> None:
    """Calls with and without the switch do not share a trace, in any order."""
    fun, around = FUNS[name], SWITCHES[switch]
    region = remat(fun, engine=engine)
    for now in (contextlib.nullcontext, around, contextlib.nullcontext, around):
        assert_bitwise(value_and_gradients(region, now), value_and_gradients(fun, now))


@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize(
    "around", [SWITCHES["matmul_precision"], deterministic], ids=["matmul", "det"]
)
def test_a_switch_in_the_backward_alone(around: Around, engine: Any) -> None:
    """What the caller switches on around the backward does not reach the recomputation."""
    region = remat(mlp, engine=engine)
    expected = value_and_gradients(mlp, contextlib.nullcontext, around)

    assert_bitwise(
        value_and_gradients(region, contextlib.nullcontext, around), expected
    )


_met: list[tuple[str, str, bool]] = []


def _note(step: str) -> None:
    precision = torch.get_float32_matmul_precision()
    _met.append((step, precision, torch.are_deterministic_algorithms_enabled()))


@torch.library.custom_op("remat_tests::noting", mutates_args=())
def noting(x: Tensor) -> Tensor:
    """A product that notes under which switches it runs, and so does its gradient."""
    _note("product")
    return x * 2


@torch.library.custom_op("remat_tests::noting_gradient", mutates_args=())
def noting_gradient(x: Tensor) -> Tensor:
    """The gradient of `noting`."""
    _note("gradient")
    return x * 2


for _operator in (noting, noting_gradient):
    _operator.register_fake(torch.empty_like)
noting.register_autograd(lambda _, cotangent: noting_gradient(cotangent))


AROUND: dict[str, Around] = {
    "nothing": contextlib.nullcontext,
    "high": lambda: matmul_precision("high"),
    "medium": lambda: matmul_precision("medium"),
    "deterministic": deterministic,
}


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize(
    ("forward", "backward"), list(itertools.permutations(AROUND, 2))
)
def test_what_a_backward_does_not_repeat_runs_under_its_own_switches(
    forward: str, backward: str, engine: Any
) -> None:
    """What it repeats runs under those of the forward; both as in plain torch."""

    def steps_of(fun: Callable[[Tensor], Tensor]) -> list[tuple[str, str, bool]]:
        _met.clear()
        x = seeded(3).requires_grad_()
        with AROUND[forward]():
            y = fun(x).sum()
        with AROUND[backward]():
            torch.autograd.grad(y, x)
        return list(_met)

    def fun(x: Tensor) -> Tensor:
        return noting(noting(x).sin()).sin()

    products, gradients = steps_of(fun)[:2], steps_of(fun)[2:]
    assert steps_of(remat(fun, engine=engine)) == [*products, *products, *gradients]


def by_default_device(x: Tensor) -> Tensor:
    """Asks where tensors are made, which on a CPU alone shows in no other way."""
    return torch.sin(torch.cos(x) * len(torch.get_default_device().type))


@contextlib.contextmanager
def set_for_good(device: str | None) -> Iterator[None]:
    """A default device that is set, not entered; the tests' own comes back."""
    before = (
        None if modes.function_modes().device is None else torch.get_default_device()
    )
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(before)


DEVICES: dict[str, Around] = {
    "entered": lambda: torch.device("meta:0"),
    "set": lambda: set_for_good("meta:0"),
    "none": lambda: set_for_good(None),
    "cpu": lambda: torch.device("cpu:0"),
}


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_the_default_device_is_part_of_the_signature(engine: Any) -> None:
    """A trace under one does not serve a call under another, in any order of calls."""
    fun, x = by_default_device, seeded(3).requires_grad_()
    region = remat(fun, engine=engine)
    for around in [contextlib.nullcontext, *DEVICES.values()] * 2:
        for _ in range(3):  # the third call of a kind takes the fast path
            with around():
                found, expected = region(x), fun(x)
            found.sum().backward()
            assert_bitwise(found.detach(), expected.detach())


@pytest.mark.standin
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_each_call_makes_its_tensors_on_the_default_device(engine: Any) -> None:
    region = remat(lambda x: (torch.sin(x) * 2, torch.ones(3) * 2), engine=engine)
    x = seeded(3).requires_grad_()
    for device in ("standin:1", "cpu", None, "standin:0") * 2:
        with set_for_good(device):
            expected = torch.ones(1).device
            assert [region(x)[1].device for _ in range(3)] == [expected] * 3


def test_the_same_default_device_takes_one_trace() -> None:
    """However it came about: entered, set, or entered inside of another one."""
    region, x = remat(lambda x: torch.sin(x) * 2), seeded(3).requires_grad_()
    for outer, inner in [("set", "entered"), ("set", "set"), ("cpu", "entered")]:
        with DEVICES[outer](), DEVICES[inner]():
            region(x)
            region(x)

    assert region.cache_info().misses == 1


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("where", ["backward", "second backward"])
def test_each_order_makes_its_tensors_where_the_forward_did(
    where: str, engine: Any
) -> None:
    """A later trace of the function is under the forward's default device, too."""

    def scaled(x: Tensor) -> Tensor:
        return torch.sin(torch.cos(x) * torch.full((3,), 0.5, dtype=x.dtype)) * x

    def second(fun: Any) -> list[Tensor]:
        x = seeded(3).requires_grad_()
        here, there = torch.device(x.device), torch.device("meta:0")
        with here:
            y = fun(x)
        with here if where == "second backward" else there:
            (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with there:
            return [first, *torch.autograd.grad(first.cos().sum(), x)]

    assert_bitwise(second(remat(scaled, engine=engine)), second(scaled))


def read_thrice(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Casts its input three times, as attention does for its queries, keys and values."""
    return torch.tanh(x @ w1) * (x @ w2) + x @ w1


def from_hidden_states(fun: Any) -> Any:
    """A region that reads what an operator made."""
    return lambda x, w1, w2: fun(x * 2, w1, w2)


@pytest.mark.contract
@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.filterwarnings("ignore::remat.RematWarning")
def test_autocast_casts_a_leaf_once_and_hidden_states_each_time(how: str) -> None:
    """In one region, in any order of calls: their gradients are summed in other precisions."""
    region = remat(read_thrice, **OPTIONS[how])
    around = SWITCHES["autocast"]
    apart = (lambda fun: fun), from_hidden_states
    expected = [value_and_gradients(place(read_thrice), around) for place in apart]

    for index in (0, 1, 1, 0, 0, 1):
        found = value_and_gradients(apart[index](region), around)
        assert_bitwise(found, expected[index])


def test_autocast_casts_captured_tensors_as_it_does_without_a_region() -> None:
    """A weight that the function reaches by name is one cast, a computed one many."""

    def of(fun: Any, *, is_computed: bool) -> Any:
        def around(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
            scale = w2 * 2 if is_computed else w2
            return fun(lambda x, w1: read_thrice(scale, w1, x.t() @ x))(x, w1)

        return around

    for is_computed in (False, True):
        plain, region = (of(fun, is_computed=is_computed) for fun in (_as_it_is, remat))
        expected = value_and_gradients(plain, SWITCHES["autocast"])

        assert_bitwise(value_and_gradients(region, SWITCHES["autocast"]), expected)


def _as_it_is(fun: Any) -> Any:
    return fun


@pytest.mark.parametrize("schedule", [None, schedules.Every(1)], ids=["none", "every"])
@pytest.mark.parametrize("how", ["scan", "chain"])
def test_autocast_casts_each_time_what_a_stack_hands_on(
    how: str, schedule: Any
) -> None:
    """The loop over the same steps is the oracle."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        return read_thrice(x, w, w.t()).float()

    def looped(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return step(step(x * 2, w1 + w2), w1 - w2)

    def stacked(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        weights = torch.stack([w1 + w2, w1 - w2])
        if how == "chain":
            stages = [lambda x, w=w: step(x, w) for w in weights.unbind()]
            return chain(stages, schedule=schedule)(x * 2)
        steps = lambda x, w: (step(x, w), None)  # noqa: E731
        return scan(steps, x * 2, weights, schedule=schedule)[0]

    expected = value_and_gradients(looped, SWITCHES["autocast"])

    assert_bitwise(value_and_gradients(stacked, SWITCHES["autocast"]), expected)


def in_force() -> dict[str, Any]:
    """Every switch but autocast, of which a program holds the casts."""
    return {
        "default_dtype": torch.get_default_dtype(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
    }


class Seen(TorchDispatchMode):
    """The switches that each operator runs under, with its name."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.rows.append((str(func.overloadpacket), in_force()))
        return func(*args, **(kwargs or {}))


RESTORED: dict[str, Around] = {
    "default_dtype": lambda: default_dtype(torch.float64),
    "matmul_precision": lambda: matmul_precision("medium"),
    "deterministic": deterministic,
    "warn_only": lambda: deterministic(warn_only=True),
    "flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    "efficient": lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
    "math": lambda: sdpa_kernel(SDPBackend.MATH),
}


@pytest.mark.contract
@pytest.mark.parametrize(
    ("switch", "where", "engine"),
    pairwise(RESTORED, ["forward", "backward"], ["trace", "rerun"]),
)
def test_recomputed_operators_see_the_forwards_switches(
    switch: str, where: str, engine: Any
) -> None:
    """Looked at from below, whichever of the two is switched; the caller's come back."""
    around, is_forward = RESTORED[switch], where == "forward"
    region = remat(mlp, engine=engine)
    leaves, before = arguments(), in_force()
    with around() if is_forward else contextlib.nullcontext():
        forward = in_force()
        y = region(*leaves)

    with contextlib.nullcontext() if is_forward else around():
        backward = in_force()
        torch.autograd.grad(y.sum(), leaves, retain_graph=True)
        with Seen() as seen:
            torch.autograd.grad(y.sum(), leaves)
        assert in_force() == backward != forward

    tanh = [found for name, found in seen.rows if name == "aten.tanh"]
    assert tanh == [forward]
    assert in_force() == before


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_autocast_under_func_grad(engine: Any) -> None:
    """Autocast around a transform, and inside it, reaches the region."""
    leaves = [leaf.detach() for leaf in arguments()]

    def gradients(fun: Any) -> Any:
        def loss(*leaves: Tensor) -> Tensor:
            with torch.autocast(HERE, dtype=torch.bfloat16):
                return fun(*leaves).float().sum()

        return torch.func.grad(loss, argnums=(0, 1, 2))(*leaves)

    found, expected = gradients(remat(mlp, engine=engine)), gradients(mlp)
    assert [g.dtype for g in found] == [torch.float32] * 3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.contract
def test_a_mapped_region_has_no_further_casts() -> None:
    """What runs without autocast inside does so under a transform that autocast is around."""
    x, w1, w2 = (leaf.detach() for leaf in arguments())

    def gradients(fun: Any) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            return fun(x, w1, w2).float().sum()

        with bfloat16:
            return torch.func.vmap(torch.func.grad(loss))(x)

    assert_bitwise(gradients(remat(autocast_off)), gradients(autocast_off))


def test_the_outputs_dtype_follows_autocast() -> None:
    """Half precision inside, single outside, through one region."""
    region = remat(lambda x, w: torch.relu(x @ w))
    x, w, _ = arguments()

    with bfloat16:
        assert region(x, w).dtype == torch.bfloat16
    assert region(x, w).dtype == torch.float32
    with bfloat16:
        assert region(x, w).dtype == torch.bfloat16


@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_what_autocast_casts_to_where_it_is_off_belongs_to_the_signature(engine: Any):
    """A function that switches it on, and names no dtype, gets that."""

    def plain(*leaves: Tensor) -> Tensor:
        with torch.autocast(HERE):
            return mlp(*leaves)

    region = remat(plain, engine=engine)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        off = functools.partial(torch.autocast, HERE, dtype=dtype, enabled=False)
        found = value_and_gradients(region, off)
        assert_bitwise(found, value_and_gradients(plain, off))
        assert found[0].dtype == dtype


def test_autocast_states_after_a_call_are_as_before() -> None:
    """Neither the forward nor the backward leaves autocast on."""
    leaves = arguments()
    with bfloat16:
        y = remat(mlp)(*leaves)
        assert torch.is_autocast_enabled(HERE)
    assert not torch.is_autocast_enabled(HERE)
    y.float().sum().backward()

    assert not torch.is_autocast_enabled(HERE)


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
def test_anomaly_mode_looks_at_a_region_from_outside(engine: Any) -> None:
    """A trace has no numbers to look at; nan in the gradient of a region is found."""
    region = remat(lambda x: (x.sqrt() * 0).sin(), engine=engine)
    before = torch.is_anomaly_enabled()

    with torch.autograd.set_detect_anomaly(True):
        x = seeded(3).square().requires_grad_()
        (found,) = torch.autograd.grad(region(x).sum(), x)
        assert torch.is_anomaly_enabled()
        with pytest.raises(RuntimeError, match="returned nan values"):
            region(torch.zeros(3, requires_grad=True)).sum().backward()
    assert torch.is_anomaly_enabled() == before
    assert_bitwise(found, torch.zeros_like(found))
