"""Drop-ins for other projects' checkpoint functions, with their own signatures.

A file for each project, over `_shared`. Import `remat.interop.transformers` separately: it needs
transformers.
"""

from remat.interop import deepspeed, megatron, torch, transformer_engine

__all__ = ["deepspeed", "megatron", "torch", "transformer_engine"]
