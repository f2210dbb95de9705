"""Switches that a caller sets around calls: what changes kernels, and what changes regions.

In come torch's own switches and this package's `with` blocks; out go values that compare,
and contexts that put the same switches back. Reads `_errors`, `_torch` and `_user_lines`.

- `numerics`: a snapshot of the switches that change what operators compute.
- `blocks`: `disabled()` and `first_order()`; and blocks inside of which something stands in
  for regions, or notes what runs tile by tile.
"""
