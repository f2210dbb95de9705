"""Storage: how a saved value waits for the backward.

In comes a tensor; out comes a `Stored`, which gives it back. Sees neither graphs nor
policies. Each class has a file.

- `_contract`: what each promises, checked where it stores and restores; `Keep`, and chains
  of storages.
- `_stored`: `Stored`: the parts that wait, where, and what restores them, several at once
  if it must.
- `_cast`: in a smaller dtype.
- `_quantize`: as integers with a scale for each group.
- `_sparse`: as the nonzero numbers and their places.
- `_offload`: in host memory, on another device, or in a file.
- `_shard`: one part on each rank, of what all ranks hold; that they do is checked by
  hashes.
- `_bits`: small integers packed into bytes.
- `_transfer`: copies between an accelerator and the host while it computes.
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
