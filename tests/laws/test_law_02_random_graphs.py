"""Law 2. Permission, on random programs against an oracle of twenty lines.

"Walk back from the wanted gradients; stop at an input or at a value that the policy
permits; recompute everything else: what the walk stops at is saved, nothing more."
"""

import warnings
from collections import Counter

import torch
from hypothesis import given, settings, strategies as st

from remat import checkpoint_name, policies, remat, saved_residuals
from tests.support import assert_bitwise, backward_operators, held_bytes, run, seeded

#: What the derivative of each operator reads: its operands, its result, or nothing.
READS = {"sin": "operands", "exp": "result", "mul": "operands", "add": "nothing"}

Step = tuple[str, tuple[int, ...]]


@st.composite
def programs(draw):
    """Steps of straight-line code; value 0 is the argument, step i makes value i + 1."""
    steps: list[Step] = []
    for _ in range(draw(st.integers(2, 7))):
        operator = draw(st.sampled_from(sorted(READS)))
        arity = 1 if operator in ("sin", "exp") else 2
        operands = draw(st.tuples(*[st.integers(0, len(steps))] * arity).map(sorted))
        if (step := (operator, tuple(operands))) not in steps:
            steps.append(step)
    names = draw(st.sets(st.integers(1, len(steps))))
    return steps, names


def evaluate(steps, x):
    """Runs a program on a tensor and names each value."""
    values = [x]
    for index, (operator, operands) in enumerate(steps):
        result = getattr(torch, operator)(*(values[i] for i in operands))
        values.append(checkpoint_name(result, f"v{index + 1}"))
    return values[-1]


def walk(steps, names):
    """The oracle: the values saved, and the operators that run again.

    A value is wanted if the derivative of a used step reads it. Wanted values that are
    named are saved; those that are not are made again, which wants their operands.
    """
    used, reads = [len(steps)], set()
    for value in range(len(steps), 0, -1):
        if value not in used:
            continue
        operator, operands = steps[value - 1]
        used += operands
        reads |= {"operands": {*operands}, "result": {value}, "nothing": set()}[
            READS[operator]
        ]
    wanted, saved, again = sorted(reads), set(), {}
    while wanted:
        value = wanted.pop()
        if value in names:
            saved.add(value)
        elif value > 0 and value not in again:
            operator, operands = steps[value - 1]
            again[value] = operator
            wanted += operands
    return saved, Counter(again.values())


def compare(steps, names):
    """A random program saves and re-runs what the oracle says, with plain bits."""
    saved, again = walk(steps, names)
    chosen = [f"v{i}" for i in sorted(names)]
    policy = policies.save_only_these_names(*chosen) if chosen else None

    def fun(x):
        return evaluate(steps, x)

    region, args = remat(fun, policy=policy), (seeded(3) / 8,)
    residuals = [r for r in saved_residuals(region, *args) if not r.path]
    assert {r.name for r in residuals} == {f"v{i}" for i in saved}
    output_is_saved = len(steps) in saved
    assert held_bytes(region, *args) == 24 * (len(saved) - output_is_saved)
    assert_bitwise(run(region, args), run(fun, args))
    counts, plain = backward_operators(region, *args), backward_operators(fun, *args)
    for operator in READS:
        name = f"aten.{operator}"
        assert counts[name] - plain[name] == again[operator], operator


@settings(max_examples=60, deadline=None, derandomize=True)
@given(programs())
def test_random_programs_save_what_the_walk_stops_at(program):
    """Residuals, held bytes, recomputed operators and gradients of random programs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(*program)


def test_the_oracle_knows_the_ladder_of_sines():
    """The oracle gives JAX's counts where they are known."""
    sines = [("sin", (i,)) for i in range(4)]

    assert walk(sines, set()) == (set(), Counter(sin=3))
    assert walk(sines, {2}) == ({2}, Counter(sin=2))
    assert walk(sines, {1, 2, 3}) == ({1, 2, 3}, Counter())
    assert walk(sines, {1, 3, 4}) == ({1, 3}, Counter(sin=1))
    assert walk(sines, {4}) == (set(), Counter(sin=3))
