"""What a region answers when it is looked at: residuals and programs.

"`.saved_residuals(*a, **k)`, `.programs(*a, **k)` (two printable programs)";
"`saved_residuals(f, *args, **kw) -> list[Residual]` (`name, path, op, shape, dtype,
size_bytes, storage, source, reason`)"; "What is to be differentiated: tensors that
require grad where there are any (captured ones included), else every floating tensor
argument. Aliases of an argument are that argument."
"""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import (
    checkpoint_name,
    policies,
    print_saved_residuals,
    remat,
    report,
    saved_residuals,
    storage,
)
from tests.support import LiveBytes, held_bytes, seeded


def block(x: Tensor, w: Tensor) -> Tensor:
    """Two matmuls; the value between them has a name."""
    h = checkpoint_name(torch.tanh(x @ w), "h")
    return torch.sin(h @ w)


named = remat(block, policy=policies.save_only_these_names("h"))


def stack(x: Tensor, w: Tensor) -> Tensor:
    """A plain function that contains regions."""
    return named(torch.cos(named(x, w)), w).sum()


def args() -> tuple[Tensor, Tensor]:
    """An input and a weight."""
    return seeded(4, 3), seeded(3, 3, seed=1)


def by_name(residuals: list[Any]) -> dict[str, Any]:
    """The residuals that have a name."""
    return {r.name: r for r in residuals if r.name}


@pytest.mark.contract
@pytest.mark.parametrize(
    "look", [named.saved_residuals, lambda *a: saved_residuals(named, *a)]
)
def test_the_residuals_of_a_region(look: Any) -> None:
    """Both arguments by their paths, and the named value with all its fields."""
    residuals = look(*args())

    assert sorted(r.path for r in residuals if r.path) == ["w", "x"]
    (value,) = [r for r in residuals if not r.path]
    assert value.name == "h"
    assert tuple(value.shape) == (4, 3)
    assert value.dtype == torch.float64
    assert value.size_bytes == 4 * 3 * 8
    assert "tanh" in str(value.op)
    assert "test_looking.py:" in str(value.source)
    assert "Keep" in repr(value.storage)
    assert value.reason


@pytest.mark.contract
def test_nothing_saveable_holds_arguments_only() -> None:
    """Under the default policy each residual is an argument."""
    residuals = remat(block).saved_residuals(*args())

    assert {r.path for r in residuals} == {"x", "w"}
    assert sum(r.size_bytes for r in residuals) == (12 + 9) * 8


@pytest.mark.parametrize(
    ("again", "shared"),
    [
        (lambda x: x.detach(), True),
        (lambda x: x.t(), True),
        (lambda x: x.clone(), False),
    ],
    ids=["detached", "transposed", "a copy"],
)
@pytest.mark.parametrize("waits", [None, storage.Cast(torch.bfloat16)], ids=str)
def test_one_memory_is_counted_once(again: Any, shared: bool, waits: Any) -> None:
    """Whichever arguments lie in it; stored in another form it is stored once, too."""
    region = remat(lambda x, z: (x.sin() * z.cos()).sum(), saved_inputs=waits)
    x = seeded(4, 4)

    first, second = region.saved_residuals(x, again(x))

    assert first.size_bytes == 16 * (2 if waits else 8)
    assert second.size_bytes == (0 if shared else first.size_bytes)
    assert ("memory that is counted" in second.reason) == shared


