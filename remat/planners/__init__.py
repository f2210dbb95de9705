"""Planners: which values to save within a budget. They never see a tensor.

In comes a `Problem`, out comes a `Solution`.

- `_problem`: both; the steps and options of the one, the outcome of the other, and a tally
  of a choice.
- `_cut`: the core solver: prices are swept, then single items are exchanged and filled in.
- `_network`: the minimum cut at one price.
- `_milp`: the exact solver, an integer program.
- `_shared_budget`: one budget for several programs.
- `_scipy`: scipy, loaded when a planner needs it.
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
