"""Drop-ins for other projects' checkpoint functions, with their own signatures."""

from remat.interop import deepspeed, megatron, transformer_engine

__all__ = ["deepspeed", "megatron", "transformer_engine"]
