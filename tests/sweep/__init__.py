"""The operator sweep: every differentiable operator of torch's own list, as a region.

`python -m tests.sweep` runs it and prints the table of `docs/operators.md`.
"""
