"""Law 5, no silent nothing.

"A name glob that matches no value in any region, a named value that its consumer
bypasses, a region that saves no memory under a policy that could, an option without
effect (a mesh of size 1), an unimplemented option: `RematWarning` or an error, once per
function and policy, at trace time, saying what to do."
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from remat import checkpoint_name, policies, remat
from tests.inspection import warned
from tests.support import seeded

names = policies.save_only_these_names


def leaf(*shape: int) -> Tensor:
    """A tensor to differentiate."""
    return seeded(*(shape or (4,))).requires_grad_()


def attend(x: Tensor) -> Tensor:
    """Four sines with two names, "attn" and "attn_out", and unnamed work around."""
    h = checkpoint_name(torch.sin(x), "attn")
    h = checkpoint_name(torch.sin(h * 2), "attn_out")
    return torch.sin(torch.cos(h))


def project(x: Tensor, w: Tensor) -> Tensor:
    """One matmul whose output is all that plain PyTorch saves beyond the inputs."""
    return torch.sin(x @ w)


MISSPELLED = {
    "only": names("atn"),
    "only_star": names("mlp*"),
    "any_but": policies.save_any_names_but_these("atn"),
    "one_of_two": names("attn", "atn"),
    "in_a_union": names("attn") | names("atn"),
}


@pytest.mark.contract
@pytest.mark.parametrize("policy", MISSPELLED.values(), ids=MISSPELLED)
def test_a_glob_that_matches_nothing_warns(policy: Any) -> None:
    """The glob that no value has is named in one warning, and the other glob is not."""
    texts = warned(lambda: remat(attend, policy=policy)(leaf()))

    glob = "mlp*" if "mlp" in repr(policy) else "atn"
    assert len(texts) == 1
    assert f'"{glob}"' in texts[0] or f"'{glob}'" in texts[0]


def test_the_warning_says_where_what_and_what_to_do() -> None:
    """It names the function, its file and line, and the names that are there."""

    def misspells(x: Tensor) -> Tensor:
        return attend(x)

    (text,) = warned(lambda: remat(misspells, policy=names("atn"))(leaf()))

    for part in ("misspells", "test_law_05", "atn", "attn_out"):
        assert part in text


def test_a_function_without_any_name_warns() -> None:
    """A policy of names on a function that names nothing warns too."""
    (text,) = warned(lambda: remat(torch.sin, policy=names("nowhere"))(leaf()))

    assert "nowhere" in text
    assert "checkpoint_name" in text


@pytest.mark.parametrize(
    "policy",
    [names("attn"), names("attn*"), names("attn", "attn_out"), names("*")],
    ids=["name", "star", "both", "all"],
)
def test_a_glob_that_matches_is_silent(policy: Any) -> None:
    """No warning where each glob has a value."""
    assert warned(lambda: remat(attend, policy=policy)(leaf())) == []


def test_a_name_inside_an_inner_region_counts() -> None:
    """The outer policy sees names of inner regions, and does not warn about them."""
    inner = remat(attend)

    def outer(x: Tensor) -> Tensor:
        return torch.sin(inner(x))

    assert warned(lambda: remat(outer, policy=names("attn"))(leaf())) == []


def test_it_warns_once_per_function_and_policy() -> None:
    """New shapes and new wrappers stay silent; a new policy or function warns again."""
    policy, other = names("atn"), names("nope")

    def twin(x: Tensor) -> Tensor:
        return attend(x)

    texts = [
        warned(lambda: remat(attend, policy=policies.by_size(min_bytes=1))(leaf())),
        warned(lambda: remat(twin, policy=policy)(leaf())),
        warned(lambda: remat(twin, policy=policy)(leaf(3, 2))),
        warned(lambda: remat(twin, policy=names("atn"))(leaf(5))),
        warned(lambda: remat(twin, policy=other)(leaf())),
    ]

    assert [len(found) for found in texts[1:]] == [1, 0, 0, 1]


def test_nothing_warns_at_run_time_or_in_the_backward() -> None:
    """The warning comes with the trace: the second call and the backward are silent."""
    region = remat(attend, policy=names("zip"))
    assert len(warned(lambda: region(leaf()))) == 1

    assert warned(lambda: region(leaf()).sum().backward()) == []


def saves_all(value: Any) -> bool:
    """Permits every value, as a user's callable."""
    return True


