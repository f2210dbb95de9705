"""The modules of scipy that planners use, which have no type annotations."""

from typing import Any

import scipy.optimize  # pyright: ignore[reportMissingTypeStubs]
import scipy.sparse  # pyright: ignore[reportMissingTypeStubs]

optimize: Any = scipy.optimize
sparse: Any = scipy.sparse
