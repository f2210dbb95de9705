"""Nests of transforms, and functions that they are taken of, in torch and in JAX.

Nothing here imports either: a `Library` is handed in, so that one text says what both count
and measure. `f(p, x)` takes a pytree of weights and a batch (b, d), and returns (b, d).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NUM_LAYERS, BATCH, WIDTH = 4, 3, 5

Function = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Library:
    """What a nest needs of torch or JAX.

    Attributes:
        transforms: has `grad`, `vmap`, `jvp`, `hessian`, `jacrev` and `jacfwd`.
        numbers: has `tanh`, `sin`, `exp`, `log`, `ones`, `ones_like` and `trace`.
        leaves: of a pytree.
        map: a function over pytrees of one structure.
    """

    transforms: Any
    numbers: Any
    leaves: Callable[[Any], list[Any]]
    map: Callable[..., Any]


Nest = Callable[[Library, Function, Any, Any], Any]


def functions(library: Library) -> dict[str, Function]:
    """The functions, by name."""
    tanh, sin = library.numbers.tanh, library.numbers.sin
    exp, log = library.numbers.exp, library.numbers.log

    def stack(p: Any, x: Any) -> Any:
        for w, b in zip(*p, strict=True):
            x = tanh(x @ w + b)
        return x

    def gated(p: Any, x: Any) -> Any:
        w, v = p
        return x + sin(x @ w) * tanh(x @ v)

    def mixed(p: Any, x: Any) -> Any:
        w, v = p
        y = x @ w
        return exp(-y * y) * sin(y) + tanh(y @ v) * log(1 + y * y)

    return {"stack": stack, "gated": gated, "mixed": mixed}


def stacks(library: Library) -> dict[str, Callable[[Callable[..., Any]], Function]]:
    """Functions of several regions, by name; each takes what makes a region of a function."""

    def layer(w: Any, x: Any) -> Any:
        return x + library.numbers.tanh(x @ w)

    def chain(unit: Callable[..., Any]) -> Function:
        region = unit(layer)
        return lambda p, x: functools.reduce(lambda x, w: region(w, x), p, x)

    def nested(unit: Callable[..., Any]) -> Function:
        region = unit(layer)
        pair = unit(lambda v, w, x: region(w, region(v, x)))
        return lambda p, x: pair(*p[2:], pair(*p[:2], x))

    return {"chain": chain, "nested": nested}


#: Of the weights that each function takes.
SHAPES: dict[str, Any] = {
    "stack": ([(WIDTH, WIDTH)] * NUM_LAYERS, [(WIDTH,)] * NUM_LAYERS),
    "gated": ((WIDTH, WIDTH), (WIDTH, WIDTH)),
    "mixed": ((WIDTH, WIDTH), (WIDTH, WIDTH)),
    "chain": ((WIDTH, WIDTH),) * 3,
    "nested": ((WIDTH, WIDTH),) * 4,
}


def squares(t: Library, tree: Any) -> Any:
    """The sum of all squares in a pytree."""
    return sum((leaf**2).sum() for leaf in t.leaves(tree))


def loss(f: Function) -> Function:
    """A number with derivatives of any order."""
    return lambda p, x: (f(p, x) ** 2).sum()


def _example_loss(f: Function, p: Any) -> Callable[[Any], Any]:
    return lambda example: loss(f)(p, example[None])


def _each_gradient(t: Library, f: Function, p: Any, x: Any) -> Any:
    gradient = t.transforms.grad(loss(f))
    return t.transforms.vmap(lambda example: gradient(p, example[None]))(x)


def _size_of_gradient(t: Library, f: Function, argnums: int = 0) -> Function:
    gradient = t.transforms.grad(loss(f), argnums=argnums)
    return lambda p, x: squares(t, gradient(p, x))


def _pushed(t: Library, f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The derivative of a function of the batch along ones."""
    return lambda x: t.transforms.jvp(f, (x,), (t.numbers.ones_like(x),))[1]


