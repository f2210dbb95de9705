"""Storage values compare, hash, pickle and print as the code that makes them."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, final

import pytest
import torch
from torch import Tensor

from remat import RematError, checkpoint_name, policies, random, remat, storage
from remat.storage import (
    AbstractStorage,
    Cast,
    Chain,
    Keep,
    Offload,
    Place,
    Quantize,
    Shard,
    Sparse,
    Stored,
)


class FakeMesh:
    """Stands for a device mesh, so that no process group is needed."""

    def __init__(self, ndim: int = 1, names: tuple[str, ...] | None = ("tp",)) -> None:
        self.ndim = ndim
        self.mesh_dim_names = names

    def __repr__(self) -> str:
        return "mesh"


MESH: Any = FakeMesh()
NAMESPACE = {**vars(storage), "torch": torch, "mesh": MESH}
FIRST = Place()

EACH = [
    Keep(),
    Offload(),
    Offload("cuda:1", pin=False, min_bytes=1, max_bytes=2, prefetch=0, path="/tmp"),
    Shard(MESH),
    Shard(MESH, "batch (tp seq) d", replicated="trust"),
    Cast(torch.bfloat16),
    Quantize(8),
    Quantize(2, group_size=64),
    Quantize(4, stochastic=True, key=random.key(3)),
    Sparse(),
    Sparse(0),
    Cast(torch.float16) >> Offload(),
    Sparse() >> Quantize(4) >> Offload(),
]

each_value = pytest.mark.parametrize("value", EACH, ids=repr)


@each_value
def test_repr_rebuilds(value: AbstractStorage):
    """Evaluating what is printed gives an equal value."""
    assert eval(repr(value), NAMESPACE) == value


@each_value
def test_copies_are_equal(value: AbstractStorage):
    """A copy compares and hashes like the original."""
    other = copy.copy(value)

    assert other == value
    assert hash(other) == hash(value)


@pytest.mark.parametrize(
    "value", [value for value in EACH if "mesh" not in repr(value)], ids=repr
)
def test_pickles(value: AbstractStorage):
    """A value comes back equal from pickle."""
    assert pickle.loads(pickle.dumps(value)) == value


def test_unlike_values_differ():
    """No two of the values above are equal."""
    assert len(set(EACH)) == len(EACH)


@each_value
def test_values_are_frozen(value: AbstractStorage):
    """No field can be set."""
    for field in fields(value):  # type: ignore[arg-type]
        with pytest.raises(AttributeError, match="cannot assign"):
            setattr(value, field.name, None)


def test_a_repr_shows_every_field():
    """The printed form leaves no default out."""
    assert repr(Offload()) == (
        "Offload(device='cpu', pin=True, min_bytes=0, max_bytes=None, prefetch=1, "
        "path=None)"
    )


def test_chaining_is_associative():
    """Brackets around `>>` do not count."""
    a, b, c = Cast(torch.float16), Sparse(), Offload()

    assert (a >> b) >> c == a >> (b >> c) == Chain((a, b, c))


def test_keys_compare_by_their_numbers():
    """Two quantizers with equal keys are equal, wherever the keys were made."""
    quantizer = Quantize(2, stochastic=True, key=random.key(3))
    other = Quantize(2, stochastic=True, key=random.key(3, device="cpu"))

    assert quantizer == other
    assert hash(quantizer) == hash(other)
    assert quantizer != Quantize(2, stochastic=True, key=random.key(4))
    assert quantizer != Sparse()


@pytest.mark.parametrize(
    "key",
    [(), (1,), (1, 2, 3), (1.5, 2), (True, 0), (-1, 2), (2**64, 0), ("a", 1)],
    ids=str,
)
def test_what_is_no_key_is_refused(key: Any):
    """Where the quantizer is made, not where it draws; a tensor is judged by its numbers."""
    with pytest.raises(ValueError, match="A key is two whole numbers of 64 bits"):
        Quantize(2, stochastic=True, key=key)
    with pytest.raises(ValueError, match=r"Quantize\(key=...\): got a tensor"):
        Quantize(2, stochastic=True, key=torch.zeros(len(key)))


LONG = "Arguments are not converted: options are compared, hashed and printed."
TYPE_ERRORS: dict[str, tuple[str, str]] = {
    "Offload(3)": ("Offload(device=...)", "a device as a string, as in `str(device)`"),
    "Offload(pin=1)": ("Offload(pin=...)", "True or False"),
    "Offload(min_bytes=1.5)": ("Offload(min_bytes=...)", "an int of at least 0"),
    "Offload(min_bytes=True)": ("Offload(min_bytes=...)", "an int of at least 0"),
    "Offload(max_bytes='1')": ("Offload(max_bytes=...)", "an int of at least 0"),
    "Offload(prefetch=None)": ("Offload(prefetch=...)", "an int of at least 0"),
    "Offload(path=1)": (
        "Offload(path=...)",
        "a folder as a string, as in `str(path)`, or None",
    ),
    "Shard(mesh, 3)": ("Shard(pattern=...)", 'a string such as "batch (tp seq) d"'),
    "Cast('float16')": ("Cast(dtype=...)", "a dtype of torch"),
    "Quantize('8')": ("Quantize(bits=...)", "8, 4 or 2"),
    "Quantize(8, 2.0)": ("Quantize(group_size=...)", "an int of at least 1"),
    "Quantize(8, stochastic=1)": ("Quantize(stochastic=...)", "True or False"),
    "Quantize(8, key=1)": ("Quantize(key=...)", "a key of `remat.random`, or None"),
    "Sparse('a')": ("Sparse(min_saving=...)", "a number from 0 to below 1, as in 0.25"),
    "Keep() >> 3": (
        "storage >> storage",
        "instances of the classes of `storage`, as in `Sparse() >> Keep()`",
    ),
}


@pytest.mark.parametrize("code", TYPE_ERRORS)
def test_wrong_types_are_refused(code: str):
    """The message says the argument, what it got, why, and what to pass."""
    where, wanted = TYPE_ERRORS[code]

    with pytest.raises(TypeError) as caught:
        eval(code, NAMESPACE)

    message = str(caught.value)
    assert message.startswith(f"{where}: got ")
    assert f". {LONG} Pass {wanted}." in message


VALUE_ERRORS: dict[str, str] = {
    "Offload('nowhere')": "Offload(device=...): got 'nowhere'. torch knows no device of "
    'that name. Pass "cpu", or an accelerator by its name and number.',
    "Offload(min_bytes=-1)": "Offload(min_bytes=...): got -1. A count below 0 has no "
    "meaning here. Pass an int of at least 0.",
    "Offload(prefetch=-1)": "Offload(prefetch=...): got -1. A count below 0 has no "
    "meaning here. Pass an int of at least 0.",
    "Offload(min_bytes=2, max_bytes=1)": "Offload(max_bytes=...): got 1. With "
    "min_bytes=2 no value would be offloaded. Pass a `max_bytes` that is not below "
    "`min_bytes`, or None.",
    "Shard(mesh, 'batch seq d')": "Shard(pattern=...): got 'batch seq d'. The mesh's "
    'dimension is "tp", and one axis must have that name. Name the axis that is cut, '
    'as in "batch (tp seq) d".',
    "Shard(mesh, 'tp (tp seq) d')": "Shard(pattern=...): got 'tp (tp seq) d'. einops "
    'cannot read it: Indexing expression contains duplicate dimension "tp". Write the axes '
    'as in "batch (tp seq) d".',
    "Shard(mesh, 'b (a tp c)')": "Shard(pattern=...): got 'b (a tp c)'. \"tp\" is "
    "between other names, so there is no way to tell their lengths. Write it first or last in its axis, "
    'as in "batch (tp seq) d".',
    "Shard(nameless, 'batch seq')": "Shard(pattern=...): got 'batch seq'. The mesh "
    "dimension has no name, so no axis of the pattern can refer to it. Make the mesh with "
    "`mesh_dim_names=...`, or pass None.",
    "Shard(grid)": "Shard(mesh=...): got mesh. It has 2 dimensions, and a value is cut "
    'along one. Pick the dimension by its name, as in `mesh["tp"]`.',
    "Shard(mesh, replicated='no')": "Shard(replicated=...): got 'no'. Sharding needs the "
    'same value on all ranks. Pass "check" to compare the ranks, or '
    '"trust" to trust them.',
    "Cast(torch.int8)": "Cast(dtype=...): got torch.int8. A cast to it would truncate "
    "numbers instead of rounding them. Pass a floating dtype such as torch.bfloat16, or use "
    "`Quantize`.",
    "Quantize(1)": "Quantize(bits=...): got 1. Only these pack evenly into "
    "bytes and keep more than the sign. Pass 8, 4 or 2.",
    "Quantize(8, 0)": "Quantize(group_size=...): got 0. A count below 1 has no meaning "
    "here. Pass an int of at least 1.",
    "Quantize(8, stochastic=True)": "Quantize(stochastic=...): got True. Random rounding "
    "needs a key, because it uses no hidden generator. Pass "
    "`key=remat.random.key(seed)`, or `stochastic=False`.",
    "Quantize(8, key=key)": "Quantize(key=...): got a tensor uint64[2]. Without "
    "`stochastic=True` the key would have no effect. Pass `stochastic=True`, or no key.",
    "Sparse(1)": "Sparse(min_saving=...): got 1. It is the fraction of the bytes to be "
    "saved, which is never all of them. Pass a number from 0 to below 1, as in 0.25.",
    "Sparse(True)": "Sparse(min_saving=...): got True. It is the fraction of the bytes to be "
    "saved, which is never all of them. Pass a number from 0 to below 1, as in 0.25.",
}


@pytest.mark.parametrize("code", VALUE_ERRORS)
def test_senseless_values_are_refused(code: str):
    """The message has its four parts, word for word."""
    meshes = {"grid": FakeMesh(ndim=2), "nameless": FakeMesh(names=None)}

    with pytest.raises(ValueError, match="got") as caught:
        eval(code, {**NAMESPACE, **meshes, "key": random.key(0, device="cpu")})

    assert str(caught.value) == VALUE_ERRORS[code]


@pytest.mark.parametrize(
    ("dtype", "count", "waits"),
    [
        (torch.float32, 46, 192),
        (torch.float32, 47, 256),
        (torch.bool, 1, 64),
        (torch.complex128, 1, 1024),
    ],
    ids=str,
)
def test_sparse_takes_what_spares_enough(dtype: torch.dtype, count: int, waits: int):
    """The numbers and a bit for each of 64 places, or else the whole value."""
    value = (torch.arange(64) < count).to(dtype)

    stored = Sparse(min_saving=0.25).store(value)

    assert stored.size_bytes == waits
    assert torch.equal(stored.restore(), value)


def test_a_mesh_is_needed():
    """What is no mesh is refused by type."""
    with pytest.raises(TypeError) as caught:
        Shard("tp")  # type: ignore[arg-type]

    assert str(caught.value) == (
        "Shard(mesh=...): got 'tp', of type str. The ranks that share a value are those "
        'of a device mesh. Pass `init_device_mesh(...)["tp"]` of `torch.distributed`.'
    )


@final
@dataclass(frozen=True)
class Careless(AbstractStorage):
    """A storage of the user's own that does not give back what it was given."""

    found: Callable[[Tensor], Any]

    is_exact: ClassVar[bool] = True

    def store(self, value: Tensor, place: Place = FIRST) -> Any:
        return self.found(value)


