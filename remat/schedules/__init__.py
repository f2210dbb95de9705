"""Schedules: which states of a stack are kept, and what is computed again.

In come described stages, out comes a list of actions, which `_replay` checks and adds up. Each
rule has a file. No tensor is seen: `layers` carries the actions out.
"""

from remat.schedules._budget import Budget
from remat.schedules._contract import (
    AbstractSchedule,
    Action,
    Advance,
    Backward,
    Drop,
    Record,
    Restore,
    Snapshot,
    Stage,
)
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
