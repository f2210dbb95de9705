"""Regions in an existing model: `apply` puts them in, `remove` takes them out."""

from remat.modules._apply import apply, remove
from remat.modules._plan import ModulePlan, ModulePlanRow, plan

__all__ = ["ModulePlan", "ModulePlanRow", "apply", "plan", "remove"]
