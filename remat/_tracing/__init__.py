"""A pure function and metadata -> its joint graph.

In comes a function over flat tensors with the metadata of its arguments; out comes the
graph of its forward and its backward, with names, the user's lines and aliases, or an
error that says why there is none. Reads `_graph`, `_generators`, `_captures`.
"""
