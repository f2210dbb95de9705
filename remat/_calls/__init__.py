"""A decorated function and its cache: from a user's call to the region that serves it.

In come a function, its options and a call; out comes the result of the region whose guards
hold, or of one that is made. Reads all rooms below it.

- `options`: the options of `remat`, with their checks and refusals.
- `decorated`: decorated functions, methods and modules, and the calls that need no region
  and run plainly.
- `method_region`: a region around a method of one module, which follows its class.
- `signature`: a call, taken apart into labelled tensors, wrapped static arguments and a
  key.
- `routes`: the short way of calls alike, each behind a guard that recognizes it.
- `cache`: the traces of one code, found by key and guards, or made.
- `families`: calls that differ in sizes alone, and what of them one trace serves.
- `cache_miss`: the pipeline that makes an entry, stage by stage.
- `traced_call`: its first stage, the trace of a call, and what a trace must not have done.
- `entry`: one trace that is kept, its guards and how it is called.
- `retraces`: why a function is traced again and again.
- `advice`: warnings of options without effect, and of what a trace reads and no call
  compares.
- `residuals`: what a region holds for its backward, as a list.
- `as_function`: what tools ask of a region as of a plain function: its signature, its
  globals.
- `torch_compile`: a region as a part of a compiled graph, with one kind for each sort of
  it.
- `decorated_in_graph`: `remat` itself called in what torch.compile traces.
"""
