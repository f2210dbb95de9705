"""A graph -> a callable that frees each value at its last use.

In comes a graph; out comes one straight-line Python function, or what Inductor or torch's
interpreter makes of the graph, which runs below every transform. Reads `_graph`,
`_generators` and `_partition`, and no user's function.
"""
