"""A call that is recognized does what it would do if it were looked up, or is not one."""

import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn

from remat import remat
from remat._calls.routes import guard_of

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore::remat.RematWarning"),
]


def gradient(region, x):
    """The gradient of the sum of a region's result."""
    (found,) = torch.autograd.grad(region(x).sum(), x)
    return found


def grad(*shape, dtype=torch.float32):
    """A leaf of ones that wants a gradient."""
    return torch.ones(shape, dtype=dtype, requires_grad=True)


def written(*call):
    """The guard of a call that one recognizes."""
    guard = guard_of(*call)
    assert guard is not None
    return guard


ARGS = ({"a": grad(2, 3), "b": [torch.ones(3), 2]}, "mean")
KWARGS = {"scale": 1.0}


def changed(**changes):
    """The arguments with some of the parts replaced."""
    parts = {"a": ARGS[0]["a"], "v": torch.ones(3), "n": 2, "how": "mean"} | changes
    return ({"a": parts["a"], "b": [parts["v"], parts["n"]]}, parts["how"])


LIKE = {
    "the same": (ARGS, KWARGS),
    "other numbers": (changed(a=grad(2, 3), v=torch.zeros(3)), KWARGS),
}
UNLIKE = {
    "shape": (changed(a=grad(3, 3)), KWARGS),
    "strides": (changed(a=grad(3, 2).detach().t().requires_grad_()), KWARGS),
    "dtype": (changed(v=torch.ones(3).double()), KWARGS),
    "gradient": (changed(v=grad(3)), KWARGS),
    "no gradient": (changed(a=torch.ones(2, 3)), KWARGS),
    "subclass": (changed(a=nn.Parameter(torch.ones(2, 3))), KWARGS),
    "conjugate": (changed(v=torch.ones(3, dtype=torch.complex64).conj().imag), KWARGS),
    "number": (changed(n=3), KWARGS),
    "a float for an int": (changed(n=2.0), KWARGS),
    "a bool for an int": (changed(n=True), KWARGS),
    "a tensor for a number": (changed(n=torch.tensor(2)), KWARGS),
    "a number for a tensor": (changed(v=2), KWARGS),
    "text": (changed(how="sum"), KWARGS),
    "keyword's value": (ARGS, {"scale": -0.0}),
    "keyword's name": (ARGS, {"size": 1.0}),
    "a keyword less": (ARGS, {}),
    "an argument more": ((*ARGS, 1), KWARGS),
    "an argument less": (ARGS[:1], KWARGS),
    "a list for a dict": (([*ARGS[0].values()], "mean"), KWARGS),
    "a tuple for a list": ((ARGS[0] | {"b": (torch.ones(3), 2)}, "mean"), KWARGS),
    "a longer list": ((ARGS[0] | {"b": [torch.ones(3), 2, 2]}, "mean"), KWARGS),
    "order of keys": ((dict(reversed(ARGS[0].items())), "mean"), KWARGS),
    "a kind of dict": ((OrderedDict(ARGS[0]), "mean"), KWARGS),
}


@pytest.mark.parametrize("call", LIKE.values(), ids=LIKE)
def test_calls_that_differ_in_numbers_alone_are_recognized(call):
    """What comes back are the call's own tensors in the order of its leaves."""
    (tree, _), _ = call

    found = written(ARGS, KWARGS)(scaled, *call)

    assert found is not None
    tensors, roots = found
    assert [id(each) for each in tensors] == [id(tree["a"]), id(tree["b"][0])]
    assert roots == (scaled,)


@pytest.mark.parametrize("call", UNLIKE.values(), ids=UNLIKE)
def test_calls_that_differ_in_anything_else_are_not(call):
    """Metadata, containers, their keys and order, and the values of static leaves."""
    assert written(ARGS, KWARGS)(scaled, *call) is None


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast(torch.get_default_device().type, torch.bfloat16),
        torch.inference_mode,
    ],
    ids=["autocast", "inference mode"],
)
def test_what_tensors_are_under_other_modes_is_not_known(context):
    """The guard errs on the safe side."""
    guard = written(ARGS, KWARGS)
    with context():
        assert guard(scaled, ARGS, KWARGS) is None


