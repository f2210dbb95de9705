"""Budgets of what memory is free: of a device, of the machine, of a control group."""

from typing import Any

import pytest
import torch

from remat import BudgetError, plan, policies
from remat._partition.free_memory import limits
from tests.plans.models import dropping, gpt, mlp, mlp_args, region_of
from tests.support import default_generator


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

    assert asked == [torch.get_default_device()]
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
    assert plan(mlp, peak="auto")(*args).recompute_cost == 0
    assert policies.budget("auto") == policies.budget(peak="auto")
    assert repr(policies.budget("auto")) == "budget(peak='auto')"


def test_a_peak_bounds_the_predicted_peak() -> None:
    """By a plan and by a policy; with a budget, both bounds hold."""
    f, args, _ = gpt()
    every = plan(f, budget=1.0)(*args)
    some = plan(f, budget=0.3)(*args)
    between = (every.predicted_peak_bytes + some.predicted_peak_bytes) // 2

    found = plan(f, peak=between)(*args)
    both = plan(f, budget=some.budget_bytes, peak=f"{between} B")(*args)
    region = region_of(f, policy=policies.budget(peak=between))

    assert some.saved_bytes < found.saved_bytes < every.saved_bytes
    assert found.predicted_peak_bytes <= between
    assert both.saved_bytes == some.saved_bytes
    made = [each for each in region.saved_residuals(*args) if each.op != "input"]
    assert sum(each.size_bytes for each in made) == found.saved_bytes


@pytest.mark.parametrize("allow", [None, policies.save_matmul_outputs], ids=str)
def test_a_part_of_the_peak(allow: Any) -> None:
    """Of that without remat, whatever may be saved; 1.0 is all of it, and 1 a byte."""
    f, args, _ = gpt()
    whole = plan(f, budget=1.0)(*args)
    most = int(0.7 * whole.predicted_peak_bytes)

    part = plan(f, budget=policies.budget(peak=0.7, allow=allow))(*args)
    limit = plan(f, budget=policies.budget(peak=most, allow=allow))(*args)

    assert part == limit
    assert part.recompute_cost > whole.recompute_cost
    assert plan(f, peak=1.0)(*args) == whole
    assert policies.budget(peak=1.0) != policies.budget(peak=1)


def test_a_peak_that_cannot_be_met() -> None:
    """The error names the least that can, and with that it works."""
    f, args, _ = gpt()
    words = r"no plan stays within 1000 bytes.*lowest predicted peak is (\d+) bytes, of a plan that saves"
    with pytest.raises(BudgetError, match=words) as caught:
        plan(f, peak=1000)(*args)

    least = int(str(caught.value).partition("Pass peak=")[2].partition(",")[0])
    assert plan(f, peak=least)(*args).predicted_peak_bytes == least
    with pytest.raises(BudgetError, match="put regions into the function"):
        plan(f, peak=least - 1)(*args)


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
    size = default_generator().get_state().nbytes
    less, least = size - 1, f"Allow at least {size} bytes"

    with pytest.raises(BudgetError, match=rf"fits {less} bytes.*{least}"):
        region_of(f, policy=policies.budget(less))(*args)
    with pytest.raises(BudgetError, match=least):
        plan(f, budget=less)(*args)
    assert plan(f, budget=size)(*args).saved_bytes == size
