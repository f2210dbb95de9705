"""Programs under every transform: one rule for each of reverse mode, forward mode and vmap.

In comes a region (a function at one signature, with its two programs) and tensors of any
level; out come tensors that can be differentiated, whose backward is a region again.
Reads all that makes programs, and nothing of how a user's call found its region.
"""
