"""Law 2 at every order: what a policy saves decides the peak, of derivatives of derivatives too.

A policy is asked about the values of a backward and about tangents where these are
differentiated again. So there, too, less memory is needed where less is saved; where nobody
differentiates again, nothing is held for it, and the peaks of the first order are what they
were when a policy was asked in the first order alone. Eight layers are one region; bytes are
those of all tensors that a run made and that are alive at one time.
"""

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from remat import checkpoint_name, policies, remat
from tests.laws.derivatives import TORCH
from tests.laws.nests import NESTS, loss
from tests.support import LiveBytes, seeded, swept

pytestmark = [
    # Some policies keep in the first order what plain torch keeps.
    pytest.mark.filterwarnings("ignore:.*saves no memory:remat.RematWarning"),
    # Forward mode itself compiles decompositions with torch.jit.script.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]

NUM_LAYERS, WIDTH, BATCH = 8, 8, 64
WEIGHTS = (
    [seeded(WIDTH, WIDTH, seed=k) / WIDTH**0.5 for k in range(NUM_LAYERS)],
    [seeded(WIDTH, seed=50 + k) for k in range(NUM_LAYERS)],
)
X = seeded(BATCH, WIDTH, seed=99)


def stack(p: tuple[list[Tensor], list[Tensor]], x: Tensor) -> Tensor:
    """Dense layers, the output of each with a name."""
    for w, b in zip(*p, strict=True):
        x = checkpoint_name(torch.tanh(x @ w + b), "layer")
    return x


KINDS = {
    "plain": stack,
    "nothing": remat(stack),
    "names": remat(stack, policy=policies.save_only_these_names("layer")),
    "matmuls": remat(stack, policy=policies.save_matmul_outputs),
    "everything": remat(stack, policy=policies.everything_saveable),
}
KINDS_OF_ONE_REGION = ("nothing", "names", "matmuls", "everything")

#: Kinds whose peaks rise strictly, from the left to the right. Names are those of the layers'
#: outputs, which are all that the first backward reads: they are everything of the first order,
#: and matmuls, from which it computes the outputs, need more. Where all of one region runs
#: again at once, nothing may need a layer more than names.
RISING = {
    "grad(grad)": ("nothing matmuls everything plain", "names matmuls"),
    "grad(vmap(grad))": ("nothing matmuls everything plain", "names matmuls"),
    "vmap(hessian)": ("nothing names matmuls", "nothing plain"),
    "jvp(grad)": ("nothing names matmuls plain", "nothing everything plain"),
    "grad(jvp)": ("nothing names everything plain", "matmuls everything"),
    "grad(laplacian)": ("nothing matmuls everything plain", "names matmuls"),
}
#: What one run of the first order needs, in bytes: nothing, names, matmuls, everything.
FIRST_ORDER = {
    "grad": (45_648, 49_104, 57_296, 49_104),
    "grad_and_value": (45_648, 49_104, 57_296, 49_104),
    "vmap(grad)": (308_224, 336_896, 340_992, 336_896),
}
#: What one gradient of a tangent needed when policies were not asked about tangents.
AT_MOST = {"grad(jvp)": (122_896, 122_896, 143_312, 131_024)}


def run(nest: str, kind: str) -> Any:
    """What a nest gives of the stack."""
    if nest == "grad_and_value":
        return torch.func.grad_and_value(loss(KINDS[kind]))(WEIGHTS, X)
    return NESTS[nest](TORCH, KINDS[kind], WEIGHTS, X)


@functools.cache
def peak_bytes(nest: str, kind: str) -> int:
    """The peak of live bytes above the arguments, once everything is traced."""
    run(nest, kind)
    with LiveBytes() as memory:
        run(nest, kind)
    return memory.peak


CHAINS = [(nest, each) for nest, chains in RISING.items() for each in chains]
#: Of the nest that takes the least time to trace.
DAILY = [("grad(grad)", RISING["grad(grad)"][0])]


@pytest.mark.parametrize(
    "case",
    [*DAILY, *swept(each for each in CHAINS if each not in DAILY)],
    ids=": ".join,
)
def test_peaks_fall_as_policies_save_less(case: tuple[str, str]) -> None:
    """Strictly."""
    nest, rising = case
    peaks = {kind: peak_bytes(nest, kind) for kind in rising.split()}

    assert all(less < more for less, more in itertools.pairwise(peaks.values())), peaks


@pytest.mark.parametrize("nest", FIRST_ORDER)
def test_peaks_of_the_first_order_are_what_they_were(nest: str) -> None:
    """To the byte: nothing is held for a derivative that nobody can take."""
    peaks = tuple(peak_bytes(nest, kind) for kind in KINDS_OF_ONE_REGION)

    assert peaks == FIRST_ORDER[nest]


@pytest.mark.parametrize("nest", AT_MOST)
def test_no_policy_peaks_higher_for_being_asked_about_tangents(nest: str) -> None:
    """A gradient of tangents."""
    peaks = [peak_bytes(nest, kind) for kind in KINDS_OF_ONE_REGION]

    assert all(a <= b for a, b in zip(peaks, AT_MOST[nest], strict=True)), peaks
