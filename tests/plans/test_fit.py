"""`fit`: the regions of a step get policies by which its peak keeps to a limit."""

import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import (
    BudgetError,
    CapturedTensorError,
    Fit,
    RematWarning,
    TraceError,
    disabled,
    fit,
    modules,
    policies,
    remat,
    scan,
    storage,
)
from remat.layers import chain
from remat.schedules import Every
from tests.support import LiveBytes, assert_bitwise, seeded


def plain_block(params: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(torch.tanh(x @ params["up"]).square() @ params["down"])


def plain_head(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w).logsumexp(-1).square()


def made(block: Any, head: Any, device: str = "cpu") -> tuple[Any, Any]:
    """A step with regions of two kinds, and its arguments."""

    def step(params: Any, x: Tensor) -> Tensor:
        for each in params["blocks"]:
            x = block(each, x)
        return head(params["head"], x).mean()

    def leaf(*shape: int) -> Tensor:
        return (seeded(*shape) / 8).to(device).requires_grad_()

    blocks = [{"up": leaf(16, 64), "down": leaf(64, 16)} for _ in range(4)]
    params = {"blocks": blocks, "head": leaf(16, 128)}
    return step, (params, seeded(64, 16).to(device))


def leaves_of(params: Any) -> list[Tensor]:
    return [w for each in params["blocks"] for w in each.values()] + [params["head"]]


def peak_of(step: Any, args: Any) -> int:
    """The most that lives in a step with an optimizer without a state."""
    leaves = leaves_of(args[0])

    def run() -> None:
        step(*args).backward()
        for each in leaves:
            each.grad = None

    run()
    with LiveBytes() as memory:
        run()
    return memory.peak + sum(each.nbytes for each in [*leaves, args[1]])


def test_a_step_keeps_to_its_limit() -> None:
    """Applied, it takes what was predicted, and the gradients are as they were."""
    block, head = remat(plain_block), remat(plain_head)
    step, args = made(block, head)
    leaves = leaves_of(args[0])
    plain = torch.autograd.grad(made(plain_block, plain_head)[0](*args), leaves)
    whole = fit(step, peak="1GiB")(*args)
    least = whole.predicted_peak_bytes
    seen: list[Fit] = []
    for part in (0.55, 0.7, 0.9):
        limit = int(part * least)

        found = fit(step, peak=limit)(*args)
        found.apply()

        peak = peak_of(step, args)
        assert peak <= found.predicted_peak_bytes <= min(limit, 1.02 * peak)
        assert_bitwise(torch.autograd.grad(step(*args), leaves), plain)
        assert [len(row.plans) for row in found.rows] == [4, 1]
        seen.append(found)
    saved = [sum(p.saved_bytes for r in each.rows for p in r.plans) for each in seen]
    assert saved == sorted(saved)
    assert "plain_block: budget(" in str(seen[0])
    assert str(seen[0]).splitlines()[-1].startswith(("cheaper: ", "dearer: "))
    for each in seen:
        assert 0.0 <= each.gap < 0.001
        assert f"budgets recomputes at most {each.gap:.2%} less" in str(each)


@pytest.mark.parametrize("limit", ["450KiB", "1MiB"])
def test_a_graph_that_is_retained_is_held(limit: str) -> None:
    """A backward of it frees nothing, and another one follows."""
    block = remat(plain_block)

    def step(params: Any, x: Tensor) -> Tensor:
        for each in params["blocks"]:
            x = block(each, x)
        loss = x.square().mean()
        torch.autograd.grad(loss, leaves_of(params)[:-1], retain_graph=True)
        return loss

    _, args = made(block, remat(plain_head))
    found = fit(step, peak=limit)(*args)
    found.apply()

    assert peak_of(step, args) <= found.predicted_peak_bytes
    assert all(size >= 0 for each in found.timeline.moments for _, size in each.parts)


HALF = storage.Cast(torch.float32)


@pytest.mark.parametrize("part", [0.7, 1.0])
@pytest.mark.parametrize("inputs", [HALF, {"params.*": HALF}], ids=["all", "by name"])
def test_inputs_that_wait_in_a_storage(inputs: Any, part: float) -> None:
    """Wait as that says, and all come back before a region's backward begins."""
    step, args = made(remat(plain_block, saved_inputs=inputs), plain_head)

    found = fit(step, peak=part)(*args)
    found.apply()

    peak = peak_of(step, args)
    assert peak <= found.predicted_peak_bytes <= 1.05 * peak


def test_a_part_of_the_peak() -> None:
    """Of that without remat, whatever regions may save."""
    step, args = made(remat(plain_block), remat(plain_head))
    whole = fit(step, peak="1GiB")(*args).predicted_peak_bytes
    few = policies.save_matmul_outputs

    for allow in (None, few):
        found = fit(step, peak=0.6, allow=allow)(*args)
        assert str(found) == str(fit(step, peak=int(0.6 * whole), allow=allow)(*args))
    assert fit(step, peak=1.0)(*args).predicted_peak_bytes == whole
    assert fit(step, peak="1GiB", allow=few)(*args).predicted_peak_bytes < whole


def test_it_is_planned_without_data_and_changes_nothing() -> None:
    """On the meta device as with numbers; until it is applied, policies stay."""
    block, head = remat(plain_block), remat(plain_head)
    step, args = made(block, head)
    before = block.settings
    limit = int(0.6 * fit(step, peak="1GiB")(*args).predicted_peak_bytes)

    here = fit(step, peak=limit)(*args)
    there = fit(step, peak=limit)(*made(block, head, "meta")[1])

    assert str(here) == str(there)
    assert block.settings == before
    assert all(each.grad is None for each in leaves_of(args[0]))
    allow = policies.everything_saveable.stored(storage.Cast(torch.bfloat16))
    cast = fit(step, peak=limit, allow=allow, optimizer=torch.optim.SGD)(*args)
    assert {row.decision for p in cast.rows[0].plans for row in p.rows} <= {
        *("recompute", "Cast(dtype=torch.bfloat16)")
    }


def test_regions_that_the_step_makes_cannot_be_reached() -> None:
    """By `apply`, which says so; policies of the others have their effect."""
    head = remat(plain_head)
    step, args = made(lambda *each: remat(plain_block)(*each), head)

    found = fit(step, peak="1GiB")(*args)

    assert [row.is_lasting for row in found.rows] == [False] * 4 + [True]
    with pytest.warns(RematWarning, match=r"`plain_block`: has no effect.*outside of"):
        found.apply()
    assert head.settings.policy == found.rows[-1].policy


def test_where_nothing_fits() -> None:
    """The error says by how much, and what would help most; a stated state counts."""
    step, args = made(remat(plain_block), remat(plain_head))

    with pytest.raises(
        BudgetError, match=r"within 1000 bytes.*Most would help: a smaller optimizer"
    ):
        fit(step, peak=1000, optimizer=20.0)(*args)


class Model(nn.Module):
    """Blocks, of which regions are made, and around them a buffer and a weight used twice."""

    def __init__(self, device: str = "cpu", **options: Any) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh())
            for _ in range(4)
        ]
        self.blocks = nn.ModuleList(blocks)
        self.ends = nn.Linear(16, 16, bias=False)
        self.register_buffer("scale", torch.ones(16))
        self.to(device, torch.float64)
        modules.apply(self, "blocks.*", **options)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ends(x) * self.scale
        for each in self.blocks:
            x = x + each(x)
        return self.ends(x).square().mean()


