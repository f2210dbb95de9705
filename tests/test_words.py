"""Words that have one module of the package, since they are true of few machines."""

import ast

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
