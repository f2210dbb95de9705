"""Programs under every transform: one rule for each of reverse mode, forward mode and vmap.

In comes a region (a function at one signature, with its two programs) and tensors of any level; out
come tensors that can be differentiated, whose backward is a region again. Reads all that makes
programs, and nothing of how a user's call found its region. `protocol`: a call, what is asked of a
region, and of one that explains itself; `rules`: runs a call level by level, as nodes of autograd;
`forwards`: `Forward`, one run, its results, what is returned of them, known backwards, the fast
path of one program; `short_way`: these under one level of torch.func; `run_backward`: what a
backward reads (`ctx`), runs, frees, and its errors; `traced`: the traced region, and those derived
from it; `derived_forwards`: their forwards, what is saved found again, DTensors' parts, duals, one
program for outputs and tangents; `opening`: programs that lower levels differentiate; `functions`:
flat functions for another trace, pullback, pushforward, map; `waiting`: saved values and inputs,
stored and resumed; `prefetch`: restored early; `out_of_memory`: reports what regions held.
"""
