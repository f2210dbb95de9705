"""Planners: which values to save within a budget. They never see a tensor.

In comes a `Problem`, out comes a `Solution`. `_problem`: both, options and outcomes, a choice
changed item by item; `_cut`: the core solver, which sweeps prices, then exchanges, fills and
branches; `_network`: the minimum cuts at one price; `_milp`: the exact solver; `_scipy`: untyped;
`_shared_budget`: one budget for several programs.
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
