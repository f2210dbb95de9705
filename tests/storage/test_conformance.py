"""Every storage keeps the same contract: what comes back, when, and what it costs."""

import functools
import gc
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from remat import checkpoint_name, disabled, policies, remat, storage
from remat._errors import RematError
from remat._regions import forwards, waiting as waiting_module
from remat._regions.waiting import Waiting, wait
from remat._torch.tensors import same_bits
from remat.random import key
from remat.storage import AbstractStorage, Place, Stored, densely
from tests.storage.test_transfer import Fake, Side
from tests.support import count_operators, in_turn, seeded, tensors_in

pytestmark = pytest.mark.filterwarnings(
    "ignore::remat.RematWarning", "ignore:`torch.jit.script`"
)


FIRST = Place()


class Twice(AbstractStorage):
    """A user's storage: keeps the value's double, and counts."""

    is_exact: ClassVar[bool] = True
    count: ClassVar[int] = 0

    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        """The value's double, where doubling is exact."""
        type(self).count += 1
        if not value.dtype.is_floating_point or value.dtype.itemsize == 1:
            return Stored.whole(value)
        return Stored((value + value,), lambda parts: parts[0] / 2)


EXACT = {
    "keep": storage.Keep(),
    "sparse": storage.Sparse(0),
    "file": storage.Offload(path="."),
    "chain": storage.Sparse(0) >> storage.Offload(path="."),
    "own": Twice(),
    "streams": Side(Fake()),
}
LOSSY = {
    "cast": storage.Cast(torch.bfloat16),
    "quantize 8": storage.Quantize(8),
    "quantize 2": storage.Quantize(2, group_size=3),
    "stochastic": storage.Quantize(4, stochastic=True, key=key(0)),
    "cast and file": storage.Cast(torch.float16) >> storage.Offload(path="."),
}
STORAGES = EXACT | LOSSY
NAMES = [pytest.param(name, id=name) for name in STORAGES]
EXACT_NAMES = [pytest.param(name, id=name) for name in EXACT]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Files are made here, and here it is seen that none is left."""
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of which a half are zero."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    wide = torch.where(found > 0, found * 4, 0.0)
    return wide.to(torch.get_default_device(), dtype)


VALUES = {
    "0-d": lambda: numbers(),
    "empty": lambda: numbers(0, 3),
    "one": lambda: numbers(1),
    "odd": lambda: numbers(7, 37),
    "three dimensions": lambda: numbers(2, 3, 5),
    "transposed": lambda: numbers(3, 5).t(),
    "permuted": lambda: numbers(2, 3, 5).permute(1, 2, 0),
    "sliced": lambda: numbers(8, 6)[::2, 1:4],
    "expanded": lambda: numbers(1, 3).expand(4, 3),
    "channels last": lambda: numbers(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "all zero": lambda: torch.zeros(300),
    **{
        str(dtype): lambda dtype=dtype: numbers(5, 7, dtype=dtype)
        for dtype in (
            *(torch.float64, torch.float16, torch.bfloat16, torch.complex64),
            *(torch.int64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn),
            *(torch.uint16, torch.float8_e5m2fnuz),
        )
    },
    "one of eight bits": lambda: torch.tensor([0.0, 3.0, -0.0]).to(torch.float8_e5m2),
    "a key": lambda: key(7),
}


def back(value: Tensor, how: AbstractStorage) -> Tensor:
    """The value after it has waited."""
    waiting = wait(value, how, Place())
    return waiting.resume() if isinstance(waiting, Waiting) else waiting


@pytest.mark.contract
@pytest.mark.parametrize("name", NAMES)
def test_shape_dtype_and_strides_come_back(name: str) -> None:
    """Whatever is stored, and the caller's tensor is as it was."""
    for kind, make in VALUES.items():
        value = make()
        before = value.clone()

        found = back(value, STORAGES[name])

        assert (found.shape, found.dtype) == (value.shape, value.dtype), kind
        assert found.stride() == value.stride(), kind
        assert same_bits(value, before), kind


@pytest.mark.contract
@pytest.mark.parametrize("name", EXACT_NAMES)
def test_exact_storages_give_back_the_bits(name: str) -> None:
    """To the last one, signs of zeros and nan included."""
    for kind, make in VALUES.items():
        assert same_bits(back(make(), STORAGES[name]), make()), kind


SPECIAL = torch.tensor([0.0, -0.0, torch.nan, -torch.inf, 1e-45, 3.4e38] * 9)


