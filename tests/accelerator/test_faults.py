"""Six kinds of faults of transfers and generators: the stand-in sees each, a CPU none."""

import warnings
from typing import Any

import pytest
import torch

from remat.storage import _transfer
from tests.accelerator import faults

pytestmark = pytest.mark.contract


@pytest.fixture(autouse=True)
def _lanes_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_transfer, "_lanes", {})


@pytest.mark.standin
def test_without_a_fault_all_is_in_order():
    faults.judged(torch.device("standin", 0))


@pytest.mark.standin
@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_fault_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch, device_counts: Any
):
    faults.plant(faults.FAULTS[name], monkeypatch)
    with pytest.raises(AssertionError):
        faults.judged(torch.device("standin", 0))
    device_counts.forget()


@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_cpu_does_not_see_it(name: str, monkeypatch: pytest.MonkeyPatch):
    faults.plant(faults.FAULTS[name], monkeypatch)
    with warnings.catch_warnings(), torch.device("cpu"):
        warnings.simplefilter("ignore")
        faults.judged(torch.device("cpu"))
