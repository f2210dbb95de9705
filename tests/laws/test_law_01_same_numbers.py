"""Law 1. Same numbers.

"Without lossy storage, the outputs of one call, and the contributions it makes to
gradients given its cotangents, are bitwise those of `fun` under `.backward()` on a CPU;
`torch.func.grad` of the region gives the same bits. Sums with contributions from outside
the call, and every other transform, agree to rounding (`torch.testing.assert_close`
defaults; suites run in float64). In-place operators inside, any strides of inputs and
cotangents, any dtype."

This file holds the bitwise half; `test_law_01_transforms.py` holds the rest.
"""

import pytest
import torch
from torch import Tensor

from remat import checkpoint_name, policies, remat
from tests.functions import FUNCTIONS, NAMES
from tests.support import (
    assert_bitwise,
    assert_close,
    clone_exactly,
    daily,
    in_turn,
    on_tensors,
    random_cotangent,
    run,
    scalar_loss,
    seeded,
    swept,
)

pytestmark = pytest.mark.filterwarnings("ignore::remat.RematWarning")

BY_NAME = {function.name: function for function in FUNCTIONS}
POLICIES = {
    "nothing": None,
    "everything": policies.everything_saveable,
    "matmuls": policies.save_matmul_outputs,
}
CORE = {"mlp", "attention", "group_norm", "lstm_cell_in_place", "complex_arithmetic"}
#: Their kernels read no strides: networks of them would only repeat the others.
PLAIN = {"mlp", "lstm_cell_in_place", "empty_and_scalar", "attention_bfloat16", "half"}
STRIDED = [name for name in NAMES[:22] if name not in PLAIN]


def contract(names):
    """Parameters that are marked `contract` where they belong to the core."""
    mark = pytest.mark.contract
    return [pytest.param(n, marks=mark) if n in CORE else n for n in names]


@pytest.mark.contract
@pytest.mark.parametrize(("name", "policy"), in_turn(NAMES, POLICIES))
def test_backward_gives_plain_bits(name, policy):
    """Outputs and gradients under .backward() are the plain function's, bit for bit."""
    fun, make_args = BY_NAME[name].fun, BY_NAME[name].make_args
    region = remat(fun, policy=POLICIES[policy])

    assert_bitwise(run(region, make_args()), run(fun, make_args()))


@pytest.mark.parametrize("name", contract(NAMES))
def test_func_grad_gives_backward_bits(name):
    """torch.func.grad of a region gives the bits of the plain function's .backward()."""
    fun, make_args = BY_NAME[name].fun, BY_NAME[name].make_args
    plain, tensors = on_tensors(scalar_loss(fun), make_args())
    region, _ = on_tensors(scalar_loss(remat(fun)), make_args())
    expected = run(plain, tensors, torch.ones_like)[1]
    wanted = tuple(i for i, gradient in enumerate(expected) if gradient is not None)

    found = torch.func.grad(region, wanted)(*tensors)

    assert_bitwise(list(found), [expected[i] for i in wanted])


@pytest.mark.contract
@pytest.mark.parametrize("policy", ["everything", *swept(["nothing", "matmuls"])])
@pytest.mark.parametrize(
    "name", daily({name: name for name in NAMES}, CORE | {"cumulative"})
)
def test_func_grad_gives_the_same_bits_where_levels_below_may_differentiate(
    name, policy
):
    """Where an argument needs a gradient of its own, and nobody asks for it now.

    So the backward saves what its own derivative will read, of which torch has another
    formula than that which `.backward()` runs, such as for silu.
    """
    fun, make_args = BY_NAME[name].fun, BY_NAME[name].make_args
    plain, tensors = on_tensors(scalar_loss(fun), make_args())
    region, _ = on_tensors(
        scalar_loss(remat(fun, policy=POLICIES[policy])), make_args()
    )
    expected = run(plain, tensors, torch.ones_like)[1]
    wanted = tuple(i for i, gradient in enumerate(expected) if gradient is not None)
    needed = [
        each.detach().requires_grad_(i in wanted) for i, each in enumerate(tensors)
    ]

    for k in wanted:
        assert_bitwise(torch.func.grad(region, k)(*needed).detach(), expected[k])


def expanded(output: Tensor) -> Tensor:
    """The cotangent of `.sum()`: one number, every stride 0."""
    return torch.ones((), dtype=output.dtype).expand(output.shape)


def transposed(output: Tensor) -> Tensor:
    """A cotangent whose strides run the other way."""
    order = tuple(range(output.dim()))[::-1]
    return random_cotangent(output.permute(order)).permute(order)


def strided(output: Tensor) -> Tensor:
    """Every second number of a cotangent twice as wide."""
    return random_cotangent(output.new_empty(*output.shape, 2))[..., 1]


