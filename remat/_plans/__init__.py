"""Plans: a budget solved over a whole function before it runs, as a value that prints.

In come a decorated function, example arguments and a size; out comes a `Plan`, which is a
policy, a table, and JSON. Reads `_calls` for the trace and `_partition` for the decisions.

- `plan`: `Plan`, its rows, its differences from another plan, its JSON.
- `shares`: one budget for the calls of several regions, within bytes or a peak, and how far
  it may be from the best.
- `recording`: a training step on tensors without data, and the bytes that live in it.
- `timeline`: the peak of such a step under plans, part by part.
- `tiles`: more tiles for what runs tile by tile, where they help.
- `fit`: policies and tiles for a whole training step within a limit.
"""
