"""Programs step by step in a trace, mapped by vmap: what torch cannot map is replaced."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from remat import policies, remat
from tests.support import count_operators, seeded

pytestmark = pytest.mark.contract

W, X = seeded(3, 3), seeded(2, 3, seed=1)


def rotated(w: Tensor, x: Tensor) -> Tensor:
    """Complex products, of whose conjugates a second derivative takes imaginary parts."""
    turned = (torch.complex(x, x) @ torch.complex(w, w)).exp()
    return (turned @ torch.complex(w, w)).abs()


def test_a_lazy_negation_is_mapped() -> None:
    """The imaginary part of a conjugate is one in a program, and torch cannot map it."""

    def sizes(f: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        def size(w: Tensor, scale: Tensor) -> Tensor:
            each = grad(lambda w, x: f(w, x[None]).square().sum())
            return vmap(lambda x: each(w, x * scale))(X).square().sum()

        return vmap(lambda scale: grad(size)(W, scale))(torch.tensor([0.5, 1.0]))

    region = remat(rotated, policy=policies.save_matmul_outputs)

    torch.testing.assert_close(sizes(region), sizes(rotated))


def filtered(w: Tensor, x: Tensor) -> Tensor:
    """A product of spectra, whose backward writes to parts of a complex tensor."""
    spectrum = torch.fft.rfft(torch.tanh(x @ w))
    return torch.fft.irfft(spectrum * spectrum, n=3)


def test_writes_to_parts_of_complex_tensors_have_derivatives() -> None:
    """Torch's derivative of a scatter is for real numbers: the region stayed closed."""

    def second(f: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        first = grad(lambda w: f(w, X).square().sum())
        return grad(lambda w: first(w).square().sum())(W)

    region = remat(filtered, policy=policies.everything_saveable)
    torch.testing.assert_close(second(region), second(filtered))
    found, plain = (count_operators(second, f) for f in (region, filtered))

    for each in ("aten.mm", "aten.tanh", "aten._fft_r2c", "aten._fft_c2r"):
        assert found[each] == plain[each]


def test_one_place_of_a_complex_tensor_is_written_too() -> None:
    """By a select, where a level maps it and where none does."""

    def written(w: Tensor, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(torch.tanh(x @ w))
        changed = torch.cat([spectrum, spectrum], -1)
        changed[..., 1] = spectrum[..., 0] * spectrum[..., -1]
        return (changed * changed).abs()

    def first(f: Callable[[Tensor, Tensor], Tensor], w: Tensor, x: Tensor) -> Tensor:
        return grad(lambda w: f(w, x).square().sum())(w)

    region = remat(written, policy=policies.save_matmul_outputs)
    for f in (
        lambda f, w: first(f, w, X),
        lambda f, w: vmap(lambda x: first(f, w, x))(X),
    ):
        found, expected = (
            grad(lambda w, f=f, each=each: f(each, w).square().sum())(W)
            for each in (region, written)
        )
        torch.testing.assert_close(found, expected)