@pytest.mark.contract
@pytest.mark.parametrize("name", ["keep", "sparse", "file", "chain"])
def test_special_numbers_keep_their_bits(name: str) -> None:
    """Zeros of both signs, infinities, nan, subnormal and huge numbers."""
    assert same_bits(back(SPECIAL, STORAGES[name]), SPECIAL)


@pytest.mark.contract
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64], ids=str)
def test_only_floating_numbers_are_rounded(dtype: torch.dtype, name: str) -> None:
    """Truth values, whole and complex numbers come back exactly from every storage."""
    value = numbers(300, dtype=dtype)

    assert same_bits(back(value, STORAGES[name]), value)


def function(w: Tensor, x: Tensor) -> Tensor:
    """A product, a name, and operators whose backwards read what they made."""
    h = checkpoint_name(torch.tanh(x @ w), "h")
    return (torch.relu(h @ w).sin() * torch.sigmoid(h)).sum(-1)


W, X = numbers(4, 4, dtype=torch.float64) / 4, numbers(3, 4, dtype=torch.float64) + 1


def region(name: str) -> Any:
    """The function with all of its intermediate values and its inputs in a storage."""
    how = STORAGES[name]
    policy = policies.everything_saveable.stored(how)
    return remat(function, policy=policy, saved_inputs=how)


def plain_gradients(f: Any) -> tuple[Tensor, ...]:
    """By `.backward()`, twice over one graph."""
    w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
    y = f(w, x.sin()).sum()
    first = torch.autograd.grad(y, (w, x), retain_graph=True)
    again = torch.autograd.grad(y, (w, x))
    assert all(map(torch.equal, first, again))
    return first


def second_gradients(f: Any) -> tuple[Tensor, ...]:
    """The gradients of a function of a gradient."""
    w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(w, x.sin()).sum(), w, create_graph=True)
    return torch.autograd.grad(first.sin().sum(), (w, x))


def total(f: Any) -> Any:
    """The sum of what a function gives."""
    return lambda w, x: f(w, x).sum()


def forward_over_reverse(f: Any) -> Tensor:
    """A Hessian-vector product."""
    return torch.func.jvp(lambda w: torch.func.grad(total(f))(w, X), (W,), (W,))[1]


def per_example(f: Any) -> Tensor:
    """Gradients for each row."""
    return torch.func.vmap(torch.func.grad(total(f)), (None, 0))(W, X)


WAYS = {
    "backward": plain_gradients,
    "double backward": second_gradients,
    "grad": lambda f: torch.func.grad(total(f), (0, 1))(W, X),
    "grad of grad": lambda f: torch.func.grad(
        lambda w: torch.func.grad(total(f))(w, X).sin().sum()
    )(W),
    "vmap of grad": per_example,
    "jvp of grad": forward_over_reverse,
    "nested": lambda f: torch.func.grad(total(remat(lambda w, x: f(w, x) * 2)))(W, X),
    "backward through vmap": lambda f: plain_gradients(
        lambda w, x: torch.func.vmap(f, (None, 0))(w, x)
    ),
}


COARSE = ("quantize 8", "quantize 2", "stochastic")
SECOND_ORDER = ("double backward", "grad of grad", "jvp of grad")
#: A storage of each kind and each transform in turn, the others where these lead to other code.
UNDER = [
    *in_turn(["sparse", "own", "streams", "cast", "quantize 8"], WAYS),
    *in_turn(
        ["keep", "file", "chain", "quantize 2", "stochastic", "cast and file"],
        ["backward", "grad of grad", "vmap of grad"],
    ),
]


@functools.cache
def kept(way: str) -> Any:
    """What a region gives in which nothing is stored."""
    return WAYS[way](remat(function))


@pytest.mark.contract
@pytest.mark.parametrize(("name", "way"), UNDER)
def test_gradients_under_every_transform(name: str, way: str) -> None:
    """Equal for exact storages, near for lossy ones as far as their rounding is small."""
    found = WAYS[way](region(name))
    near: Any = {"rtol": 0.5, "atol": 0.6} if name in LOSSY else {}
    if name in COARSE and way in SECOND_ORDER:
        # A second derivative reads derivatives of what was rounded: any number may come.
        assert all(each.isfinite().all() for each in tensors_in(found))
    else:
        torch.testing.assert_close(found, kept(way), **near)


