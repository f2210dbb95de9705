"""`assert_equivalent`: what it compares, what it excuses, and what its errors say."""

import copy

import pytest
import torch
from torch import nn

from remat import RematWarning, policies, remat
from remat.testing import NotEquivalentError, assert_equivalent
from remat.testing.strategies import Cotangents
from tests.support import name_of_generator, seeded

pytestmark = pytest.mark.filterwarnings(
    "ignore::remat.RematWarning",
    "ignore:`torch.jit.script",
    "ignore:Attempted to insert a get_attr",
    "ignore:There is a performance drop",
)
WEIGHT = seeded(3).requires_grad_()


def block(params, x):
    """A function of pytrees with a captured weight."""
    return {"y": (x @ params["w"] * WEIGHT).tanh(), "n": 3}


def arguments():
    return {"w": seeded(3, 3)}, seeded(2, 3, seed=1)


def test_a_region_is_equivalent_under_the_usual_transforms():
    """All of them are compared, and none is excused."""
    found = assert_equivalent(block, remat(block))(*arguments())

    assert found.excused == ()
    assert "backward" in found.compared
    assert "grad(vmap)" in found.compared
    assert str(found).startswith("equivalent under backward, grad, vjp, ")


@pytest.mark.filterwarnings("default::remat.RematWarning")
def test_what_is_not_called_is_told():
    """Without the arguments nothing is compared, and a test would pass."""
    with pytest.warns(RematWarning, match=r"compared nothing.*\(f, g\)\(x\)") as told:
        assert_equivalent(block, block)

    assert told[0].filename == __file__


def sorted_and_whole(x):
    """An output between two others has no gradient."""
    values, order = x.sort(dim=-1)
    return values, order, x.sin()


def test_outputs_without_a_gradient_are_counted_alike():
    """By plain autograd and by transforms, which give the others the same cotangents."""
    found = assert_equivalent(sorted_and_whole, remat(sorted_and_whole))(seeded(2, 3))

    assert found.excused == ()


def complex_and_real(z):
    return (z * z).sin(), z.abs(), torch.complex(z.imag, z.real) * z[0]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_regions_are_equivalent_to_the_bit(dtype):
    """Plain autograd's cotangents are those of the loss that transforms differentiate."""
    z = torch.complex(seeded(3), seeded(3, seed=1)).to(dtype)

    found = assert_equivalent(complex_and_real, remat(complex_and_real))(z)

    # Those of torch take real tensors only.
    assert [each.transform for each in found.excused] == ["jacrev", "jacfwd"]


def scaled(factor):
    def fun(params, x):
        return {"y": block(params, x)["y"] * factor, "n": 3}

    return fun


