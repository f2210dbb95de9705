"""The property of a region: what must hold of every random function, policy, transform.

`tests/test_properties.py` holds the engine to it; `tests/planted.py` shows that it sees.
"""

import dataclasses
import warnings
from typing import Any

from hypothesis import HealthCheck, settings, strategies as st

from remat import remat, saved_residuals
from remat.policies import AbstractPolicy
from remat.testing import assert_equivalent, strategies
from remat.testing.strategies import Cotangents, Program
from tests import oracle
from tests.support import backward_operators

COMMON = settings(
    deadline=None,
    derandomize=True,
    database=None,
    # Each statement is run when it is drawn, on machines that may be busy.
    suppress_health_check=[HealthCheck.too_slow],
)


@dataclasses.dataclass(frozen=True, repr=False)
class Case:
    """A random function and what to do with it."""

    program: Program
    policy: AbstractPolicy
    transform: str
    cotangents: Cotangents

    def __repr__(self):
        return (
            f"\n{self.program!r}\n# policy: {self.policy!r}\n# transform: "
            f"{self.transform}\n# cotangents: {', '.join(self.cotangents.kinds)}\n"
        )


#: Functions that the oracle knows, of everything pure, and with effects.
PROGRAMS = {
    "known": strategies.programs(kinds=(), captures=False, max_inner=0),
    "pure": st.one_of(
        strategies.programs(kinds=()),
        strategies.programs(kinds=("capture",), max_steps=3),
        strategies.programs(),
    ),
    "effects": strategies.programs(
        kinds=("draw", "state"), captures=False, max_inner=1, max_steps=4
    ),
}


#: How many are tried: more than it takes to find each bug of `tests/planted.py`, because
#: hypothesis also tries constants of the modules that are imported, so that the functions
#: depend on which other tests are collected.
EXAMPLES = {"known": 150, "pure": 140, "effects": 200}


def budget(kind, share=1):
    """The settings of a hunt among functions of a kind; `share` of them is 1 / share."""
    return settings(COMMON, max_examples=EXAMPLES[kind] // share)


def cases(kind):
    """Random functions of one of the kinds above, and what to do with them."""
    return st.builds(
        Case,
        PROGRAMS[kind],
        strategies.policies(),
        strategies.transforms(),
        strategies.cotangents(),
    )


def check(case):
    """A region is its function, saves what it must, and sees what changes around it."""
    program = case.program
    rng = "preserve" if "draw" in program.kinds else None
    region: Any = remat(program.fun, policy=case.policy, rng=rng)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compare(case, region, ("backward", *transforms_of(case)))
            check_permission(case, region)
            program.change_globals()
            compare(case, region, ("backward",))
        finally:
            region.cache_clear()


def transforms_of(case):
    """The case's transform, unless it is one of two that docs/limits.md names.

    torch.func.linearize calls a function once and keeps its trace: how often a buffer in
    it is updated is up to torch. And forward mode over forward mode refuses a region in a
    region that reaches tensors by itself.
    """
    program, transform = case.program, case.transform
    is_frozen = "linearize" in transform and "state" in program.kinds
    num_forward = sum(transform.count(name) for name in ("jvp", "jacfwd", "linearize"))
    is_refused = num_forward > 1 and program.inner and program.captures
    return () if is_frozen or is_refused else (transform,)


def compare(case, region, transforms):
    """The region gives the numbers of its function, or torch cannot and nor can it.

    Inner regions sum what flows to their arguments in their own order: no bits there.
    """
    judge = assert_equivalent(
        case.program.plain,
        region,
        transforms=transforms,
        cotangents=case.cotangents,
        exact=not case.program.inner,
    )
    judge(*case.program.make_arguments())


def check_permission(case, region):
    """Residuals and recomputed operators are those of the oracle."""
    program = case.program
    if not oracle.is_simple(program) or "by_size" in repr(case.policy):
        return
    args = [tensor.requires_grad_() for tensor in program.make_arguments()]
    saved, again = oracle.Oracle(program, case.policy).walk()
    found = [r.name for r in saved_residuals(region, *args) if not r.path]
    names = sorted(sorted(set(name.split(", ")) - {""}) for name in found)
    assert names == sorted(map(sorted, saved.values())), "saved residuals"
    if program.inner or program.captures:
        return
    counts = backward_operators(region, *args)
    plain = backward_operators(program.plain, *args)
    for operator in oracle.COUNTED:
        more = counts[f"aten.{operator}"] - plain[f"aten.{operator}"]
        assert more == again[operator], f"recomputed {operator}"
