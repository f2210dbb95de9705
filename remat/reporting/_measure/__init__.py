"""Measures one step: runs and watches it, and reads the traces of its regions.

It fills in `remat.reporting._records`, and knows nothing of how these are shown. `step`: a call run
again from one state, autograd's nodes behind it and what each saved; `watch`: storages, runs and
times; `live_bytes`: live storages, an allocator's peak; `traced`: which call a run is of, bytes and
work of a region's trace under other decisions; `suggestions`: the change worth most, the frontier.
"""