class TwiceTheGradient(torch.autograd.Function):
    """The identity, with a gradient that is wrong."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grad_outputs):
        return grad_outputs[0] * 2


def wrong_gradient(params, x):
    return block({"w": TwiceTheGradient.apply(params["w"])}, x)


def without_capture(params, x):
    return {"y": (x @ params["w"] * WEIGHT.detach()).tanh(), "n": 3}


def other_structure(params, x):
    return {"y": block(params, x)["y"], "n": 4}


def other_class(params, x):
    return {"y": block(params, x)["y"], "n": 3.0}


def in_single(params, x):
    return {"y": block(params, x)["y"].float(), "n": 3}


def changes_its_argument(params, x):
    found = block(params, x.clone())
    with torch.no_grad():
        x.add_(1.0)
    return found


def fails(params, x):
    raise RuntimeError("out of luck")


def divides(params, x):
    return 1 / 0


def draws(params, x):
    torch.rand(1)
    return block(params, x)


DIFFERENCES = {
    "output": (
        scaled(1.5),
        "under backward, output `y` (float64[2, 3]): element (0, 0)",
    ),
    "gradient": (wrong_gradient, "the gradient of argument `params.w` (float64[3, 3])"),
    "capture": (
        without_capture,
        "the gradient of global `WEIGHT`: is missing in the sec",
    ),
    "structure": (other_structure, "under backward, the structure of the outputs: is "),
    "class": (other_class, "under backward, the structure of the outputs: is "),
    "dtype": (
        in_single,
        "is float64[2, 3] in the first and float32[2, 3] in the second.",
    ),
    "mutation": (changes_its_argument, "argument `x` after the call (float64[2, 3])"),
    "error": (fails, "only the second function raises RuntimeError: out of luck"),
    "an error of Python's": (divides, "only the second function raises ZeroDivision"),
    "generator": (draws, f"{name_of_generator()} after the call"),
}


@pytest.mark.parametrize(("g", "text"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_a_difference_is_named(g, text):
    """The error says under which transform what differs, where and by how much."""
    with pytest.raises(NotEquivalentError) as caught:
        assert_equivalent(block, g, transforms=["backward"])(*arguments())

    assert text in str(caught.value)
    assert isinstance(caught.value, AssertionError)


def test_the_whole_text():
    """Where, what, why and what to do."""
    with pytest.raises(NotEquivalentError) as caught:
        assert_equivalent(torch.sin, lambda x: x.sin() * torch.tensor([1.0, 2.0]))(
            torch.tensor([0.5, 0.5])
        )

    assert str(caught.value) == (
        "under backward, the output (float32[2]): element (1,) is 0.4794255495071411 in "
        "the first and 0.9588510990142822 in the second; 1 of 2 elements differ, by at "
        "most 0.479 (relative 1). They should agree to rounding, by the defaults of "
        "torch.testing.assert_close. testing.first_difference(f, g)(*args) names the "
        "first operator whose result differs, also of functions that are transformed."
    )


def test_a_second_derivative_is_compared():
    """What is right once and wrong twice is found by a composition."""

    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.cosine = x.cos().detach()
            return x.sin()

        @staticmethod
        def backward(ctx, *grad_outputs):
            return grad_outputs[0] * ctx.cosine

    check = assert_equivalent(
        torch.sin, Constant.apply, transforms=["backward", "backward(backward)"]
    )

    with pytest.raises(NotEquivalentError, match=r"under backward\(backward\)"):
        check(seeded(3))


def product_with(weight):
    return lambda x: x @ weight


def detached_product_with(weight):
    return lambda x: x @ weight.detach()


@pytest.mark.parametrize("lost", range(3))
def test_captured_tensors_of_one_label_are_told_apart(lost):
    """Closures of one factory: the gradient of each is compared."""
    weights = [seeded(3, 3, seed=k).requires_grad_() for k in range(3)]
    whole = [product_with(weight) for weight in weights]
    parts = [*whole]
    parts[lost] = detached_product_with(weights[lost])

    def summed(terms):
        return lambda x: sum(term(x).sin() for term in terms)

    number = f" ({lost + 1})" if lost else ""
    text = f"the gradient of closure variable `weight`{number}: is missing in the sec"
    with pytest.raises(NotEquivalentError) as caught:
        assert_equivalent(summed(whole), summed(parts))(seeded(2, 3))
    assert text in str(caught.value)
    # Met in another order they are the same tensors.
    found = assert_equivalent(summed(whole), summed(whole[::-1]))(seeded(2, 3))
    assert found.excused == ()


def doubled(x):
    return x * 2


@pytest.mark.parametrize("place", range(2))
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (doubled, "output `a.b`"),
        (TwiceTheGradient.apply, "the gradient of argument `x.a.b`"),
    ],
)
def test_leaves_of_one_label_are_told_apart(place, change, what):
    """Keys with a dot in them: each output and each gradient is compared."""
    changes = [torch.clone, torch.clone]
    changes[place] = change

    def fun(x, first=torch.clone, second=torch.clone):
        return {"a.b": first(x["a.b"]), "a": {"b": second(x["a"]["b"])}}

    check = assert_equivalent(fun, lambda x: fun(x, *changes), transforms=["backward"])
    with pytest.raises(NotEquivalentError) as caught:
        check({"a.b": seeded(3), "a": {"b": seeded(3, seed=1)}})

    assert f"{what}{' (2)' if place else ''} (float64[3])" in str(caught.value)


def nudged(x):
    """The sine, one bit off."""
    y = x.sin()
    return y + (torch.nextafter(y.detach(), y.detach() + 1) - y.detach())


@pytest.mark.parametrize(("exact", "raises"), [(None, False), (True, True)])
def test_bits_are_compared_where_they_are_promised(exact, raises):
    """Rounding is forgiven unless bits are asked for."""
    check = assert_equivalent(torch.sin, nudged, transforms=["backward"], exact=exact)

    if raises:
        with pytest.raises(NotEquivalentError, match="agree to the last bit"):
            check(seeded(3))
    else:
        check(seeded(3))


def attention(x):
    return nn.functional.scaled_dot_product_attention(x, x, x)


def test_what_the_first_function_does_not_support_is_excused():
    """Plain attention has no forward mode on a CPU: the report says so."""
    transforms = ["backward", "jvp"]

    found = assert_equivalent(attention, remat(attention), transforms=transforms)(
        seeded(1, 1, 4, 4)
    )

    assert found.compared == ("backward",)
    (excuse,) = found.excused
    assert excuse.transform == "jvp"
    assert "forward AD" in excuse.reason
    assert "jvp excused: " in str(found)


def test_a_missing_gradient_is_zero_to_rounding():
    """Where bits are compared, None and zeros differ; elsewhere they agree."""

    def fun(x):
        return x.detach() + 1

    def zeros(x):
        return x.detach() + 1 + 0 * x

    assert_equivalent(fun, zeros, transforms=["backward"])(seeded(2))
    with pytest.raises(NotEquivalentError, match="missing in the first"):
        assert_equivalent(fun, zeros, transforms=["backward"], exact=True)(seeded(2))


def test_nothing_compared_is_an_error():
    """Excuses alone prove nothing."""
    with pytest.raises(
        NotEquivalentError, match="nothing was compared: the first func"
    ):
        assert_equivalent(fails, fails)(*arguments())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("backward(grad(backward))", "is none that assert_equivalent knows"),
        ("gard", "'gard' is none that assert_equivalent knows. They are backward, "),
        ("vmap(grad", "and compositions, outermost first: 'vmap(grad)'"),
        ("grad(backward)", "'backward' is outermost, as plain autograd does not"),
        ("functional_call(grad)", "and 'functional_call', which"),
    ],
)
def test_wrong_names_are_refused(name, text):
    """A name that is no transform raises before anything runs."""
    with pytest.raises(ValueError, match="the transform") as caught:
        assert_equivalent(torch.sin, torch.sin, transforms=[name])

    assert text in str(caught.value)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.2), nn.Tanh())


def test_modules_with_buffers_and_draws():
    """Buffers, generators and arguments are what they were; parameters are compared."""
    plain, x = model(), torch.randn(4, 3)
    before = copy.deepcopy([plain.state_dict(), torch.get_rng_state(), x])

    found = assert_equivalent(plain, remat(plain), transforms=["backward"])(x)

    assert found.compared == ("backward",)
    after = [plain.state_dict(), torch.get_rng_state(), x]
    torch.testing.assert_close(after, before, rtol=0.0, atol=0.0)


def test_functional_calls():
    """The parameters of a module are replaced, differentiated, and put back under each name."""
    linear = nn.Linear(3, 3)
    plain, weight = nn.Sequential(linear, nn.Tanh(), linear), linear.weight
    transforms = [
        "functional_call",
        "grad(functional_call)",
        "vmap(grad(functional_call))",
    ]

    found = assert_equivalent(plain, remat(plain), transforms=transforms)(
        torch.randn(4, 3)
    )

    assert found.compared == tuple(transforms)
    assert linear.weight is weight


def test_a_buffer_changed_twice_is_found():
    """State is compared after the call."""
    plain = nn.BatchNorm1d(3)

    def twice(x):
        plain(x)
        return plain(x)

    with pytest.raises(NotEquivalentError, match="after the call"):
        assert_equivalent(plain, twice, transforms=["backward"])(torch.randn(4, 3))


class TwiceCounted(nn.BatchNorm1d):
    """Counts each batch twice."""

    def forward(self, input):
        super().forward(input)
        return super().forward(input)


class Uncounted(nn.BatchNorm1d):
    """Loses what it should count."""

    def forward(self, input):
        return nn.functional.batch_norm(
            input, None, None, self.weight, self.bias, training=True
        )


class Rebound(Uncounted):
    """Counts in a new tensor, not in its own."""

    def forward(self, input):
        self.num_batches_tracked = torch.tensor(1)
        return super().forward(input)


def normalized(kind):
    return nn.Sequential(nn.Linear(3, 3), kind(3))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, TwiceCounted, Rebound])
def test_a_copy_of_a_module_is_compared_by_its_own_state(kind):
    """What becomes of the buffers of one, and what of those of the other."""
    plain, x = normalized(kind), seeded(4, 3, dtype=torch.float32)

    check = assert_equivalent(plain, copy.deepcopy(plain), transforms=["backward"])

    assert check(x).compared == ("backward",)


@pytest.mark.parametrize("kind", [TwiceCounted, Uncounted, Rebound])
def test_state_that_a_copy_changes_otherwise_is_found(kind):
    """An update that is lost, and one too many, in either."""
    plain, other = normalized(nn.BatchNorm1d), normalized(kind)
    other.load_state_dict(plain.state_dict())
    x = seeded(4, 3, dtype=torch.float32)

    for f, g in ((plain, other), (other, plain)):
        with pytest.raises(NotEquivalentError, match=r"self\.1\..* after the call"):
            assert_equivalent(f, g, transforms=["backward"])(x)


def counter_from(start):
    count = torch.tensor(start)

    def counted(x):
        return x * (count - start + 1)

    return counted


def test_other_state_of_the_same_name_is_no_copy():
    """Constants that differ are compared each with itself."""
    found = assert_equivalent(counter_from(1.0), counter_from(2.0))(seeded(3))

    assert found.excused == ()


def counting(x, count):
    count.add_(1)
    return x.sin()


def test_state_of_the_second_function_is_compared():
    """A change of what it alone reaches."""
    count = torch.zeros(())

    with pytest.raises(NotEquivalentError) as caught:
        assert_equivalent(torch.sin, lambda x: counting(x, count))(seeded(3))

    text = "closure variable `count` of the second function after the call (float32[])"
    assert text in str(caught.value)


@pytest.mark.parametrize("kind", ["transposed", "expanded", "sliced", "none"])
def test_cotangents_of_any_layout(kind):
    """A rule for cotangents is followed under backward."""
    check = assert_equivalent(
        block,
        remat(block, policy=policies.save_matmul_outputs),
        transforms=["backward"],
        cotangents=Cotangents((kind,)),
    )

    assert check(*arguments()).compared == ("backward",)


def test_arguments_that_share_memory():
    """Copies share memory as the arguments do; one tensor given twice is one."""
    base = seeded(4, 3)
    check = assert_equivalent(
        lambda x, y, z: x * y[0] + z, remat(lambda x, y, z: x * y[0] + z)
    )

    assert check(base, base[1:], base).excused == ()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_arguments_without_strides():
    """Sparse ones are copied, too."""
    x, sparse = seeded(3, 2).requires_grad_(), seeded(3, 3).to_sparse_csr()

    def product(x, sparse):
        return (sparse @ x).sin()

    check = assert_equivalent(
        product, lambda x, a: (a @ x).sin(), transforms=["backward"]
    )

    assert check(x, sparse).compared == ("backward",)
