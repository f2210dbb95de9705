"""Budgets and plans on functions: what they predict is what a call is measured to do.

"Predicted bytes equal measured bytes exactly; predicted peak within 10 % of the measured
peak on the demo's GPT and on a convolutional net"; "A plan's cost equals the operators
counted in the executed backward"; "a fingerprint that refuses a plan for another program".
"""

import itertools
import json
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from remat import (
    BudgetError,
    Plan,
    PolicyError,
    checkpoint_name,
    plan,
    policies,
    random,
    remat,
    storage,
)
from remat._partition.free_memory import limits
from remat.reporting import LiveBytes
from remat.reporting._demo.gpt import GPTShape, block, initial_parameters, make_loss
from tests.support import assert_bitwise, assert_close, seeded

SHAPE = GPTShape(layers=3, width=32, heads=2, time=32, batch=2)
PARTS = (0.1, 0.25, 0.5, 0.75, 1.0)
Model = tuple[Any, tuple[Any, ...], list[Tensor]]
_aten = torch.ops.aten
UNCOUNTED = (
    _aten._unsafe_view.default,
    _aten._reshape_alias.default,
    torch.ops.remat.rng_swap.default,  # a few kilobytes of a generator's state
)
ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu


def mlp(x: Tensor, w: Tensor) -> Tensor:
    """Three unlike layers; each backward reads its output and its input."""
    h = checkpoint_name(torch.tanh(x @ w), "first")
    h = torch.tanh((h @ w) * 2)
    return torch.tanh(h @ w).square().sum()


def mlp_args() -> tuple[Tensor, Tensor]:
    """A batch and a weight, in double precision."""
    return seeded(6, 4), seeded(4, 4, seed=1).requires_grad_()


def gpt() -> Model:
    """The demo's GPT as one function, a call of it, and what is differentiated."""
    generator = torch.Generator().manual_seed(0)
    parameters = initial_parameters(SHAPE, generator)
    size = (SHAPE.batch, SHAPE.time + 1)
    batch = torch.randint(0, 256, size, generator=generator)
    leaves = [
        t.requires_grad_() for group in parameters.values() for t in group.values()
    ]
    return make_loss(SHAPE, block), (parameters, batch, random.key(0)), leaves


def conv_net() -> Model:
    """Convolutions, pooling and a classifier; batch normalization changes buffers."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, 10),
    )
    args = (seeded(4, 3, 16, 16, dtype=torch.float32),)
    return net, args, list(net.parameters())


def dropping() -> Model:
    """A module that draws: states of the generator are held."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(8, 64),
        nn.Dropout(0.5),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Linear(64, 4),
    )
    return net, (seeded(256, 8, dtype=torch.float32),), list(net.parameters())


MODELS = {"gpt": gpt, "conv": conv_net, "dropout": dropping}
each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def region_of(f: Any, policy: Any) -> Any:
    """A function or a module as a region under a policy."""
    return remat(f, policy=policy)


