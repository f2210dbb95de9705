"""Numbers drawn by the newest torch, kept in `known_answers.json` beside this.

`python -m tests.random.known_answers` writes the file again, with a torch that has the
kernels on a CPU; a test compares it with them wherever they are.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).with_suffix(".json")

KEYS = ((0, 0), (42, 0), (2**63 + 9, 2**32 - 2), (2**64 - 1, 2**64 - 1))
FLOATS = ("float64", "float32", "float16", "bfloat16")
BOUNDS = ((0.0, 1.0), (-3.5, 11.25))
SCALES = ((0.0, 1.0), (1.5, 0.25))
FULL = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
RANGES = (
    ("int32", -5, 1000),
    ("uint8", 0, 7),
    ("int16", -(2**15), 2**15 - 1),
    ("int64", 0, 10**12),
    ("int64", -(2**63), 2**63 - 2),
    ("int64", -1, 2**62 + 12345),
    ("uint64", 3, 2**64 - 7),
    ("uint64", 2**63, 2**63 + 2**62 + 1),
)
COUNT = 11  # no multiple of a block


def answers(draws: Any) -> dict[str, Any]:
    """What `split`, `fold_in`, `uniform`, `normal` and `randint` of a module give."""
    return {f"{seed} {offset}": _of_key(draws, seed, offset) for seed, offset in KEYS}


def _of_key(draws: Any, seed: int, offset: int) -> dict[str, Any]:
    key = torch.tensor([seed, offset], dtype=torch.uint64)
    found: dict[str, Any] = {
        "split": draws.split(key, 5).tolist(),
        "fold_in": [draws.fold_in(key, n).tolist() for n in (0, 3, 2**64 - 1)],
    }
    for name in FLOATS:
        for low, high in BOUNDS:
            drawn = draws.uniform(
                key, (COUNT,), dtype=getattr(torch, name), low=low, high=high
            )
            found[f"uniform {name} {low} {high}"] = _hex(drawn)
        for mean, std in SCALES:
            drawn = draws.normal(
                key, (COUNT,), dtype=getattr(torch, name), mean=mean, std=std
            )
            found[f"normal {name} {mean} {std}"] = _hex(drawn)
    for name in FULL:
        drawn = draws.bits(key, (COUNT,), dtype=getattr(torch, name))
        found[f"bits {name}"] = drawn.tolist()
    for name, low, high in RANGES:
        drawn = draws.randint(
            key, (COUNT,), dtype=getattr(torch, name), low=low, high=high
        )
        found[f"randint {name} {low} {high}"] = drawn.tolist()
    return found


def _hex(drawn: torch.Tensor) -> list[str]:
    return [float(each).hex() for each in drawn]


def torchs_own() -> Any:
    """Torch's stateless draws; not every version has them."""
    return importlib.import_module("torch.func._random")


def recorded() -> dict[str, Any]:
    """The contents of the file."""
    return json.loads(FILE.read_text())


if __name__ == "__main__":
    FILE.write_text(json.dumps(answers(torchs_own()), indent=1) + "\n")
