"""A decorated function and its cache: from a user's call to the region that serves it.

In come a function, its options and a call; out comes the result of the region whose guards hold, or
of one that is made. Reads all. `options`: checks, refusals; `decorated`: functions, methods,
modules as regions, and calls that need none and run plainly; `signature`: a call, taken apart,
leaves labelled, static ones wrapped and keyed; `routes`: the short way of calls alike, which a
guard recognizes; `cache`: the traces of one code, found or made; `families`: calls that differ in
sizes; `entry`: one trace; `cache_miss`: how it is made; `traced_call`: what a trace must not have
done; `retraces`: why there are many; `advice`: warnings of what has no effect, or is read and not
compared; `residuals`: what is held, listed; `torch_compile`: kinds of regions in graphs;
`decorated_in_graph`: `remat` called in one.
"""
