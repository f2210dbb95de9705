"""Stacks of layers: `scan` for equal ones, `chain` for different ones.

In come functions, a state and a schedule; out comes the last state. A `Link` is one traced stage,
a `Stack` all of them; `_run_stack` makes and starts them for both, `_executor` carries out the
actions of a schedule, `_scheduled` is the region around that. Reads `_regions` and `schedules`.
"""

from remat.layers._chain import Chain, chain
from remat.layers._scan import scan

__all__ = ["Chain", "chain", "scan"]
