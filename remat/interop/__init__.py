"""Drop-ins for other projects' checkpoint functions, with their own signatures.

`remat.interop.transformers` is imported by itself: it needs the package.
"""

from remat.interop import deepspeed, megatron, torch, transformer_engine

__all__ = ["deepspeed", "megatron", "torch", "transformer_engine"]
