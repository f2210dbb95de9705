"""Puts what the demo measured in words: a table, JSON, and a verdict on the losses."""

import json
from collections.abc import Sequence

from remat.policies._sizes import show_size
from remat.reporting._demo.run import DemoRow
from remat.reporting._show.text import show_ratio, table

_HEADINGS = ("policy", "final loss", "held", "", "peak", "", "step time", "")


def first_loss_difference(rows: Sequence[DemoRow]) -> str | None:
    """Says which loss, in row order, is the first that is not the first row's to the bit."""
    for row in rows[1:]:
        pairs = zip(rows[0].losses, row.losses, strict=True)
        for step, (expected, actual) in enumerate(pairs, start=1):
            if expected.hex() != actual.hex():
                return (
                    f"the loss under {row.name} differs from the one without remat at "
                    f"step {step}: {actual.hex()} in place of {expected.hex()}"
                )
    return None


def demo_table(rows: Sequence[DemoRow]) -> str:
    """Returns the rows as aligned text; the ratios are to the first row, no remat."""
    lines = [
        *table(_HEADINGS, [_cells_of_demo(row, rows[0]) for row in rows]),
        "",
        "held: bytes that live between forward and backward; peak: the most in one step;",
        "both measured, beyond parameters and batch. Ratios are to no remat.",
        _verdict(rows),
    ]
    return "\n".join(lines)


def demo_json(rows: Sequence[DemoRow]) -> str:
    """Returns the rows as JSON; `loss_bits` writes the final loss without rounding."""
    shown = [
        {
            "policy": row.name,
            "final_loss": row.losses[-1],
            "loss_bits": row.losses[-1].hex(),
            "held_bytes": row.held_bytes,
            "peak_bytes": row.peak_bytes,
            "step_time_s": row.step_time_s,
        }
        for row in rows
    ]
    is_equal = first_loss_difference(rows) is None
    return json.dumps({"losses_equal": is_equal, "rows": shown}, indent=2)


def _cells_of_demo(row: DemoRow, plain: DemoRow) -> tuple[str, ...]:
    return (
        row.name,
        f"{row.losses[-1]:.9g}",  # nine digits tell any two float32 apart
        show_size(row.held_bytes),
        show_ratio(row.held_bytes, plain.held_bytes),
        show_size(row.peak_bytes),
        show_ratio(row.peak_bytes, plain.peak_bytes),
        f"{row.step_time_s * 1000:.1f} ms",
        show_ratio(row.step_time_s, plain.step_time_s),
    )


def _verdict(rows: Sequence[DemoRow]) -> str:
    difference = first_loss_difference(rows)
    if difference is not None:
        return f"NOT EQUAL: {difference}."
    losses = rows[0].losses
    return (
        f"All {len(losses)} losses are equal in every row to the last bit; "
        f"the final one is {losses[-1].hex()}."
    )
