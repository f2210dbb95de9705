"""A graph -> a callable that frees each value at its last use.

In comes a graph; out comes one function, below every transform. Reads `_graph`, `_generators` and
`_partition`, and no user's function. `program`: straight-line Python that is written; `compiled`:
by Inductor; `interpreted`: by torch's interpreter, for small tensors; `inside_traces`: step by
step in an outer trace, with draws and operators for vmap; `by_places`: strided operators there;
`bindings`: the cheapest function in C for a step or a product of views, rehearsed; `overwriting`:
pointwise steps that write over a last read; `lending`: values that the next program takes;
`barriers`: copies that hold a compiler off; `verification`: `verify=True`, saved values compared.
"""
