"""The demo: a small GPT, trained under several policies.

It reads `remat.reporting._measure` and `remat.reporting._show`. `gpt`: the model; `run`: batches,
training steps, measured; rows as a table or JSON, a verdict.
"""