@pytest.mark.parametrize("cotangent", [expanded, transposed, strided])
@pytest.mark.parametrize("name", contract(STRIDED))
def test_any_strides_of_cotangents(name, cotangent):
    """A cotangent's strides change no bit that they do not change in plain code."""
    fun, make_args = BY_NAME[name].fun, BY_NAME[name].make_args

    found = run(remat(fun), make_args(), cotangent)

    assert_bitwise(found, run(fun, make_args(), cotangent))


def test_cotangents_of_other_strides_at_each_call():
    """One region serves cotangents of different strides one after the other."""
    fun, make_args = BY_NAME["group_norm"].fun, BY_NAME["group_norm"].make_args
    region = remat(fun)

    for cotangent in [expanded, transposed, expanded, strided, random_cotangent]:
        found = run(region, make_args(), cotangent)
        assert_bitwise(found, run(fun, make_args(), cotangent))


def restrided(tensor: Tensor, how: str) -> Tensor:
    """The same numbers with other strides."""
    if how == "transposed":
        order = tuple(range(tensor.dim()))[::-1]
        return tensor.permute(order).contiguous().permute(order)
    if how == "sliced":
        return torch.stack([tensor, tensor], -1)[..., 1]
    if how == "offset":
        return torch.cat([tensor[:1], tensor])[1:]
    return tensor[:1].expand(tensor.shape)


@pytest.mark.parametrize(
    ("name", "how"), in_turn(STRIDED, ["transposed", "expanded", "sliced", "offset"])
)
def test_any_strides_of_inputs(name, how):
    """An argument's strides change no bit that they do not change in plain code."""
    fun = BY_NAME[name].fun
    flat, tensors = on_tensors(fun, BY_NAME[name].make_args())
    tensors = [restrided(tensor, how) for tensor in tensors]
    region, _ = on_tensors(remat(fun), BY_NAME[name].make_args())

    assert_bitwise(run(region, tensors), run(flat, tensors))


@pytest.mark.parametrize("flag", ["conj", "neg", "channels_last"])
def test_lazy_bits_and_memory_formats(flag):
    """Conjugate and negative bits and channels-last inputs are honored."""
    z = seeded(2, 3, 4, 5, dtype=torch.complex64)
    x = {
        "conj": z.conj(),
        "neg": z.conj().imag,
        "channels_last": z.real.to(memory_format=torch.channels_last),
    }[flag]

    def fun(x):
        return (x.sin() * x).exp().mean(1), x * 2

    assert_bitwise(run(remat(fun), (x,)), run(fun, (x,)))


@pytest.mark.parametrize("around", ["grad", "vmap", "region"])
@pytest.mark.parametrize("num_steps", [1, 40])
def test_parts_of_a_lazy_conjugate(around, num_steps):
    """The operator of `x.real` refuses one, and no trace knows which of its inputs are."""
    z = seeded(3, 4, dtype=torch.complex128).conj()

    def fun(x):
        y = x.real
        for _ in range(num_steps):
            y = y.sin()
        return y.exp() * x[1:].real.sum() + x.mT[0].real.sum()

    def alone(f):
        return torch.func.grad(lambda x: f(x).sum())(z)

    def mapped(f):
        batch = torch.stack([z.conj()]).conj()
        return torch.func.grad(lambda x: torch.func.vmap(f)(x).sum())(batch)

    def inside(f):
        return alone(remat(lambda x: f(x.sin().conj()).cos()))

    transformed = {"grad": alone, "vmap": mapped, "region": inside}[around]

    assert_close(transformed(remat(fun)), transformed(fun))


@pytest.mark.parametrize("used", [0, 1, 2])
def test_unused_outputs(used):
    """Outputs without a cotangent add nothing, and the others keep their bits."""

    def fun(x, y):
        z = x.sin().exp()
        return (z * y).cos(), z.softmax(0), y.exp().sin()

    def one(f):
        return lambda *args: f(*args)[used]

    args = (seeded(3, 4), seeded(3, 4, seed=1))
    assert_bitwise(run(one(remat(fun)), args), run(one(fun), args))


@pytest.mark.contract
@pytest.mark.parametrize("policy", ["nothing", "everything", "name"])
def test_a_saved_value_that_is_also_an_output(policy):
    """A value may be saved and returned; both paths keep their gradient."""
    chosen = {**POLICIES, "name": policies.save_only_these_names("y")}[policy]

    def fun(x):
        y = checkpoint_name(x.exp().sin(), "y")
        return y, y.exp(), y.T, y

    args = (seeded(3, 4),)
    assert_bitwise(run(remat(fun, policy=chosen), args), run(fun, args))


def test_an_argument_that_is_also_an_output():
    """An argument may be returned as it is, and as a view."""

    def fun(x, y):
        return x, y.T, (x * y).exp().sin(), [x]

    args = (seeded(3, 4), seeded(3, 4, seed=1))
    assert_bitwise(run(remat(fun), args), run(fun, args))