class Costs(TorchDispatchMode):
    """FLOPs plus bytes read and written by each operator that is no view."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(each.alias_info is not None for each in func._schema.returns):
            return result
        if func in UNCOUNTED:
            return result
        given = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        tensors = [*given.values(), *(t for t in tree_leaves(result) if t is not None)]
        self.total += sum(map(_distinct_bytes, tensors))
        packet = func.overloadpacket
        packet = (
            _aten._scaled_dot_product_flash_attention if packet is ATTENTION else packet
        )
        formula = flop_registry.get(packet)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result


def _distinct_bytes(tensor: Tensor) -> int:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    dense = torch.Size(size if step else 1 for size, step in sizes)
    return dense.numel() * tensor.element_size()


def attention_flops(*args: Any, **kwargs: Any) -> int:
    """The CPU's attention counts like the GPU's: torch 2.13 has no formula for it."""
    return flop_registry[_aten._scaled_dot_product_flash_attention](*args, **kwargs)


vars(attention_flops)["_get_raw"] = True  # it takes tensors, not shapes


def measured(
    f: Any, args: tuple[Any, ...], leaves: list[Tensor]
) -> tuple[int, int, int, int]:
    """Bytes held, the peak, and FLOPs and cost of the backward of one call."""

    cotangent = torch.ones_like(f(*args))

    def gradients(output: Tensor) -> None:
        torch.autograd.grad(output, leaves, cotangent)

    gradients(f(*args))
    with LiveBytes() as live:
        output = f(*args)
        held = live.current_bytes - output.untyped_storage().nbytes()
        gradients(output)
    output = f(*args)
    mapping = {ATTENTION: attention_flops}
    with FlopCounterMode(display=False, custom_mapping=mapping) as flops:
        gradients(output)
    output = f(*args)
    with Costs() as costs:
        gradients(output)
    return held, live.peak_bytes, flops.get_total_flops(), costs.total


@pytest.mark.contract
@each_model
@pytest.mark.parametrize("part", [0.25, 0.75])
def test_predictions_are_what_is_measured(model: Any, part: float) -> None:
    """Bytes, FLOPs and cost are exact, the peak is within 10 %."""
    f, args, leaves = model()
    found = plan(f, budget=part)(*args)

    *_, plain_flops, plain_cost = measured(f, args, leaves)
    held, peak, flops, cost = measured(region_of(f, policy=found.policy), args, leaves)

    assert held == found.saved_bytes <= found.budget_bytes
    assert abs(found.predicted_peak_bytes - peak) <= 0.1 * peak
    assert flops - plain_flops == found.recompute_flops
    # Batch normalization hands out its new statistics, which its kernel does not make.
    statistics = 4 * 2 * (8 + 16) if model is conv_net else 0
    assert found.recompute_cost - (cost - plain_cost) in (0, statistics)


@pytest.mark.parametrize("part", [0.5, 0.8, 1.0])
def test_a_view_keeps_what_is_saved(part: float) -> None:
    """A saved value ends with the last step that reads one of its views."""
    w = (seeded(4, 16, 32) / 4).requires_grad_()
    u = (seeded(4, 32, 8, seed=1) / 4).requires_grad_()
    args = (seeded(40, 16, seed=2), w, u)

    def f(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        gates = torch.einsum("nd,edh->enh", x, w)
        return (nn.functional.silu(gates) @ u).sum(0).sin().square().sum()

    found = plan(f, budget=part)(*args)
    held, peak, *_ = measured(region_of(f, policy=found.policy), args, [w, u])

    assert held == found.saved_bytes
    assert abs(found.predicted_peak_bytes - peak) <= 0.01 * peak


@pytest.mark.parametrize("part", [0.1, 0.6])
def test_a_write_to_a_column_holds_a_column(part: float) -> None:
    """torch's pure `copy` has all the memory behind the view that it stands for."""
    args = (seeded(40, 16), (seeded(16, 16, seed=1) / 4).requires_grad_())

    def f(x: Tensor, w: Tensor) -> Tensor:
        h = (x @ w).mul(2).sin()
        h[:, 0] = h[:, 1] * 2
        return (h.sin() @ w).exp().log1p().sum()

    found = plan(f, budget=part)(*args)
    held, *_ = measured(region_of(f, policy=found.policy), args, [args[1]])

    assert held == found.saved_bytes <= found.budget_bytes


@pytest.mark.contract
@each_model
def test_residuals_are_what_is_predicted(model: Any) -> None:
    """What `saved_residuals` lists beside the arguments adds up to the plan's bytes."""
    f, args, _ = model()
    found = plan(f, budget=0.5)(*args)

    residuals = region_of(f, policy=found.policy).saved_residuals(*args)

    made = [each for each in residuals if each.op != "input"]
    listed = sum(row.held_bytes for row in found.rows)
    assert sum(each.size_bytes for each in made) == listed
    assert listed == found.saved_bytes - found.problem.fixed_bytes
    assert {each.reason for each in made} == {"chosen by a plan"}


