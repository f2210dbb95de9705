"""Where random numbers come from: states of generators as values, trackers and streams.

In come generators; out go recorded states, and operators that draw from them again. Reads `_graph`
and what is below it. `device_states`: of torch's generators, got, put, swapped; `python_and_numpy`:
the states of these two, and the warning of draws; `trackers`: tables as Megatron's and
their states, registered and handled plainly; `streams`: whose numbers a draw takes in a trace, which enters and
leaves them, and errors of implicit draws; `compiled_draws`: a draw and its state as one operator.
"""
