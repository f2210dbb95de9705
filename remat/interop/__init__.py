"""Drop-ins for other projects' checkpoint functions, with their own signatures.

- `torch`: for `torch.utils.checkpoint` and torch's wrappers.
- `deepspeed`: `checkpoint`, and `configure` with its switches.
- `megatron`: `checkpoint` of its tensor-parallel package.
- `transformer_engine`: `checkpoint` with its options.
- `transformers`: models of Hugging Face's, by their own hook, their MLPs and losses in
  tiles; imported separately, as it needs that library.
- `_late_product`: for these, the logits of a head, computed only when something reads them.
- `_shared`: one call as a region, its settings and warnings, trackers, sharding of inputs.
"""

from remat.interop import deepspeed, megatron, torch, transformer_engine

__all__ = ["deepspeed", "megatron", "torch", "transformer_engine"]
