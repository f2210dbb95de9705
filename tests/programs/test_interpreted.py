"""Programs of small tensors run in torch's own interpreter: the same steps, the same bits."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vmap

from remat import SavedTensorModifiedError, checkpoint_name, random, remat
from remat._graph.meta import TensorMeta
from remat._graph.values import Graph, Ref, Value
from remat._programs.interpreted import interpreted_function, overhead_dominates
from remat._torch import modes, tensors
from tests.functions import FUNCTIONS
from tests.inspection import inputs_of, programs
from tests.support import Heard, LiveBytes, deterministic

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore::remat.RematWarning"),
    # Forward mode's first use compiles torch's own formulas with it.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]

ATEN = torch.ops.aten


def rand(*shape):
    """Numbers of a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(shape, generator=generator, device="cpu") - 0.5
    return drawn.to(torch.get_default_device())


def heard(run, inputs):
    """What a program returns, and the operators that it runs."""
    with Heard() as listener, modes.below_autograd():
        outputs = run(list(inputs))
    return outputs, listener.names


def one_step(op, *args, inputs, **kwargs):
    """A graph of one operator."""
    given = tuple(Value(None, meta=TensorMeta.of(tensor)) for tensor in inputs)
    meta = TensorMeta.of(inputs[0])
    step = Value(op, args, tuple(kwargs.items()), meta=meta)
    return Graph((*given, step), len(inputs), (Ref(len(inputs)),))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
