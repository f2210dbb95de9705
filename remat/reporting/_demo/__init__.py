"""The demo: a small GPT, trained under several policies.

It reads `remat.reporting._measure` and `remat.reporting._show`.

- `gpt`: the model and its parameters.
- `run`: batches, training steps, measurements, the table and its verdict.
"""
