"""Storage: how a saved value waits for the backward.

In comes a tensor; out comes a `Stored`, which gives it back. Sees neither graphs nor policies. A
class a file: `_cast`, `_quantize` (integers, scales of groups), `_sparse` (nonzeros), `_offload`
(to a device or file), `_shard` (a rank's part, of what all ranks hold by its hash; which groups
have the same ranks). `_contract`: what each promises, checked where it stores, restores or is
rehearsed; `Keep`, and chains of storages; `_stored`: the parts that wait, their joints, their
place, and `Restoration`: how they come back, untouched; `_bits`: numbers packed into bytes;
`_transfer`: copies to the host, lanes and pools.
"""

from remat.storage._cast import Cast
from remat.storage._contract import (
    AbstractStorage,
    Chain,
    Keep,
    densely,
    links_of,
    stored_in,
)
from remat.storage._offload import Offload
from remat.storage._quantize import Quantize
from remat.storage._shard import Shard
from remat.storage._sparse import Sparse
from remat.storage._stored import Held, Place, Restoration, Stored
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
