"""Law 5 on options.

"An option without effect, an unimplemented option: `RematWarning` or an error, once per
function and policy, at trace time, saying what to do."
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import (
    RematError,
    RematWarning,
    chain,
    checkpoint_name,
    modules,
    policies,
    remat,
    scan,
    schedules,
    storage,
)
from tests.inspection import warned
from tests.support import seeded

names = policies.save_only_these_names


def leaf(*shape: int) -> Tensor:
    """A tensor to differentiate."""
    return seeded(*(shape or (4,))).requires_grad_()


def attend(x: Tensor) -> Tensor:
    """A named value between sines."""
    return torch.sin(checkpoint_name(torch.sin(torch.sin(x)), "attn") * 2)


OFFLOADING = {
    "names": lambda: policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["attn"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "dots": lambda: policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "stored": lambda: names("attn").stored(storage.Offload()),
}


@pytest.mark.contract
@pytest.mark.parametrize("policy", OFFLOADING.values(), ids=OFFLOADING)
def test_a_policy_that_offloads_to_where_values_are_says_so(policy: Any) -> None:
    """On a CPU alone, values wait in its memory anyway."""
    region = remat(lambda x, w: attend(x @ w), policy=policy())

    texts = warned(lambda: region(leaf(2, 2), leaf(2, 2)))

    assert any("Offload" in text and "no effect" in text for text in texts)


@pytest.mark.contract
def test_an_inputs_storage_without_effect_says_so() -> None:
    """So does storage for inputs."""
    region = remat(attend, saved_inputs=storage.Offload())

    texts = warned(lambda: region(leaf()))

    assert any("Offload" in text and "no effect" in text for text in texts)


@pytest.mark.contract
@pytest.mark.parametrize("waits", [storage.Cast(torch.bfloat16), storage.Keep()])
def test_a_storage_for_what_is_never_saved_says_so(waits: Any) -> None:
    """And where the inputs' storage is said, which may have been meant; `Keep` is silent."""
    policy = policies.nothing_saveable.stored(waits)

    texts = warned(lambda: remat(attend, policy=policy)(leaf()))

    meant = f"@remat(saved_inputs={waits!r})"
    assert [meant in text for text in texts] == (
        [True] if waits != storage.Keep() else []
    )


LOSSY = storage.Quantize(8)
LEAVING = [
    storage.Cast(torch.float64),
    storage.Quantize(8, group_size=1),
    storage.Offload(path=".", min_bytes=10**9),
    storage.Cast(torch.float64) >> storage.Keep(),
]


@pytest.mark.contract
@pytest.mark.parametrize("how", LEAVING, ids=repr)
def test_a_storage_that_leaves_all_its_values_alone_says_so(
    how: storage.AbstractStorage,
) -> None:
    """Once, of inputs and of saved values; the latter save no memory, either."""

    def f(x: Tensor) -> Tensor:
        return checkpoint_name(x.sin(), "h").cos()

    by_policy = remat(f, policy=names("h").stored(how))
    of_inputs = remat(f, saved_inputs={"x": how})

    useless, idle = warned(lambda: [by_policy(leaf()) for _ in range(2)])
    (idle_too,) = warned(lambda: [of_inputs(leaf()) for _ in range(2)])

    assert "saves no memory" in useless
    for text in (idle, idle_too):
        assert f"the storage {how!r} has no effect. It leaves each value" in text
        assert text.endswith(
            "makes these values smaller or moves them, or leave it out."
        )


@pytest.mark.contract
def test_a_storage_that_takes_one_of_its_values_is_silent() -> None:
    """Whole numbers beside others; of whole numbers alone it says so."""
    region = remat(lambda x, i: x.sin().gather(0, i).sin(), saved_inputs=LOSSY)
    of_index = remat(lambda x, i: x.gather(0, i).sin(), saved_inputs={"i": LOSSY})
    index = torch.zeros(64, dtype=torch.long)

    assert warned(lambda: region(leaf(64), index)) == []
    (text,) = warned(lambda: of_index(leaf(64), index))
    assert "has no effect" in text


@pytest.mark.contract
def test_a_bound_of_a_peak_beside_inputs_that_wait_in_a_storage() -> None:
    """These are not in it, nor when they come back; a bound of what is saved never has inputs."""
    half = {"x": storage.Cast(torch.bfloat16)}
    bounded = remat(attend, policy=policies.budget(peak=10_000), saved_inputs=half)
    of_saved = remat(attend, policy=policies.budget(10_000), saved_inputs=half)

    (text,) = warned(lambda: [bounded(leaf(64)) for _ in range(2)])

    assert "inputs that wait in a storage: 128 bytes, and 512 when they come" in text
    assert text.endswith("or plan the step: fit(step, peak=...) counts them.")
    assert not any("come back" in each for each in warned(lambda: of_saved(leaf(64))))


