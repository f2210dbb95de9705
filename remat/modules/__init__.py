"""Regions in an existing model: `apply` puts them in, `remove` takes them out.

In comes a model, out comes the same one, whose chosen modules call regions. Reads the
decorator, and `_plans`.

- `_apply`: both, and the globs of `where`.
- `_blocks`: the blocks of a model, and how one call of the model calls them.
- `_plan`: one budget, split among the blocks.
- `_step`: what a training step holds around the blocks.
"""

from remat.modules._apply import apply, remove
from remat.modules._plan import ModulePlan, ModulePlanRow, plan
from remat.modules._step import Step

__all__ = ["ModulePlan", "ModulePlanRow", "Step", "apply", "plan", "remove"]
