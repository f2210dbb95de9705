"""A pure function and metadata -> its joint graph.

In come a function over flat tensors and metadata; out comes the graph of forward and backward, as
`importing` reads it, or an error of `refusals`. The user's code meets what `thread`, `like_numbers`
and `indexing` put in its way; `aliases` chooses outputs, `engines` drive modules, `side_effects` are
put back. Reads `_graph`, `_generators`, `_captures`.
"""
