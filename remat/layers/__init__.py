"""Stacks of layers: `scan` for like ones."""

from remat.layers._scan import scan

__all__ = ["scan"]
