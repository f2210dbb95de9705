"""What is public is documented, and the README, .ci/run and pyproject.toml agree."""

import ast
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import remat

ROOT = Path(__file__).parent.parent
INITS = sorted((ROOT / "remat").rglob("__init__.py"))


def public_values() -> Iterator[tuple[str, object]]:
    """The exported values of the package and of the public modules that it exports."""
    pending: list[tuple[str, ModuleType]] = [("remat", remat)]
    while pending:
        path, module = pending.pop()
        for name in module.__all__:
            value = getattr(module, name)
            yield f"{path}.{name}", value
            if isinstance(value, ModuleType):
                pending.append((f"{path}.{name}", value))


def ci_script() -> str:
    """The text of the script that runs all checks."""
    return (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("path", INITS, ids=lambda path: path.parent.name)
def test_init_only_exports(path: Path):
    """An `__init__` holds its docstring, imports and `__all__`, nothing else."""
    docstring, *rest = ast.parse(path.read_text()).body

    assert isinstance(docstring, ast.Expr)
    for node in rest:
        text = ast.unparse(node)
        assert isinstance(node, ast.ImportFrom) or text.startswith("__all__ = "), text


def test_public_names_are_documented():
    """Each public name says in a docstring what it is; what torch says of its own is torch's."""
    silent = [
        name
        for name, value in public_values()
        if not inspect.getdoc(value)
        and not str(getattr(value, "__module__", "")).startswith("torch.")
    ]

    assert not silent


def test_readme_and_ci_run_the_same_tests():
    """What the README tells a reader to run is what is checked."""
    told = re.findall(r"^python .*-m pytest.*$", (ROOT / "README.md").read_text(), re.M)
    run = re.findall(r'^readme_test_command="(.*)"$', ci_script(), re.M)

    assert told == run == ["python -m pip install '.[dev]' && python -m pytest"]


def test_readme_says_how_to_run_the_demo():
    """One command installs the package and runs the demo."""
    command = "python -m pip install '.[cli]' && python -m remat demo"

    assert command in (ROOT / "README.md").read_text().splitlines()


def test_the_version_is_told_once_for_all():
    """Its release notes exist; the package, CITATION.cff and the site name it too."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    notes = re.findall(
        r"^## (\S+) \(.+\)$", (ROOT / "docs/CHANGELOG.md").read_text(), re.M
    )
    site = re.findall(r'^version = "(.*)"$', (ROOT / "docs/conf.py").read_text(), re.M)

    assert notes[0] == version == remat.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert version.startswith(f"{site[0]}.")


def test_nothing_is_installed_from_a_registry_that_does_not_have_it():
    """Until the package is published, its name is a clone's."""
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("remat/**/*.py"),
    ]

    assert [path for path in pages if "install 'remat" in path.read_text()] == []


def test_ci_tests_the_oldest_torch_that_is_promised():
    """The lower bound in pyproject.toml is the version that .ci/run installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = [d for d in project["dependencies"] if d.startswith("torch>=")]
    tested = re.findall(r'^oldest_torch="torch==(.*)\.0"$', ci_script(), re.M)

    assert bounds == [f"torch>={version}" for version in tested]


def test_pages_for_maintainers_name_what_exists():
    """Every file that they name is there, and every room of the house has its line."""
    architecture = (ROOT / "docs/architecture.md").read_text()
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    files = re.findall(r"`((?:remat|tests|docs)/[\w/.]+\.(?:py|md))`", contributing)
    files += re.findall(r"`((?:tests|docs)/[\w/.]+\.py)`", architecture)
    files += [f"remat/{path}" for path in re.findall(r"`(\w+/\w+\.py)`", architecture) if not path.startswith("tests")]  # fmt: skip
    house = (ROOT / "tests/test_house.py").read_text()
    rooms = re.findall(r'ROOMS.*?"""(.*?)"""', house, re.S)[0].split()

    assert [path for path in files if not (ROOT / path).exists()] == []
    assert [room for room in rooms if f"`{room}`" not in architecture] == []
