"""How the tests are handed out, and where what they all need is loaded."""

import gc
import importlib
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# They start several processes each, once for all tests of a file.
WORLDS = ("tests/storage/test_shard.py", "tests/distributed/")
# Each of their tests traces functions of its own, some for long.
SINGLE = (
    "tests/laws/test_law_01_functions_under_transforms.py",
    "tests/laws/test_law_02_random_graphs.py",
    "tests/test_examples.py",
    "tests/sweep/test_operator_sweep.py",
    "tests/test_planted_bugs.py",
    "tests/test_properties.py",
)


# The second asks about the traces that the first has made.
OF_FUNCTIONS = (
    "tests/laws/test_law_01_same_numbers.py",
    "tests/laws/test_no_fallback.py",
)


class ByFile(LoadScopeScheduling):
    """Hands out files, whose tests share traces and fixtures, the ones with most tests first.

    Those that start a world of ranks go to one process, and so do those that trace the same
    functions. At the end come single tests, so that no process waits long for the others.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(WORLDS):
            return "worlds"
        if nodeid.startswith(OF_FUNCTIONS):
            return "functions"
        return nodeid if nodeid.startswith(SINGLE) else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> ByFile:
    """By name: pytest 9.2 does not let xdist 3.8 see its `xdist_group` marks."""
    return ByFile(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the device on which the tests make their tensors, unless they name another."""
    parser.addoption("--device", default="cpu", help="cpu, cuda, standin or another")


@pytest.hookimpl(trylast=True)  # after xdist's own
def pytest_configure(config: pytest.Config) -> None:
    """Loads what a process needs that runs tests.

    One that hands them out to others needs none of it, and the others wait for it. Nothing
    is collected from here to where the tests start: what is imported and listed stays.
    """
    gc.disable()
    hands_out = config.pluginmanager.hasplugin("dsession")
    if not hands_out or config.getoption("--device") != "cpu":
        running = importlib.import_module("tests.running")
        config.pluginmanager.register(running, "tests.running")
