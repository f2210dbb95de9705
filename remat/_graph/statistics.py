"""Operators that write running statistics, although their schemas say that they do not.

A trace has their functional forms instead, which return the new statistics behind what the
operators return: as values like others, which are written back once a call. Run again as they
are, in a backward, they would count one batch twice. Obsolete when torch's schemas tell of it.
"""

import dataclasses
from typing import Any, final

import torch
from torch import Tensor

from remat._torch import schemas

_aten = torch.ops.aten


@final
@dataclasses.dataclass(frozen=True)
class QuietWriter:
    """An operator that writes two of its arguments without telling.

    Attributes:
        functional: what returns the new ones too.
        places: where among its arguments they are.
        flag: where the argument is that tells whether it writes; None if it always does.
    """

    functional: Any
    places: tuple[int, int] = (3, 4)
    flag: int | None = 5

    def writes(self, args: tuple[Any, ...]) -> bool:
        """Whether a call with these arguments writes."""
        is_told = self.flag is None or args[self.flag]
        return bool(is_told) and args[self.places[0]] is not None


def _functional(op: Any, places: tuple[int, int]) -> Any:
    """The form that clones what it would write, and returns the clones behind the results.

    Made of other operators: derivatives and batches are those of the operator itself.
    """

    def run(*args: Any) -> tuple[Tensor, ...]:
        given = list(args)
        for place in places:
            given[place] = given[place].clone()
        return (*op(*given), *(given[place] for place in places))

    return schemas.define_composite(op, ("Tensor", "Tensor"), run)


def _clones_first(op: Any, flag: int | None) -> QuietWriter:
    return QuietWriter(_functional(op, QuietWriter.places), flag=flag)


#: By operator. The last two are those of nn.SyncBatchNorm, for what it gathers from all ranks.
QUIET_WRITERS: dict[Any, QuietWriter] = {
    _aten.native_batch_norm.default: QuietWriter(
        _aten._native_batch_norm_legit_functional.default
    ),
    **{
        op: _clones_first(op, flag)
        for op, flag in (
            (_aten.cudnn_batch_norm.default, 5),
            (_aten.miopen_batch_norm.default, 5),
            (_aten.batch_norm_gather_stats.default, None),
            (_aten.batch_norm_gather_stats_with_counts.default, None),
        )
    },
}
FUNCTIONAL = frozenset(each.functional for each in QUIET_WRITERS.values())
