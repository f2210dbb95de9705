"""Makes every test start alike: one thread, the same seeds, the same examples.

`tests/conftest.py` loads it where tests run: all that it imports takes seconds.
"""

import gc
import os
import random
import warnings
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from remat._generators import device_states
from tests import accelerator
from tests.accelerator import Counts, left_out
from tests.probe import Errors, forget_retraces, nothing_left, use_torch_at_length
from tests.support import FakeDevice

# One thread: the tensors are small, and a sum is split in the same way on every machine.
torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "remat", derandomize=True, deadline=None, database=None
)
hypothesis.settings.load_profile("remat")
# It draws some numbers from the constants of whatever modules are imported: its examples would
# depend on the tests that ran before. No setting turns that off.
providers._get_local_constants = Constants


def pytest_configure(config: pytest.Config) -> None:
    """Makes it torch's own default, for this thread."""
    device = str(config.getoption("--device"))
    if device == accelerator.NAME:
        if lacking := accelerator.missing():
            pytest.exit(lacking, returncode=0)
        accelerator.load()
    if device != "cpu":
        torch.set_default_device(torch.device(device, 0))
        # torch's own formulas do, in forward mode, and it warns once in a process.
        config.addinivalue_line("filterwarnings", "ignore:Accessing the data pointer")
        _add_up_in_one_order(config)


def _add_up_in_one_order(config: pytest.Config) -> None:
    """Has the device's kernels give the same bits each time, as the CPU's do, where they can."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False
    for warning in (
        "does not have a deterministic",
        "to a non-deterministic algorithm",
    ):
        config.addinivalue_line("filterwarnings", f"ignore:.* {warning}")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Skips what needs an accelerator where there is none, and what cannot run on one."""
    device = config.getoption("--device")
    has = {"gpu": torch.accelerator.is_available(), "standin": device == "standin"}
    reasons = {"gpu": "needs an accelerator", "standin": "needs --device standin"}
    for item in items:
        lacking = [
            mark for mark in has if not has[mark] and item.get_closest_marker(mark)
        ]
        why = reasons[lacking[0]] if lacking else None
        if device != "cpu":
            is_standin = device == accelerator.NAME
            why = why or left_out.reason(item.nodeid, is_standin=is_standin)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Says how many tests a device other than the CPU has run."""
    device, stats = config.getoption("--device"), terminalreporter.stats
    if device != "cpu":
        num_passed, num_skipped = (
            len(stats.get(key, [])) for key in ("passed", "skipped")
        )
        terminalreporter.write_line(
            f"on {device}: {num_passed} tests passed, {num_skipped} did not run"
        )


def pytest_collection_finish() -> None:
    """Leaves what imports have made to no collection: each would look through all of it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # by the usual 700, 65,000 of them take 4 % of the time
    gc.enable()


def pytest_unconfigure() -> None:
    """Has the interpreter find them as it ends."""
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _without_what_is_older() -> None:
    """Leaves what earlier files have made to no collection either."""
    gc.collect(1)
    gc.freeze()


@pytest.fixture(scope="session")
def remat_errors() -> Iterator[Errors]:
    """Counts the errors of the package that are made."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as monkeypatch:
        warnings.simplefilter("ignore")  # what torch imports at first use
        use_torch_at_length()
        yield Errors(monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def _torch_works_after_errors(remat_errors: Errors) -> Iterator[None]:
    before = remat_errors.count
    yield
    if remat_errors.count > before:
        use_torch_at_length()


@pytest.fixture(autouse=True)
def _nothing_left_by_errors(remat_errors: Errors) -> Iterator[None]:
    """Looks, after each test that met such an error, for what it has left behind."""
    with nothing_left(remat_errors):
        yield


@pytest.fixture(autouse=True)
def _fixed_seeds(request: pytest.FixtureRequest) -> None:
    random.seed(0)
    if request.config.getoption("--device") == "cpu":
        torch.default_generator.manual_seed(0)  # a hundredth of the next one's time
    else:
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_retraces_counted() -> None:
    forget_retraces()


@pytest.fixture
def device_counts() -> Counts:
    """What the stand-in for an accelerator has counted in this test."""
    return Counts()


@pytest.fixture(autouse=True)
def _all_in_order(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that has read, on the stand-in, what nothing has waited for."""
    if request.config.getoption("--device") != accelerator.NAME:
        yield
        return
    counts = Counts()
    counts.forget()
    yield
    assert counts.of("unordered_accesses", "early_frees") == (0, 0)


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Stands in for `torch.cuda` where generator states are read and set."""
    device = FakeDevice()
    monkeypatch.setattr(device_states, "_module", lambda kind: device)
    return device