@pytest.mark.contract
def test_what_a_storage_will_be_given_is_not_known_of_all_examples_or_of_none(
    tmp_path: Any,
) -> None:
    """Where vmap maps a region it gets all of them at once; a batch of none tells nothing."""
    large = storage.Offload(path=str(tmp_path), min_bytes=64)
    region = remat(attend, policy=policies.everything_saveable.stored(large))
    half = remat(attend, saved_inputs=storage.Cast(torch.bfloat16))

    each = torch.func.vmap(torch.func.grad(lambda x: region(x).sum()))
    assert warned(lambda: each(torch.ones(16, 3))) == []
    assert warned(lambda: half(leaf(0, 3))) == []


@pytest.mark.parametrize(
    "saved_inputs", [storage.Keep(), {"x": storage.Keep()}], ids=["for_all", "by_path"]
)
def test_keeping_inputs_is_what_happens_anyway(saved_inputs: Any) -> None:
    """`Keep` is there, and says nothing."""
    assert warned(lambda: remat(attend, saved_inputs=saved_inputs)(leaf())) == []


def test_an_input_path_that_matches_nothing_is_no_silent_nothing() -> None:
    """A path that no argument has is an error or a warning that names it."""
    with pytest.raises((RematError, RematWarning, ValueError), match="nope"):
        remat(attend, saved_inputs={"nope": storage.Keep()})(leaf())


@pytest.mark.contract
@pytest.mark.parametrize("path", ["x", "y", "pair.1", "more", "y*"])
def test_an_input_given_twice_goes_by_each_name(path: str) -> None:
    """It is one operand, and waits as is said under whichever of its names."""
    how = storage.Cast(torch.bfloat16)

    def f(x: Tensor, y: Tensor, pair: Any, more: Tensor) -> Tensor:
        return (x * y).sin() * pair[1].cos() * more

    x = leaf()
    region = remat(f, saved_inputs={path: how})

    assert warned(lambda: region(x, x, (1.0, x), more=x)) == []
    assert [
        each.storage for each in region.saved_residuals(x, x, (1.0, x), more=x)
    ] == [how]


WRONG = {
    "engine": {"engine": "magic"},
    "rng": {"rng": "global"},
    "backend": {"backend": "bogus"},
    "backend_of_rerun": {"backend": "inductor", "engine": "rerun"},
    "backend_of_verify": {"backend": "inductor", "verify": True},
    "policy_string": {"policy": "matmuls"},
    "policy_number": {"policy": 3},
    "static_argnames": {"static_argnames": ("nope",)},
    "static_argnums": {"static_argnums": (7,)},
    "saved_inputs_value": {"saved_inputs": "cpu"},
    "rerun_with_verify": {"engine": "rerun", "verify": True},
    "rerun_with_sizes": {"engine": "rerun", "dynamic_shapes": True},
    "rerun_with_policy": {"engine": "rerun", "policy": policies.save_matmul_outputs},
    "rerun_with_names": {"engine": "rerun", "policy": names("attn")},
    "rerun_with_everything": {
        "engine": "rerun",
        "policy": policies.everything_saveable,
    },
}


@pytest.mark.contract
@pytest.mark.parametrize("options", WRONG.values(), ids=WRONG)
def test_a_wrong_option_is_an_error(options: dict[str, Any]) -> None:
    """An unknown value, or one that means nothing here, raises and names the option."""
    with pytest.raises((RematError, ValueError, TypeError)) as error:
        remat(attend, **options)(leaf())

    assert any(name.rstrip("s") in str(error.value) for name in options)


UNKNOWN: dict[str, tuple[object, str]] = {
    "prevent_cse": (False, "Leave it out."),
    "concrete": (True, 'a function that branches on values takes engine="rerun".'),
    "use_reentrant": (False, "Leave it out."),
    "preserve_rng_state": (True, 'Pass rng="preserve", the default of modules'),
    "context_fn": (None, "Pass policy=policies.by_op(...)"),
    "determinism_check": ("none", "verify=True looks for nondeterministic kernels"),
    "debug": (True, "region.programs(*args) shows what runs."),
    "early_stop": (True, "Leave it out."),
    "fun": (torch.sin, "Write remat(fun, ...)."),
    "polcy": (None, "Write `policy`."),
    "zzz": (
        None,
        "static_argnums, static_argnames, verify, cache_size. Use one of these.",
    ),
}


@pytest.mark.contract
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_option_of_others_says_what_to_write(name: str) -> None:
    """What users of jax.checkpoint and of torch's checkpoint bring with them."""
    value, do = UNKNOWN[name]
    makers: list[Any] = [
        remat,
        lambda **options: modules.apply(nn.Tanh(), "", **options),
    ]

    for make in makers:
        with pytest.raises(TypeError) as raised:
            make(**{name: value})
        text = str(raised.value)
        assert text.startswith(f"remat({name}=...): is not an option of remat. ")
        assert do in text


