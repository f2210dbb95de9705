"""`engine="rerun"`: a function that cannot be traced runs again in the backward.

In come the user's function and its arguments; out come its results. Reads `_regions`, under
whose rules it stands.

- `flat_call`: a call as a function of all the tensors that it reaches.
- `region`: the region, which runs that function once more in its backward.
- `state`: what a run finds outside the function (generators, numbers of tensors), so that
  each run starts from the same.
- `constants`: tensors that are read and not differentiated, and must not have changed.
- `written`: what a torch function writes to, as far as its name tells.
- `dependence`: which leaves the outputs depend on, by autograd's nodes, and what only its
  graph holds.
- `fully_shard`: regions around modules of FSDP.
"""
