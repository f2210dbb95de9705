"""flex attention: one value with its log-sum-exp; what its functions reach gets its gradient.

On a CPU torch's function refuses a backward, although its operator has one. Without that check the
operator's plain kernels are the oracle.
"""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from remat import checkpoint_name, policies, remat
from tests.support import assert_bitwise, in_turn, seeded

# Dynamo's own.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")
attend: Any = flex_attention
HERE = torch.get_default_device().type
BIAS = seeded(2, seed=7, dtype=torch.float32).requires_grad_()
MASK = create_block_mask(lambda _, __, i, j: i >= j, None, None, 128, 128, device=HERE)
OFFSET = torch.tensor(3)
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _with_a_backward_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    module = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)
    # Its advice to compile it.
    monkeypatch.setattr(module, "_warn_once", lambda *_, **__: None)


def biased(score: Tensor, _: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + BIAS[head] * (i - j)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q.sin(), k, v).sin()


def captured(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint_name(attend(q.sin(), k, v, score_mod=biased), "attn").sin()


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q.sin(), k, v, score_mod=biased, block_mask=MASK).sin()


def made_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mask and a factor are the region's own, and the mask reaches a tensor."""
    factor = q.sum((0, 2, 3))
    mask = create_block_mask(
        lambda _, __, i, j: i >= j - OFFSET, None, None, 128, 128, device=HERE
    )

    def score_mod(score: Tensor, _: Tensor, head: Tensor, *__: Tensor) -> Tensor:
        return score * factor[head] + BIAS[head]

    return attend(q.sin(), k, v, score_mod=score_mod, block_mask=mask).sin()


FUNCTIONS: dict[str, Function] = {
    "plain": plain,
    "captured": captured,
    "masked": masked,
}


def operands() -> list[Tensor]:
    return [
        seeded(1, 2, 128, 16, seed=seed, dtype=torch.float32).requires_grad_()
        for seed in range(3)
    ]


def with_gradients(fun: Function) -> list[Tensor]:
    given = operands()
    y = fun(*given)
    found = torch.autograd.grad(
        (y * y.detach().cos()).sum(),
        [*given, BIAS],
        allow_unused=True,
        materialize_grads=True,
    )
    return [y.detach(), *found]


def test_what_the_region_makes_is_followed() -> None:
    """On torch 2.13 the kernel on a CPU gives no gradient of what a function reaches."""
    region = remat(made_inside, policy=policies.save_attention_outputs)
    assert_bitwise(with_gradients(region), with_gradients(made_inside))


@pytest.mark.contract
@pytest.mark.parametrize(
    ("name", "policy"),
    in_turn(FUNCTIONS, [policies.nothing_saveable, policies.save_attention_outputs]),
)
def test_values_and_gradients_are_those_of_plain_torch(name: str, policy: Any) -> None:
    fun = FUNCTIONS[name]
    assert_bitwise(with_gradients(remat(fun, policy=policy)), with_gradients(fun))


# That a policy permits nothing is told, and is what some of the cases are about.
@pytest.mark.filterwarnings("ignore::remat.RematWarning")
@pytest.mark.contract
@pytest.mark.parametrize(
    ("policy", "is_saved"),
    [
        (policies.nothing_saveable, False),
        (policies.save_matmul_outputs, False),
        (policies.save_attention_outputs, True),
        (policies.save_only_these_names("attn"), True),
        (policies.by_op("flex_attention"), True),
    ],
)
def test_it_is_saved_with_its_log_sum_exp(policy: Any, is_saved: bool) -> None:
    region = remat(captured, policy=policy)

    permitted = [
        (each.op, each.shape, each.size_bytes)
        for each in region.saved_residuals(*operands())
        if "permitted" in each.reason
    ]
    output = ("flex_attention", (1, 2, 128, 16), 4 * 2 * 128 * 16)
    statistics = ("flex_attention", (1, 2, 128), 4 * 2 * 128)
    assert permitted == ([output, statistics] if is_saved else [])
    _, backward = region.programs(*operands())
    assert backward.operators.count("flex_attention") == (0 if is_saved else 1)
    assert backward.operators.count("flex_attention_backward") == 1
