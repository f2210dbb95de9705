"""Programs under every transform: one rule for each of reverse mode, forward mode and vmap.

In comes a region (a function at one signature, with its two programs) and tensors of any
level; out come tensors that can be differentiated, whose backward is a region again. Reads
all that makes programs, and nothing of how a user's call found its region.

- `protocol`: what the rules ask of any region, also of one without programs, and what one
  call of a region is.
- `rules`: runs a call level by level, each by the rule of its transform, as nodes of
  autograd; plainly, where it may, by the fast path of one program and the backwards known
  of it.
- `short_way`: the same under one level of torch.func, by one program each way.
- `forwards`: `Forward`: one run of the forward program, its results, what is returned of
  them, and what is remembered for the fast path.
- `derived_forwards`: the forwards of derived regions (backward, mapped, pushed), made from
  the programs of the first.
- `by_rules`: the map of a region in which a user's `autograd.Function` has a rule for vmap.
- `run_backward`: what the backward of a node reads, runs, frees and returns, and its
  errors.
- `traced`: the traced region, and the regions derived from it.
- `opening`: when levels below differentiate a region by its programs, and how it is opened
  for them.
- `functions`: flat functions of tensors, to be traced again: pullback, pushforward, map.
- `waiting`: saved values and inputs on their way to the backward, stored and resumed.
- `prefetch`: stored values whose return starts while the backward before theirs computes.
- `out_of_memory`: what regions held, reported when memory runs out.
"""