@pytest.mark.contract
def test_what_is_held_in_any_case_is_counted() -> None:
    """The state that a draw starts from, and copies of the statistics of two layers."""
    fixed = [
        plan(f, budget=1.0)(*args).problem.fixed_bytes
        for f, args, _ in (gpt(), dropping(), conv_net())
    ]

    assert fixed == [0, 5056, 2 * (8 + 16) * 4 + 2 * 8]


@pytest.mark.parametrize("solver", ["cut", "milp"])
def test_more_budget_costs_less(solver: str) -> None:
    """Down to nothing where all is saved; bounds hold, and bytes stay within."""
    f, args, _ = gpt()
    plans = [plan(f, budget=part, solver=solver)(*args) for part in PARTS[::2]]

    costs = [each.recompute_cost for each in plans]
    assert costs == sorted(costs, reverse=True)
    assert plans[-1].recompute_flops == 0
    for each in plans:
        assert each.lower_bound <= each.recompute_cost
        assert each.saved_bytes <= each.budget_bytes
        assert each.solver == solver


@pytest.mark.contract
def test_a_budget_is_a_policy() -> None:
    """A region with a budget saves what the plan for it says; gradients are the same."""
    f, args, leaves = gpt()
    found = plan(f, budget=0.4)(*args)
    plain = torch.autograd.grad(f(*args), leaves)

    for policy in (policies.budget(0.4), found.policy):
        region = region_of(f, policy=policy)

        assert_bitwise(torch.autograd.grad(region(*args), leaves), plain)
        assert measured(region, args, leaves)[0] == found.saved_bytes


@pytest.mark.parametrize("budget", [100, "1 KiB", 0.3])
def test_sizes(budget: Any) -> None:
    """Bytes, a string, and a fraction of what is saved without remat."""
    args = mlp_args()
    whole = sum(
        each.size_bytes
        for each in remat(mlp, policy=policies.everything_saveable).saved_residuals(
            *args
        )
        if each.op != "input"
    )

    found = plan(mlp, budget=budget)(*args)

    expected = {100: 100, "1 KiB": 1024, 0.3: int(0.3 * whole)}[budget]
    assert found.budget_bytes == expected


def _mapped(f: Any) -> Any:
    return torch.func.vmap(f, (0, None))


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(f, 1),
    "vmap(grad)": lambda f: (
        lambda x, w: _mapped(torch.func.grad(f, 1))(torch.stack([x, x + 1]), w)
    ),
    "grad(vmap)": lambda f: torch.func.grad(
        lambda x, w: _mapped(f)(torch.stack([x, x + 1]), w).sum(), 1
    ),
    "jvp(grad)": lambda f: (
        lambda x, w: torch.func.jvp(
            lambda w: torch.func.grad(f, 1)(x, w), (w,), (torch.ones_like(w),)
        )
    ),
    "hessian": lambda f: torch.func.hessian(f, 1),
}


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("planned", [True, False], ids=["plan", "budget"])
def test_under_transforms(transform: Any, planned: bool) -> None:
    """A planned region is right where a region is; what is derived is planned anew."""
    x, w = mlp_args()
    policy = plan(mlp, budget=200)(x, w).policy if planned else policies.budget(200)

    found = transform(remat(mlp, policy=policy))(x, w.detach())

    assert_close(found, transform(mlp)(x, w.detach()))


@pytest.mark.contract
def test_another_program_is_refused() -> None:
    """Other shapes, another function, a transposed argument: the error says what to do."""
    x, w = mlp_args()
    policy = plan(mlp, budget=200)(x, w).policy
    others: list[tuple[Any, Any]] = [
        (mlp, (seeded(7, 4), w)),
        (mlp, (x.float(), w.detach().float().requires_grad_())),
        (mlp, (x, w.detach().t().requires_grad_())),
        (lambda x, w: mlp(x, w) * 2, (x, w)),
    ]

    for f, args in others:
        with pytest.raises(
            PolicyError, match=r"got a different program.*Plan this call"
        ):
            region_of(f, policy=policy)(*args)


