"""Activation recomputation for pure functions, under every torch.func transform.

A call of a decorated function enters `_calls`. At its first time `_tracing` makes a graph of it
(`_graph`), with what it reaches beyond its arguments (`_captures`); `_partition` asks a policy what
is saved, and cuts the graph in two; `_programs` makes functions of both halves. Then, as at each
later call, `_regions` runs these under whatever transforms are active; `_rerun` stands in for
functions that cannot be traced.

- `_api`: the decorator.
- `_errors`: the errors and the class of warnings, each a message of four parts.
- `_user_lines`: the "file.py:line" of the user's code behind a value or an error, and warnings
  that name it, said once.
- `_version`: the version.
- `__main__`: the command line.
"""

from remat import interop, modules, policies, random, schedules, storage
from remat._api import remat
from remat._calls.residuals import Residual
from remat._errors import (
    BudgetError,
    CapturedTensorError,
    CarryError,
    ImplicitRandomnessError,
    KeyReuseError,
    MutationError,
    NotReplicatedError,
    PolicyError,
    RecomputationError,
    RematError,
    RematWarning,
    SavedTensorModifiedError,
    ScheduleError,
    SecondDerivativeError,
    SideEffectError,
    StaticArgumentError,
    TileError,
    TraceError,
)
from remat._plans.fit import Fit, fit
from remat._plans.plan import Plan, plan
from remat._switches.blocks import disabled, first_order
from remat._tracing.naming import checkpoint_name
from remat._version import __version__
from remat.layers import chain, scan
from remat.reporting import (
    Checklist,
    NamedValue,
    Report,
    checklist,
    named_values,
    print_saved_residuals,
    report,
    saved_residuals,
)

__all__ = [
    "BudgetError",
    "CapturedTensorError",
    "CarryError",
    "Checklist",
    "Fit",
    "ImplicitRandomnessError",
    "KeyReuseError",
    "MutationError",
    "NamedValue",
    "NotReplicatedError",
    "Plan",
    "PolicyError",
    "RecomputationError",
    "RematError",
    "RematWarning",
    "Report",
    "Residual",
    "SavedTensorModifiedError",
    "ScheduleError",
    "SecondDerivativeError",
    "SideEffectError",
    "StaticArgumentError",
    "TileError",
    "TraceError",
    "__version__",
    "chain",
    "checklist",
    "checkpoint_name",
    "disabled",
    "first_order",
    "fit",
    "interop",
    "modules",
    "named_values",
    "plan",
    "policies",
    "print_saved_residuals",
    "random",
    "remat",
    "report",
    "saved_residuals",
    "scan",
    "schedules",
    "storage",
]
