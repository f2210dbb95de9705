"""Many calls of functions: stacks of layers, by `scan` and `chain`, and tiles, by `tiled`.

In come functions, a state and a schedule, or a pattern; out comes the last state, or the
tiles' results put together. Reads `_regions`, `schedules`.

- `_scan`: `scan`: one function repeated, its carry and its `xs` checked.
- `_chain`: `chain`: different functions in a row.
- `_links`: one stage of a stack as a traced link; a pass over links, forward, and back with
  gradients.
- `_stack`: the links in a row: which tensors go into each, and what comes out.
- `_run_stack`: what a stage costs, the schedule's actions, and a run of the stack by them.
- `_executor`: carries actions out on tensors: states, records, sums of gradients.
- `_scheduled`: the region around a scheduled stack.
- `_unrolled`: stacks as torch.compile traces them.
- `_tiled`: `tiled`: a function run tile by tile.
- `_tiles`: the pattern of `tiled`, and a call whose arguments it cuts.
- `_independence`: whether a function mixes the axis, proved on traces of two lengths.
- `_axis_rules`: what each operator does to that axis.
- `_cross_entropy`: a loss whose logits exist one tile at a time.
"""

from remat.layers._chain import Chain, chain
from remat.layers._cross_entropy import tiled_cross_entropy
from remat.layers._scan import scan
from remat.layers._tiled import Tiled, tiled

__all__ = ["Chain", "Tiled", "chain", "scan", "tiled", "tiled_cross_entropy"]
