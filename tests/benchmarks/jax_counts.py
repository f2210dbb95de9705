"""What JAX computes in nests of transforms: `python -m tests.benchmarks.jax_counts`.

By an interpreter that has JAX, from the root of a checkout; torch is not needed. It prints
`tests/laws/jax_counts.json`: for each function, nest and policy of `jax.checkpoint` (and
without it, as "plain") how many matrix products, hyperbolic tangents, and sines and cosines
stand in the jaxpr after dead-code elimination.
"""

import functools
import json
from collections import Counter
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
from jax.interpreters import (  # pyright: ignore[reportMissingImports]
    partial_eval,
)

from tests.laws.nests import (
    BATCH,
    NESTS,
    SHAPES,
    WIDTH,
    Function,
    Library,
    functions,
    stacks,
)

LIBRARY = Library(jax, jnp, jax.tree.leaves, jax.tree.map)
POLICIES = {
    "nothing": "nothing_saveable",
    "matmuls": "dots_saveable",
    "everything": "everything_saveable",
}


def counted(jaxpr: Any) -> Counter[str]:
    """The primitives of a jaxpr, those of the jaxprs in it included."""
    found: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        inner = [
            getattr(each, "jaxpr", each)
            for each in equation.params.values()
            if hasattr(each, "eqns") or hasattr(each, "jaxpr")
        ]
        for each in inner:
            found += counted(each)
        if not inner:
            found[equation.primitive.name] += 1
    return found


def counts(name: str, nest: str, f: Function) -> list[int]:
    """Products, hyperbolic tangents, sines and cosines of one nest of one function."""
    is_shape = lambda each: isinstance(each, tuple) and isinstance(each[0], int)  # noqa: E731
    p = jax.tree.map(jnp.ones, SHAPES[name], is_leaf=is_shape)
    traced = jax.make_jaxpr(lambda p, x: NESTS[nest](LIBRARY, f, p, x))
    jaxpr = traced(p, jnp.ones((BATCH, WIDTH))).jaxpr
    read, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    found = counted(read)
    return [found["dot_general"], found["tanh"], found["sin"] + found["cos"]]


def main() -> None:
    """Prints the file, one nest a line."""
    print(f'{{"jax": "{jax.__version__}"', end="")
    whole = {name: lambda unit, f=f: unit(f) for name, f in functions(LIBRARY).items()}
    for name, made in (whole | stacks(LIBRARY)).items():
        units = {"plain": made(lambda f: f)} | {
            keeps: made(
                functools.partial(
                    jax.checkpoint, policy=getattr(jax.checkpoint_policies, policy)
                )
            )
            for keeps, policy in POLICIES.items()
        }
        lines = [
            f'"{nest}": '
            + json.dumps(
                {each: counts(name, nest, unit) for each, unit in units.items()}
            )
            for nest in NESTS
        ]
        print(f',\n "{name}": {{\n  ' + ",\n  ".join(lines) + "\n }", end="")
    print("\n}")


if __name__ == "__main__":
    main()
