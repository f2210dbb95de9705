"""Regions in an existing model: `apply` puts them in, `remove` takes them out.

In comes a model, out comes the same one, whose chosen modules call regions. Reads the decorator,
and `_plans`. `_apply`: both, globs for `where`; `_blocks`: its blocks, and one call of each; `_plan`:
one budget or peak split among them, and the plan of a model that this gives; `_step`: what a
training step does around them.
"""

from remat.modules._apply import apply, remove
from remat.modules._plan import ModulePlan, ModulePlanRow, plan
from remat.modules._step import Step

__all__ = ["ModulePlan", "ModulePlanRow", "Step", "apply", "plan", "remove"]