def _thrice(t: Library, f: Function, p: Any, x: Any) -> Any:
    second = t.transforms.grad(_size_of_gradient(t, f))
    return t.transforms.grad(lambda p: squares(t, second(p, x)))(p)


def _third_along(t: Library, f: Function, p: Any, x: Any) -> Any:
    second = t.transforms.grad(_size_of_gradient(t, f))
    along = t.map(t.numbers.ones_like, p)
    return t.transforms.jvp(lambda p: second(p, x), (p,), (along,))


def _hessians(t: Library, f: Function, p: Any, x: Any) -> Any:
    return t.transforms.vmap(t.transforms.hessian(_example_loss(f, p)))(x)


def _of_laplacian(t: Library, f: Function, p: Any, x: Any) -> Any:
    def laplacian(p: Any, example: Any) -> Any:
        return t.numbers.trace(t.transforms.hessian(_example_loss(f, p))(example))

    def size(p: Any) -> Any:
        return (t.transforms.vmap(lambda each: laplacian(p, each))(x) ** 2).sum()

    return t.transforms.grad(size)(p)


def _of_hessians(t: Library, f: Function, p: Any, x: Any) -> Any:
    def size(p: Any) -> Any:
        slope = t.transforms.grad(_example_loss(f, p))
        return squares(t, t.transforms.vmap(t.transforms.jacfwd(slope))(x))

    return t.transforms.grad(size)(p)


def _of_tangents(t: Library, f: Function, p: Any, x: Any, order: int) -> Any:
    def size(p: Any) -> Any:
        pushed: Callable[[Any], Any] = lambda x: f(p, x)  # noqa: E731
        for _ in range(order):
            pushed = _pushed(t, pushed)
        return squares(t, pushed(x))

    return t.transforms.grad(size)(p)


def _of_each_tangent(t: Library, f: Function, p: Any, x: Any) -> Any:
    def size(p: Any) -> Any:
        return squares(t, t.transforms.vmap(_pushed(t, lambda e: f(p, e[None])))(x))

    return t.transforms.grad(size)(p)


def _hessian_vector(t: Library, f: Function, p: Any, x: Any) -> Any:
    along = t.map(t.numbers.ones_like, p)
    return t.transforms.jvp(lambda p: t.transforms.grad(loss(f))(p, x), (p,), (along,))


def _jacobians(t: Library, f: Function, p: Any, x: Any, order: int) -> Any:
    found: Callable[[Any], Any] = lambda example: f(p, example[None])  # noqa: E731
    for _ in range(order):
        found = t.transforms.jacrev(found)
    return t.transforms.vmap(found)(x)


NESTS: dict[str, Nest] = {
    "grad": lambda t, f, p, x: t.transforms.grad(loss(f))(p, x),
    "vmap(grad)": _each_gradient,
    "grad(jvp)": lambda t, f, p, x: _of_tangents(t, f, p, x, 1),
    "grad(vmap(jvp))": _of_each_tangent,
    "vmap(jacrev)": lambda t, f, p, x: _jacobians(t, f, p, x, 1),
    "grad(grad)": lambda t, f, p, x: t.transforms.grad(_size_of_gradient(t, f))(p, x),
    "grad(grad) by x": lambda t, f, p, x: t.transforms.grad(
        _size_of_gradient(t, f, argnums=1), argnums=1
    )(p, x),
    "grad(vmap(grad))": lambda t, f, p, x: t.transforms.grad(
        lambda p: squares(t, _each_gradient(t, f, p, x))
    )(p),
    "vmap(hessian)": _hessians,
    "jvp(grad)": _hessian_vector,
    "grad(jvp(jvp))": lambda t, f, p, x: _of_tangents(t, f, p, x, 2),
    "vmap(jacrev(jacrev))": lambda t, f, p, x: _jacobians(t, f, p, x, 2),
    "grad(grad(grad))": _thrice,
    "jvp(grad(grad))": _third_along,
    "grad(vmap(jacfwd(grad)))": _of_hessians,
    "grad(laplacian)": _of_laplacian,
}
