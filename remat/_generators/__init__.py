"""Where random numbers come from: states of generators as values, trackers and streams.

In come generators; out go recorded states, and operators that draw from them again. Reads
`_graph` and what is below it.

- `device_states`: the states of torch's generators: got, put, swapped around a draw.
- `python_and_numpy`: the states of these two generators, and the warning of draws from
  them.
- `trackers`: tables of states by name, as Megatron's: registered, recorded, run without
  tracing.
- `streams`: whose numbers a draw takes while a function is traced, and the errors of
  implicit draws.
- `compiled_draws`: a draw and its state as one operator, for graphs of torch.compile.
"""
