"""Measures one step: runs and watches it, and reads the traces of its regions.

It reads `remat.reporting._records`, whose figures it fills in, and nothing of how these
are shown.
"""
