"""The process in which JAX runs: `python -m tests.benchmarks.jax_child FOLDER`.

By an interpreter that has JAX, from the root of a checkout; torch is not needed. It finds
parameters and batch in the folder, compiles one step for each policy, and writes what these gave
and need. After that it reads the name of a policy from each line of its input, takes a step, and
answers with the seconds of its processor, or those of the wall.
"""

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np
from jax.ad_checkpoint import (  # pyright: ignore[reportMissingImports]
    checkpoint_name,
)

from tests.benchmarks import nests
from tests.laws.nests import Library

PLAIN = "jax"
LIBRARY = Library(jax, jnp, jax.tree.leaves, jax.tree.map)

#: A function -> what runs in its place.
Wrap = Callable[[Any], Any]
#: What is compiled: of a wrap, the parameters and a batch.
Step = Callable[[Wrap, Any, Any], Any]


def block(p: Any, x: Any, heads: int) -> Any:
    """The transformer block of `work.block`; x and the result are (b, s, d)."""
    b, s, d = x.shape
    h = layer_norm(x, p["norm1"], p["bias1"])
    q, k, v = jnp.moveaxis((h @ p["qkv"]).reshape(b, s, 3, heads, d // heads), 2, 0)
    a = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + a.reshape(b, s, d) @ p["out"]
    h = layer_norm(x, p["norm2"], p["bias2"])
    return x + jax.nn.gelu(h @ p["up"], approximate=False) @ p["down"]


def layer_norm(x: Any, scale: Any, bias: Any) -> Any:
    """Over the last axis, as torch does it."""
    mean = x.mean(-1, keepdims=True)
    variance = x.var(-1, keepdims=True)
    return (x - mean) / (variance + 1e-5) ** 0.5 * scale + bias


def of_blocks(heads: int) -> Step:
    """The gradient of the blocks' sum by their parameters."""

    def step(wrap: Wrap, params: Any, x: Any) -> Any:
        unit = wrap(functools.partial(block, heads=heads))

        def loss(params: Any) -> Any:
            return functools.reduce(lambda x, own: unit(own, x), params, x).sum()

        return jax.grad(loss)(params)

    return step


def of_nest(name: str) -> Step:
    """A nested row."""
    network = nests.network(LIBRARY, checkpoint_name)
    return lambda wrap, p, x: nests.STEPS[name](LIBRARY, wrap(network), p, x)


def checkpointed(policy: str, *args: str) -> Wrap:
    """`jax.checkpoint` with a policy of JAX, or with what one of these arguments makes."""
    found = getattr(jax.checkpoint_policies, policy)
    return functools.partial(jax.checkpoint, policy=found(*args) if args else found)


def peak_bytes(program: Any) -> int:
    """By XLA's own analysis: temporaries, and what is returned."""
    found = program.memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes


def main(folder: Path) -> None:
    """Compiles, says what was found, and takes steps until its input ends."""
    given = json.loads((folder / "given.json").read_text())
    arrays = np.load(folder / "arrays.npz")
    params = [
        {name: jnp.asarray(arrays[f"{k}.{name}"]) for name in given["names"]}
        for k in range(given["layers"])
    ]
    x = jnp.asarray(arrays["x"])
    step = of_nest(given["nest"]) if "nest" in given else of_blocks(given["heads"])
    wraps: dict[str, Wrap] = {PLAIN: lambda unit: unit} | {
        name: checkpointed(*policy) for name, policy in given["policies"].items()
    }
    programs = {
        name: jax.jit(functools.partial(step, wrap)).lower(params, x).compile()
        for name, wrap in wraps.items()
    }
    found = jax.tree.leaves(programs[PLAIN](params, x))
    np.savez(folder / "found.npz", *map(np.asarray, found))
    sizes = {name: peak_bytes(each) for name, each in programs.items()}
    clock: Callable[[], float] = getattr(time, given["clock"])
    print(json.dumps(sizes), flush=True)
    for line in sys.stdin:
        started = clock()
        jax.block_until_ready(programs[line.strip()](params, x))
        print(clock() - started, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
