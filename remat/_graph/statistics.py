"""Operators that write running statistics, although their schemas say that they do not.

A trace has their functional forms instead, which return the new statistics behind what the
operators return: as values like others, which are written back once a call. Run again as they
are, in a backward, they would count one batch twice. Obsolete when torch's schemas tell of it.
"""

from typing import Any

import torch
from torch import Tensor

from remat._torch import schemas

_aten = torch.ops.aten

PLACES = (3, 4)  # of the statistics, among the arguments of each
_IS_TRAINING = 5  # another argument, which these have
_NORMS = (_aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default)
# Those of nn.SyncBatchNorm, for what comes from all ranks.
_GATHERS = (
    _aten.batch_norm_gather_stats.default,
    _aten.batch_norm_gather_stats_with_counts.default,
)


def _functional(op: Any) -> Any:
    """The form that clones what it would write, and returns the clones behind the results.

    Made of other operators: derivatives and batches are those of the operator itself.
    """

    def run(*args: Any) -> tuple[Tensor, ...]:
        given = list(args)
        for place in PLACES:
            given[place] = given[place].clone()
        return (*op(*given), *(given[place] for place in PLACES))

    return schemas.define_composite(op, ("Tensor", "Tensor"), run)


#: By operator, the one that returns the new statistics too.
FUNCTIONAL_OF: dict[Any, Any] = {
    _aten.native_batch_norm.default: _aten._native_batch_norm_legit_functional.default,
    **{op: _functional(op) for op in (*_NORMS, *_GATHERS)},
}
FUNCTIONAL = frozenset(FUNCTIONAL_OF.values())


def writes(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call writes statistics: if it has some, and a norm only in training."""
    if op not in FUNCTIONAL_OF or any(args[place] is None for place in PLACES):
        return False
    return op in _GATHERS or bool(args[_IS_TRAINING])
