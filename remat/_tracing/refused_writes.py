"""Writes to what is outside of a function that a trace cannot have, and their errors."""

from collections.abc import Callable
from typing import Any, final

from torch import Tensor

from remat._errors import MutationError
from remat._torch import trees
from remat._torch.fakes import is_fake, wraps_fakes
from remat._torch.modes import DispatchMode
from remat._tracing.in_place_operators import written_arguments
from remat._user_lines import user_line

_FROM_CHANGED = "The recomputation would start from the changed value, and the tensor belongs to the caller."
_WRITE_ANEW = (
    "Write x = x + 1 instead of x += 1, or x = x.clone() first. If the first call alone writes "
    "it, to set a parameter, make that one inside `with remat.disabled():`."
)


def mutates(line: str) -> MutationError:
    return MutationError.of(
        where=line or "the function",
        what="an argument that is to be differentiated is changed in place.",
        why=_FROM_CHANGED,
        do=f"{_WRITE_ANEW} Convert a module (self.double()) outside.",
    )


def changes_operand(where: str, *, is_settled: bool) -> MutationError:
    """An operand that requires grad is written; `is_settled`: a second run writes the same."""
    return MutationError.of(
        where=where,
        what="is changed in place by the function.",
        why=_FROM_CHANGED,
        do='Use engine="rerun", which runs the function again in the backward: a second time '
        "changes nothing here."
        if is_settled
        else _WRITE_ANEW,
    )


def gains_gradient(where: str) -> MutationError:
    return MutationError.of(
        where=where,
        what="gets a gradient by what the function writes to it.",
        why="The region returns gradients through its results alone, and whoever "
        "reads the tensor afterwards would get none.",
        do="Return the new value, write under torch.no_grad() or from x.detach(), "
        "or pass the tensor as an argument.",
    )


def changes_twice(line: str) -> MutationError:
    return MutationError.of(
        where=line or "a function that runs again in a traced region",
        what="changes a buffer, or an argument of the region around.",
        why="The trace of that region would have the change in its backward once more.",
        do='Pass engine="rerun" to the region around, too, or engine="trace" to the one inside.',
    )


@final
class RefusedInBackward(DispatchMode):
    """Refuses writes, in the backward of a trace, to what lies outside of it.

    A hook writes there, or the backward of an `autograd.Function`: to an input of the trace
    (`is_given`), or, as no function of torch shows what is captured there, to a tensor itself.
    """

    def __init__(self, is_given: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._is_given = is_given

    def _hear(self, op: Any, args: Any, kwargs: Any) -> Any:
        for each in trees.tensor_leaves(written_arguments(op, args, kwargs)):
            is_own = wraps_fakes(each) or (is_fake(each) and not self._is_given(each))
            if not is_own:
                raise _changes_in_backward(user_line())
        return op(*args, **kwargs)


def _changes_in_backward(line: str) -> MutationError:
    return MutationError.of(
        where=line or "a hook, or the backward of an autograd.Function,",
        what="changes an argument, a buffer or a captured tensor in the backward.",
        why="A trace of forward and backward would have the change in the forward.",
        do='Use engine="rerun", which runs such code in the backward, once.',
    )
