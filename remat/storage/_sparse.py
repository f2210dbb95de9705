"""Sparse storage: of a value with many zeros only the rest and its places wait.

Gist [1] stores the outputs of ReLU so, in compressed sparse rows.

References:
    [1] Gist: Efficient Data Encoding for Deep Neural Network Training. A. Jain et al.,
    2018. https://doi.org/10.1109/ISCA.2018.00070, section on sparse storage.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from remat.storage._check import refuse, require_type
from remat.storage._contract import AbstractStorage


@final
@dataclass(frozen=True, slots=True)
class Sparse(AbstractStorage):
    """Keeps the numbers that are not zero and a bit for each place.

    Laws: exact, up to the sign of zeros.

    Args:
        min_saving: the part of the value's bytes that must be saved for it to be stored
            so, from 0 to below 1; a value that saves less is kept as it is.

    Raises:
        TypeError: `min_saving` is no number.
        ValueError: `min_saving` is not in [0, 1).

    Example:
        >>> from remat import storage
        >>> storage.Sparse(min_saving=0.5)
        Sparse(min_saving=0.5)
    """

    min_saving: float = 0.25

    is_available: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Checks the argument."""
        argument = "Sparse(min_saving=...)"
        wanted = "a number from 0 to below 1, as in 0.25"
        require_type(argument, self.min_saving, (float, int), wanted=wanted)
        if isinstance(self.min_saving, bool) or not 0 <= self.min_saving < 1:
            raise refuse(
                argument,
                self.min_saving,
                why="It is the part of the bytes that is saved, and none saves all.",
                do=f"Pass {wanted}.",
            )