@pytest.mark.parametrize(
    "is_given", [True, False], ids=["the module", "its parameters"]
)
def test_a_step_of_a_module(is_given: bool) -> None:
    """By the module or by `functional_call`: what its regions capture is counted, too."""
    model, x = Model(), seeded(64, 16)
    leaves = [*model.parameters()]
    plain = torch.autograd.grad(model(x), leaves)

    def step(given: Any, x: Tensor) -> Tensor:
        return given(x) if is_given else torch.func.functional_call(model, given, (x,))

    def run() -> None:
        model(x).backward()
        model.zero_grad()

    def fitted(model: nn.Module, x: Tensor, peak: Any) -> Fit:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return fit(step, peak=peak)(model if is_given else tensors, x)

    found = fitted(model, x, 0.8)
    shown = str(found)
    found.apply()
    run()
    with LiveBytes() as memory:
        run()

    there = sum(each.nbytes for each in [*leaves, *model.buffers(), x])
    predicted = found.predicted_peak_bytes
    assert memory.peak + there <= predicted <= 1.1 * (memory.peak + there)
    assert found.timeline.moments[-1].gradients == sum(each.nbytes for each in leaves)
    assert all(each.grad is None for each in leaves)
    assert_bitwise(torch.autograd.grad(model(x), leaves), plain)
    if is_given:
        assert str(fitted(Model("meta"), x.to("meta"), 0.8)) == shown


