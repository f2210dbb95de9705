"""A joint graph and a policy -> what is saved, and two graphs.

In come a joint graph and a policy, a plan or a budget; out come what is saved and both
halves. Reads `_graph`, `policies`, `planners` and `storage`, and never traces.

- `analysis`: classes of equal values, the roots of views, names, steps that only check, and
  what a policy sees of a value.
- `decide`: what a policy, plan or budget permits to be saved, and the fingerprint of a
  program.
- `budgets`: a budget as a planner's problem, solved for held bytes or for a peak.
- `costs`: what a step costs a region: FLOPs, elements, bytes, or measured time; and the
  memory inside its kernel.
- `free_memory`: the bytes that are free on a device or to the process.
- `cut`: the walk back from the wanted gradients among the permitted values, and the graphs
  of forward and backward.
- `peak`: the most bytes that live at once, by replay of both graphs.
- `stages`: all of these as one value that prints.
"""