def test_another_choice_of_gradients_is_the_same_program() -> None:
    """A plan says what of the forward is saved; less may be read of it, never more."""
    x, w = mlp_args()
    found = plan(mlp, budget=500)(x, w)

    region = remat(mlp, policy=found.policy)
    both = x.clone().requires_grad_(), w

    assert_bitwise(
        torch.autograd.grad(region(*both), both), torch.autograd.grad(mlp(*both), both)
    )


def test_json() -> None:
    """What is written is read back, storages and all; other text is refused."""

    def allow(value: Any) -> Any:
        return storage.Cast(torch.bfloat16) >> storage.Keep(), storage.Quantize(8)

    for policy in (policies.budget(300), policies.budget(300, allow=allow)):
        found = plan(mlp, budget=policy)(*mlp_args())

        again = Plan.from_json(found.to_json())

        assert again == found
        assert again.policy == found.policy
        assert again.frontier() == found.frontier()
        assert str(again) == str(found)
    for text in ("[]", "{}", json.dumps({"version": 0}), json.dumps({"version": 1})):
        with pytest.raises(ValueError, match="not a plan of version 1"):
            Plan.from_json(text)


def test_a_damaged_text() -> None:
    """What is cut off, or was changed by hand, is refused in words."""
    text = plan(mlp, budget=300)(*mlp_args()).to_json()
    fields = json.loads(text)
    damaged = {
        text[:99]: "It is not JSON: ",
        text.replace("Keep", "Kept"): "cannot be read: AttributeError: .*'Kept'",
        json.dumps({**fields, "problem": {}}): "cannot be read: KeyError: 'steps'",
        json.dumps({**fields, "rows": "none"}): "cannot be read: TypeError: ",
    }

    for each, why in damaged.items():
        with pytest.raises(
            ValueError, match=f"^Plan.from_json.*version 1.*{why}.*Pass"
        ):
            Plan.from_json(each)


@pytest.mark.parametrize("option", ["solver", "costs"])
def test_an_unknown_option_names_the_function(option: str) -> None:
    """It is `plan` that was called."""
    options: Any = {option: "best"}

    with pytest.raises(ValueError, match=rf"^plan\({option}='best'\): is not a value"):
        plan(mlp, budget=0.5, **options)


def test_what_cannot_be_written() -> None:
    """A key is no text: the error says what can be done instead."""
    hidden = storage.Quantize(8, stochastic=True, key=random.key(0))
    policy = policies.budget(300, allow=policies.everything_saveable.stored(hidden))

    with pytest.raises(PolicyError, match=r"cannot be written.*Plan again"):
        plan(mlp, budget=policy)(*mlp_args()).to_json()


def test_table_and_difference() -> None:
    """A plan prints what it does with each value; two plans print where they part."""
    args = mlp_args()
    small, large = (plan(mlp, budget=size)(*args) for size in (200, 600))

    text, difference = str(large), small.diff(large)

    for part in ("aten.tanh", '"first"', "Keep()", "test_plans.py:", "saved 576 B of"):
        assert part in text
    assert difference.saved_bytes == large.saved_bytes - small.saved_bytes
    assert difference.recompute_cost == large.recompute_cost - small.recompute_cost
    assert all(one.storage != other.storage for one, other in difference.changes)
    assert "recompute -> Keep()" in str(difference)
    assert small.diff(small).changes == ()
    other = plan(lambda x, w: mlp(x, w) * 2, budget=200)(*args)
    with pytest.raises(PolicyError, match="the programs differ"):
        small.diff(other)


def test_frontier() -> None:
    """From nothing to everything; each point within its budget, and none in vain."""
    points = plan(mlp, budget=200)(*mlp_args()).frontier()

    assert points[0].saved_bytes == 0
    assert points[-1].recompute_cost == 0
    for one, other in itertools.pairwise(points):
        assert one.saved_bytes < other.saved_bytes
        assert one.recompute_cost > other.recompute_cost
    assert all(each.saved_bytes <= each.budget_bytes for each in points)
    assert all(each.lower_bound <= each.recompute_cost for each in points)


