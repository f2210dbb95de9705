"""Planners: which values to save within a budget. They never see a tensor.

In comes a `Problem`, out comes a `Solution`: by `_cut`, over the minimum cuts of `_network`, or by
`_milp`. `_shared_budget` divides one budget among several programs.
"""

from remat.planners._cut import solve_cut
from remat.planners._milp import solve_milp
from remat.planners._problem import Option, Outcome, Problem, Solution, Step
from remat.planners._shared_budget import Share, share

__all__ = [
    "Option",
    "Outcome",
    "Problem",
    "Share",
    "Solution",
    "Step",
    "share",
    "solve_cut",
    "solve_milp",
]
