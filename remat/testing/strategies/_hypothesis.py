"""Imports hypothesis, which only the strategies need."""

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "remat.testing.strategies needs hypothesis, which is not installed. Run "
        "pip install 'remat[testing]'. The rest of remat.testing works without."
    ) from error

__all__ = ["st"]
