"""A graph -> a callable that frees each value at its last use.

In comes a graph; out comes one function, below every transform. Reads `_graph`,
`_generators` and `_partition`, and no user's function.

- `program`: a graph as straight-line Python, which is written and then runs.
- `compiled`: a graph as a function that Inductor compiles.
- `interpreted`: a graph of small tensors for torch's own interpreter.
- `inside_traces`: a graph run step by step inside another trace: its draws, its dtypes, its
  operators under vmap.
- `by_places`: in such a trace, strided views by the places of their numbers.
- `bindings`: for a step the cheapest function in C that runs just its operator, and
  products folded with their views.
- `overwriting`: pointwise steps that write over an argument at its last read.
- `narrowing`: masks of gradients that a step computes, narrowed to those that are read.
- `lending`: values that one program recomputes and the next one takes over.
- `barriers`: copies that keep a compiler from undoing a recomputation.
- `verification`: `verify=True`: saved values, compared with what is computed again.
"""
