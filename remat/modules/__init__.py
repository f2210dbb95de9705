"""Regions in an existing model: `apply` puts them in, `remove` takes them out.

In comes a model, out comes the same one, whose chosen modules call regions. Reads the decorator,
and `_plans`. `_apply`: both, globs for `where`; `_plan`: splits one budget among its blocks.
"""

from remat.modules._apply import apply, remove
from remat.modules._plan import ModulePlan, ModulePlanRow, plan

__all__ = ["ModulePlan", "ModulePlanRow", "apply", "plan", "remove"]
