"""Stacks of layers: `scan` for equal ones, `chain` for different ones."""

from remat.layers._chain import Chain, chain
from remat.layers._scan import scan

__all__ = ["Chain", "chain", "scan"]
