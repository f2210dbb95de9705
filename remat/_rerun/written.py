"""What a torch function of a run writes to, as far as its name and its arguments tell."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from remat._torch import trees
from remat._torch.tensors import SET_DATA, is_own_data


def written_tensors(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The tensors that a torch function of the run writes to, as far as its name tells."""
    name = str(getattr(func, "__name__", "")).split(".")[0]
    found = trees.tensor_leaves(kwargs.get("out"))
    is_own = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
    is_set = func == SET_DATA and not is_own_data(*args)
    is_written = is_own or name in _ASSIGNING or is_set
    if is_written or kwargs.get("inplace"):
        found += trees.tensor_leaves(args[:1])
    if name in _TRACKING:
        running = (kwargs.get("running_mean"), kwargs.get("running_var"))
        # torch's own functions take weight and bias first, those of `F` last.
        first = 3 if func in _WEIGHTS_FIRST else 1
        found += trees.tensor_leaves((args[first : first + 2], running))
    return found


_ASSIGNING = frozenset(
    f"__{name}__"
    for name in (
        *("iadd", "isub", "imul", "imatmul", "itruediv", "idiv", "ifloordiv", "imod"),
        *("ipow", "ilshift", "irshift", "iand", "ior", "ixor", "setitem"),
    )
)
# Their names end like those of writers, but they change no numbers.
_HARMLESS = frozenset({"detach_", "rename_", "requires_grad_", "share_memory_"})
# They write to statistics without telling: no version changes.
_TRACKING = frozenset({"batch_norm", "instance_norm"})
_WEIGHTS_FIRST = frozenset({torch.batch_norm, torch.instance_norm})