@pytest.mark.contract
@pytest.mark.parametrize(
    "policy",
    [policies.save_matmul_outputs, policies.by_op("mm"), saves_all],
    ids=["matmuls", "by_op", "callable"],
)
def test_a_region_that_saves_no_memory_warns(policy: Any) -> None:
    """Some policy would hold less than plain PyTorch here, and this one does not."""
    (text,) = warned(lambda: remat(project, policy=policy)(leaf(3, 3), leaf(3, 3)))

    assert "project" in text
    assert "memory" in text or "bytes" in text
    assert "nothing_saveable" in text


@pytest.mark.parametrize(
    ("fun", "policy"),
    [
        (project, policies.everything_saveable),
        (project, policies.nothing_saveable),
        (project, None),
        (torch.matmul, policies.save_matmul_outputs),
    ],
    ids=["everything", "nothing", "default", "nothing_to_save"],
)
def test_no_warning_where_none_is_due(fun: Callable[..., Tensor], policy: Any) -> None:
    """Everything was asked for, or nothing could be saved, or memory is saved."""
    assert warned(lambda: remat(fun, policy=policy)(leaf(3, 3), leaf(3, 3))) == []


def adds_one(x: Tensor) -> Tensor:
    """Names a sine that no derivative reads."""
    return checkpoint_name(torch.sin(x), "h") + 1


def names_a_copy(x: Tensor) -> Tensor:
    """Names a copy, and goes on with the original."""
    h = torch.sin(x)
    checkpoint_name(h.clone(), "h")
    return torch.sin(torch.sin(h))


def linear_after(x: Tensor) -> Tensor:
    """Names a product that only linear operators use."""
    return checkpoint_name(torch.cos(x) * 2, "h").sum(0)


@pytest.mark.contract
@pytest.mark.parametrize("fun", [adds_one, names_a_copy, linear_after])
def test_a_bypassed_name_warns(fun: Callable[[Tensor], Tensor]) -> None:
    """A value permitted by its name that no backward step reads, and that is no output."""
    (text,) = warned(lambda: remat(fun, policy=names("h"))(leaf()))

    assert '"h"' in text or "'h'" in text
    assert "test_law_05" in text


def reads_an_alias(x: Tensor) -> Tensor:
    """Names a value whose transposed view is what the backward reads."""
    return torch.sin(checkpoint_name(torch.sin(torch.sin(x)), "h").t())


def goes_on_unnamed(x: Tensor) -> Tensor:
    """Names a value and goes on with the unnamed one: they are one value."""
    h = torch.sin(torch.sin(x))
    checkpoint_name(h, "h")
    return torch.sin(h)


def returns_it(x: Tensor) -> Tensor:
    """Names the output."""
    return checkpoint_name(torch.sin(x), "h")


@pytest.mark.parametrize("fun", [reads_an_alias, returns_it])
def test_a_name_that_is_read_or_returned_is_silent(
    fun: Callable[[Tensor], Tensor],
) -> None:
    """Aliases of a named value are the value, and an output is held in any case."""
    assert warned(lambda: remat(fun, policy=names("h"))(leaf(2, 2))) == []


def test_a_name_whose_result_is_dropped_is_no_silent_nothing() -> None:
    """Naming a value and using the unnamed one saves it, or warns."""
    region = remat(goes_on_unnamed, policy=names("h"))

    texts = warned(lambda: region(leaf()))

    saved = [r.name for r in region.saved_residuals(leaf())]
    assert texts or "h" in saved
