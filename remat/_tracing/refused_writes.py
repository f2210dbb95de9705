"""The errors of functions that write to what is differentiated, from outside of them."""

from remat._errors import MutationError

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