@pytest.mark.contract
@pytest.mark.parametrize("target", [torch.ops.aten.linear.default, "aten.linear"])
def test_an_operator_that_is_made_of_others_can_be_saved(target: Any) -> None:
    """A trace never shows it, so that a policy of it would save nothing."""
    weight = leaf(3, 4)
    region = remat(
        lambda x: nn.functional.linear(x.sin(), weight).sin().cos(),
        policy=policies.by_op(target),
    )

    saved = [each.op for each in region.saved_residuals(leaf(2, 4)) if not each.path]
    assert saved == ["aten.mm"]


@pytest.mark.contract
@pytest.mark.parametrize("target", [torch.ops.aten.mul, "aten.mul"])
def test_an_operator_that_torchscript_has_too_can_be_saved(target: Any) -> None:
    """`aten.mul.default` multiplies two numbers, and the dispatcher has none."""
    region = remat(lambda x: (x * x).sin().cos(), policy=policies.by_op(target))

    saved = [each.op for each in region.saved_residuals(leaf(2, 4)) if not each.path]
    assert saved == ["aten.mul"]


@pytest.mark.contract
@pytest.mark.parametrize("target", [torch.ops.aten.softmax, "aten.softmax"])
def test_an_operator_without_a_default_overload_can_be_saved(target: Any) -> None:
    """Its overloads, of which a trace shows none, say that it is made of others."""
    region = remat(
        lambda x: x.sin().softmax(-1).sin().cos(), policy=policies.by_op(target)
    )

    saved = [each.op for each in region.saved_residuals(leaf(2, 4)) if not each.path]
    assert saved == ["aten._softmax"]


STACKS = {
    "chain": (4, lambda x, schedule: chain([torch.sin] * 4, schedule)(x)),
    "scan": (5, lambda x, schedule: scan(scaled, x, length=5, schedule=schedule)),
}


def scaled(h: Tensor, _: None) -> tuple[Tensor, None]:
    """A step."""
    return h.tanh() * h, None


@pytest.mark.parametrize(("count", "run"), STACKS.values(), ids=STACKS)
def test_a_schedule_that_runs_no_stage_again_says_so(count: int, run: Any) -> None:
    (text,) = warned(lambda: run(leaf(), schedules.Every(count)))
    assert f"a stack of {count} stages: the schedule Every(k={count}) saves no" in text


@pytest.mark.parametrize(
    "schedule",
    [schedules.Every(3), schedules.Revolve(9), schedules.Budget(1.0)],
    ids=repr,
)
def test_a_schedule_that_runs_one_again_or_has_a_limit_says_nothing(schedule: Any):
    assert not warned(lambda: STACKS["chain"][1](leaf(), schedule))


def test_a_rule_of_few_stages_says_nothing() -> None:
    """Whoever chooses it does not choose how many stages a segment has."""
    assert not warned(lambda: chain([torch.sin, torch.tanh], schedules.Sqrt())(leaf()))


@pytest.mark.contract
def test_a_path_that_no_input_has_warns_once_for_equal_layers() -> None:
    """Also where the first layer, whose input wants no gradient, has a trace of its own."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in "abc"))
    modules.apply(model, "*", saved_inputs={"hidden_states": storage.Keep()})

    (text,) = warned(lambda: model(seeded(2, 4).float()))
    assert 'has no input "hidden_states", which saved_inputs names.' in text


def square(x: Tensor) -> Tensor:
    """Nothing in it has a name."""
    return (x.sin() * x.sin()).sum()


def misspelled(number: int) -> dict[str, Any]:
    """The options of a region that warns, whatever has warned before."""
    return {"policy": names(f"misspelled_{number}")}


WARNING = {
    "call": lambda: remat(square, **misspelled(0))(leaf()),
    "torch.func": lambda: torch.func.grad(remat(square, **misspelled(1)))(leaf()),
    "module": lambda: remat(nn.Tanh(), **misspelled(2))(leaf()),
    "look": lambda: remat(square, **misspelled(3)).saved_residuals(leaf()),
    "input": lambda: remat(square, saved_inputs={"z": storage.Keep()})(leaf()),
    "open sizes": lambda: [
        scaled(leaf(size))
        for scaled in [remat(lambda x: x * int(x.shape[0]), dynamic_shapes=True)]
        for size in (4, 5, 6)
    ],
    "stored": lambda: remat(
        lambda x: x.sin().cos().sin(),
        policy=policies.everything_saveable.stored(storage.Offload()),
    )(leaf()),
    "scan": lambda: scan(lambda c, _: (c.sin(), None), leaf(), length=2, unroll=2),
    "modules.apply": lambda: modules.apply(nn.Sequential(nn.Tanh()), "no_such"),
}


@pytest.mark.contract
@pytest.mark.parametrize("run", WARNING.values(), ids=WARNING)
def test_a_warning_is_at_the_users_line(run: Callable[[], object]) -> None:
    """Not at one of the package, by which Python would tell two of them apart."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()

    assert {warning.filename for warning in caught} == {__file__}
