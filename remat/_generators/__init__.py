"""Where random numbers come from: states of generators as values, trackers and streams.

In come generators, torch's (`device_states`) and those of `python_and_numpy`, and the `trackers` of
Megatron and TransformerEngine, whose states are `streams`; out go recorded states, and operators
that draw from them again (`compiled_draws`). Reads `_graph` and what is below it.
"""
