"""A joint graph and a policy -> what is saved, and two graphs.

In come a joint graph and a policy, a plan or a budget; out come what is saved and both halves.
Reads `_graph`, `policies`, `planners` and `storage`, and never traces. `analysis`: classes of
values, their names, what a policy sees; `decide`: what policies, plans and budgets permit, and a
program's fingerprint; `budgets`: a planner's problem, solved; `costs`: FLOPs and bytes of a step,
or its time, and what kernels hold inside; `free_memory`: bytes free on a device or to the process;
`cut`: the walk back from wanted gradients, what is recomputed, graphs of forward and backward;
`peak`: most bytes alive, by replay; `stages`: all these as one value.
"""
