"""The rules of the house: which module may import what, and what must be documented."""

import ast
import graphlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import remat

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "remat"

# A module may import its own layer and those above it in this list, never those below.
LAYERS = (
    ("_errors",),
    ("_compat",),
    (
        "_batching",
        "_departures",
        "_host",
        "_lines",
        "_memoized",
        "_operators",
        "_refusals",
        "_rng",
        "_trackers",
        "_streams",
        "_numerics",
        "_orders",
        "_switch",
        "_wrapped",
    ),
    ("random",),
    ("storage",),
    ("policies",),
    ("planners", "_memory", "schedules"),
    ("_graph", "_names"),
    ("_in_place",),
    ("_import_fx", "_overhead", "_watching"),
    ("_captures", "_collectives", "_indexing"),
    ("_signature",),
    ("_guards", "_hooked", "_sharded"),
    ("_output_aliases", "_running"),
    ("_trace",),
    ("_dynamic", "_leaks", "_redraws"),
    ("_merge", "_partition", "_derived"),
    ("_backend", "_bindings", "_drawing", "_holding", "_interpreted", "_reuse"),
    ("_composites",),
    ("_program",),
    ("_costs", "_peak"),
    ("_following", "_planning"),
    ("_ahead",),
    ("_function", "_resting", "_run_state", "_verification", "_waiting"),
    ("_forward", "_hidden", "_views"),
    ("_straight",),
    ("_any_region", "_push"),
    ("_given",),
    ("_region",),
    ("_shortage",),
    ("_backward",),
    ("_bind", "_rerun_region"),
    ("_rerun", "_entry"),
    ("_first_call",),
    ("_advice", "_families", "_residuals", "_options", "_in_graph"),
    ("_routes",),
    ("_cache",),
    ("_lookup",),
    ("_decorated",),
    ("_made_in_graph",),
    ("_api",),
    ("_plan_text",),
    ("_plan",),
    ("layers", "modules"),
    ("interop", "reporting", "testing"),
    ("__init__",),
    ("__main__",),
)
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}

PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {module: ast.parse(path.read_text()) for module, path in PATHS.items()}

each_module = pytest.mark.parametrize("module", PATHS)


def layer_of(module: str) -> str:
    """The name under which LAYERS lists a module."""
    return "__init__" if module == "remat" else module.split(".")[1]


def imports_of(tree: ast.Module) -> Iterator[str]:
    """The dotted names that a module imports anywhere in it, functions included."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(str(source), names, 0):
                yield from (f"{source}.{alias.name}" for alias in names)
            case ast.ImportFrom():
                raise AssertionError(f"line {node.lineno}: a relative import")
            case _:
                pass


def own_imports_of(tree: ast.Module) -> set[str]:
    """The modules of this package that a module imports."""
    names = (name for name in imports_of(tree) if f"{name}.".startswith("remat."))
    return {name if name in PATHS else name.rpartition(".")[0] for name in names}


def attributes_of(tree: ast.Module) -> Iterator[str]:
    """The dotted names, such as `torch.ops.aten`, that a module reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def is_torch_internal(name: str) -> bool:
    """Whether a dotted name reaches a part of torch without a promise of stability."""
    if not name.startswith("torch.") or name.startswith("torch.ops."):
        return False
    private = any(re.match("_[^_]", part) for part in name.split("."))
    return private or f"{name}.".startswith("torch.fx.experimental.")


def test_every_module_has_a_layer():
    """A new module is put into LAYERS by whoever adds it."""
    assert {layer_of(module) for module in PATHS} <= HEIGHT.keys()


@each_module
def test_imports_run_one_way(module: str):
    """A module imports no layer below its own."""
    here = HEIGHT[layer_of(module)]

    upward = {
        name for name in own_imports_of(TREES[module]) if HEIGHT[layer_of(name)] > here
    }

    assert not upward


def test_imports_have_no_cycle():
    """Inside a layer, too, no module imports itself by a detour."""
    arrows = {module: own_imports_of(tree) for module, tree in TREES.items()}

    graphlib.TopologicalSorter(arrows).prepare()


@each_module
def test_only_compat_reaches_into_torch(module: str):
    """Torch's internals come through `_compat`, where each says when it may go."""
    if module == "remat._compat":
        return
    names = {*imports_of(TREES[module]), *attributes_of(TREES[module])}

    assert not {name for name in names if is_torch_internal(name)}


@pytest.mark.parametrize(
    "module", [m for m, p in PATHS.items() if p.stem == "__init__"]
)
def test_init_only_exports(module: str):
    """An `__init__` holds its docstring, imports and `__all__`, nothing else."""
    docstring, *rest = TREES[module].body

    assert isinstance(docstring, ast.Expr)
    for node in rest:
        text = ast.unparse(node)
        assert isinstance(node, ast.ImportFrom) or text.startswith("__all__ = "), text


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


def test_public_names_are_documented():
    """Each public name says in a docstring what it is."""
    silent = [name for name, value in public_values() if not inspect.getdoc(value)]

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


def test_ci_tests_the_oldest_torch_that_is_promised():
    """The lower bound in pyproject.toml is the version that .ci/run installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = [d for d in project["dependencies"] if d.startswith("torch>=")]
    tested = re.findall(r'^oldest_torch="torch==(.*)\.0"$', ci_script(), re.M)

    assert bounds == [f"torch>={version}" for version in tested]


def ci_script() -> str:
    """The text of the script that runs all checks."""
    return (ROOT / ".ci" / "run").read_text()
