"""Benchmarks: `python -m tests.benchmarks NAME`, each beside its peers in one process."""
