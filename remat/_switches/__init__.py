"""Switches that a caller sets around calls: what changes kernels, and what changes regions.

In come torch's own switches and this package's `with` blocks; out go values that compare, and
contexts that put the same switches back. Reads `_errors`, `_torch` and `_user_lines`. `numerics`:
a snapshot of what changes what operators compute; `blocks`: `disabled()`, `first_order()`, `with`
blocks in which another stands in for regions, and which note what runs tile by tile.
"""
