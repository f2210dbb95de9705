"""Where random numbers come from: states of generators as values, trackers and streams.

In come generators of torch, of Python and of the trackers that Megatron and
TransformerEngine use; out go recorded states, and operators that draw from them again.
Reads `_graph` and what is below it.
"""