@pytest.mark.parametrize("name", [*EXACT, "cast", "quantize 8"])
def test_a_value_waits_for_the_backward_alone(name: str) -> None:
    """After it, nothing of what waited is alive."""
    seen: list[weakref.ref[Tensor]] = []

    def noted(*args: Any) -> Tensor:
        waiting = wait(*args)
        if isinstance(waiting, Waiting):
            seen.extend(map(weakref.ref, waiting.stored.tensors))
        return waiting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forwards, "wait", noted)
        patch.setattr(waiting_module, "wait", noted)
        w = W.clone().requires_grad_()
        y = region(name)(w, X).sum()
        assert all(each() is not None for each in seen)
        y.backward()
    gc.collect()

    assert seen or name == "keep"
    assert all(each() is None for each in seen)


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_holds_what_its_last_link_made_alone(name: str) -> None:
    """What an earlier link made is gone as soon as the next one has stored it."""
    parts: list[weakref.ref[Tensor]] = []

    class Copied(AbstractStorage):
        """Keeps a copy, and notes what it was given."""

        def store(self, value: Tensor, place: Place = FIRST) -> Stored:
            parts.append(weakref.ref(value))
            return Stored((value.clone(),), lambda parts: parts[0].clone())

    value = numbers(7, 37)
    stored = (STORAGES[name] >> Copied()).store(value)

    assert parts
    assert all(part() is None or part() is value for part in parts)
    torch.testing.assert_close(stored.restore(), back(value, STORAGES[name]))


def test_nothing_is_stored_without_a_gradient() -> None:
    """Under no_grad, without a tensor that wants one, and where regions are off."""
    own = region("own")
    Twice.count = 0
    with torch.no_grad():
        own(W.clone().requires_grad_(), X)
    own(W, X)
    with disabled():
        own(W.clone().requires_grad_(), X)
    assert Twice.count == 0
    own(W.clone().requires_grad_(), X)
    assert Twice.count > 0


def test_no_operator_slices_what_repeats_no_number() -> None:
    """A dense value is only permuted; of an expanded one, one row is taken."""
    dense, expanded = seeded(3, 4), seeded(1, 4).expand(3, 4)

    assert set(count_operators(densely, dense, Place())) == {"aten.permute"}
    assert "aten.slice" in count_operators(densely, expanded, Place())


def test_places_tell_values_and_calls_apart() -> None:
    """Each value of a region has an index, each call a number."""
    places: list[Place] = []

    class Noting(Twice):
        def store(self, value: Tensor, place: Place = FIRST) -> Stored:
            places.append(place)
            return super().store(value, place)

    own = remat(function, policy=policies.everything_saveable.stored(Noting()))
    for _ in range(2):
        own(W.clone().requires_grad_(), X)

    half = len(places) // 2
    found = [Place(each.index, each.call) for each in places]
    assert found == [Place(k, 0) for k in range(half)] + [
        Place(k, 1) for k in range(half)
    ]


