"""Storage: how a saved value waits for the backward.

In comes a tensor; out comes a `Stored`, which gives it back. Each class has a file; `_contract` is
what it promises, `_contract_checks` whether it does, `_held_bytes` what it will hold, `_transfer`
its copies to the host, `_replicated` agrees with other ranks. Sees neither graphs nor policies.
"""

from remat.storage._cast import Cast
from remat.storage._contract import AbstractStorage, Chain, links_of
from remat.storage._contract_checks import stored_in
from remat.storage._held_bytes import Held, densely
from remat.storage._keep import Keep
from remat.storage._offload import Offload
from remat.storage._quantize import Quantize
from remat.storage._shard import Shard
from remat.storage._sparse import Sparse
from remat.storage._stored import Place, Restoration, Stored
from remat.storage._transfer import release_host_memory

__all__ = [
    "AbstractStorage",
    "Cast",
    "Chain",
    "Held",
    "Keep",
    "Offload",
    "Place",
    "Quantize",
    "Restoration",
    "Shard",
    "Sparse",
    "Stored",
    "densely",
    "links_of",
    "release_host_memory",
    "stored_in",
]