def test_one_tensor_as_two_arguments():
    """A tensor passed twice gets the sum of both gradients."""

    def fun(pair, z):
        return (pair[0].sin() @ pair[1].exp() * z).cos()

    def twice(f):
        return lambda x: f((x, x.T), x)

    args = (seeded(4, 4),)
    assert_close(run(twice(remat(fun)), args), run(twice(fun), args))


@pytest.mark.contract
def test_residual_connection_around_a_region():
    """x + block(x) is right: the argument is the caller's, and has two gradients."""
    fun = BY_NAME["mlp"].fun
    region = remat(fun)
    args = BY_NAME["mlp"].make_args()

    def stack(block):
        def twice(x, *weights):
            x = x + block(x, *weights)
            return x + block(x, *weights)

        return twice

    found, expected = run(stack(region), args), run(stack(fun), args)
    assert_bitwise(found[0], expected[0])
    assert_close(found[1], expected[1])


def test_tied_weights():
    """A weight used inside two regions and outside gets the sum of its gradients."""

    def head(weight, x):
        return (x @ weight).tanh().softmax(-1) @ weight.T

    def model(block):
        return lambda weight, x: block(weight, block(weight, x) @ weight.exp()[:, :5])

    args = (seeded(5, 6), seeded(3, 5, seed=1))
    assert_close(run(model(remat(head)), args), run(model(head), args))


def test_in_place_operators_under_every_policy():
    """A saved value that is overwritten later in the function is saved as it was."""

    def fun(x, y):
        z = checkpoint_name(x.exp(), "z")
        w = z * y
        z = z.clone().mul_(y).sigmoid_()
        w.add_(z)[0].sin_()
        return w * z

    args = (seeded(3, 4), seeded(3, 4, seed=1))
    expected = run(fun, args)
    for policy in [*POLICIES.values(), policies.save_only_these_names("z")]:
        assert_bitwise(run(remat(fun, policy=policy), args), expected)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_some_arguments_require_grad(wanted):
    """Which arguments require grad changes no bit of the gradients that remain."""
    flat, tensors = on_tensors(
        BY_NAME["layer_norm"].fun, BY_NAME["layer_norm"].make_args()
    )
    region = remat(flat)
    for index in wanted:
        tensors[index] = clone_exactly(tensors[index]).requires_grad_()

    found, expected = run(region, tensors), run(flat, tensors)

    assert_bitwise(found, expected)
    assert [i for i, g in enumerate(found[1]) if g is not None] == list(wanted)


def test_special_values():
    """NaN, infinities and signed zeros come out as in plain code."""
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-310])

    def fun(x):
        return x.sin().exp() * x, (x * -0.0).relu(), x.abs().sqrt()

    for dtype in [torch.float32, torch.float64, torch.bfloat16]:
        args = (x.to(dtype),)
        assert_bitwise(run(remat(fun), args), run(fun, args))


@pytest.mark.contract
@pytest.mark.parametrize("name", ["max", "min", "median", "nanmedian"])
def test_ties_share_a_gradient_as_torch_has_them(name):
    """Torch has two formulas, by device: they differ in signs of zeros, and in NaN."""
    fun = getattr(torch, name)
    rows = [[1.0, 2, 2, -1], [0.0, -0.0, 0, -1], [float("nan"), 1, float("nan"), 0]]

    for row in rows:
        for cotangent in (-1.0, 0.0, float("inf")):
            args, flow = (torch.tensor(row),), [torch.tensor(cotangent)]
            assert_bitwise(run(remat(fun), args, flow), run(fun, args, flow))


def test_a_formula_of_the_users_like_that_of_ties_stays():
    """It multiplies, although torch's derivative of a maximum may not."""

    class Largest(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.max()

        @staticmethod
        def backward(ctx, *grad_outputs):
            (x,) = ctx.saved_tensors
            mask = x == x.max()
            return mask * (grad_outputs[0] / mask.sum())

    def fun(x):
        mask = x > 0
        return mask * (x.sum() / mask.sum()) * 1, Largest.apply(x)

    args, flows = (torch.tensor([1.0, -5, 1, -0.0]),), [-torch.ones(4), -torch.ones(())]
    assert_bitwise(run(remat(fun), args, flows), run(fun, args, flows))


def test_many_signatures_through_one_region():
    """Shapes, dtypes and requires_grad may change from call to call."""
    region = remat(lambda x, y: (x.sin() @ y.exp()).tanh())
    plain = region.__wrapped__

    for size, dtype in [(3, torch.float32), (4, torch.float64), (3, torch.float32)]:
        for only_first in [False, True]:
            args = (seeded(2, size, dtype=dtype), seeded(size, 2, seed=1, dtype=dtype))
            args[0].requires_grad_(only_first)
            assert_bitwise(run(region, args), run(plain, args))
