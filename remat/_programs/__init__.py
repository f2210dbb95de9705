"""A graph -> a callable that frees each value at its last use.

In comes a graph; out comes one straight-line function (`program`), or what Inductor (`compiled`) or
torch's interpreter (`interpreted`) makes of it, below every transform; `inside_traces` runs it step
by step in an outer trace. `composites`, `bindings` and `overwriting` make it cheaper, `barriers`
hold a compiler off. Reads `_graph`, `_generators` and `_partition`, and no user's function.
"""
