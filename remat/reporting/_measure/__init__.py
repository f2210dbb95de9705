"""Measures one step: runs and watches it, and reads the traces of its regions.

It fills in `remat.reporting._records`, and knows nothing of how these are shown.

- `step`: a call that can run again from one state; autograd's nodes behind it, and what
  each saved.
- `watch`: the storages, runs and times of a step, as operators run.
- `live_bytes`: `LiveBytes`: live storages; and an allocator's peak.
- `traced`: which call a run is of, and what a region's trace holds and repeats, also under
  other decisions.
- `suggestions`: the change that is worth most, and the frontier.
"""
