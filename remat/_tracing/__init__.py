"""A pure function and metadata -> its joint graph.

In come a function over flat tensors and metadata; out comes the graph of forward and backward, read
by `importing`, or an error (`refusals`). User code meets `thread`, `like_numbers` and `indexing`;
`aliases` chooses outputs, `side_effects` are put back. Reads `_graph`, `_generators`, `_captures`.
"""