CARELESS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "dtype": (
        lambda value: Stored((value.clone(),), lambda parts: parts[0].double()),
        r"float32\[2, 5\] on .* in Careless: came back .* as float64\[2, 5\] on ",
    ),
    "shape": (
        lambda value: Stored((value.clone(),), lambda parts: parts[0][1:]),
        r"came back from its storage as float32\[1, 5\]",
    ),
    "order": (
        lambda value: Stored((value.clone(),), lambda parts: parts[0].t()),
        r"came back from its storage as float32\[5, 2\]",
    ),
    "device": (
        lambda value: Stored((value.clone(),), lambda parts: parts[0].to("meta")),
        r'came back from its storage as float32\[2, 5\] on "meta"',
    ),
    "no tensor": (
        lambda value: Stored((value.clone(),), list),  # type: ignore[arg-type]
        r"came back from its storage as list",
    ),
    "nothing": (lambda value: None, r"Careless\.store: returned NoneType"),
    "a tensor": (lambda value: value.clone(), r"returned Tensor, .* Stored\.whole"),
    "a tensor as parts": (
        lambda value: Stored(value.clone(), lambda parts: parts[0]),  # type: ignore[arg-type]
        r"returned Stored with a Tensor in place of parts",
    ),
    "sparse parts": (
        lambda value: Stored((value.to_sparse(),), lambda parts: parts[0].to_dense()),
        r"returned Stored with a torch\.sparse_coo tensor among its parts\. .* dense",
    ),
    "other parts": (
        lambda value: Stored((value.cpu().numpy(),), lambda parts: value),  # type: ignore[arg-type]
        r"returned Stored with a ndarray among its parts",
    ),
    "a changed value": (
        lambda value: Stored((value.mul_(2),), lambda parts: parts[0] / 2),
        r"Careless\.store: changed the value float32\[2, 5\] on ",
    ),
    "changed parts": (
        lambda value: Stored((value * 2,), lambda parts: parts[0].div_(2)),
        r"`decode` of a storage: changed one of the stored parts",
    ),
}


