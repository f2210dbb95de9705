"""Budgets and plans are values: policies that print, are written and read, and combine."""

import itertools
import json
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import Plan, PolicyError, modules, plan, policies, random, remat, storage
from tests.plans.models import gpt, measured, mlp, mlp_args, region_of
from tests.support import assert_bitwise, assert_close, in_turn, seeded


def test_a_budget_is_a_policy() -> None:
    """A region with a budget saves what the plan for it says; gradients are the same."""
    f, args, leaves = gpt()
    found = plan(f, budget=0.4)(*args)
    plain = torch.autograd.grad(f(*args), leaves)

    for policy in (policies.budget(0.4), found.policy):
        region = region_of(f, policy=policy)

        assert_bitwise(torch.autograd.grad(region(*args), leaves), plain)
        assert measured(region, args, leaves)[0] == found.saved_bytes


@pytest.mark.parametrize(
    "options", [{}, {"saved_inputs": storage.Cast(torch.half)}], ids=["", "stored"]
)
def test_a_plan_states_what_is_held_in_all(options: dict[str, Any]) -> None:
    """Its own bytes, and those of the arguments, as the list of what is held has them."""
    f, args = mlp, mlp_args()

    found = plan(remat(f, **options), budget=0.4)(*args)

    held = remat(f, policy=found.policy, **options).saved_residuals(*args)
    own = {
        is_input: sum(r.size_bytes for r in held if (r.op == "input") is is_input)
        for is_input in (True, False)
    }
    assert (found.argument_bytes, found.saved_bytes) == (own[True], own[False])
    assert "with the arguments, predicted peak" in str(found)


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


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize(("name", "kind"), in_turn(TRANSFORMS, ["plan", "budget"]))
def test_under_transforms(name: str, kind: str) -> None:
    """A planned region is right where a region is; what is derived is planned anew."""
    x, w = mlp_args()
    is_plan, transform = kind == "plan", TRANSFORMS[name]
    policy = plan(mlp, budget=200)(x, w).policy if is_plan else policies.budget(200)

    found = transform(remat(mlp, policy=policy))(x, w.detach())

    assert_close(found, transform(mlp)(x, w.detach()))


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
    earlier = json.dumps({**json.loads(found.to_json()), "version": 2})
    for text in ("[]", "{}", json.dumps({"version": 3}), earlier):
        with pytest.raises(ValueError, match="not a plan of version 3"):
            Plan.from_json(text)


def test_a_damaged_text() -> None:
    """What is cut off, or was changed by hand, is refused in words."""
    text = plan(mlp, budget=300)(*mlp_args()).to_json()
    fields = json.loads(text)
    damaged = {
        text[:99]: "cannot be read: JSONDecodeError: ",
        text.replace("Keep", "Kept"): "cannot be read: KeyError: 'Kept'",
        text.replace("Keep", "release_host_memory"): "KeyError: 'release_host_memory'",
        json.dumps({**fields, "problem": {}}): "cannot be read: KeyError: 'steps'",
        json.dumps({**fields, "rows": "none"}): "cannot be read: TypeError: ",
        json.dumps({**fields, "peaks": {"forward": 1}}): "cannot be read: TypeError: ",
    }

    for each, why in damaged.items():
        with pytest.raises(
            ValueError, match=f"^Plan.from_json.*version 3.*{why}.*Pass"
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

    for part in ("aten.tanh", '"first"', "Keep()", "models.py:", "saved 576 B of"):
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
        ("-3MB", ValueError),
    ],
)
def test_what_is_no_size(size: Any, error: type[Exception]) -> None:
    """Neither as a policy nor for a plan, nor for the blocks of a model."""
    with pytest.raises(error):
        policies.budget(size)
    with pytest.raises(error):
        plan(mlp, budget=size)
    with pytest.raises(error):
        modules.plan(torch.nn.Linear(1, 1), budget=size)
    with pytest.raises(error):
        plan(mlp, peak=size)


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [("20MB", 20 * 10**6), ("8GB", 8 * 10**9), ("1.5 GiB", 3 * 2**29), ("2 KB", 2000)],
)
def test_sizes_as_people_write_them(size: str, num_bytes: int) -> None:
    """Units of 1000 as of 1024."""
    assert policies.budget(size) == policies.budget(num_bytes)
    assert policies.budget(peak=size) == policies.budget(peak=num_bytes)


def test_what_plan_refuses() -> None:
    """Unknown solvers and costs, and policies that are no budgets."""
    for options in ({"solver": "magic"}, {"costs": "guessed"}):
        with pytest.raises(ValueError, match="is not a value of this option"):
            plan(mlp, budget=1, **options)
    with pytest.raises(
        PolicyError, match=r"Pass `policies.budget\(size, allow=policy\)`"
    ):
        plan(mlp, budget=policies.everything_saveable)


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
