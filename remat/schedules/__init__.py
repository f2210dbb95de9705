"""Schedules: which states of a stack are kept, and what is computed again.

In come described stages, out comes a list of actions. No tensor is seen: `layers` carries
them out.

- `_contract`: a stage, the base class of schedules, and checks of arguments.
- `_actions`: the actions: advance, record, keep, restore, drop, run a backward.
- `_every`: equal segments.
- `_revolve`: equal stages and few snapshots.
- `_budget`: different stages within bytes.
- `_replay`: a ledger that checks actions one by one and adds up their costs.
"""

from remat.schedules._actions import (
    Action,
    Advance,
    Backward,
    Drop,
    Record,
    Restore,
    Snapshot,
)
from remat.schedules._budget import Budget
from remat.schedules._contract import AbstractSchedule, Stage
from remat.schedules._every import Every, Sqrt
from remat.schedules._replay import Ledger, Replay, replay
from remat.schedules._revolve import Revolve

__all__ = [
    "AbstractSchedule",
    "Action",
    "Advance",
    "Backward",
    "Budget",
    "Drop",
    "Every",
    "Ledger",
    "Record",
    "Replay",
    "Restore",
    "Revolve",
    "Snapshot",
    "Sqrt",
    "Stage",
    "replay",
]
