"""Shows what regions hold: before a step, during it, and when memory runs out.

In come a function and its arguments; out come the records of a step. `_measure` runs and watches
one, `_show` shows records, `_demo` trains a model. `_make_report`: `report`, from
what each node of the graph holds; `_report`: what it returns; `_records`: its parts, and JSON; `_saved_residuals`: before a step runs, also of a
plain function, as autograd would; `_named_values`: values with a name, and recomputed;
`_checklist`: its checks, gradients' gaps, the memory of a device and the largest batch for it;
`_compare`: policies; `_arguments`: those of a command, as tensors and targets.
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
