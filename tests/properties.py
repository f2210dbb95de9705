"""The property of a region: what must hold of every random function, policy, transform.

`tests/test_properties.py` holds the engine to it; `tests/planted.py` shows that it sees.
"""

import dataclasses
import warnings
from typing import Any

from hypothesis import settings, strategies as st

from remat import remat, saved_residuals
from remat.policies import AbstractPolicy
from remat.testing import NotEquivalentError, assert_equivalent, strategies
from remat.testing.strategies import Cotangents, Program
from tests import oracle
from tests.support import backward_operators

BUDGET = settings(max_examples=400, deadline=None, derandomize=True, database=None)


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


def cases():
    """Simple functions, functions of everything pure, and functions with effects."""
    programs = st.one_of(
        strategies.programs(kinds=()),
        strategies.programs(),
        strategies.programs(kinds=("plain", "in place", "draw", "state"), max_steps=4),
    )
    return st.builds(
        Case,
        programs,
        strategies.policies(),
        strategies.transforms(),
        strategies.cotangents(),
    )


# Transforms that run forward mode under vmap over something with a captured tensor: torch
# fails on fakes there (aten._fw_primal) and leaves the thread's dispatch state broken.
BREAKS = ("vmap(jacfwd)",)


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
    """The case's transform, unless it would break torch."""
    names = case.program.captures
    return () if names and case.transform in BREAKS else (case.transform,)


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
    try:
        judge(*case.program.make_arguments())
    except NotEquivalentError as error:
        if not is_known(case, error):
            raise


FORWARD = ("jvp", "jacfwd", "hessian", "linearize")


def is_known(case, error):
    """Whether a failure is one of the engine's known ones, each as narrow as can be."""
    cause, forward = str(error.__cause__), any(k in case.transform for k in FORWARD)
    names = {step.statement.name for step in case.program.steps}
    # An output that no example moves is expanded over the batch, and has no room for the
    # tangent that the region gives it.
    if forward and "more than one element of the written-to tensor" in cause:
        return True
    # Under forward mode an output that is a detached operand keeps the tangent.
    if forward and "detach" in names and error.__cause__ is None:
        return True
    # Plain linearize folds a buffer's update; the region's raises.
    return "linearize" in case.transform and "state" in case.program.kinds


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
