"""Measures one step: runs and watches it, and reads the traces of its regions.

It fills in `remat.reporting._records`, and knows nothing of how these are shown. `step` is run,
`watch` and `live_bytes` listen; `traced` tells of a region, `region_calls` which call a run is of.
"""