def test_parameters_of_modules_wait_as_they_are() -> None:
    """Where a storage is for all inputs, as at run time."""
    model, x = Model(saved_inputs=HALF), seeded(64, 16)

    def run() -> None:
        model(x).backward()
        model.zero_grad()

    found = fit(lambda model, x: model(x), peak=0.8)(model, x)
    found.apply()
    run()
    with LiveBytes() as memory:
        run()

    there = [*model.parameters(), *model.buffers(), x]
    peak = memory.peak + sum(each.nbytes for each in there)
    assert peak <= found.predicted_peak_bytes <= 1.05 * peak


@pytest.mark.parametrize(
    "is_region", [True, False], ids=["in a region", "around regions"]
)
def test_a_parameter_that_is_no_argument(is_region: bool) -> None:
    """Would not be counted, nor would its gradient; a constant may be captured."""
    scale, mask = seeded(16).requires_grad_(), seeded(16)
    block, head = remat(plain_block), remat(plain_head)
    step, args = made(block, head)
    scaled = remat(lambda x: x * scale) if is_region else lambda x: x * scale

    with pytest.raises(
        CapturedTensorError,
        match=r"test_fit.py:\d+: reads a tensor float64\[16\] that requires grad.*or the module",
    ):
        fit(lambda params, x: step(params, scaled(x)), peak="1GiB")(*args)

    fit(lambda params, x: step(params, x * mask), peak="1GiB")(*args)


class Caching(nn.Module):
    """Fills caches of several kinds at its first call, and skips blocks at random."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.rnn = nn.Sequential(nn.Linear(8, 8)), nn.LSTM(8, 8)
        self.scale: Tensor | None = None
        self.seen: dict[str, Tensor] = {}
        modules.apply(self, "block")

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.arange(8.0).to(x)
            self.register_buffer("late", self.scale)
        if not hasattr(self, "shift"):
            self.shift = self.scale.cos()
        self.seen["input"] = x
        for _ in range(random.randrange(1, 9)):
            x = self.block(x)
        return self.rnn(x * self.scale + self.shift)[0].square().mean()


def test_a_step_leaves_nothing_behind() -> None:
    """Neither tensors without data in caches and in what it fills, nor draws of Python's."""
    model, x, losses = Caching(), seeded(4, 8).float(), []

    def step(model: nn.Module, x: Tensor) -> Tensor:
        losses.append(model(x))
        return losses[-1]

    before, names = random.getstate(), {*vars(model)}

    for seed in range(4):
        random.seed(seed)
        before = random.getstate()
        fit(step, peak=1.0)(model, x)
        modules.plan(model, peak=1.0, step=modules.Step(torch.mean), where="block")(x)
        modules.apply(model, "block")
        assert random.getstate() == before

    assert not losses
    assert (model.scale, model.seen, {*vars(model)}) == (None, {}, names)
    assert not {*model.rnn._buffers}
    assert model.rnn._flat_weights[0] is model.rnn.weight_ih_l0
    assert type(step(model, x)) is Tensor


def test_free_memory_is_that_of_the_parameters() -> None:
    """Of a module, too, whatever device the batch waits on."""
    seen: list[str] = []

    def free(device: torch.device) -> int:
        seen.append(device.type)
        return 2**30

    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.to("meta"))

    fit(step, peak=free)(Model("meta"), seeded(64, 16))

    assert seen == ["meta"]