def test_the_interpreter_runs_what_python_runs(function):
    """The same operators in the same order, and the same bits."""
    for program in programs(function.fun, *function.make_args()):
        graph = program.graph
        run = interpreted_function(graph)
        if run is None:
            continue
        expected = heard(program._compiled(graph), inputs_of(program))

        found = heard(run, inputs_of(program))

        assert found[1] == expected[1]
        for ours, theirs in zip(found[0], expected[0], strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or tensors.same_bits(ours, theirs)


def block(x, weight, norm):
    """Attention and a GELU, after a layer norm."""
    h = F.layer_norm(x, x.shape[-1:], norm)
    q, k, v = (h @ weight).chunk(3, -1)
    return x + F.gelu(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_a_transformer_block_is_run_there():
    """What the interpreter is for, it takes: both programs."""
    for program in programs(block, rand(2, 8, 16), rand(16, 48), rand(16)):
        assert interpreted_function(program.graph) is not None


def waves(x):
    """A function of 40 operators."""
    for _ in range(40):
        x = x.sin()
    return x


@pytest.mark.parametrize(
    ("fun", "size", "gains"),
    [(waves, 3, True), (torch.sin, 3, False), (waves, 2**18 + 1, False)],
    ids=["long", "short", "of large tensors"],
)
def test_a_long_program_of_small_tensors_gains(fun, size, gains):
    """A call into C++ costs what some thirty operators save, and memory may run short there."""
    (forward, _) = programs(fun, torch.zeros(size))

    assert overhead_dominates(forward.graph, fewest_steps=32) is gains


def test_a_region_runs_there():
    """Both programs by the interpreter give the bits of the plain function."""
    results = []
    for fun in (waves, remat(waves)):
        x = rand(3).requires_grad_()
        y = fun(x)
        results.append((y, *torch.autograd.grad(y.sum(), x)))

    for found, expected in zip(*results, strict=True):
        assert tensors.same_bits(found, expected)


LITERALS = {
    "a memory format": (ATEN.clone.default, (), {"memory_format": torch.channels_last}),
    "a dtype": (ATEN._to_copy.default, (), {"dtype": torch.float64}),
    "a device": (ATEN._to_copy.default, (), {"device": torch.device("cpu")}),
    "a whole number for a fraction": (ATEN.leaky_relu.default, (2,), {}),
    "infinity": (ATEN.clamp.default, (-float("inf"), 0.25), {}),
    "a number": (ATEN.mul.Scalar, (3,), {}),
    "no list": (ATEN.sum.dim_IntList, (None,), {"keepdim": True}),
    "an empty list": (ATEN.sum.dim_IntList, ([],), {}),
    "a text": (ATEN.gelu.default, (), {"approximate": "tanh"}),
    "sizes": (ATEN.view.default, ([2, -1],), {}),
    "truth": (ATEN.cumsum.default, (0,), {"dtype": torch.float64}),
    "numbers of a list": (ATEN.constant_pad_nd.default, ([1, 2], 0.5), {}),
}


@pytest.mark.parametrize(("op", "args", "kwargs"), LITERALS.values(), ids=LITERALS)
def test_literals_arrive_as_they_are_written(op, args, kwargs):
    """Every kind of literal that the schemas of operators know."""
    x = rand(2, 3, 4, 5)
    run = interpreted_function(one_step(op, Ref(0), *args, inputs=[x], **kwargs))

    assert run is not None
    (found,) = run([x])

    expected = op(x, *args, **kwargs)
    assert TensorMeta.of(found) == TensorMeta.of(expected)
    assert tensors.same_bits(found, expected)


TOO_MUCH = {
    "constants": (lambda x: x * torch.tensor([0.5]), torch.zeros(3)),
    "draws": (F.dropout, torch.zeros(3)),
    "parts of numbers": (lambda x: x.real.sin(), torch.zeros(3, dtype=torch.complex64)),
    "operators of other libraries": (
        lambda x: random.dropout(random.key(0), x, rate=0.5),
        torch.zeros(3),
    ),
}


@pytest.mark.parametrize(("fun", "x"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_what_the_interpreter_does_not_take(fun, x):
    """It sets no generator, resolves no conjugate, has no constants, and runs no Python."""
    (program, _) = programs(fun, x)

    assert interpreted_function(program.graph) is None


def test_an_error_is_the_operators_own():
    """Type and text are those of a call from Python, where an operator may fail."""

    def looked_up(table, index):
        return F.embedding(index, table).sin()

    table, region = rand(4, 3).requires_grad_(), remat(looked_up)
    good, bad = torch.tensor([1, 2]), torch.tensor([1, 9])
    with pytest.raises(IndexError) as expected:
        looked_up(table, bad)
    region(table, good)

    with pytest.raises(IndexError) as raised:
        region(table, bad)

    assert str(raised.value) == str(expected.value)
    assert torch.equal(region(table, good), looked_up(table, good))


def test_the_switch_of_the_interpreter_is_put_back():
    """Programs run as written; the user's own scripted functions are optimized as ever."""
    (_, backward) = programs(block, rand(2, 8, 16), rand(16, 48), rand(16))
    run = interpreted_function(backward.graph)
    assert run is not None
    before = torch._C._get_graph_executor_optimize()

    run(inputs_of(backward))

    assert torch._C._get_graph_executor_optimize() is before


def test_each_value_is_let_go_after_its_last_use():
    """Inputs too: the peak is that of the same program in Python."""

    def steps(x, y, z):
        return (x.sin() + y).cos() * z

    peaks = []
    (program, _) = programs(steps, *[rand(100)] * 3)
    for run in (interpreted_function(program.graph), program._compiled(program.graph)):
        assert run is not None
        with LiveBytes() as live, modes.below_autograd():
            given = [rand(100).add(place) for place in range(3)]
            run(given)
        assert given == []
        peaks.append(live.peak)

    assert peaks == [4 * 400, 4 * 400]


def test_a_literal_of_no_schema_is_left_to_python():
    """The overload that the interpreter would take must be the one of the graph."""
    graph = one_step(ATEN.add.Tensor, Ref(0), 1, inputs=[rand(3)])

    assert interpreted_function(graph) is None


def rows(x, weight):
    """Of each row, with names and views."""
    for _ in range(6):
        x = checkpoint_name(torch.tanh(x @ weight), "h")
        x = x.softmax(-1) * x.cos() + x.flip(-1)
    return x


def gradients(fun, x, weight):
    """Of the inputs, each once."""
    given = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    return torch.autograd.grad(fun(*given).sum(), given)


def test_threads_share_an_interpreted_program():
    """Called from several at once, and traced by the first, it gives each its own bits."""
    weight, region = rand(6, 6), remat(rows)
    inputs = [rand(4, 6) + place for place in range(4)]
    expected = [gradients(rows, x, weight) for x in inputs]
    start, found = threading.Barrier(len(inputs)), {}
    switches = set()

    def work(place):
        start.wait()
        found[place] = [gradients(region, inputs[place], weight) for _ in range(20)]
        switches.add(torch._C._get_graph_executor_optimize())

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    (_, backward) = region.programs(
        inputs[0].clone().requires_grad_(), weight.clone().requires_grad_()
    )
    assert interpreted_function(backward.graph) is not None
    assert overhead_dominates(backward.graph, fewest_steps=32)
    for place, each in enumerate(expected):
        for got in found[place]:
            assert all(map(tensors.same_bits, got, each))
    assert switches == {torch._C._get_graph_executor_optimize()}


def test_a_thread_that_fails_leaves_the_others_alone():
    """An input that was changed after its call fails there, and there alone."""
    weight, region = rand(6, 6), remat(rows)
    expected = gradients(rows, rand(4, 6), weight)
    found, raised = [], []

    def fail():
        for _ in range(10):
            x = rand(4, 6).requires_grad_() * 1
            y = region(x, weight)
            x.add_(1)
            try:
                y.sum().backward()
            except SavedTensorModifiedError as error:
                raised.append(error)

    def work():
        found.extend(gradients(region, rand(4, 6), weight) for _ in range(10))

    threads = [threading.Thread(target=each) for each in (fail, work)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(raised) == 10
    assert len(found) == 10
    for got in found:
        assert all(map(tensors.same_bits, got, expected))


@pytest.mark.parametrize("is_first", [True, False], ids=["traced_there", "met_later"])
def test_deterministic_algorithms(is_first):
    """The operators choose by the switch as they run, and it stays as it is."""
    weight, region = rand(6, 6), remat(rows)
    if not is_first:
        gradients(region, rand(4, 6), weight)

    with deterministic():
        expected = gradients(rows, rand(4, 6), weight)
        found = gradients(region, rand(4, 6), weight)
        assert torch.are_deterministic_algorithms_enabled()

    assert all(map(tensors.same_bits, found, expected))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: vmap(grad(lambda x: f(x).sum()))(x),
        lambda f, x: grad(lambda x: vmap(f)(x).sum())(x),
        lambda f, x: vmap(vmap(grad(lambda x: f(x).sum())))(torch.stack([x, x + 1])),
        lambda f, x: grad(lambda x: grad(lambda x: f(x).sum())(x).square().sum())(x),
        lambda f, x: jvp(grad(lambda x: f(x).sum()), (x,), (x.cos(),))[1],
    ],
    ids=["vmap_grad", "grad_vmap", "vmap_vmap_grad", "grad_grad", "jvp_grad"],
)
def test_transforms_of_an_interpreted_program(transform):
    """The programs of each transform run there too, and agree to rounding."""
    weight, x = rand(6, 6).double(), rand(4, 6).double()
    region = remat(rows)

    found = transform(lambda x: region(x, weight), x)

    torch.testing.assert_close(found, transform(lambda x: rows(x, weight), x))
