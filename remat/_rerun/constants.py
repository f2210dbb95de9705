"""The tensors that a function reads and does not differentiate: the same when it runs again."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import final

import torch
from torch import Tensor

from remat._captures.walk import Survey
from remat._errors import (
    MutationError,
    RecomputationError,
    SavedTensorModifiedError,
)
from remat._rerun.state import NewOperandError, RunState
from remat._torch import dtensor, levels, modes
from remat._torch.tensors import storage_key
from remat._tracing.refused_writes import mutates
from remat._user_lines import user_line

_WithNumbers = Iterable[tuple[Tensor, Tensor]]  # tensors, and the numbers they held


@final
class Constants:
    """The tensors without a gradient that a function reaches, which are not copied.

    Those that it used and did not change must have the same numbers when it runs again.
    """

    def __init__(self, survey: Survey, operands: Sequence[Tensor]) -> None:
        known = set(map(id, operands))
        self._survey = survey
        self._hooks = survey.hooks()
        self._versions = [
            (tensor, tensor._version)
            for tensor in survey.reached
            if id(tensor) not in known and _has_version_to_compare(tensor)
        ]
        self._unasked = [each for each, _ in self._versions if not each.requires_grad]
        self._by_storage: dict[int, list[Tensor]] = {}
        for tensor, _ in self._versions:
            if not survey.is_buffer(id(tensor)) and has_storage_to_compare(tensor):
                key = storage_key(tensor)
                self._by_storage.setdefault(key, []).append(tensor)
        leaves = map(levels.unwrapped, filter(levels.requires_grad_anywhere, operands))
        self._wanted = set(map(storage_key, filter(has_storage_to_compare, leaves)))

    def has(self, tensor: Tensor) -> bool:
        return any(tensor is each for each, _ in self._versions)

    def require_no_operands(self) -> None:
        """Ends a first run that wrote `requires_grad` of one of them, to start over with it."""
        with modes.unseen_by_traces():
            if any(each.requires_grad and each.is_leaf for each in self._unasked):
                raise NewOperandError

    def before_write(self, target: Tensor, state: RunState) -> None:
        """Saves what shares memory with the target; refuses a write to what is to be differentiated."""
        if not (_has_version_to_compare(target) and has_storage_to_compare(target)):
            return
        key = storage_key(target)
        if key in self._wanted:
            raise mutates(user_line())
        for tensor in self._by_storage.get(key, ()):
            state.note_numbers(tensor)

    def require_unwritten(self, used: Set[int], kept: _WithNumbers) -> None:
        """Forgets all but what the first run used (by ids) and left as it was.

        Refuses a run that wrote to one that is not `kept`, to be put back.
        """
        self._versions = [pair for pair in self._versions if id(pair[0]) in used]
        if changed := self._changed(put_back=kept):
            raise MutationError.of(
                where=f"the region reaches {changed}",
                what="a tensor that the function changes in place, hidden from remat.",
                why="The function runs again, and would start from the changed numbers.",
                do="Register it as a buffer of a module, or write to it with its own "
                "method (x.copy_(y)).",
            )
        self._versions = [(t, v) for t, v in self._versions if t._version == v]

    def replace(self, others: Mapping[int, Tensor]) -> None:
        """Puts others, of the same numbers, in place of tensors, by id."""
        pairs = self._versions
        self._versions = [(others.get(id(each), each), v) for each, v in pairs]
        self._by_storage.clear()  # what was written is known by now

    def require_unchanged(self, found: _WithNumbers) -> None:
        """Refuses a run if one of them was written to since, and is not put back.

        Or if hooks for all modules have come or gone, which modules call as they are.
        """
        if self._hooks != self._survey.hooks():
            raise RecomputationError.of(
                where="the backward of a region",
                what="hooks for all modules were registered or removed after the forward.",
                why="The function runs again, and its modules would call other hooks.",
                do="Do that after backward(), or register hooks on the modules themselves.",
            )
        if changed := self._changed(put_back=found):
            raise SavedTensorModifiedError.of(
                where=f"the backward of a region that reaches {changed}",
                what="a tensor that the function reads was changed in place since the "
                "forward.",
                why="The function runs again, and would start from other numbers.",
                do="Change a copy (x = x + 1 instead of x += 1), or do it after backward().",
            )

    def _changed(self, put_back: _WithNumbers) -> str | None:
        """What messages call one that was written to and is not put back, if one was."""
        known = {id(tensor) for tensor, _ in put_back}
        for tensor, version in self._versions:
            if tensor._version != version and id(tensor) not in known:
                return str(self._survey.tensors[id(tensor)][0].label)
        return None


def has_storage_to_compare(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and dtensor.placement(tensor) is None


def _has_version_to_compare(tensor: Tensor) -> bool:
    # A wrapper has none, nor has one of a transform that has ended, which an object may hold.
    return not (tensor.is_inference() or levels.is_wrapped(tensor))
