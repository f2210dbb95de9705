"""Random numbers from explicit keys, which a recomputation draws again.

A key is a small tensor that says which numbers will be drawn: there is no hidden state.
Split a key, or fold a number into it, wherever two draws should differ; the same key gives
the same numbers wherever it is used, which is what makes a recomputation exact.

Laws of every draw: it is a pure function of key, shape and options. Its numbers are the
same under every transform, in a recomputation, on every device and every version of torch
from 2.13 (`normal` and what is made by logarithms up to their last bits). Under
`torch.func.vmap` each key has a stream of its own, so that a mapped draw equals the draws
one by one; a key that is not mapped gives all examples the same numbers. Keyed draws, and
what is computed from them alone, are never saved by a region, whatever its policy: the
backward draws them again.

Keys, streams and bits are those of `torch.func._random` in torch 2.15 (Philox4x32-10,
Salmon et al., SC'11, https://doi.org/10.1145/2063384.2063405), names those of `jax.random`.

- `_keys`: keys made, split, folded.
- `_draws`: the distributions, and checks of their arguments.
- `_ops`: the operators behind both, with their rules for traces and vmap.
- `_native`: those operators by torch's own kernels.
- `_portable`: the same by arithmetic, where torch has no kernel.
- `_philox`: blocks of the stream, for `_portable`.
- `_checking`: a key that is consumed twice.
"""

from remat._generators.trackers import register_tracker
from remat.random._checking import checking
from remat.random._draws import (
    bernoulli,
    bits,
    categorical,
    dropout,
    gumbel,
    normal,
    permutation,
    randint,
    truncated_normal,
    uniform,
)
from remat.random._keys import fold_in, key, split

__all__ = [
    "bernoulli",
    "bits",
    "categorical",
    "checking",
    "dropout",
    "fold_in",
    "gumbel",
    "key",
    "normal",
    "permutation",
    "randint",
    "register_tracker",
    "split",
    "truncated_normal",
    "uniform",
]