def test_an_argument_that_requires_grad_gets_a_gradient() -> None:
    """Wherever it stands; what is passed twice is there once."""
    model, table = Model(), seeded(4096, 16).requires_grad_()

    def step(model: nn.Module, table: Tensor, rows: Tensor) -> Tensor:
        return model(table[rows])

    args = model, table, torch.arange(8)
    found = fit(step, peak=1.0)(*args)
    twice = fit(lambda given, *args: step(*args), peak=1.0)([table], *args)

    step(*args).backward()
    model.zero_grad()
    table.grad = None
    with LiveBytes() as memory:
        step(*args).backward()
    there = [*model.parameters(), *model.buffers(), *args[1:]]
    peak = memory.peak + sum(each.nbytes for each in there)
    assert peak <= found.predicted_peak_bytes <= 1.1 * peak
    assert twice.predicted_peak_bytes == found.predicted_peak_bytes


def in_scan(f: Any, x: Tensor, **options: Any) -> Tensor:
    return scan(lambda carry, _: (f(carry), None), x, length=4, **options)[0]


def in_chain(f: Any, x: Tensor) -> Tensor:
    return chain([lambda x: f(x)] * 4, schedule=Every(2))(x)


STACKS: dict[str, Any] = {
    "scan": in_scan,
    "scheduled scan": functools.partial(in_scan, schedule=Every(2)),
    "scheduled chain": in_chain,
}


@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
@pytest.mark.parametrize("is_module", [True, False], ids=["module", "function"])
def test_regions_in_a_stack_are_a_part_of_it(is_module: bool, stack: Any) -> None:
    """They follow what that recomputes, and are counted with it; no trace has stand-ins."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Tanh()).double()
    block: Any = remat(lambda x: torch.tanh(torch.tanh(x).sin()))
    block = modules.apply(layers, "") if is_module else block
    w, x = (seeded(16, 128) / 8).requires_grad_(), seeded(64, 16).requires_grad_()
    leaves = [w, x, *(layers.parameters() if is_module else ())]
    head = remat(plain_head)

    def step(w: Tensor, block: Any, x: Tensor) -> Tensor:
        return head(w, stack(block, x)).mean()

    found = fit(step, peak=1.0)(w, block, x)

    again = torch.autograd.grad(step(w, block, x), leaves)
    with LiveBytes() as memory:
        step(w, block, x).backward()
    peak = memory.peak + sum(each.nbytes for each in leaves)
    assert peak <= found.predicted_peak_bytes <= 1.05 * peak
    assert [row.region for row in found.rows] == [head]
    modules.remove(layers)
    plain = layers if is_module else block.__wrapped__
    with disabled():
        assert_bitwise(torch.autograd.grad(step(w, plain, x), leaves), again)


def test_a_step_whose_regions_are_all_in_stacks() -> None:
    """Has nothing to plan, and the message says why."""
    block = remat(lambda x, w: torch.tanh(x @ w).sin())

    with pytest.raises(ValueError, match=r"calls no region .*inside a `scan`"):
        fit(lambda w, x: in_scan(lambda x: block(x, w), x).sum(), peak=1.0)(
            seeded(16, 16).requires_grad_(), seeded(4, 16)
        )


def result_of(returned: Any) -> Any:
    """A step that returns what a function makes of the output of a region."""
    block = remat(plain_head)
    return lambda params, x: returned(block(params["head"], x))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            lambda y: {"loss": y.mean()},
            r"loss of the step is a dict\. .*Return the loss",
        ),
        (lambda y: y, r"loss of the step is float64\[64\]\. .*one number"),
        (lambda y: 1.0, r"loss of the step is a float"),
    ],
    ids=["in a dict", "several numbers", "no tensor"],
)
def test_a_step_that_gives_no_number(returned: Any, message: str) -> None:
    """Is refused by what it gives."""
    _, args = made(None, None)

    with pytest.raises(ValueError, match=message):
        fit(result_of(returned), peak="1GiB")(*args)


def test_a_step_that_goes_further_than_its_loss() -> None:
    """Or has its parameters where they are not looked for, or an optimizer of others."""

    def whole(y: Tensor) -> Tensor:
        loss = y.mean()
        loss.backward()
        return loss

    _, args = made(None, None)
    with pytest.raises(TraceError, match=r"calls `.backward\(\)` itself.*`optimizer`"):
        fit(result_of(whole), peak="1GiB")(*args)
    assert all(each.grad is None for each in leaves_of(args[0]))

    step = result_of(Tensor.mean)
    head = {"head": seeded(16, 128)}
    with pytest.raises(ValueError, match=r"nothing to differentiate.*Pass the param"):
        fit(step, peak="1GiB")(params=head, x=args[1])
    other = torch.optim.AdamW([seeded(4).requires_grad_()])
    with pytest.raises(ValueError, match=r"none of the parameters of this AdamW is"):
        fit(step, peak="1GiB", optimizer=other)(*args)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "rerun"}, r'`plain_head`, which has engine="rerun"'),
        ({"verify": True}, r"`plain_head`, which has verify=True.*Leave `verify` out"),
    ],
    ids=["rerun", "verify"],
)
def test_a_region_whose_backward_has_no_plan(options: Any, message: str) -> None:
    """Is refused before the policies are applied; where nothing is differentiated, it runs."""
    again = remat(plain_head, **options)
    step, args = made(remat(plain_block), again)

    with pytest.raises(ValueError, match=message):
        fit(step, peak="1GiB")(*args)

    def ended(params: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = again(params["head"], x)
        return made(remat(plain_block), plain_head)[0](params, x) - target.mean()

    fit(ended, peak="1GiB")(*args)


class Failing(torch.autograd.Function):
    """A function of the user's, whose backward has a fault."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError("a fault of the user's")


