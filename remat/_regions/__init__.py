"""Programs under every transform: one rule for each of reverse mode, forward mode and vmap.

In comes a region (a function at one signature, with its two programs) and tensors of any
level; out come tensors that can be differentiated, whose backward is a region again.
Reads all that makes programs, and nothing of how a user's call found its region.
`rules` runs a call level by level, `traced` has the region and `derived_forwards` the forwards
of those derived from it, `forwards` and `run_backward` run its two programs. `transforms` takes
flat functions to flat functions; `waiting` has what is saved, `prefetch` restores it early.
"""
