"""Drop-ins for other projects' checkpoint functions, with their own signatures.

A file for each project: `deepspeed`, with `configure`; `megatron`; `transformer_engine`;
`transformers` (to be imported separately, as it needs these), by the models' own hook; `torch`.
`_shared`: one call as a region, the settings and warnings of all drop-ins, trackers preserved,
sharding of inputs; `_late_product`: a head's logits, which are computed when they are read.
"""

from remat.interop import deepspeed, megatron, torch, transformer_engine

__all__ = ["deepspeed", "megatron", "torch", "transformer_engine"]
