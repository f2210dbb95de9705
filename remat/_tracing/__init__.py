"""A pure function and metadata -> its joint graph.

In come a function over flat tensors and metadata; out comes the graph of forward and
backward, or an error. Reads `_graph`, `_generators`, `_captures`.

- `trace`: one run of forward and backward under the tracer, and the joint graph made of it.
- `thread`: the trace that this thread is in: what it lifts, and the calls of the user's
  that it sees.
- `arguments`: the arguments of a call: their names in messages, and that they stay as they
  are.
- `importing`: a torch.fx graph as this package's values, cut where outputs are detached.
- `draws`: which draws of a trace repeat earlier ones.
- `in_place_operators`: writes in a torch.fx graph as pure operators, or on copies.
- `arrays`: arrays of numpy that become tensors.
- `aliases`: which of the returned tensors are outputs, and which are made from others.
- `caught`: errors of a trace that the user's code catches.
- `collectives`: in-place communication as pure operators.
- `engines`: modules that DDP and its like drive by hooks, refused.
- `indexing`: reads and writes at indices or masks that are tensors.
- `naming`: `checkpoint_name`.
- `open_sizes`: `dynamic_shapes`: one trace for every size, and what user code may ask of a
  size.
- `taken_functions`: operators that take functions, as `torch.cond`, in a trace: one step,
  with what the functions reach.
- `side_effects`: what a trace changed or left behind in objects of the user or of a
  library.
- `once_more`: a function that runs, or is traced, again for a derivative, and its errors.
- `refused_kinds`: the errors of tensors that a trace has no stand-in for.
- `refused_writes`: the errors of writes that cannot be traced.
- `refusals`: the errors of all else that cannot be traced.
"""