@pytest.mark.contract
@pytest.mark.parametrize("kind", ["dropout", "norm", "both"])
@pytest.mark.parametrize(
    "policy",
    [
        policies.nothing_saveable,
        policies.save_matmul_outputs,
        policies.everything_saveable,
    ],
    ids=repr,
)
def test_states_and_copies_are_listed(
    policy: Any, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As reports and plans count them: what is no argument is held, to the byte."""
    layers: dict[str, list[nn.Module]] = {
        "dropout": [nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.1)],
        "norm": [nn.BatchNorm1d(22)],
    }
    layers["both"] = [*layers["norm"], *layers["dropout"]]
    module = nn.Sequential(nn.Linear(14, 22), *layers[kind])
    region: Any = remat(module, policy=policy)
    x = torch.randn(9, 14, requires_grad=True)

    held = region.saved_residuals(x)

    made = [each for each in held if each.op != "input"]
    assert made == [each for each in held if not each.path]
    (row,) = report(lambda x: region(x).sum(), x).regions
    size_bytes = sum(each.size_bytes for each in made)
    assert size_bytes == held_bytes(region, x) == row.held_bytes
    states = [each for each in made if "generator state" in each.reason]
    assert len(states) == (0 if kind == "norm" else 2)
    copies = [each.name for each in made if "as a copy" in each.reason]
    assert len(copies) == (0 if kind == "dropout" else 3)
    assert "self.1.running_mean" in copies or kind == "dropout"
    print_saved_residuals(region, x)
    assert capsys.readouterr().out.count("a generator state") == len(states)


def test_a_plain_function_keeps_no_state_and_no_copy() -> None:
    """Its backward reads the masks; a region inside it draws from the state again."""
    drop, norm = nn.Dropout(0.3), nn.BatchNorm1d(3)
    region = remat(drop)
    x = torch.randn(4, 3, requires_grad=True)

    plain = saved_residuals(lambda x: norm(drop(x)).sin(), x)
    around = saved_residuals(lambda x: region(x).sin(), x)

    assert not [each for each in plain if "state" in each.reason or "copy" in each.name]
    assert [each.op for each in around if "state" in each.reason] == ["remat.rng_state"]


def test_paths_of_containers_and_captures() -> None:
    """A nested argument has a dotted path; a captured tensor says what it is."""
    weight = nn.Parameter(seeded(3, 3))

    def fun(batch: dict[str, Any], x: Tensor) -> Tensor:
        return torch.sin(torch.sin(x @ weight) @ batch["p"]["w"])

    residuals = remat(fun).saved_residuals({"p": {"w": seeded(3, 3)}}, seeded(2, 3))

    paths = [r.path for r in residuals]
    assert any(path == "x" for path in paths)
    assert any("weight" in path for path in paths)
    assert not weight.grad_fn


def test_only_what_requires_grad_is_differentiated() -> None:
    """Where a tensor requires grad, only that one is; its residuals are fewer."""
    x, w = args()

    def product(x: Tensor, w: Tensor) -> Tensor:
        return x * w[0]

    both = remat(product).saved_residuals(x, w)
    one = remat(product).saved_residuals(x.requires_grad_(), w)

    assert {r.path for r in both} == {"x", "w"}
    assert {r.path for r in one if "second" not in str(r.reason)} == {"w"}


def test_a_value_between_regions_says_why_it_is_held() -> None:
    """The second region holds it: no backward step of plain autograd reads it."""
    region = remat(block)

    residuals = saved_residuals(lambda x, w: region(region(x, w), w), *args())

    (between,) = [each for each in residuals if not each.path]
    assert between.reason == "a value that the backward reads"


def test_an_alias_of_an_argument_is_the_argument() -> None:
    """A transposed or named view of an argument is listed once, as the argument."""

    def fun(x: Tensor) -> Tensor:
        return torch.sin(checkpoint_name(x.t(), "alias"))

    residuals = remat(
        fun, policy=policies.save_only_these_names("alias")
    ).saved_residuals(seeded(2, 3))

    assert [r.path for r in residuals] == ["x"]


@pytest.mark.contract
def test_residuals_of_a_plain_function_with_regions() -> None:
    """What crosses from forward to backward of a function that is no region itself."""
    residuals = saved_residuals(stack, *args())

    assert sum(r.name == "h" for r in residuals) == 2
    assert {"x", "w"} <= {r.path for r in residuals}
    whole = saved_residuals(
        lambda x, w: block(torch.cos(block(x, w)), w).sum(), *args()
    )
    assert sum(r.size_bytes for r in residuals) < sum(r.size_bytes for r in whole)


@pytest.mark.parametrize("is_region", [False, True], ids=["plain", "region"])
def test_constants_that_a_plain_function_makes_are_held(is_region: bool) -> None:
    """A region makes them again where it is one itself; what calls it holds them."""
    times: Any = remat(torch.mul) if is_region else torch.mul

    def scaled(x: Tensor) -> Tensor:
        return times(x, torch.ones(4, 8) * 2).sum()

    x = torch.randn(4, 8, requires_grad=True)
    residuals = saved_residuals(scaled, x)
    scaled(x)
    with LiveBytes() as memory:
        value = scaled(x)
        held_bytes = memory.live - value.nbytes

    assert sum(each.size_bytes for each in residuals if not each.path) == held_bytes


def test_looking_changes_nothing() -> None:
    """No gradient appears, and looking draws no random number."""
    x, w = (a.requires_grad_() for a in args())
    state = torch.get_rng_state()

    named.saved_residuals(x, w)
    named.programs(x, w)
    saved_residuals(stack, x, w)

    assert x.grad is None
    assert w.grad is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.contract
def test_print_saved_residuals(capsys: pytest.CaptureFixture[str]) -> None:
    """Path or name, operator, dtype[shape], bytes, source line, and the total."""
    print_saved_residuals(named, *args())

    text = capsys.readouterr().out
    for part in (
        "x",
        "w",
        "h",
        "tanh",
        "float64[4, 3]",
        "float64[3, 3]",
        "test_looking.py:",
    ):
        assert part in text
    assert "96" in text
    assert "264" in text or "total" in text.lower()


def test_storages_are_shown_where_there_are_some(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the table and in a line; what is kept as it is has none."""
    region = remat(
        block,
        policy=policies.save_only_these_names("h").stored(storage.Quantize(8)),
        saved_inputs={"x": storage.Cast(torch.bfloat16)},
    )
    print_saved_residuals(named, *args())
    assert "storage" not in capsys.readouterr().out

    print_saved_residuals(region, *args())

    heading, *rows = capsys.readouterr().out.splitlines()
    place = heading.index("storage")
    shown = {row.split()[0]: row[place:].split("  ")[0] for row in rows}
    assert shown["x"] == "Cast(dtype=torch.bfloat16)"
    assert shown["w"] == "Keep()"
    assert shown["h"].startswith("Quantize(bits=8")
    lines = {each.name: str(each) for each in saved_residuals(region, *args())}
    assert "24 bytes in Cast(dtype=torch.bfloat16), an argument" in lines["x"]
    assert "72 bytes, an argument" in lines["w"]


@pytest.mark.contract
@pytest.mark.parametrize(
    ("policy", "recomputed"),
    [(None, True), (policies.save_only_these_names("h"), False)],
    ids=["nothing", "names"],
)
def test_programs_print(policy: Any, recomputed: bool) -> None:
    """A forward and a backward program; the backward shows what is recomputed."""
    forward, backward = map(str, remat(block, policy=policy).programs(*args()))

    assert "tanh" in forward
    assert "sin" in forward
    assert "cos" in backward
    assert (re.search(r"tanh(?!_backward)", backward) is not None) == recomputed
    assert min(text.count("\n") for text in (forward, backward)) >= 3


def with_scale(*xs: Tensor, scale: float) -> Tensor:
    """A keyword-only parameter behind the tensors."""
    return (xs[0].sin() * xs[1].sin() * scale).sin()


def with_others(a: Tensor, *xs: Tensor, **others: float) -> Tensor:
    """Any keywords behind the tensors."""
    return (xs[0].sin() * xs[1].sin() * others["w"] * a).sin()


@pytest.mark.parametrize(
    ("function", "count", "kwargs", "paths"),
    [
        (with_scale, 2, {"scale": 2.0}, ["xs.0", "xs.1"]),
        (with_others, 3, {"w": 0.5}, ["a", "xs.0", "xs.1"]),
        (nn.Bilinear(3, 3, 1, bias=False), 2, {}, ["input1", "input2"]),
    ],
    ids=["keyword only", "any keyword", "module"],
)
def test_arguments_are_called_as_the_function_calls_them(
    function: Any, count: int, kwargs: dict[str, float], paths: list[str]
) -> None:
    """Each of `*xs` by its number, whatever parameters follow; a module's by its forward."""
    xs = [torch.ones(2, 3) * k for k in range(1, count + 1)]

    region: Any = remat(function)
    found = [each.path for each in region.saved_residuals(*xs, **kwargs)]

    assert found[:count] == paths


def test_a_static_name_takes_no_other_argument() -> None:
    """A keyword-only parameter behind `*xs` is not one of these."""
    region = remat(with_scale, static_argnames="scale")
    x = torch.ones(2, 3)

    found = torch.func.grad(lambda x: region(x, x + 1, scale=2.0).sum())(x)

    plain = torch.func.grad(lambda x: with_scale(x, x + 1, scale=2.0).sum())(x)
    assert torch.equal(found, plain)
