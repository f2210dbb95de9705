"""The demo: a small GPT, trained under several policies.

It reads `remat.reporting._measure` and `remat.reporting._show`. `gpt`: the model; `run`: batches,
training steps, measured; `summary`: rows as a table, JSON, a verdict.
"""
