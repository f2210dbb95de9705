"""Keys and draws under vmap, jvp and torch.compile: the bits of the calls one by one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from remat import random

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

KEYS = random.split(random.key(4), 3)
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "split": lambda key: random.split(key, 4),
    "fold_in": lambda key: random.fold_in(key, 7),
    "bits": lambda key: random.bits(key, (5, 2)),
    "uniform": lambda key: random.uniform(key, (5, 2), minval=-1.0),
    "normal": lambda key: random.normal(key, (5, 2), dtype=torch.float64),
    "scalar": random.normal,
    "truncated_normal": lambda key: random.truncated_normal(key, (5, 2)),
    "bernoulli": lambda key: random.bernoulli(key, (5, 2), p=0.3),
    "randint": lambda key: random.randint(key, (5, 2), maxval=9, dtype=torch.int64),
    "permutation": lambda key: random.permutation(key, 9),
    "shuffle": lambda key: random.permutation(key, torch.arange(9.0)),
    "categorical": lambda key: random.categorical(key, (6,), logits=torch.arange(4.0)),
    "gumbel": lambda key: random.gumbel(key, (5, 2)),
    "dropout": lambda key: random.dropout(key, torch.ones(5, 2), 0.5),
}
each_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


def one_by_one(f: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return torch.stack([f(*each) for each in zip(*args, strict=True)])


@each_draw
@pytest.mark.parametrize("dim", [0, 1])
def test_mapped_keys(draw: Callable[[Tensor], Tensor], dim: int) -> None:
    """Each key has its own stream, wherever the mapped dimension is."""
    found = vmap(draw, in_dims=dim)(KEYS.movedim(0, dim))

    assert torch.equal(found, one_by_one(draw, KEYS))


@each_draw
def test_no_keys_are_mapped_to_no_numbers(draw: Callable[[Tensor], Tensor]) -> None:
    """Of the shape and dtype that the numbers of a key have."""
    found, one = vmap(draw)(KEYS[:0]), draw(KEYS[0])

    assert found.shape == (0, *one.shape)
    assert found.dtype == one.dtype


@each_draw
def test_twice_mapped_keys(draw: Callable[[Tensor], Tensor]) -> None:
    """vmap in vmap, the outer one over the last dimension."""
    table = vmap(lambda key: random.split(key, 2))(KEYS)

    found = vmap(vmap(draw), in_dims=1)(table)

    rows = [one_by_one(draw, table[:, place]) for place in range(2)]
    assert torch.equal(found, torch.stack(rows))


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0), (1, 0)])
def test_mapped_fold_in(in_dims: Any) -> None:
    """Over the keys, over the numbers, and over both."""
    numbers = torch.tensor([5, 0, 2])
    keys = {0: KEYS, 1: KEYS.t(), None: KEYS[0]}[in_dims[0]]
    data = numbers if in_dims[1] == 0 else numbers[0]

    found = vmap(random.fold_in, in_dims=in_dims)(keys, data)

    each_key = KEYS if in_dims[0] is not None else KEYS[:1].expand(3, 2)
    each_number = data.expand(3).tolist()
    wanted = [
        random.fold_in(key, number)
        for key, number in zip(each_key, each_number, strict=True)
    ]
    assert torch.equal(found, torch.stack(wanted))


def test_fold_in_mapped_on_two_levels() -> None:
    """A table of keys from keys and numbers, in either nesting."""
    numbers = torch.arange(4)
    wanted = torch.stack([random.split(key, 4) for key in KEYS])

    rows = vmap(vmap(random.fold_in, (None, 0)), (0, None))(KEYS, numbers)
    columns = vmap(vmap(random.fold_in, (0, None)), (None, 0))(KEYS, numbers)

    assert torch.equal(rows, wanted)
    assert torch.equal(columns, wanted.transpose(0, 1))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dims", [(0, 0), (1, 2), (0, -1)])
def test_mapped_dropout(dims: tuple[int, int], dtype: torch.dtype) -> None:
    """vmap(dropout)(keys, xs) is the loop over examples, to the last bit."""
    x = random.normal(random.key(1), (3, 7, 5), dtype=dtype)
    keys, xs = KEYS.movedim(0, dims[0]), x.movedim(0, dims[1])

    found = vmap(random.dropout, in_dims=(*dims, None))(keys, xs, 0.5)

    assert torch.equal(
        found, one_by_one(lambda k, v: random.dropout(k, v, 0.5), KEYS, x)
    )


def test_data_mapped_under_one_key() -> None:
    """A key that is not mapped drops the same numbers of every example."""
    found = vmap(random.dropout, in_dims=(None, 0, None))(
        KEYS[0], torch.ones(4, 50), 0.5
    )

    assert (found == found[0]).all()
    assert torch.equal(found[0], random.dropout(KEYS[0], torch.ones(50), 0.5))


def test_a_mapped_probability() -> None:
    """Tensor parameters may be mapped like keys."""
    p = torch.tensor([0.1, 0.5, 0.9])

    found = vmap(lambda key, p: random.bernoulli(key, (20,), p=p))(KEYS, p)

    wanted = [
        random.bernoulli(k, (20,), p=float(q)) for k, q in zip(KEYS, p, strict=True)
    ]
    assert torch.equal(found, torch.stack(wanted))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dropout_is_linear(dtype: torch.dtype) -> None:
    """Gradients, tangents and their mixtures have the mask of the value."""
    x = torch.linspace(1, 2, 9).to(dtype)

    def drop(x: Tensor) -> Tensor:
        return random.dropout(KEYS[0], x, 0.5)

    factor = drop(torch.ones_like(x))
    value, tangent, *_ = jvp(drop, (x,), (torch.ones_like(x),))

    assert torch.equal(value, x * factor)
    assert torch.equal(tangent, factor)
    assert torch.equal(grad(lambda x: drop(x).sum())(x), factor)
    cube = grad(lambda x: grad(lambda x: (drop(x) ** 3).sum())(x).sum())(x)
    torch.testing.assert_close(cube, 6 * factor**3 * x)


def test_draws_have_no_tangent() -> None:
    """What a key gives does not depend on what is differentiated."""

    def noisy(x: Tensor) -> Tensor:
        return x + random.normal(KEYS[0], x.shape)

    _, tangent, *_ = jvp(noisy, (torch.zeros(3),), (torch.ones(3),))

    assert torch.equal(tangent, torch.ones(3))


@each_draw
def test_compiled(draw: Callable[[Tensor], Tensor]) -> None:
    """In one graph, with the bits of the eager call."""
    torch.compiler.reset()
    compiled: Any = torch.compile(draw, backend="aot_eager", fullgraph=True)

    assert torch.equal(compiled(KEYS[0]), draw(KEYS[0]))


def test_compiled_training_step() -> None:
    """Forward and backward, with a key made inside."""
    torch.compiler.reset()

    def loss(x: Tensor, step: Tensor) -> Tensor:
        key = random.fold_in(random.key(0), step)
        return (random.dropout(key, x.sin(), 0.5) ** 2).sum()

    compiled: Any = torch.compile(loss, backend="aot_eager", fullgraph=True)
    x = torch.linspace(1, 2, 9).requires_grad_()
    step = torch.tensor(3)

    (found,) = torch.autograd.grad(compiled(x, step), x)
    (wanted,) = torch.autograd.grad(loss(x, step), x)
    torch.testing.assert_close(found, wanted)