@pytest.mark.contract
@pytest.mark.parametrize(("found", "text"), CARELESS.values(), ids=CARELESS)
@pytest.mark.parametrize("is_link", [False, True], ids=["alone", "in a chain"])
def test_a_storage_that_breaks_its_contract_is_told_so(
    found: Any, text: str, is_link: bool
) -> None:
    """Another form, or a changed value, would be a gradient of other numbers."""
    x = torch.randn(2, 5, requires_grad=True)
    named = policies.save_only_these_names("h")
    policy = named.stored(Keep() >> Careless(found) if is_link else Careless(found))
    region = remat(lambda x: checkpoint_name(x.sin(), "h").exp(), policy=policy)

    with pytest.raises(RematError, match=text):
        region(x * 1).cos().sum().backward()


class Silent(AbstractStorage):
    """A storage of the user's own that says nothing of what it promises."""

    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        return Stored((value.half(),), lambda parts: parts[0].float())


class Stating(Silent):
    """One whose `held` returns nothing."""

    def held(self, meta: Any) -> Any:
        return None


@dataclass
class Unhashable(Silent):
    """One with `__eq__` and no `__hash__`."""


@dataclass(frozen=True)
class Columns(AbstractStorage):
    """One that gives back a matrix in another order in memory."""

    def store(self, value: Tensor, place: Place = FIRST) -> Stored:
        if value.dim() != 2:
            return Stored.whole(value)
        return Stored((value.t().contiguous(),), lambda parts: parts[0].t())


