"""`backend="inductor"`: a region's programs are compiled, its rules stay the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import RematWarning, checkpoint_name, policies, random, remat
from remat._programs import overwriting
from remat._torch import runners
from remat.testing import assert_equivalent
from tests.benchmarks.memory import allocated
from tests.support import daily, seeded, swept

# Forward mode's first use compiles torch's own formulas with it.
pytestmark = [
    pytest.mark.apart,
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

compiled = remat(backend="inductor")


def mlp(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Pointwise tails around two matmuls; one value has a name."""
    h = checkpoint_name(torch.tanh(x @ params["up"]), "h")
    return x + F.silu(h * h.sin()) @ params["down"]


def arguments() -> tuple[dict[str, Tensor], Tensor]:
    """Parameters and a batch of 3."""
    params = {"up": seeded(4, 8), "down": seeded(8, 4)}
    return {k: p.requires_grad_() for k, p in params.items()}, seeded(3, 4)


def runs_of(region: Any, *args: Any) -> list[bool]:
    """Whether the forward and the backward program are compiled."""
    return [program.is_compiled for program in region.programs(*args)]


POLICIES: dict[str, Any] = {
    "nothing": None,
    "names": policies.save_only_these_names("h"),
    "everything": policies.everything_saveable,
}


@pytest.mark.contract
@pytest.mark.parametrize("policy", daily(POLICIES, ["names"]))
def test_both_programs_are_compiled_under_every_policy(policy: Any) -> None:
    """Values and gradients agree with the plain function, policies are followed."""
    params, x = arguments()
    region = remat(mlp, policy=policy, backend="inductor")
    alike = remat(mlp, policy=policy)

    found = torch.autograd.grad(region(params, x).sum(), list(params.values()))

    torch.testing.assert_close(
        found, torch.autograd.grad(mlp(params, x).sum(), list(params.values()))
    )
    assert runs_of(region, params, x) == [True, True]
    assert region.saved_residuals(params, x) == alike.saved_residuals(params, x)


def stack(weights: list[Tensor], x: Tensor) -> Tensor:
    """Matmuls with a pointwise tail each; what is saved is as large as what is made."""
    for weight in weights:
        x = torch.tanh(x @ weight).sin()
    return x


#: Layers and rows of a step, by where its kernels are called from.
SIZES = {"from Python": (4, 512), "from C++": (12, 64)}


@pytest.mark.contract
@pytest.mark.parametrize(
    "policy", [policies.save_matmul_outputs, *swept([policies.nothing_saveable])]
)
@pytest.mark.parametrize("size", daily(SIZES, ["from C++"]))
def test_a_compiled_step_peaks_no_higher(
    policy: Any, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was saved is let go inside the compiled backward, weights' gradients come early.

    Held against operators that make new tensors: what may be written over, Inductor decides
    by its own rules.
    """
    monkeypatch.setattr(overwriting, "_FEWEST_BYTES", 2**60)
    layers, rows = size
    weights = [seeded(32, 32, seed=k).requires_grad_() for k in range(layers)]
    x = seeded(rows, 32)

    def peak(backend: Any, *, twice: bool = False) -> int:
        region = remat(stack, policy=policy, backend=backend)

        def step() -> Any:
            out = region(weights, x).sum()
            found = torch.autograd.grad(out, weights, retain_graph=twice)
            if twice:
                again = torch.autograd.grad(out, weights)
                assert all(map(torch.equal, again, found))
            return found

        step()
        return allocated(step).peak

    assert peak("inductor") <= peak(None)
    if policy is policies.save_matmul_outputs:
        assert peak("inductor", twice=True) > peak("inductor")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each graph that the compiler gets, whether kernels are to be called from C++.

    It takes seconds. In its place, the graph runs as it is.
    """
    found: list[bool] = []

    def as_it_is(graph: Any, inputs: Any, *, wrapper_in_cpp: bool) -> Any:
        found.append(wrapper_in_cpp)
        return lambda given: graph(*given)

    monkeypatch.setattr(runners, "inductor", as_it_is)
    return found


@pytest.mark.parametrize(("layers", "is_long"), [(1, False), (12, True)])
def test_kernels_of_long_programs_are_called_from_cpp(
    layers: int, is_long: bool, asked: list[bool]
) -> None:
    """Where tensors are small, the calls take longer than the kernels; few steps do not pay."""
    weights = [seeded(4, 4, seed=k).requires_grad_() for k in range(layers)]
    region = remat(stack, backend="inductor")

    found = torch.autograd.grad(region(weights, seeded(3, 4)).sum(), weights)

    plain = torch.autograd.grad(stack(weights, seeded(3, 4)).sum(), weights)
    torch.testing.assert_close(found, plain)
    assert asked == [is_long, is_long]


def hessian_vector(f: Callable[..., Tensor]) -> Callable[..., Any]:
    """Reverse over forward."""

    def product(params: Any, x: Tensor) -> Any:
        def slope(x: Tensor) -> Tensor:
            return torch.func.jvp(lambda x: f(params, x).sum(), (x,), (x,))[1]

        return torch.func.grad(slope)(x)

    return product


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "grad": lambda f: torch.func.grad(lambda p, x: f(p, x).sum()),
    "per_example": lambda f: torch.func.vmap(
        torch.func.grad(lambda p, x: f(p, x).sum()), in_dims=(None, 0)
    ),
    "grad_grad": lambda f: torch.func.grad(
        lambda p, x: torch.func.grad(lambda x: f(p, x).sum())(x).square().sum()
    ),
    "hessian_vector": hessian_vector,
}


