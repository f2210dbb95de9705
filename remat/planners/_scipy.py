"""scipy, which has no type annotations. Each of its parts is loaded when a planner needs it."""

from typing import Any

import scipy as _scipy  # pyright: ignore[reportMissingTypeStubs]

scipy: Any = _scipy
