"""DTensors, and the results of collectives that are under way.

Obsolete when DTensor makes its spec public.
"""

# pyright: reportPrivateUsage=false
import sys
from typing import Any

from torch import Tensor

from remat._torch.autograd import apply_through
from remat._torch.levels import is_mapped, unwrapped


def placement(tensor: Tensor) -> Any:
    """How a DTensor is spread over the ranks (its spec), None for any other tensor.

    None under vmap too, whose wrappers hide it: a DTensor is traced as a whole there.
    """
    kind = _dtensor_class()
    if kind is None:
        return None
    innermost: Any = unwrapped(tensor)
    is_spread = isinstance(innermost, kind) and not is_mapped()
    return innermost._spec if is_spread else None


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, once it has arrived; any other tensor as it is."""
    kind = _dtensor_class()
    if kind is None or not isinstance(tensor, kind):
        return tensor
    parts: Any = tensor
    return _awaited_collective(parts._local_tensor)


def in_place_of(local: Tensor, spec: Any, *, requires_grad: bool = False) -> Tensor:
    """The DTensor of which this rank holds `local`, as a leaf."""
    kind = _dtensor_class()
    assert kind is not None, "there is a spec, and no DTensor"
    return kind(local, spec, requires_grad=requires_grad)


def _dtensor_class() -> Any:
    # Importing it is slow, and a class that is not imported has no instances.
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_under_way(tensor: Tensor) -> bool:
    """Whether a tensor is the result of a collective that is still to be waited for.

    Obsolete, with the function below, when such a tensor is a plain one after its wait.
    """
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(tensor, module.AsyncCollectiveTensor)


def _awaited_collective(tensor: Any) -> Tensor:
    return tensor.trigger_wait() if is_under_way(tensor) else tensor


def arrived(tensor: Tensor) -> Tensor:
    """The result of a collective as a plain tensor, with its gradient."""
    return apply_through(_awaited_collective, tensor)
