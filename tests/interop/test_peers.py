"""The drop-ins for TransformerEngine, Megatron-LM and DeepSpeed, in one process.

`tests/storage/peer_checks.py` has what they shard, in worlds of several ranks.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported

from remat import RematWarning, SideEffectError, TraceError, random, remat
from remat._calls import cache, decorated
from remat._generators.trackers import is_tracker, registered
from remat.interop import deepspeed, megatron, transformer_engine
from remat.interop.deepspeed import _Configuration, _Current
from remat.storage import Keep
from tests.interop.peers import gradients
from tests.random.trackers import Tracker, generator_state
from tests.support import assert_bitwise, graphs_of_torch_compile

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]

Checkpoint = Callable[..., Any]


def plain_megatron(function: Any, *args: Any) -> Any:
    """Megatron's, without sharding."""
    return megatron.checkpoint(function, False, *args)


TE = transformer_engine.checkpoint
EACH: dict[str, Checkpoint] = {
    "transformer_engine": TE,
    "transformer_engine_no_reentry": functools.partial(TE, use_reentrant=False),
    "megatron": plain_megatron,
    "deepspeed": deepspeed.checkpoint,
}
each_peer = pytest.mark.parametrize("checkpoint", EACH.values(), ids=EACH)
keyword_peer = pytest.mark.parametrize(
    "checkpoint",
    [each for name, each in EACH.items() if name != "megatron"],
    ids=[name for name in EACH if name != "megatron"],
)


class Block(nn.Module):
    """Dropout, a buffer that moves, and what a keyword brings."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        return F.dropout(self.linear(self.norm(x)).tanh(), 0.3) * scale + x


def test_signatures_are_the_peers() -> None:
    """By position and by keyword."""
    assert list(inspect.signature(megatron.checkpoint).parameters) == [
        "function", "distribute_saved_activations", "args",
    ]  # fmt: skip
    assert list(inspect.signature(TE).parameters) == [
        "function", "args", "distribute_saved_activations", "get_rng_state_tracker",
        "tp_group", "use_reentrant", "kwargs",
    ]  # fmt: skip
    assert list(inspect.signature(deepspeed.configure).parameters) == [
        "mpu_", "deepspeed_config", "partition_activations", "contiguous_checkpointing",
        "num_checkpoints", "checkpoint_in_cpu", "synchronize", "profile",
    ]  # fmt: skip


@each_peer
def test_modules_have_their_gradients_draws_and_buffers(checkpoint: Checkpoint) -> None:
    """Bitwise those of the module itself; the generator and the buffers end alike."""
    block, twin = Block(), Block()
    twin.load_state_dict(block.state_dict())
    x = torch.randn(3, 4, requires_grad=True)

    torch.manual_seed(1)
    ours = gradients(checkpoint(block, x), x, *block.parameters())
    state = generator_state()
    torch.manual_seed(1)
    theirs = gradients(twin(x), x, *twin.parameters())

    assert_bitwise(ours, theirs)
    assert torch.equal(state, generator_state())
    assert_bitwise(tuple(block.buffers()), tuple(twin.buffers()))


@each_peer
def test_nothing_but_inputs_is_saved(checkpoint: Checkpoint) -> None:
    """The backward recomputes all of it."""
    x = torch.randn(3, 4, requires_grad=True)
    y = checkpoint(lambda x: x.sin().exp().tanh(), x)

    node: Any = y.grad_fn
    assert [each.shape for each in node.saved_tensors] == [x.shape]
    assert node.saved_tensors[0].data_ptr() == x.data_ptr()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@each_peer
def test_a_graph_of_torch_compile_holds_a_call(checkpoint: Checkpoint) -> None:
    """It recomputes there, and registers the tracker of the project that is in use."""
    torch.compiler.reset()
    x, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    backend, graphs = graphs_of_torch_compile()

    def loss(x: Tensor) -> Tensor:
        return checkpoint(lambda x: (x @ weight).sin().exp(), x).sum()

    compiled = torch.compile(loss, backend=backend, fullgraph=True)

    assert_bitwise(torch.autograd.grad(compiled(x), x), torch.autograd.grad(loss(x), x))
    # One of those in the backward is the derivative's own.
    assert [each["aten.mm.default"] for each in graphs] == [1, 2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_graph_of_torch_compile_registers_a_tracker() -> None:
    """Which is done while it is compiled."""
    torch.compiler.reset()
    tracker = Tracker()
    x = torch.randn(4, requires_grad=True)

    def get() -> Tracker:
        return tracker

    fun = torch.compile(
        lambda x: TE(torch.sin, x, get_rng_state_tracker=get),
        backend="aot_eager",
        fullgraph=True,
    )
    fun(x).sum().backward()

    assert x.grad is not None
    assert_bitwise(x.grad, x.detach().cos())
    assert is_tracker(tracker)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:storage.Offload:remat.RematWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_what_waits_in_host_memory_ends_a_graph() -> None:
    """With `fullgraph=True` the error says why; else it runs between two graphs."""
    torch.compiler.reset()
    deepspeed.configure(checkpoint_in_cpu=True)
    x = torch.randn(4, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return deepspeed.checkpoint(torch.sin, x.exp()).sum()

    with pytest.raises(Unsupported, match="its inputs wait in a storage"):
        torch.compile(loss, backend="aot_eager", fullgraph=True)(x)
    compiled = torch.compile(loss, backend="aot_eager")
    assert_bitwise(torch.autograd.grad(compiled(x), x), torch.autograd.grad(loss(x), x))


@each_peer
def test_functions_that_only_reach_a_parameter(checkpoint: Checkpoint) -> None:
    """No argument requires grad, as of a first layer: peers then lose all gradients."""
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4)
    y = checkpoint(lambda x: (x @ weight).tanh(), x)

    assert_bitwise(gradients(y, weight), gradients((x @ weight).tanh(), weight))


@keyword_peer
def test_tensors_by_keyword_have_their_gradients(checkpoint: Checkpoint) -> None:
    """Also where no other tensor has one."""

    def scaled(x: Tensor, *, scale: Tensor) -> Tensor:
        return (x * scale).sin().exp()

    x, scale = (torch.randn(3, requires_grad=True) for _ in range(2))
    only = checkpoint(scaled, x.detach(), scale=scale)

    assert only.requires_grad
    assert_bitwise(
        gradients(checkpoint(scaled, x, scale=scale), x, scale),
        gradients(scaled(x, scale=scale), x, scale),
    )
    assert_bitwise(
        gradients(only, scale), gradients(scaled(x.detach(), scale=scale), scale)
    )


@each_peer
def test_every_transform(checkpoint: Checkpoint) -> None:
    """Peers raise under torch.func."""
    x = torch.randn(3, dtype=torch.float64)

    def loss(x: Tensor, call: Checkpoint) -> Tensor:
        return call(lambda x: x.sin().exp(), x).square().sum()

    plain: Checkpoint = lambda function, *args: function(*args)  # noqa: E731
    for transform in (torch.func.grad, torch.func.hessian):
        ours = transform(lambda x: loss(x, checkpoint))(x)
        torch.testing.assert_close(ours, transform(lambda x: loss(x, plain))(x))


class Layer(nn.Module):
    """One of many equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sin().exp()


