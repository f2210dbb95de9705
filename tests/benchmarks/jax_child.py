"""The process in which JAX runs: `python jax_child.py FOLDER`, by an interpreter that has it.

It finds parameters and batch in the folder, compiles one gradient for each policy, and writes
what these gave and need. After that it reads the name of a policy from each line of its input,
takes a step, and answers with the seconds of its processor, or those of the wall.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np

PLAIN = "jax"


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


def compiled(params: Any, x: Any, heads: int, policy: str | None) -> Any:
    """The gradient of the blocks' sum by their parameters."""

    def unit(p: Any, x: Any) -> Any:
        return block(p, x, heads)

    if policy is not None:
        unit = jax.checkpoint(unit, policy=getattr(jax.checkpoint_policies, policy))

    def loss(params: Any, x: Any) -> Any:
        for own in params:
            x = unit(own, x)
        return x.sum()

    return jax.jit(jax.grad(loss)).lower(params, x).compile()


def peak_bytes(program: Any) -> int:
    """By XLA's own analysis: temporaries, and the gradients."""
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
    programs = {
        name: compiled(params, x, given["heads"], policy)
        for name, policy in {PLAIN: None, **given["policies"]}.items()
    }
    grads = jax.tree.leaves(programs[PLAIN](params, x))
    np.savez(folder / "grads.npz", *map(np.asarray, grads))
    sizes = {name: peak_bytes(each) for name, each in programs.items()}
    clock: Callable[[], float] = getattr(time, given["clock"])
    print(json.dumps(sizes), flush=True)
    for line in sys.stdin:
        started = clock()
        jax.block_until_ready(programs[line.strip()](params, x))
        print(clock() - started, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