def test_inputs_are_chosen_by_path() -> None:
    """A path or a glob names them; a storage for all leaves parameters as they are."""

    def f(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (x @ params["up"]).sin() @ params["down"]

    params = {
        "up": torch.nn.Parameter(W.clone()),
        "down": W.clone().requires_grad_(),
    }
    half = storage.Cast(torch.bfloat16)
    x = X.clone().requires_grad_()
    stored = {
        label: [
            residual.path
            for residual in remat(f, saved_inputs=given).saved_residuals(params, x)
            if residual.storage == half
        ]
        for label, given in {
            "all": half,
            "one": {"x": half},
            "glob": {"params.*": half},
            "first match": {"params.up": storage.Keep(), "*": half},
        }.items()
    }

    assert stored == {
        "all": ["params.down", "x"],
        "one": ["x"],
        "glob": ["params.up", "params.down"],
        "first match": ["params.down", "x"],
    }


def test_paths_of_what_args_takes() -> None:
    """They count from 0, whatever parameters come after them."""

    def f(x: Tensor, *others: Tensor, scale: Tensor, **more: Tensor) -> Tensor:
        for each in (*others, *more.values()):
            x = x * each.sin()
        return x * scale.sin()

    half = storage.Cast(torch.bfloat16)
    given = [numbers(4).requires_grad_() for _ in range(6)]
    by_name = {"scale": given[4], "last": given[5]}
    found = {
        path: [
            residual.path
            for residual in remat(f, saved_inputs={path: half}).saved_residuals(
                *given[:4], **by_name
            )
            if residual.storage == half
        ]
        for path in ("others.0", "others.2", "scale", "last")
    }

    assert found == {path: [path] for path in found}


def test_a_named_input_waits_as_the_policy_says() -> None:
    """As in JAX, where naming an argument lets it be offloaded; `saved_inputs` goes first."""

    def f(w: Tensor, x: Tensor) -> Tensor:
        w, x = checkpoint_name(w, "w"), checkpoint_name(x, "x")
        return (x.T.sin().T @ w).sin()

    half = storage.Cast(torch.bfloat16)
    named = policies.save_only_these_names("x").stored(half)
    w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
    asked: list[Any] = []

    def callable_policy(value: policies.Value) -> Any:
        asked.append((value.op, value.names, value.flops))
        return policies.Save(half) if "x" in value.names else False

    for policy in (named, callable_policy):
        region = remat(f, policy=policy)
        found = region.saved_residuals(w, x)
        assert {each.path: each.storage for each in found if each.path} == {
            "w": storage.Keep(),
            "x": half,
        }
        y = region(w, x)
        node: Any = y.grad_fn
        waiting = [each for each in node.saved_tensors if type(each) is Waiting]
        assert [each.stored.size_bytes for each in waiting] == [x.numel() * 2]
        y.sum().backward()
    assert (None, ("x",), 0) in asked
    region = remat(f, policy=named, saved_inputs={"x": storage.Sparse()})
    storages = {each.path: each.storage for each in region.saved_residuals(w, x)}
    assert storages["x"] == storage.Sparse()


def test_a_stored_input_may_be_changed() -> None:
    """What waits is a copy: nothing of the caller's is read in the backward."""
    x = X.clone()
    w = W.clone().requires_grad_()
    expected = torch.autograd.grad(function(w, x).sum(), w)
    y = remat(function, saved_inputs={"x": storage.Offload(path=".")})(w, x)
    x.zero_()

    assert torch.equal(torch.autograd.grad(y.sum(), w)[0], expected[0])


def test_a_stored_input_that_reaches_nothing_has_no_gradient() -> None:
    """As in plain torch, not zeros: an optimizer leaves alone what has none."""
    used, unused = (seeded(8, seed=k).requires_grad_() for k in range(2))
    region = remat(
        lambda used, unused: used.sin(), saved_inputs=storage.Cast(torch.bfloat16)
    )

    for _ in range(2):
        region(used, unused).sum().backward()

    assert used.grad is not None
    assert unused.grad is None


def test_the_same_input_in_a_residual_stream() -> None:
    """`x + f(x)` with a stored x has the gradient of both branches."""
    x = X.clone().requires_grad_()
    own = remat(function, saved_inputs=storage.Sparse(0))
    found = torch.autograd.grad((x.sum(-1) + own(W, x)).sum(), x)
    expected = torch.autograd.grad((x.sum(-1) + function(W, x)).sum(), x)

    assert torch.equal(found[0], expected[0])


def test_a_waiting_value_is_not_to_be_read() -> None:
    """Saved-tensor hooks that compute with it are told so."""
    own = region("cast")
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t + 1, lambda t: t)
    with hooks, pytest.raises(RematError, match="reads a value while it waits"):
        own(W.clone().requires_grad_(), X)


def test_a_value_that_its_storage_leaves_alone_is_saved_as_itself() -> None:
    """Saved-tensor hooks may read it."""
    here = storage.Offload(device="cpu")
    own = remat(function, policy=policies.everything_saveable.stored(here))
    w, x = W.clone().requires_grad_(), X.clone().requires_grad_()

    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        found = torch.autograd.grad(own(w, x).sum(), (w, x))

    assert all(
        map(torch.equal, found, torch.autograd.grad(function(w, x).sum(), (w, x)))
    )


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_have_no_numbers_to_store(name: str) -> None:
    """A region runs on them under every storage, as plain code does."""
    with FakeTensorMode():
        w, x = torch.ones(4, 4, requires_grad=True), torch.ones(3, 4)
        (found,) = torch.autograd.grad(region(name)(w, x).sum(), w)

    assert found.shape == w.shape


def test_verification_compares_exact_storages_alone() -> None:
    """What is rounded on purpose is no failed recomputation."""
    for name in ("cast", "sparse"):
        policy = policies.everything_saveable.stored(STORAGES[name])
        own = remat(function, policy=policy, verify=True)
        own(W.clone().requires_grad_(), X).sum().backward()


def test_the_other_engine_refuses() -> None:
    """It runs the function again on its own arguments."""
    wrong: Any = {0: storage.Keep()}
    with pytest.raises(
        TypeError, match=r'names arguments by strings, such as "x", not by 0'
    ):
        remat(torch.sin, saved_inputs=wrong)
    with pytest.raises(ValueError, match=r"saved_inputs=\.\.\.\): has no effect"):
        remat(function, engine="rerun", saved_inputs=storage.Cast(torch.bfloat16))
