"""For tests: are two functions equivalent, and if not, where do they first differ?

`remat.testing.strategies` makes random functions; only it needs hypothesis.

- `_equivalent`: runs both under transforms, and compares results and state.
- `_named_transforms`: transforms by name, and their cotangents.
- `_compare`: two results, and how far they are apart.
- `_difference`: the first operator at which two computations differ.
- `_repeated_call`: one call again and again, on copies of its arguments and from one state.
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
