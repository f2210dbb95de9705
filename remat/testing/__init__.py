"""For tests: are two functions equivalent, and if not, where do they first differ?

`_equivalent`: runs both, and compares results and state; `_named_transforms`: grad, vmap and
others by name, cotangents; `_compare`: two tensors; `_difference`: operators recorded and matched,
the first that differs; `_repeated_call`: a call on copies of its arguments, from one state of
captured tensors and generators. `remat.testing.strategies` makes random functions; only it needs hypothesis.
"""

from remat.testing._compare import NotEquivalentError
from remat.testing._difference import Difference, first_difference
from remat.testing._equivalent import Equivalence, Excuse, assert_equivalent
from remat.testing._named_transforms import COMPOSITIONS, TRANSFORMS

__all__ = [
    "COMPOSITIONS",
    "TRANSFORMS",
    "Difference",
    "Equivalence",
    "Excuse",
    "NotEquivalentError",
    "assert_equivalent",
    "first_difference",
]