@pytest.mark.parametrize("transform", daily(TRANSFORMS, ["per_example"]))
def test_compiled_regions_under_transforms(transform: Any) -> None:
    """The derived programs are compiled too, and agree to rounding."""
    params, x = arguments()
    plain = {name: each.detach() for name, each in params.items()}

    found = transform(compiled(mlp))(plain, x)

    torch.testing.assert_close(found, transform(mlp)(plain, x))


def test_nested_regions_compile_as_one_program(asked: list[bool]) -> None:
    """The outer region's programs hold the inner one's operators."""
    params, x = arguments()
    inner = remat(mlp)
    outer = remat(lambda p, x: inner(p, inner(p, x)), backend="inductor")

    found = torch.autograd.grad(outer(params, x).sum(), list(params.values()))

    plain = torch.autograd.grad(
        mlp(params, mlp(params, x)).sum(), list(params.values())
    )
    torch.testing.assert_close(found, plain)
    assert runs_of(outer, params, x) == [True, True]
    assert len(asked) == 2


def test_keyed_draws_keep_their_bits() -> None:
    """The mask of the recomputation is that of the forward."""

    def drop(key: Tensor, x: Tensor) -> Tensor:
        return random.dropout(key, x.sin(), 0.5)

    key, x = random.key(3), seeded(64).requires_grad_()

    y = compiled(drop)(key, x)
    (found,) = torch.autograd.grad(y.sum(), x)

    plain = drop(key, x)
    assert torch.equal(y == 0, plain == 0)
    torch.testing.assert_close(found, torch.autograd.grad(plain.sum(), x)[0])


def test_outputs_that_share_memory_and_buffers_that_change() -> None:
    """Views come back as views; running statistics change once."""

    def views(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y, y.view(-1)

    x = seeded(2, 3).requires_grad_()
    y, flat = compiled(views)(x)
    (found,) = torch.autograd.grad(flat.sum(), x)
    torch.testing.assert_close(found, x.cos())
    assert flat.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()

    norms = [nn.BatchNorm1d(3).double() for _ in range(2)]
    for norm, apply in zip(norms, (lambda f: f, compiled), strict=True):
        apply(norm)(seeded(5, 3)).sum().backward()
    torch.testing.assert_close(norms[1].running_var, norms[0].running_var)
    torch.testing.assert_close(norms[1].weight.grad, norms[0].weight.grad)


def test_a_generator_s_draws_run_uncompiled_and_say_so() -> None:
    """The option has no effect there: a warning, and the right numbers."""
    region = remat(
        lambda x: F.dropout(x.sin(), 0.5), rng="preserve", backend="inductor"
    )
    x = seeded(16).requires_grad_()

    with pytest.warns(RematWarning, match=r"backend='inductor' has no effect"):
        y = region(x)
    (found,) = torch.autograd.grad(y.sum(), x)

    torch.testing.assert_close(found, (y != 0) * 2 * x.cos())


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code")
def test_lazy_negatives_and_conjugates() -> None:
    """Compiled kernels read memory, where their numbers do not lie; strides stay."""
    z = seeded(3, 4, dtype=torch.complex128).conj()
    thin = z.imag[:, :1].expand(3, 4)

    def parts(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x.sin() * y.exp() + z.real * z.mT[0, 0].imag

    given = [each.detach().requires_grad_() for each in (z.imag, thin, z)]
    found = torch.autograd.grad(compiled(parts)(*given).sum(), given)

    torch.testing.assert_close(compiled(parts)(*given), parts(*given))
    torch.testing.assert_close(found, torch.autograd.grad(parts(*given).sum(), given))


def test_a_cotangent_without_memory() -> None:
    """Zeros get some before a compiled kernel reads them."""
    x = seeded(3, 4).requires_grad_()
    zeros: Tensor = torch.ops.aten._efficientzerotensor((3, 4), dtype=x.dtype)

    (found,) = torch.autograd.grad(compiled(torch.sin)(x), x, zeros)

    assert found.count_nonzero() == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [({"engine": "rerun"}, "no programs"), ({"verify": True}, "compares bits")],
    ids=["rerun", "verify"],
)
def test_a_backend_without_meaning_is_refused(options: Any, why: str) -> None:
    """The text says why."""
    with pytest.raises(ValueError, match=why):
        remat(mlp, backend="inductor", **options)


@pytest.mark.sweep
def test_the_contract_of_a_block_with_a_backend() -> None:
    """What users test their own blocks with holds to rounding."""
    params, x = arguments()

    assert_equivalent(mlp, compiled(mlp))(params, x)


def test_keys_made_in_a_graph() -> None:
    """Inductor has no constants of a key's dtype."""
    torch._dynamo.reset()
    run: Any = torch.compile(lambda x: random.key(-1) if x.dim() else x, fullgraph=True)

    assert torch.equal(run(seeded(1)), random.key(-1))