def megatrons_custom_forward(layer: Layer) -> Any:
    """A closure for each call, as Megatron-LM makes them."""

    def custom_forward(x: Tensor) -> Tensor:
        return layer(x)

    return custom_forward


@each_peer
@pytest.mark.parametrize(
    "made",
    [
        lambda layer: lambda x: layer(x),
        megatrons_custom_forward,
        lambda layer: layer.forward,
        lambda layer: functools.partial(Layer.forward, layer),
        lambda layer: layer,
    ],
    ids=["lambda", "closure", "method", "partial", "module"],
)
def test_a_function_that_is_made_at_each_call_is_traced_once(
    checkpoint: Checkpoint, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traces belong to the code, and equal layers share one."""
    traced: list[str] = []
    compile_call = cache.compile_call
    monkeypatch.setattr(
        cache,
        "compile_call",
        lambda *args: (traced.append("x"), compile_call(*args))[1],
    )
    monkeypatch.setattr(decorated, "_caches", {})
    for _ in range(3):
        layer, x = Layer(), torch.randn(4, requires_grad=True)
        y = checkpoint(made(layer), x)
        leaves = (x, layer.weight)
        assert_bitwise(gradients(y, *leaves), gradients(layer(x), *leaves))

    assert traced == ["x"]


@each_peer
def test_without_gradients_the_function_runs_as_it_is(checkpoint: Checkpoint) -> None:
    """And what cannot be traced is no error there."""
    x = torch.ones(3)
    with torch.no_grad():
        assert checkpoint(lambda x: x if x.sum().item() > 0 else -x, x) is x


@each_peer
def test_what_cannot_be_traced_says_how_to_run_again(checkpoint: Checkpoint) -> None:
    """A region that runs again is taken as it is."""

    def branching(x: Tensor) -> Tensor:
        return x.sin().exp() if x.sum() > 0 else x.cos().exp()

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(TraceError, match='engine="rerun"'):
        checkpoint(branching, x)
    y = checkpoint(remat(branching, engine="rerun"), x)

    assert_bitwise(gradients(y, x), gradients(branching(x), x))


@pytest.mark.parametrize("engine", ["rerun", "auto"])
def test_what_runs_again_is_not_sharded(
    monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    """Its inputs are kept as they are, and this is said in the peers' words."""
    monkeypatch.setattr(_Current, "value", _Configuration(checkpoint_in_cpu=True))
    region, x = remat(torch.sin, engine=engine), torch.ones(3)
    calls: list[Callable[[], Any]] = [
        lambda: deepspeed.checkpoint(region, x),
        lambda: megatron.checkpoint(region, True, x),
        lambda: transformer_engine.checkpoint(
            region, x, distribute_saved_activations=True
        ),
    ]

    words = (
        rf"in parts.*\(distribute_saved_.*engine='{engine}', .* Leave that option off"
    )
    for call in calls:
        with pytest.raises(ValueError, match=words):
            call()


def test_a_region_inside_bounds_the_recomputation() -> None:
    """What crosses to the backward is the drop-in's to say: nothing."""

    @remat
    def inner(x: Tensor) -> Tensor:
        return x.sin().exp().tanh()

    x = torch.randn(3, requires_grad=True)
    y = TE(inner, x)

    node: Any = y.grad_fn
    assert [each.shape for each in node.saved_tensors] == [x.shape]
    assert_bitwise(gradients(y, x), gradients(x.sin().exp().tanh(), x))


def trackers() -> tuple[Tracker, Tracker]:
    """Two trackers in one state."""
    found = Tracker(), Tracker()
    for each in found:
        each.add("tp", 7)
    return found


def dropped(x: Tensor, forked: Tracker) -> Tensor:
    """Draws from the state of a tracker."""
    with forked.fork("tp"):
        return F.dropout(x.sin(), 0.5).exp()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_transformer_engines_tracker_is_kept_by_value(use_reentrant: bool) -> None:
    """Draws come again, whatever happens to the tracker between forward and backward."""
    tracker, twin = trackers()
    x = torch.randn(64, requires_grad=True)
    for _ in range(2):
        y = TE(
            lambda x: dropped(x, tracker),
            x,
            get_rng_state_tracker=lambda: tracker,
            use_reentrant=use_reentrant,
        )
        expected = dropped(x, twin)
        state = tracker.get_states()["tp"]
        assert torch.equal(state, twin.get_states()["tp"])
        kept = state.clone()
        state.fill_(0)  # peers hold this very tensor
        assert_bitwise(gradients(y, x), gradients(expected, x))
        state.copy_(kept)
    assert sum(each is tracker for each in registered.values()) == 1


def test_transformer_engines_options_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM passes them by position, which TransformerEngine reads and deprecates."""
    tracker = Tracker()
    x = torch.randn(3, requires_grad=True)
    asked: list[Any] = []
    monkeypatch.setattr(
        transformer_engine,
        "shard_over",
        lambda group, args, kwargs: asked.append((group, args, kwargs)) or Keep(),
    )
    for sharded in (False, True):
        with pytest.warns(DeprecationWarning, match="by position.*by keyword"):
            y = TE(
                lambda x, scale: x.sin() * scale, sharded, lambda: tracker, None, x, 2
            )
        assert_bitwise(gradients(y, x), gradients(x.sin() * 2, x))
    assert asked == [(None, (x, 2), {})]
    assert any(each is tracker for each in registered.values())
    calls = TE(lambda flag, f, rest, x: f(x), True, torch.sin, "no group", x)
    assert torch.equal(calls, x.sin())


def test_a_registration_of_the_users_is_left_alone() -> None:
    """It is neither doubled nor ended."""
    tracker = Tracker()
    tracker.add("tp", 7)
    x = torch.randn(3, requires_grad=True)
    with random.register_tracker(tracker):
        TE(torch.sin, x, get_rng_state_tracker=lambda: tracker)
        assert sum(each is tracker for each in registered.values()) == 1

    assert not is_tracker(tracker)


def test_a_tracker_inside_a_region_is_registered_before_it() -> None:
    """The error says so; then the draws come again."""
    tracker, twin = trackers()

    @remat(rng="preserve")
    def outer(x: Tensor) -> Tensor:
        inner = lambda x: dropped(x, tracker)  # noqa: E731
        return TE(inner, x * 2, get_rng_state_tracker=lambda: tracker).sin()

    x = torch.randn(64, requires_grad=True)
    with pytest.raises(
        SideEffectError, match=r"random\.register_tracker\(tracker\) bef"
    ):
        outer(x)
    with random.register_tracker(tracker):
        ours = gradients(outer(x), x)

    assert_bitwise(ours, gradients(dropped(x * 2, twin).sin(), x))


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        (plain_megatron, "megatron.core.tensor_parallel.random"),
        (
            deepspeed.checkpoint,
            "deepspeed.runtime.activation_checkpointing.checkpointing",
        ),
    ],
    ids=["megatron", "deepspeed"],
)
def test_a_projects_own_tracker_is_preserved(
    checkpoint: Checkpoint, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the project is imported; a module of its name stands for it."""
    tracker: Any = Tracker()
    tracker.add("tp", 7)
    loaded: Any = types.ModuleType(name)
    loaded.get_cuda_rng_tracker = lambda: tracker
    monkeypatch.setitem(sys.modules, name, loaded)

    def dropped(x: Tensor) -> Tensor:
        with tracker.fork("tp"):
            return F.dropout(x.sin(), 0.5).exp()

    x = torch.randn(64, requires_grad=True)
    start = tracker.get_states()["tp"].clone()
    ours = gradients(checkpoint(dropped, x), x)
    tracker.set_states({"tp": start})

    assert_bitwise(ours, gradients(dropped(x), x))


def test_megatrons_group_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensor-parallel group where that is initialized, else all ranks."""
    state: Any = types.ModuleType("megatron.core.parallel_state")
    state.model_parallel_is_initialized = lambda: False
    state.get_tensor_model_parallel_group = lambda: "its group"
    assert megatron._tensor_parallel_group() is None
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    assert megatron._tensor_parallel_group() is None
    state.model_parallel_is_initialized = lambda: True

    assert megatron._tensor_parallel_group() == "its group"


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x: TE(f, x, distribute_saved_activations=True),
        lambda f, x: megatron.checkpoint(f, True, x),
    ],
    ids=["transformer_engine", "megatron"],
)
def test_sharding_needs_process_groups(call: Checkpoint) -> None:
    """Without them it is an error, that says so."""
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialized"):
        call(torch.sin, torch.ones(3, requires_grad=True))


def test_megatron_takes_its_flag_second() -> None:
    """A call as of torch's checkpoint does not take a tensor for it."""
    wrong: Any = torch.ones(3)
    with pytest.raises(
        TypeError, match="takes True or False after the function, not a"
    ):
        megatron.checkpoint(torch.sin, wrong)


def test_megatrons_flag_may_be_left_unsaid() -> None:
    """Its `TransformerConfig` says None by default, and means False."""
    x = torch.randn(3, requires_grad=True)
    y = megatron.checkpoint(lambda x: x.sin().sin(), None, x)

    expected = torch.autograd.grad(x.sin().sin().sum(), x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected[0])


@pytest.mark.parametrize("option", ["determinism_check", "debug"])
def test_options_that_transformer_engine_passes_on_warn(option: str) -> None:
    """They have no effect, and do not reach the function."""
    options: Any = {option: "none"}
    with pytest.warns(RematWarning, match=rf"\({option}=\.\.\.\): has no effect"):
        TE(lambda x: x.sin().exp(), torch.ones(3, requires_grad=True), **options)


@pytest.mark.parametrize("is_preserved", [True, False])
def test_transformer_engine_takes_what_torch_calls_preserve_rng_state(
    is_preserved: bool,
) -> None:
    """It goes to torch's checkpoint there, not to a function without modules of its own."""
    x = torch.randn(3, requires_grad=True)
    torch.manual_seed(0)
    y = TE(F.dropout, x, preserve_rng_state=is_preserved)
    torch.manual_seed(0)
    assert torch.equal(y, F.dropout(x))


def test_contexts_around_the_recomputation_are_refused() -> None:
    """No Python runs there."""
    with pytest.raises(
        ValueError, match="none of its Python code runs in the backward"
    ):
        TE(torch.sin, torch.ones(3), context_fn=lambda: None)