def test_allow_says_what_may_be_saved() -> None:
    """Names only; or nothing at all, and then nothing is."""
    args = mlp_args()
    named = policies.save_only_these_names("first")

    found = plan(mlp, budget=policies.budget(10**6, allow=named))(*args)
    nothing = plan(mlp, budget=policies.budget(10**6, allow=lambda value: False))(*args)

    assert [row.name for row in found.rows] == ["first"]
    assert found.saved_bytes == 6 * 4 * 8
    assert nothing.saved_bytes == 0
    assert nothing.recompute_flops == 3 * 2 * 6 * 4 * 4


STORAGES = {
    "cast": storage.Cast(torch.bfloat16),
    "quantize": storage.Quantize(4, group_size=32),
    "chain": storage.Cast(torch.float32) >> storage.Quantize(8, group_size=64),
    "sparse": storage.Sparse(),
}


@pytest.mark.contract
@pytest.mark.parametrize("kind", STORAGES.values(), ids=STORAGES)
def test_allowed_storages_count_as_they_wait(kind: storage.AbstractStorage) -> None:
    """What is predicted is what waits; more than predicted never does."""
    f, args, leaves = gpt()
    allow = policies.everything_saveable.stored(kind)
    found = plan(f, budget=policies.budget(0.1, allow=allow))(*args)

    held = measured(region_of(f, policy=found.policy), args, leaves)[0]

    assert {row.decision for row in found.rows} <= {repr(kind), "recompute"}
    assert held <= found.saved_bytes <= found.budget_bytes
    assert held == found.saved_bytes or isinstance(kind, storage.Sparse)


def test_of_several_storages_the_cheapest_that_fits_is_taken() -> None:
    """With room values are kept, in a tight budget they are cast or quantized."""
    f, args, _ = gpt()

    def allow(value: policies.Value) -> Any:
        return storage.Keep(), storage.Cast(torch.bfloat16)

    loose, tight = (
        plan(f, budget=policies.budget(part, allow=allow))(*args) for part in (1.0, 0.4)
    )

    cast = "Cast(dtype=torch.bfloat16)"
    assert cast not in {row.decision for row in loose.rows}
    assert cast in {row.decision for row in tight.rows}
    kept_only = plan(f, budget=0.4)(*args)
    assert tight.recompute_cost < kept_only.recompute_cost


def test_offloaded_values_hold_nothing(tmp_path: Any) -> None:
    """A value in a file or on another device is not held where it was."""
    away = storage.Offload(path=str(tmp_path))
    policy = policies.budget(0, allow=policies.everything_saveable.stored(away))

    found = plan(mlp, budget=policy)(seeded(64, 512), seeded(512, 512))

    assert found.saved_bytes == 0
    assert repr(away) in {row.decision for row in found.rows}
    assert found.recompute_flops == 0 < found.recompute_cost


@pytest.mark.contract
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_planned_without_numbers(kind: str) -> None:
    """Meta and fake tensors give the plan of real ones, which then holds for those."""
    x, w = mlp_args()
    if kind == "meta":
        stand_ins = [torch.empty_like(t, device="meta") for t in (x, w)]
        stand_ins[1].requires_grad_()
        found = plan(mlp, budget=400)(*stand_ins)
    else:
        with FakeTensorMode() as mode:
            stand_ins = [mode.from_tensor(t) for t in (x, w)]
            found = plan(mlp, budget=400)(*stand_ins)

    assert found == plan(mlp, budget=400)(x, w)
    assert_bitwise(
        torch.autograd.grad(remat(mlp, policy=found.policy)(x, w), w),
        torch.autograd.grad(mlp(x, w), w),
    )


@pytest.mark.contract
def test_measured_costs() -> None:
    """Times are positive, in nanoseconds, and the plan still fits; numbers must be there."""
    f, args, leaves = gpt()
    found = plan(f, budget=0.5, costs="measured")(*args)

    assert (
        measured(region_of(f, policy=found.policy), args, leaves)[0]
        == found.saved_bytes
    )
    assert found.saved_bytes <= found.budget_bytes
    assert all(row.cost > 0 for row in found.rows)
    assert found.lower_bound <= found.recompute_cost
    state = torch.get_rng_state()
    drop, drop_args, _ = dropping()
    torch.set_rng_state(state)
    plan(drop, budget=10**5, costs="measured")(*drop_args)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(PolicyError, match="without data"):
        plan(mlp, budget=1, costs="measured")(
            *(torch.empty_like(t, device="meta") for t in mlp_args())
        )


