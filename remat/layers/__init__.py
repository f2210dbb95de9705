"""Many calls of functions: stacks of layers, by `scan` and `chain`, and tiles, by `tiled`.

In come functions, a state and a schedule, or a pattern; out comes the last state, or the tiles'
results put together. Reads `_regions`, `schedules`. `_scan`: its carry, `xs` and step checked,
numbers as tensors; `_chain`: functions in a row; `_links`: one stage, traced (`link_of`), and a pass
that runs stages: stand-ins without data, strides, gradients pulled back and added; `_stack`: links
in a row, mapped, and which tensors go where; `_run_stack`: runs one by a schedule: a stage's cost,
actions; `_executor`: carries those out, with states, records, rows and sums of gradients;
`_scheduled`: the region around, from its forward's sweep on; `_unrolled`: for torch.compile.
`_tiled`: a function run tile by tile; `_tiles`: which dimensions are cut, the arguments as tiles;
`_independence`: whether a function mixes the axis, by traces of two lengths; `_axis_rules`: what a
value has of it, what a step (`AxisStep`) of each operator does to it; `_cross_entropy`: tiles of a
vocabulary's logits.
"""

from remat.layers._chain import Chain, chain
from remat.layers._cross_entropy import tiled_cross_entropy
from remat.layers._scan import scan
from remat.layers._tiled import Tiled, tiled

__all__ = ["Chain", "Tiled", "chain", "scan", "tiled", "tiled_cross_entropy"]
