"""Law 3 at every order: what a nest of transforms computes beyond what plain torch does.

Where a region is differentiated again, its policy is asked about the values of the backward
and of the tangents too. So a nest under `everything_saveable` computes what plain torch does,
and under another policy at most as much more as `jax.checkpoint` adds to JAX without it. JAX's
figures stand in `jax_counts.json`, which `tests/benchmarks/jax_counts.py` prints.
"""

import functools
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from remat import policies, remat
from tests.laws.derivatives import TORCH, weights
from tests.laws.nests import BATCH, NESTS, WIDTH, Function, functions, stacks
from tests.support import PRODUCTS, count_operators, seeded, swept

pytestmark = [
    pytest.mark.contract,
    # Small stacks keep as much under some policies as plain torch does.
    pytest.mark.filterwarnings("ignore:.*saves no memory:remat.RematWarning"),
    # Forward mode itself compiles decompositions with torch.jit.script.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]

#: Matrix products, hyperbolic tangents, sines and cosines.
Counts = tuple[int, int, int]
#: The names of a function, of a nest and of a policy.
Case = tuple[str, str, str]

JAX: Mapping[str, Any] = json.loads(
    Path(__file__).with_name("jax_counts.json").read_text()
)
FUNCTIONS = functions(TORCH)
STACKS = stacks(TORCH)
POLICIES = {
    "nothing": policies.nothing_saveable,
    "matmuls": policies.save_matmul_outputs,
    "everything": policies.everything_saveable,
}
X = seeded(BATCH, WIDTH, seed=99)

#: JAX differentiates the derivative of the forward as it would without `jax.checkpoint`, whose
#: values its outer levels then hold, under `nothing_saveable` too. In second order that is every
#: layer's `tanh` and `1 - tanh`, by `jax.ad_checkpoint.print_saved_residuals`; here the counts are
#: JAX's, and nothing is held. In third order the cotangents inside of that derivative are among
#: the values: those of the three inner layers are products, which run again here.
JAX_HOLDS: dict[Case, Counts] = {
    ("stack", "grad(grad(grad))", "nothing"): (163, 16, 0),
}
#: `jacrev` returns no value. JAX removes a forward that only the value needs, for the
#: recomputation gives the backward all that it reads; an eager forward has run by then.
NO_VALUE_IS_READ: dict[Case, Counts] = {
    ("stack", "vmap(jacrev)", "nothing"): (12, 8, 0),
    ("stack", "vmap(jacrev)", "matmuls"): (8, 8, 0),
    ("stack", "vmap(jacrev(jacrev))", "nothing"): (27, 12, 0),
    ("stack", "vmap(jacrev(jacrev))", "matmuls"): (16, 12, 0),
    ("gated", "vmap(jacrev)", "nothing"): (6, 2, 3),
    ("gated", "vmap(jacrev)", "matmuls"): (4, 2, 3),
    ("gated", "vmap(jacrev(jacrev))", "nothing"): (12, 3, 7),
    ("gated", "vmap(jacrev(jacrev))", "matmuls"): (8, 3, 7),
    ("mixed", "vmap(jacrev)", "nothing"): (6, 2, 3),
    ("mixed", "vmap(jacrev)", "matmuls"): (4, 2, 3),
    ("mixed", "vmap(jacrev(jacrev))", "nothing"): (12, 3, 7),
    ("mixed", "vmap(jacrev(jacrev))", "matmuls"): (8, 3, 7),
}
#: Cases in which JAX adds less, each with what it comes to here, and no more.
MORE_THAN_JAX = JAX_HOLDS | NO_VALUE_IS_READ

CASES: list[Case] = [
    (name, nest, policy) for name in FUNCTIONS for nest in NESTS for policy in POLICIES
]
#: Each nest once, with the policies in turn; a stack takes long to trace.
TURNS = {*zip(NESTS, itertools.cycle(POLICIES), strict=False)}
DAILY = [
    case
    for case in CASES
    if (case[0] == "gated" and case[1] != "grad(laplacian)" and case[1:] in TURNS)
    or case[1:] in (("grad(grad)", "matmuls"), ("jvp(grad)", "nothing"))
    or case[:2] == ("mixed", "grad(grad) by x")
]
REGIONS: list[Case] = [
    (name, nest, policy)
    for nest in ("grad(grad)", "jvp(grad)", "vmap(hessian)", "grad(grad) by x")
    for name in STACKS
    for policy in POLICIES
]


def run(nest: str, name: str, f: Function) -> Any:
    """What a nest gives of a function."""
    return NESTS[nest](TORCH, f, weights(name), X)


def counts(nest: str, name: str, f: Function) -> Counts:
    """What one run computes, once everything is traced."""
    run(nest, name, f)
    found = count_operators(run, nest, name, f)
    products = sum(found[each] for each in PRODUCTS)
    return products, found["aten.tanh"], found["aten.sin"] + found["aten.cos"]


def law(nest: str, name: str, policy: str) -> Counts:
    """The most that a nest may compute: plain's, and what JAX adds to its own plain."""
    function = FUNCTIONS.get(name) or STACKS[name](lambda f: f)
    jax, plain = JAX[name][nest], counts(nest, name, function)
    added = zip(plain, jax[policy], jax["plain"], strict=True)
    products, tanhs, sines = (
        own + with_it - without for own, with_it, without in added
    )
    return products, tanhs, sines


def is_within(found: Counts, most: Counts) -> bool:
    """Whether none of the counts is greater than its bound."""
    return all(each <= bound for each, bound in zip(found, most, strict=True))


@pytest.mark.parametrize(
    "case",
    [*DAILY, *swept(case for case in CASES if case not in DAILY)],
    ids=" ".join,
)
def test_no_more_is_computed_than_jax_adds(case: Case) -> None:
    """Or than the tables above say."""
    name, nest, policy = case
    most = MORE_THAN_JAX.get(case) or law(nest, name, policy)

    found = counts(nest, name, remat(FUNCTIONS[name], policy=POLICIES[policy]))

    assert is_within(found, most), f"{found} is more than {most}"


@pytest.mark.parametrize("case", REGIONS, ids=" ".join)
def test_of_several_regions_no_more_is_computed_than_jax_adds(case: Case) -> None:
    """One after the other, or in each other: the small values of each are lent."""
    name, nest, policy = case
    most = law(nest, name, policy)
    region = functools.partial(remat, policy=POLICIES[policy])

    found = counts(nest, name, STACKS[name](region))

    assert is_within(found, most), f"{found} is more than {most}"


def normalized(w: Any, x: Any) -> Any:
    """A norm, whose backward reads a mean that autograd has no derivative of."""
    return torch.layer_norm(x @ w, (WIDTH,)).tanh()


@pytest.mark.parametrize("nest", ["grad(grad)", "jvp(grad)", "grad(vmap(grad))"])
def test_a_norm_that_is_saved_is_computed_once(nest: str) -> None:
    """At every order."""
    region = remat(normalized, policy=POLICIES["everything"])
    run = functools.partial(NESTS[nest], TORCH, region, weights("gated")[0], X)
    run()

    assert count_operators(run)["aten.native_layer_norm"] == 1


def convolved(w: Any, x: Any) -> Any:
    """Two convolutions along each row: the backward convolves the gradient between them."""
    h = x[:, None]
    for k in range(2):
        h = torch.tanh(torch.conv1d(h, w[k : k + 1, None, :3], padding=1))
    return h[:, 0]


def test_what_a_backward_convolves_is_saved_as_a_product_is() -> None:
    """By `save_matmul_outputs`, as JAX's `dots_saveable` does."""
    found: list[int] = []
    for f in (convolved, remat(convolved, policy=POLICIES["matmuls"])):
        run = functools.partial(NESTS["grad(grad)"], TORCH, f, weights("gated")[0], X)
        run()
        found.append(count_operators(run)["aten.convolution_backward"])

    assert found[1] == found[0]


def with_a_mask(w: Any, x: Any) -> Any:
    """What it makes of `x` has no gradient where nobody differentiates by that."""
    return torch.tanh(x @ w), x * 2


def test_an_output_without_a_gradient_closes_no_region() -> None:
    """Nothing was detached there. By `x` it has one."""
    region = remat(with_a_mask, policy=POLICIES["everything"])
    w = weights("gated")[0]
    for nest in ("grad(grad)", "grad(grad) by x"):
        found = list[dict[str, int]]()
        for f in (with_a_mask, region):
            run = functools.partial(NESTS[nest], TORCH, _product_of(f), w, X)
            run()
            ran = count_operators(run)
            found.append({each: ran[each] for each in ("aten.mm", "aten.tanh")})

        assert found[0] == found[1], nest


def _product_of(f: Callable[..., Any]) -> Function:
    return lambda w, x: functools.reduce(torch.mul, f(w, x))


def in_two_steps(unit: Callable[[Function], Function]) -> Function:
    """A region around two of its kind, which both read the weight and the input twice."""
    step = unit(lambda w, x: torch.tanh(x[0] @ w + x[1] @ w.mT))
    return unit(lambda w, x: step(w, (step(w, (x, x)), x)))


def test_the_order_of_a_sum_closes_no_region() -> None:
    """A region inside adds its own gradients up before they are added to the others."""
    run = NESTS["grad(grad) by x"]
    w, found = weights("gated")[0], list[dict[str, int]]()
    for unit in (lambda f: f, functools.partial(remat, policy=POLICIES["everything"])):
        f = in_two_steps(unit)
        run(TORCH, f, w, X)
        ran = count_operators(run, TORCH, f, w, X)
        found.append({each: ran[each] for each in ("aten.mm", "aten.tanh")})

    assert found[0] == found[1]


def attention(w: Any, x: Any) -> Any:
    """Both halves of a row attend to each other: products of what is seen by views."""
    h = torch.cat([x, x[:, :1]], 1).unflatten(1, (2, -1))
    q, v = h @ w[:3, :3], h @ w[2:, 2:]
    return h + torch.softmax(q @ v.mT, -1) @ v


def looked_up(w: Any, x: Any) -> Any:
    """Rows by their numbers, a constant that each trace makes anew."""
    return torch.tanh(x @ w[torch.tensor([0, 2, 1, 2, 3])])


@pytest.mark.parametrize("function", [attention, looked_up])
def test_a_map_between_two_derivatives_adds_no_recomputation(
    function: Function,
) -> None:
    """Kinds of view that only autograd tells apart, and equal constants, are one value."""
    w, added = weights("gated")[0], set[int]()

    for nest in ("grad(grad)", "grad(vmap(grad))"):
        found: list[int] = []
        for f in (function, remat(function)):
            run = functools.partial(NESTS[nest], TORCH, f, w, X)
            run()
            ran = count_operators(run)
            found.append(sum(ran[each] for each in PRODUCTS))
        added.add(found[1] - found[0])

    assert len(added) == 1, added


def test_jax_adds_nothing_where_everything_is_saved() -> None:
    """So there the bound is what plain torch computes, in every nest."""
    for name in FUNCTIONS:
        assert set(JAX[name]) == set(NESTS)
        for found in JAX[name].values():
            assert found["everything"] == found["plain"]


@pytest.mark.parametrize("case", MORE_THAN_JAX, ids=" ".join)
def test_no_case_is_excused_that_the_law_allows(case: Case) -> None:
    """A figure within the law has no place in the tables."""
    name, nest, policy = case

    assert not is_within(MORE_THAN_JAX[case], law(nest, name, policy))
