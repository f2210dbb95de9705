"""Shows what regions hold: before a step, during it, and when memory runs out.

In come a function and its arguments; out come the records of a step.

- `_saved_residuals`: what a function will hold, without running it.
- `_named_values`: the values with names, and their recomputation.
- `_make_report`: `report`: a step is run and watched, and summed up from autograd's graph.
- `_report`: `Report`: what it returns, and the forms in which that is shown.
- `_records`: the parts of a report, and JSON.
- `_checklist`: what to check before trusting a step, with the largest batch that fits.
- `_compare`: one function under several policies and peers.
- `_arguments`: the words of a command line, as tensors, functions and policies.
- `_measure`, `_show`, `_demo`: rooms that measure a step, show records, and train a model.
"""

from remat.reporting._checklist import Check, Checklist, checklist
from remat.reporting._compare import Comparison, Row, compare
from remat.reporting._make_report import report
from remat.reporting._measure.live_bytes import LiveBytes
from remat.reporting._named_values import NamedValue, named_values
from remat.reporting._report import Report
from remat.reporting._saved_residuals import print_saved_residuals, saved_residuals
from remat.reporting._show.figures import (
    batch_figure,
    comparison_figure,
    frontier_figure,
    timeline_figure,
)

__all__ = [
    "Check",
    "Checklist",
    "Comparison",
    "LiveBytes",
    "NamedValue",
    "Report",
    "Row",
    "batch_figure",
    "checklist",
    "compare",
    "comparison_figure",
    "frontier_figure",
    "named_values",
    "print_saved_residuals",
    "report",
    "saved_residuals",
    "timeline_figure",
]
