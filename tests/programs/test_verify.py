"""`verify=True`: the backward recomputes saved values too, and compares bits.

"The backward recomputes saved values too, compares bitwise, and names the first operator
that differs."
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remat import RecomputationError, checkpoint_name, policies, remat
from tests.support import assert_bitwise, assert_close, grads, seeded

pytestmark = pytest.mark.filterwarnings("ignore::remat.RematWarning")


def block(x: Tensor, w: Tensor) -> Tensor:
    """Two named values; only the second depends on `w`."""
    a = checkpoint_name(torch.exp(torch.sin(x)), "a")
    b = checkpoint_name(torch.tanh(a @ w), "b")
    return torch.sin(b * a)


POLICIES: dict[str, Any] = {
    "nothing": None,
    "a": policies.save_only_these_names("a"),
    "b": policies.save_only_these_names("b"),
    "both": policies.save_only_these_names("*"),
    "matmuls": policies.save_matmul_outputs,
    "everything": policies.everything_saveable,
}


def leaves() -> list[Tensor]:
    """An input and a weight."""
    return [seeded(3, 3).requires_grad_(), seeded(3, 3, seed=1).requires_grad_()]


def test_the_option_is_true_or_false() -> None:
    with pytest.raises(ValueError, match=r"verify=3\): is not a value of this option"):
        remat(block, verify=3)  # pyright: ignore[reportCallIssue, reportArgumentType]


@pytest.mark.contract
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_sound_function_passes(policy: Any) -> None:
    """The gradients are plain's, in the first order bitwise."""
    region = remat(block, policy=policy, verify=True)
    args = leaves()

    assert_bitwise(grads(region, args), grads(block, args))


def test_a_kernels_workspace_is_not_compared() -> None:
    """It has bytes that nothing writes."""
    module = torch.nn.LSTM(3, 4, 2, bidirectional=True)
    region = remat(module, policy=policies.everything_saveable, verify=True)

    for size in (5, 6, 7):
        region(seeded(size, 2, 3).float())[0].sum().backward()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_transforms_pass(policy: Any) -> None:
    """Under torch.func and in the second order."""
    region = remat(block, policy=policy, verify=True)
    args = [leaf.detach() for leaf in leaves()]

    def second(fun: Any) -> Any:
        def size(x: Tensor, w: Tensor) -> Tensor:
            gradient = torch.func.grad(lambda x: fun(x, w).sum())(x)
            return gradient.square().sum()

        return torch.func.grad(size, argnums=(0, 1))(*args)

    assert_close(second(region), second(block))


def test_preserved_randomness_passes() -> None:
    """A dropout that is drawn again gives the same bits."""

    def fun(x: Tensor) -> Tensor:
        return checkpoint_name(torch.sin(F.dropout(torch.sin(x), 0.5)), "h").sin()

    region = remat(
        fun,
        rng="preserve",
        verify=True,
        policy=policies.save_only_these_names("h"),
    )
    torch.manual_seed(0)
    found = grads(region, [seeded(8)])
    torch.manual_seed(0)

    assert_bitwise(found, grads(fun, [seeded(8)]))


CHANGED = {
    "x_everything": (0, "everything", "exp"),
    "x_a": (0, "a", "exp"),
    "x_both": (0, "both", "exp"),
    "w_matmul": (1, "matmuls", "mm"),
    "w_everything": (1, "everything", "tanh"),
    "w_both": (1, "both", "tanh"),
}


@pytest.mark.contract
@pytest.mark.parametrize(("which", "policy", "operator"), CHANGED.values(), ids=CHANGED)
def test_a_change_through_data_is_found(which: int, policy: str, operator: str) -> None:
    """A change that autograd does not see is; the first saved value to differ is named."""
    region = remat(block, policy=POLICIES[policy], verify=True)
    args = leaves()
    y = region(*args)

    args[which].data.add_(0.5)

    with pytest.raises(RecomputationError, match=operator) as error:
        y.sum().backward()
    assert "test_verify.py:" in str(error.value)
    assert "float64[3, 3]" in str(error.value)


def test_a_named_value_is_named() -> None:
    """The message says the value's name."""
    region = remat(block, policy=POLICIES["both"], verify=True)
    args = leaves()
    y = region(*args)
    args[1].data.mul_(2)

    with pytest.raises(RecomputationError, match=r"\bb\b"):
        y.sum().backward()


def test_without_verify_nothing_is_compared() -> None:
    """The default does not look."""
    region = remat(block, policy=POLICIES["both"])
    args = leaves()
    y = region(*args)
    args[0].data.add_(0.5)

    y.sum().backward()


def test_it_works_again_after_a_failure() -> None:
    """One failed comparison spoils nothing."""
    region = remat(block, policy=POLICIES["both"], verify=True)
    args = leaves()
    y = region(*args)
    args[0].data.add_(0.5)
    with pytest.raises(RecomputationError):
        y.sum().backward()

    assert_bitwise(grads(region, leaves()), grads(block, leaves()))


def test_a_nan_equals_itself() -> None:
    """Values that are not a number compare by their bits."""

    def fun(x: Tensor) -> Tensor:
        return torch.sin(checkpoint_name(torch.log(x), "h"))

    region = remat(fun, verify=True, policy=policies.save_only_these_names("h"))
    x = torch.tensor([-1.0, 1.0], requires_grad=True)
    region(x).sum().backward()

    assert x.grad is not None
    assert x.grad.isnan().tolist() == [True, False]
