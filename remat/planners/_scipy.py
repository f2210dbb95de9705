"""What planners take of scipy, whose types are not known."""

from typing import Any

import scipy.optimize  # pyright: ignore[reportMissingTypeStubs]
import scipy.sparse  # pyright: ignore[reportMissingTypeStubs]

optimize: Any = scipy.optimize
sparse: Any = scipy.sparse
