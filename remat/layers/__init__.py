"""Stacks of layers: `scan` for equal ones, `chain` for different ones.

In come functions, a state and a schedule; out comes the last state. Reads `_regions`, `schedules`.
`_scan`: its carry, `xs` and step checked, numbers as tensors; `_chain`: functions in a row;
`_links`: one traced stage: stand-ins without data, strides, gradients pulled back and added;
`_stack`: links in a row, mapped, and which tensors go where; `_run_stack`: shared: a stage's link
and cost, a schedule's actions; `_executor`: carries those out; `_scheduled`: the region around;
`_unrolled`: for torch.compile.
"""

from remat.layers._chain import Chain, chain
from remat.layers._scan import scan

__all__ = ["Chain", "chain", "scan"]
