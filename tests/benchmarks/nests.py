"""What the nested rows differentiate, and how: the same text for torch and for JAX.

Nothing here imports either: a `Library` is handed in, as in `tests/laws/nests.py`.
"""

from collections.abc import Callable
from typing import Any

from tests.laws.nests import Library

#: Of the parameters, dictionaries of `w` (in, out) and `b` (out,) for each layer, and of an
#: example (d,) or a batch (b, d).
Network = Callable[[Any, Any], Any]
#: What a row computes, of a network, its parameters and a batch.
Step = Callable[[Library, Network, Any, Any], Any]


def network(t: Library, named: Callable[[Any, str], Any]) -> Network:
    """Dense layers, each output but the last after a tanh and with the name "layer"."""

    def run(params: Any, x: Any) -> Any:
        *hidden, last = params
        for own in hidden:
            x = named(t.numbers.tanh(x @ own["w"] + own["b"]), "layer")
        return x @ last["w"] + last["b"]

    return run


def pinn(t: Library, f: Network, params: Any, x: Any) -> Any:
    """The gradient of the mean squared residual of Poisson's equation."""
    vmap, hessian = t.transforms.vmap, t.transforms.hessian

    def residual(params: Any, point: Any) -> Any:
        return t.numbers.trace(hessian(lambda z: f(params, z).sum())(point)) - 1

    def loss(params: Any) -> Any:
        return (vmap(lambda z: residual(params, z))(x) ** 2).mean()

    return t.transforms.grad(loss)(params)


def maml(t: Library, f: Network, params: Any, x: Any, num_steps: int = 5) -> Any:
    """The gradient through inner steps of gradient descent, over eight tasks."""

    def loss(params: Any, x: Any) -> Any:
        return ((f(params, x) - t.numbers.sin(x).sum(-1)[:, None]) ** 2).mean()

    def adapted(own: Any, x: Any) -> Any:
        half = x.shape[0] // 2
        for _ in range(num_steps):
            gradient = t.transforms.grad(loss)(own, x[:half])
            own = t.map(lambda p, g: p - 0.01 * g, own, gradient)
        return loss(own, x[half:])

    tasks = x.reshape(8, -1, x.shape[-1])
    mean = lambda params: t.transforms.vmap(lambda x: adapted(params, x))(tasks).mean()  # noqa: E731
    return t.transforms.grad(mean)(params)


def hessians(t: Library, f: Network, params: Any, x: Any) -> Any:
    """The Hessian by each point."""
    jacobian = t.transforms.jacrev(lambda z: f(params, z).sum())
    return t.transforms.vmap(t.transforms.jacfwd(jacobian))(x)


def penalty(t: Library, f: Network, params: Any, x: Any) -> Any:
    """The gradient of the mean squared Jacobian."""

    def size(params: Any) -> Any:
        jacobian = t.transforms.jacrev(lambda z: f(params, z))
        return (t.transforms.vmap(jacobian)(x) ** 2).mean()

    return t.transforms.grad(size)(params)


def third(t: Library, f: Network, params: Any, x: Any) -> Any:
    """The third derivative by each point, as of the Korteweg-de Vries equation."""
    found = lambda z: f(params, z).sum()  # noqa: E731
    for _ in range(2):
        found = _summed_gradient(t, found)
    return t.transforms.vmap(t.transforms.grad(found))(x)


def _summed_gradient(t: Library, f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda z: t.transforms.grad(f)(z).sum()


STEPS: dict[str, Step] = {
    "pinn": pinn,
    "maml": maml,
    "hessian": hessians,
    "penalty": penalty,
    "third": third,
}