def test_free_memory() -> None:
    """A tenth of what is free stays in reserve; the rest bounds the predicted peak."""
    f, args, _ = gpt()
    every = plan(f, budget=1.0)(*args)
    some = plan(f, budget=0.3)(*args)
    assert some.predicted_peak_bytes < every.predicted_peak_bytes
    between = (every.predicted_peak_bytes + some.predicted_peak_bytes) // 2
    asked: list[torch.device] = []

    def free(device: torch.device) -> int:
        asked.append(device)
        return between

    found = plan(f, budget=free)(*args)

    assert asked == [torch.device("cpu")]
    assert 0 < found.saved_bytes < every.saved_bytes
    assert found.predicted_peak_bytes <= 0.9 * between
    assert region_of(f, policy=policies.budget(free)).saved_residuals(*args)


def test_too_little_free_memory() -> None:
    """The error names the least that suffices, and with that it works."""
    f, args, _ = gpt()
    with pytest.raises(
        BudgetError, match=r"the 1000 bytes.*Free (\d+) bytes"
    ) as caught:
        plan(f, budget=lambda device: 1000)(*args)

    needed = int(str(caught.value).rpartition("Free ")[2].split(" ")[0])
    plan(f, budget=lambda device: needed)(*args)
    with pytest.raises(BudgetError):
        plan(f, budget=lambda device: needed - 2)(*args)


def test_auto_reads_the_memory_of_this_machine() -> None:
    """A small function fits whole, whatever machine this is."""
    args = mlp_args()

    assert plan(mlp, budget="auto")(*args).recompute_cost == 0
    assert repr(policies.budget("auto")) == "budget('auto')"


