"""Models with regions train as plain ones: mixed precision, accumulation, recurrence."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from remat import modules, remat
from tests.modules.models import WIDTH, Block, a_model, each_option
from tests.support import assert_bitwise, assert_close, grads, seeded

HERE = torch.get_default_device().type

pytestmark = [
    pytest.mark.contract,
    # Forward mode itself compiles decompositions with torch.jit.script.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]


@each_option
def test_autocast(options):
    """Recomputation runs under the forward's autocast, after it has ended too."""
    found = []
    for model in (a_model(dtype=torch.float32), a_model(dtype=torch.float32)):
        if found:
            modules.apply(model, Block, **options)
        torch.manual_seed(1)
        x = seeded(6, WIDTH, dtype=torch.float32).requires_grad_()
        with torch.autocast(HERE, torch.bfloat16):
            y = model(x)
        assert y.dtype is torch.bfloat16
        y.float().square().sum().backward()
        found.append((y.detach(), x.grad, [each.grad for each in model.parameters()]))

    assert_bitwise(*found)


def test_gradient_scaler():
    """Scaled losses, a step that is skipped for an infinity, and one that is taken."""
    found = []
    for model in (a_model(dtype=torch.float32), modules.apply(a_model(dtype=torch.float32), Block)):  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(HERE, init_scale=2.0**8)
        for factor in (1.0, float("inf"), 1.0):
            torch.manual_seed(1)
            optimizer.zero_grad()
            with torch.autocast(HERE, torch.bfloat16):
                loss = (
                    model(seeded(6, WIDTH, dtype=torch.float32)).float().square().mean()
                )
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(
            (scaler.get_scale(), [each.detach() for each in model.parameters()])
        )

    assert found[0][0] == 2.0**7
    assert_bitwise(found[1][1], found[0][1])
    assert found[1][0] == found[0][0]


def test_gradients_accumulate():
    """Micro-batches, forwards and backwards in turn, or all forwards first, as in a pipeline."""
    batches = [seeded(6, WIDTH, seed=seed) for seed in range(3)]

    def in_turn(model):
        for batch in batches:
            model(batch).square().sum().backward()

    def forwards_first(model):
        losses = [model(batch).square().sum() for batch in batches]
        for loss in losses:
            loss.backward()

    for schedule in (in_turn, forwards_first):
        plain, model = a_model(), modules.apply(a_model(), Block)
        for each in (plain, model):
            torch.manual_seed(1)
            schedule(each)
        assert_bitwise(
            [each.grad for each in model.parameters()],
            [each.grad for each in plain.parameters()],
        )


@pytest.mark.parametrize("make", [nn.RNN, nn.GRU])
def test_recurrent_modules_with_other_parameters(make):
    """They hold their parameters in a second place, which functional_call leaves stale."""
    plain, x = nn.Sequential(make(3, 4)).double(), seeded(2, 1, 3)
    model = modules.apply(copy.deepcopy(plain), make)
    others = [
        {k: t.detach() * scale for k, t in plain.named_parameters()} for scale in (2, 3)
    ]

    def gradients(of, parameters):
        return torch.func.grad(
            lambda p: torch.func.functional_call(of, p, (x,))[0].sin().sum()
        )(parameters)

    for parameters in others:
        assert_bitwise(model(x)[0], plain(x)[0])
        assert_close(gradients(model, parameters), gradients(plain, parameters))
    layers: list[Any] = [plain[0], model[0]]
    for each in layers:
        each.weight_hh_l0 = nn.Parameter(torch.ones_like(each.weight_hh_l0))
    assert_bitwise(model(x)[0], plain(x)[0])
    assert layers[1].forward.cache_info().misses == 1


@pytest.mark.parametrize("make", [nn.RNN, nn.GRU])
def test_a_recurrent_module_whose_backward_runs_under_autocast(make):
    """The trace of that backward puts the second place of its parameters in order."""
    module, x = make(3, 4), seeded(2, 1, 3, dtype=torch.float32)
    weights = dict(module.named_parameters())

    def called(weights):
        return torch.func.functional_call(module, weights, (x,))[0]

    def gradients(called):
        with torch.autocast(HERE, torch.bfloat16):
            out = called(weights).float().sum()
            return torch.autograd.grad(out, [*weights.values()])

    assert_bitwise(gradients(remat(called)), gradients(called))


def test_a_region_that_calls_a_recurrent_module_leaves_it_as_it_was():
    """No tensor of the trace stays in the module's second place for its parameters."""
    module, x = nn.RNN(3, 4).double(), seeded(2, 1, 3)
    others = {k: t.detach() * 2 for k, t in module.named_parameters()}
    expected = module(x)[0]

    def fun(parameters, x):
        return torch.func.functional_call(module, parameters, (x,))[0]

    assert_bitwise(grads(remat(fun), [others, x]), grads(fun, [others, x]))
    assert_bitwise(module(x)[0], expected)


@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_flops_are_counted_by_module(engine: Any) -> None:
    """As with torch's checkpoint: each block, and what its backward repeats."""
    plain = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
    )
    model, x = modules.apply(copy.deepcopy(plain), "*", engine=engine), torch.ones(3, 8)

    with FlopCounterMode(display=False) as found:
        model(x).sum().backward()
    with FlopCounterMode(display=False) as expected:
        y = x
        for block in plain:
            y = checkpoint(block, y, use_reentrant=False)
        y.sum().backward()

    assert found.get_total_flops() == expected.get_total_flops()
    assert {"Sequential.0", "Sequential.1", "Sequential.2"} <= {
        *found.get_flop_counts()
    }
