"""A pure function and metadata -> its joint graph.

In come a function over flat tensors and metadata; out comes the graph of forward and backward, or
an error. Reads `_graph`, `_generators`, `_captures`. `trace`: a run of both, and the joint graph
made of it; `thread`: the trace that this thread is in, what it lifts, users' calls; `importing`:
torch.fx nodes as values, zeros and maxima rewritten, notes, cuts by `detach`; `in_place_operators`:
writes of torch.fx nodes as pure operators, or on copies; `aliases`: which returned tensors are
outputs, and which made again; `caught`: errors of a trace that the user's code catches;
`collectives`: communication as pure operators; `engines`: of DDP and others, which drive modules by
hooks; `indexing`: tensors as indices or masks; `naming`: `checkpoint_name`; `open_sizes`: templates for every size, and symbols in user code;
`taken_functions`: those of `torch.cond` and its like; `refusals`: errors of what cannot be traced:
tensors of other kinds, lazy modules, numbers that are read; `side_effects`: what a trace leaves
behind, in objects of others too; `arguments`: their names in messages, and that they stay as they
are.
"""
