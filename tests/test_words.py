"""Where words of the package stand: those of one device, and the names of modules."""

import ast
import re

from tests.sources import trees


def test_one_module_names_cuda():
    """Other code asks torch for the device's own module; a docstring may give an example."""
    for module, tree in trees().items():
        said = ast.parse(ast.unparse(tree))  # without comments
        for node in ast.walk(said):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = ""
        # Megatron and TransformerEngine have named their trackers after it.
        assert "cuda" not in ast.unparse(said) or module == "remat.interop._shared", (
            module
        )


def test_a_room_says_what_each_of_its_files_is_for() -> None:
    """By name, in its docstring: whoever looks for something reads these."""
    said = {name: ast.get_docstring(tree) or "" for name, tree in trees().items()}
    unsaid = {
        name
        for name in said
        if name.count(".") > 1
        and not re.search(
            rf"\b{name.rpartition('.')[2]}\b", said[name.rpartition(".")[0]]
        )
    }

    assert not unsaid