@pytest.mark.parametrize(
    "tree",
    [{object()}, iter(()), {1: 2}.values(), type("Users", (), {})],
    ids=["set of objects", "iterator", "view of a dict", "class"],
)
def test_what_a_type_does_not_tell_is_not_simple(tree):
    """It is signed in full at each call, or refused."""
    assert guard_of((tree,), {}, (tree,)) is None
    assert guard_of((OrderedDict(a=1),), {}) is None


@pytest.mark.parametrize(
    "thing", [object(), nn.Linear(2, 2), len], ids=["object", "module", "function"]
)
def test_what_must_be_looked_into_is_told_by_its_type(thing):
    """It becomes a root; what is read of it is for the trace to check."""
    assert guard_of((grad(2), thing), {}) is None
    guard = written((grad(2), thing), {}, (thing,))

    found = guard(scaled, (grad(2), thing), {})

    assert found is not None
    assert found[1] == (scaled, thing)
    assert guard(scaled, (grad(2), object), {}) is None


def test_wrapped_tensors_are_not_simple():
    """Inside a transform every call is looked up."""
    found = []

    def loss(x):
        found.append(guard_of((x,), {}))
        return x.sum()

    torch.func.grad(loss)(torch.ones(2))

    assert found == [None]


def test_a_guard_keeps_nothing_alive():
    """Neither tensors nor containers."""
    tensor, tree = grad(2), {}
    tree["a"] = tensor
    guard = written((tree,), {})
    reference = weakref.ref(tensor)
    del tensor, tree
    gc.collect()

    assert reference() is None
    assert guard(scaled, ({"a": grad(2)},), {}) is not None


def counts(region):
    """Hits, misses and traces kept."""
    info = region.cache_info()
    return info.hits, info.misses, info.currsize


def scaled(x, by=2.0):
    """A function of a tensor and a number."""
    return (x * by).sin()


def test_recognized_calls_count_as_hits_and_are_right():
    """Layers that alternate between two signatures trace twice and are right each time."""
    region = remat(scaled)
    region.cache_clear()
    for step in range(6):
        for x in (grad(2), grad(3)):
            expected = 2 * (2 * torch.ones_like(x)).cos()
            assert torch.equal(gradient(region, x), expected)
        assert counts(region) == (2 * step, 2, 2)


def test_more_signatures_than_guards_are_looked_up():
    """Beyond the first few, calls are found by their key."""
    region = remat(scaled)
    region.cache_clear()
    for size in [*range(1, 21), *range(1, 21)]:
        x = grad(size)
        assert torch.equal(gradient(region, x), 2 * (2 * torch.ones(size)).cos())

    assert counts(region) == (20, 20, 20)


FACTOR = 2.0


def test_a_changed_global_is_seen_by_recognized_calls():
    """What a trace rests on is checked at each call, however the call was found."""

    def fun(x):
        return x * FACTOR

    global FACTOR
    region = remat(fun)
    try:
        for value in (2.0, 3.0, 3.0, 2.0):
            FACTOR = value
            assert gradient(region, grad(2)).tolist() == [value, value]
    finally:
        FACTOR = 2.0


@pytest.mark.parametrize(
    "switch",
    [
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
    ids=["attention kernels", "autocast"],
)
def test_other_numerics_trace_again(switch):
    """A recognized call under other switches is another call."""
    region = remat(scaled)
    region.cache_clear()
    for _ in range(2):
        region(grad(2))
    with switch():
        for _ in range(2):
            region(grad(2))
    region(grad(2))

    assert counts(region) == (3, 2, 2)


def test_recognized_calls_under_transforms_and_modes():
    """After plain calls, torch.func and a call without gradients go their own ways."""
    region = remat(scaled)
    x = grad(3)
    for _ in range(2):
        region(x)
    expected = torch.func.vmap(torch.func.grad(scaled))(torch.ones(3))

    assert torch.equal(
        torch.func.vmap(torch.func.grad(region))(torch.ones(3)), expected
    )
    with torch.no_grad():
        assert region(x).grad_fn is None


def test_like_tensors_are_told_apart_by_their_keys():
    """A dict in another order, whose values are alike in all but their numbers."""
    region = remat(lambda d: (d["p"] * d["q"].sin()).sum())
    p, q = grad(3), torch.full((3,), 2.0, requires_grad=True)
    for given in ({"p": p, "q": q}, {"p": p, "q": q}, {"q": q, "p": p}):
        (found,) = torch.autograd.grad(region(given), p)

        assert torch.equal(found, q.detach().sin())