def test_what_a_backward_raises_is_left_as_it_is() -> None:
    """Also where other parameters have their gradients by then."""
    step, args = made(remat(plain_block), remat(plain_head))

    def failing(params: Any, x: Tensor) -> Tensor:
        early: Any = Failing.apply(params["head"])  # pyright: ignore[reportUnknownMemberType]
        return early.sum() + step(params, x)

    with pytest.raises(RuntimeError, match=r"^a fault of the user's$"):
        fit(failing, peak="1GiB")(*args)


def penalty(step: Any, params: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    loss = step(params, x)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().mean()


def inner_step(step: Any, params: Any, x: Tensor) -> Tensor:
    slope = torch.autograd.grad(step(params, x), params["head"], create_graph=True)[0]
    return step({**params, "head": params["head"] - slope / 8}, x)


def backward_with_a_graph(step: Any, params: Any, x: Tensor) -> Tensor:
    loss = step(params, x)
    loss.backward(create_graph=True, inputs=[params["head"]])
    return loss


@pytest.mark.parametrize("nested", [penalty, inner_step, backward_with_a_graph])
def test_a_gradient_that_is_differentiated_again(nested: Any) -> None:
    """Is refused by the line that takes it: a stand-in has no graph that could be counted."""
    step, args = made(remat(plain_block), remat(plain_head))

    with pytest.raises(
        TraceError,
        match=r"at test_fit\.py:\d+: takes a gradient .* create_graph=True.*policies\.budget",
    ):
        fit(functools.partial(nested, step), peak="1GiB")(*args)

    assert all(each.grad is None for each in leaves_of(args[0]))


def test_what_has_no_plan_is_refused() -> None:
    """No region, gradients of them in the loss, numbers that decide."""
    step, args = made(plain_block, plain_head)
    with pytest.raises(ValueError, match=r"calls no region .*Decorate the parts"):
        fit(step, peak="1GiB")(*args)

    step, args = made(remat(plain_block), remat(plain_head))

    def gradient(params: Any, x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: step(params, x))(x).sum()

    with pytest.raises(TraceError, match=r"under a transform of torch.func"):
        fit(gradient, peak="1GiB")(*args)

    def slope(params: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(step(params, x), x)[0].sum()

    with pytest.raises(TraceError, match=r"has no gradient.*policies\.budget"):
        fit(slope, peak="1GiB")(*args)

    def deciding(params: Any, x: Tensor) -> Tensor:
        found = step(params, x)
        return found if float(found) > 0 else -found

    with pytest.raises(
        TraceError,
        match=r"at test_fit\.py:\d+: needs the numbers of a tensor .*_local_scalar",
    ):
        fit(deciding, peak="1GiB")(*args)