def test_what_comes_back_may_lie_otherwise_in_memory():
    """Also where a view of the same numbers, of another shape, waits with it."""
    x = torch.randn(2, 6, requires_grad=True)

    def viewed(x: Tensor) -> Tensor:
        y = x * 2
        return (y.sin() * y.view(-1).cos().view(2, 6).exp()).sum()

    policy = policies.everything_saveable.stored(Columns())
    (found,) = torch.autograd.grad(remat(viewed, policy=policy)(x), x)

    assert torch.equal(found, torch.autograd.grad(viewed(x), x)[0])


def sines(x: Tensor) -> Tensor:
    """A named value, and one that reads it."""
    return checkpoint_name(x.sin(), "h").exp().sum()


def test_a_storage_that_says_nothing_is_taken_for_a_lossy_one():
    """The backward runs, and nothing is compared to the last bit."""
    policy = policies.save_only_these_names("h").stored(Silent())
    x = torch.randn(2, 5, requires_grad=True)

    remat(sines, policy=policy, verify=True)(x).backward()

    assert x.grad is not None
    torch.testing.assert_close(x.grad, x.cos() * x.sin().exp(), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("is_link", [False, True], ids=["alone", "in a chain"])
def test_what_is_held_is_checked(is_link: bool):
    """The error says what `held` returned, and what it has to return."""
    how = Keep() >> Stating() if is_link else Stating()
    policy = policies.save_only_these_names("h").stored(how)
    look = remat(sines, policy=policy).saved_residuals

    with pytest.raises(
        RematError, match=r"^Stating\.held: returned NoneType, not `storage"
    ):
        look(torch.randn(2, 5, requires_grad=True))


def test_a_storage_that_cannot_be_hashed_is_refused():
    """Wherever it is given, before anything is looked up by it."""
    text = r"which cannot be hashed\. Traced .* Give its class `__hash__` beside"

    with pytest.raises(TypeError, match=r"^Save\(storage=\.\.\.\): got .*" + text):
        policies.Save(Unhashable())
    with pytest.raises(TypeError, match=r"\.stored\(\.\.\.\): got .*" + text):
        policies.everything_saveable.stored(Unhashable())
    for inputs in (Unhashable(), {"x": Unhashable()}):
        with pytest.raises(TypeError, match=r"^remat\(saved_inputs.*" + text):
            remat(sines, saved_inputs=inputs)
