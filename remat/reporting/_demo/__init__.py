"""The demo: a small GPT, trained under several policies.

It reads `remat.reporting._measure` and `remat.reporting._show`.
"""
