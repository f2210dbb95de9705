"""`jax.checkpoint` on the same block with the same policies, where JAX is installed.

jit on the CPU. A policy's line stands only where JAX's own memory analysis falls with it:
XLA merges what is equal, and may undo the recomputation.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any

from tests.benchmarks.contenders import is_installed
from tests.benchmarks.work import HEAD_WIDTH, Work, block, summed

NAME = "jax.checkpoint, {}"
POLICIES = {
    "nothing": "nothing_saveable",
    "matmuls": "dots_saveable",
    "everything": "everything_saveable",
}


def admit(
    steps: dict[str, Callable[[], Any]],
    peaks: dict[str, int],
    missing: dict[str, str],
    work: Work,
) -> None:
    """Adds JAX's steps to a row of transformer blocks, or says why they are missing."""
    if work.unit is not block or work.loss is not summed:
        return
    if not is_installed("jax"):
        missing["jax.checkpoint"] = "not installed"
        return
    plain, peak = _step(work, None)
    steps["jax"], peaks["jax"] = plain, peak
    for keeps, policy in POLICIES.items():
        step, temporaries = _step(work, policy)
        if temporaries < peak:
            steps[NAME.format(keeps)] = step
            peaks[NAME.format(keeps)] = temporaries
        else:
            missing[NAME.format(keeps)] = "its memory analysis does not fall"


def _step(work: Work, policy: str | None) -> tuple[Callable[[], Any], int]:
    """The compiled gradient, and the bytes of its temporaries."""
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    jax: Any = importlib.import_module("jax")

    unit = _block
    if policy is not None:
        chosen = getattr(jax.checkpoint_policies, policy)
        unit = jax.checkpoint(unit, policy=chosen)

    def loss(params: Any, x: Any) -> Any:
        for own in params:
            x = unit(own, x)
        return x.sum()

    params = [{k: t.detach().numpy() for k, t in own.items()} for own in work.params]
    given = jax.device_put((params, work.x.numpy()))
    compiled = jax.jit(jax.grad(loss)).lower(*given).compile()
    size = compiled.memory_analysis().temp_size_in_bytes
    return lambda: jax.block_until_ready(compiled(*given)), size


def _block(p: Any, x: Any) -> Any:
    """The transformer block of `work.block`."""
    jax: Any = importlib.import_module("jax")
    jnp = jax.numpy
    b, s, d = x.shape
    heads = max(2, d // HEAD_WIDTH)
    h = _layer_norm(x, p["norm1"], p["bias1"])
    q, k, v = jnp.moveaxis((h @ p["qkv"]).reshape(b, s, 3, heads, d // heads), 2, 0)
    a = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + a.reshape(b, s, d) @ p["out"]
    h = _layer_norm(x, p["norm2"], p["bias2"])
    return x + jax.nn.gelu(h @ p["up"], approximate=False) @ p["down"]


def _layer_norm(x: Any, scale: Any, bias: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    variance = x.var(-1, keepdims=True)
    return (x - mean) / (variance + 1e-5) ** 0.5 * scale + bias
