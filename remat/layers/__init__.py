"""Stacks of layers: `scan` for like ones, `chain` for others."""

from remat.layers._chain import Chain, chain
from remat.layers._scan import scan

__all__ = ["Chain", "chain", "scan"]
