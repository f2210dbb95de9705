"""The largest eigenvalues of a transformer's Hessian, by Lanczos' method.

Forward mode over reverse mode, `jvp(grad(loss))`, is the Hessian times a vector for the price
of a few gradients [1], and such products are all that scipy's `eigsh` asks for [2]. Each of
them holds the activations of a gradient and, beside them, their tangents; with each block a
region it holds one input a block, and its tangent.

Prints, without and with regions, the peak of one product and the largest eigenvalues. All of
it is in float64, as eigenvalues should be.

[1] B. A. Pearlmutter, Fast Exact Multiplication by the Hessian, Neural Computation 6(1), 1994,
    https://doi.org/10.1162/neco.1994.6.1.147
[2] Z. Yao et al., PyHessian: Neural Networks Through the Lens of the Hessian, 2020,
    https://arxiv.org/abs/1912.07145
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor
from torch.func import grad, jvp
from torch.nn import functional as F

from remat import remat
from remat.reporting import LiveBytes

LAYERS, WIDTH, HEADS, TIME, BATCH, SYMBOLS = 6, 16, 2, 48, 2, 16
SHAPES = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
SHAPES |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}

Tree = dict[str, Tensor]
Block = Callable[[Tree, Tensor], Tensor]


def block(p: Tree, x: Tensor) -> Tensor:
    """One layer, (batch, time, width) in and out."""
    qkv = F.layer_norm(x, (WIDTH,)) @ p["qkv"]
    q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    # Written out: torch's fused attention has no second derivative on a CPU.
    attended = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
    x = x + attended.transpose(1, 2).flatten(2) @ p["out"]
    return x + F.gelu(F.layer_norm(x, (WIDTH,)) @ p["up"]) @ p["down"]


def loss_of(params: Tree, tokens: Tensor, block: Block) -> Tensor:
    """Cross-entropy of each next token."""
    x = params["table"][tokens[:, :-1]]
    for layer in range(LAYERS):
        x = block({name: params[f"{name}{layer}"] for name in SHAPES}, x)
    return F.cross_entropy((x @ params["table"].T).mT, tokens[:, 1:])


def hessian_of(loss: Callable[[Tree], Tensor], params: Tree) -> LinearOperator:
    """The Hessian at `params`, as an operator on vectors of all parameters."""
    sizes = [each.numel() for each in params.values()]

    def product(vector: np.ndarray) -> np.ndarray:
        parts = torch.tensor(vector.ravel(), dtype=torch.float64).split(sizes)
        named = zip(params.items(), parts, strict=True)
        direction = {name: part.view_as(each) for (name, each), part in named}
        found = jvp(grad(loss), (params,), (direction,))[1]
        return torch.cat([found[name].flatten() for name in params]).numpy()

    return LinearOperator(2 * (sum(sizes),), product)


def main() -> None:
    """Compares the model without and with regions."""
    parser = argparse.ArgumentParser(description="Eigenvalues of a Hessian.")
    parser.add_argument("--eigenvalues", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=0)
    given = parser.parse_args()

    torch.manual_seed(0)
    shapes = {"table": (SYMBOLS, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {f"{name}{layer}": shape for name, shape in SHAPES.items()}
    params = {
        name: torch.randn(shape, dtype=torch.float64) / shape[0] ** 0.5
        for name, shape in shapes.items()
    }
    tokens = torch.randint(SYMBOLS, (BATCH, TIME + 1))
    start = np.ones(sum(each.numel() for each in params.values()))

    peaks, spectra = [], []
    print("         peak of a product  largest eigenvalues")
    for name, layer in {"plain": block, "regions": remat(block)}.items():
        hessian = hessian_of(lambda p, layer=layer: loss_of(p, tokens, layer), params)
        how = {"v0": start, "tol": given.tolerance, "return_eigenvectors": False}
        spectra.append(eigsh(hessian, given.eigenvalues, **how))
        with LiveBytes() as live:
            hessian.matvec(start)
        peaks.append(live.peak_bytes)
        values = " ".join(f"{value:.10f}" for value in spectra[-1])
        print(f"{name:8} {peaks[-1] / 2**20:13.2f} MiB  {values}")

    np.testing.assert_allclose(spectra[0], spectra[1], rtol=1e-8)
    assert peaks[1] < 0.25 * peaks[0]


if __name__ == "__main__":
    main()