@pytest.mark.parametrize(
    ("limit", "used"),
    [
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        (
            "sys/fs/cgroup/memory/memory.limit_in_bytes",
            "sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ],
    ids=["v2", "v1"],
)
def test_limits_of_the_process(tmp_path: Any, limit: str, used: str) -> None:
    """What the machine has, and what the control group leaves, old form and new."""
    files = {"proc/meminfo": "MemAvailable:  100 kB\n", limit: "5000", used: "1000"}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert list(limits(tmp_path))[:2] == [102400, 4000]
    (tmp_path / limit).write_text("max" if "max" in limit else str(2**63))
    assert min(limits(tmp_path)) == 102400


def test_what_is_held_in_any_case_can_be_too_much() -> None:
    """A generator's state is held whatever is saved: less cannot be promised."""
    f, args, _ = dropping()

    with pytest.raises(BudgetError, match=r"fits 100 bytes.*Allow at least 5056 bytes"):
        region_of(f, policy=policies.budget(100))(*args)
    with pytest.raises(BudgetError, match="Allow at least 5056 bytes"):
        plan(f, budget=100)(*args)
    assert plan(f, budget=5056)(*args).saved_bytes == 5056


def _combinations() -> list[Any]:
    other, budget = policies.save_matmul_outputs, policies.budget(100)
    planned = plan(mlp, budget=100)(*mlp_args()).policy
    return [
        combine
        for whole in (budget, planned)
        for combine in (
            lambda whole=whole: whole | other,
            lambda whole=whole: other | whole,
            lambda whole=whole: whole & other,
            lambda whole=whole: other & whole,
            lambda whole=whole: ~whole,
            lambda whole=whole: whole.stored(storage.Keep()),
            lambda whole=whole: policies.save_from_both_policies(other, whole),
            lambda whole=whole: policies.budget(100, allow=whole),
        )
    ]


def test_a_budget_combines_through_allow_only() -> None:
    """Any other combination raises, and says how to write what was meant."""
    for combine in _combinations():
        with pytest.raises(PolicyError, match="decides over the whole program"):
            combine()
    value = policies.Value(None, (), (2,), torch.float32, 8)
    with pytest.raises(PolicyError, match="was asked about it alone"):
        policies.decide(policies.budget(100), value)


@pytest.mark.parametrize(
    "policy",
    [
        policies.budget(100),
        policies.budget("1.5 KiB"),
        policies.budget(0.5, allow=policies.save_only_these_names("a*")),
        policies.budget("auto"),
        policies.Planned("0f", ((3, storage.Keep()),), 100),
    ],
    ids=repr,
)
def test_budgets_are_values(policy: Any) -> None:
    """The repr rebuilds them; they compare, hash and pickle."""
    names = {**vars(policies), **vars(storage)}

    assert eval(repr(policy), names) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert hash(pickle.loads(pickle.dumps(policy))) == hash(policy)
    assert policy != policies.budget(99)


@pytest.mark.parametrize(
    ("size", "error"),
    [
        (True, PolicyError),
        (None, PolicyError),
        (-1, ValueError),
        (0.0, ValueError),
        (1.5, ValueError),
        (float("nan"), ValueError),
        ("12 parsecs", ValueError),
    ],
)
def test_what_is_no_size(size: Any, error: type[Exception]) -> None:
    """Neither as a policy nor for a plan."""
    with pytest.raises(error):
        policies.budget(size)
    with pytest.raises(error):
        plan(mlp, budget=size)


def test_what_plan_refuses() -> None:
    """Unknown solvers and costs, and policies that are no budgets."""
    for options in ({"solver": "magic"}, {"costs": "guessed"}):
        with pytest.raises(ValueError, match="is not a value of this option"):
            plan(mlp, budget=1, **options)
    with pytest.raises(
        PolicyError, match=r"Pass `policies.budget\(size, allow=policy\)`"
    ):
        plan(mlp, budget=policies.everything_saveable)


@pytest.mark.contract
def test_what_may_be_planned() -> None:
    """Regions, bound methods and modules; the region's own policy does not count."""
    x, w = mlp_args()
    region = remat(mlp, policy=policies.save_only_these_names("first"))

    class Model(nn.Module):
        @remat
        def middle(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ w).sum()

        def forward(self, x: Tensor) -> Tensor:
            return self.middle(x)

    assert plan(region, budget=300)(x, w) == plan(mlp, budget=300)(x, w)
    assert plan(Model().middle, budget=10**4)(x).saved_bytes == 6 * 4 * 8
    assert plan(remat(Model()), budget=10**4)(x).saved_bytes == 6 * 4 * 8
    assert plan(Model(), budget=10**4)(x).saved_bytes == 6 * 4 * 8


@pytest.mark.contract
def test_regions_inside_are_planned_through() -> None:
    """The outermost policy decides: values of inner regions are saved if they fit."""
    inner = remat(lambda x, w: torch.tanh(torch.tanh(x @ w) @ w))

    def outer(x: Tensor, w: Tensor) -> Tensor:
        return inner(inner(x, w), w).sum()

    x, w = mlp_args()
    costs = []
    for size in (0, 200, 600, 10**4):
        found = plan(outer, budget=size)(x, w)
        region = remat(outer, policy=found.policy)
        assert measured(region, (x, w), [w])[0] == found.saved_bytes
        assert found.lower_bound <= found.recompute_cost
        assert_bitwise(
            torch.autograd.grad(region(x, w), w), torch.autograd.grad(outer(x, w), w)
        )
        costs.append(found.recompute_cost)
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 0


@pytest.mark.contract
def test_late_recomputation_bounds_the_peak() -> None:
    """Layers in one region come back one at a time: the peak is near one layer's."""

    def deep(x: Tensor) -> Tensor:
        for _ in range(12):
            y = checkpoint_name(x, "layer")
            x = torch.sin(torch.sin(torch.sin(torch.sin(y))))
        return x.sum()

    x = torch.ones(1000, requires_grad=True)
    one = x.numel() * 4
    region = remat(deep, policy=policies.save_only_these_names("layer"))

    held, peak, *_ = measured(region, (x,), [x])

    assert held == 11 * one
    assert peak <= (11 + 7) * one
