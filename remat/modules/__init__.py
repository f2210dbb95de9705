"""Regions in an existing model: `apply` puts them in, `remove` takes them out.

In comes a model, out comes the same one, whose chosen modules call regions (`_apply`). `_plan`
splits one budget among its blocks. Reads the decorator, and `_plans`.
"""

from remat.modules._apply import apply, remove
from remat.modules._plan import ModulePlan, ModulePlanRow, plan

__all__ = ["ModulePlan", "ModulePlanRow", "apply", "plan", "remove"]
