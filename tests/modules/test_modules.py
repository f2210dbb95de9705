"""`modules.apply`: regions in a model that is there already, and nothing else of it changed."""

import copy
import io
import pickle
from collections import Counter
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from remat import (
    RematWarning,
    SideEffectError,
    TraceError,
    disabled,
    modules,
    policies,
    remat,
    saved_residuals,
)
from tests.modules.models import WIDTH, Block, Mlp, Model, a_model, a_step, each_option
from tests.support import (
    LiveBytes,
    OperatorCounter,
    assert_bitwise,
    assert_close,
    seeded,
)

pytestmark = [
    pytest.mark.contract,
    # Forward mode itself compiles decompositions with torch.jit.script.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]


def regions_in(model):
    """The names of the modules that have a region."""
    return [name for name, each in model.named_modules() if "forward" in vars(each)]


LAYERS = ["layers.0", "layers.1", "layers.2"]
WHERES = {
    "a class": (Block, LAYERS),
    "a base class": (nn.modules.batchnorm._BatchNorm, [f"{n}.norm" for n in LAYERS]),
    "classes": ((Mlp, nn.Dropout), [f"{n}.{p}" for n in LAYERS for p in ("mlp", "dropout")]),
    "a glob": ("layers.*", LAYERS),
    "a glob further in": ("layers.*.mlp", [f"{n}.mlp" for n in LAYERS]),
    "a glob of any depth": ("**.up", [f"{n}.mlp.up" for n in LAYERS]),
    "a glob in a part": ("layers.[02]", ["layers.0", "layers.2"]),
    "a name": ("head", ["head"]),
    "the model": ("", [""]),
    "a predicate": (lambda name, module: "1" in name and hasattr(module, "index"), ["layers.1"]),
}  # fmt: skip


@pytest.mark.parametrize("where", WHERES)
def test_where(where):
    """A class, classes, a glob by parts, or a predicate says which modules are meant."""
    place, names = WHERES[where]

    assert regions_in(modules.apply(a_model(), place)) == names


@pytest.mark.parametrize(
    ("every", "names"), [(1, LAYERS), (2, LAYERS[::2]), (3, LAYERS[:1])]
)
def test_every(every, names):
    """Every k-th of the matches, from the first on."""
    assert regions_in(modules.apply(a_model(), Block, every=every)) == names


def test_a_module_of_two_names_matches_once():
    """A shared module is found by each of its names, and counted once."""
    model = a_model()
    model.layers[2] = model.layers[0]

    assert regions_in(modules.apply(model, "layers.2")) == ["layers.0"]
    assert (
        regions_in(modules.apply(modules.remove(model), Block, every=2)) == LAYERS[:1]
    )


@pytest.mark.parametrize(
    "where", [nn.Conv2d, "layer.*", "*.mlp", lambda name, module: False]
)
def test_no_match_warns(where):
    """What has no effect says so."""
    with pytest.warns(
        RematWarning, match="matches no module of the model.*named_modules"
    ):
        modules.apply(a_model(), where)


def test_a_container_warns():
    """A ModuleList is never called: a region around it would never run."""
    with pytest.warns(
        RematWarning, match=r'`layers`, a ModuleList, has no `forward`.*"layers\.\*"'
    ):
        modules.apply(a_model(), "layers")


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
@pytest.mark.parametrize("where", [torch.jit.ScriptModule, "*"], ids=["class", "glob"])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_script_module_is_refused(where, engine):
    """No region can look into it; nothing of the model is changed."""
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))

    with pytest.raises(
        TraceError,
        match=r"matches `1`, a RecursiveScriptModule. TorchScript's .*gradients.* Use the "
        r"module from before torch.jit.script",
    ):
        modules.apply(model, where, engine=engine)

    assert "forward" not in vars(model[0])
    assert modules.remove(model) is model


@pytest.mark.parametrize(
    ("where", "found"),
    [
        (3, "3."),
        (None, "None."),
        ((Block, "layers.*"), "'layers.*')."),
        (["layers.0", "layers.1"], "['layers.0', 'layers.1']."),
        (lambda: True, "<lambda>"),
        (Block(0), "got a Block. It is"),
    ],
)
def test_a_place_that_is_none(where, found):
    """Anything else is refused, with what it can be; a module is not printed whole."""
    with pytest.raises(TypeError) as raised:
        modules.apply(a_model(), where)

    text = str(raised.value)
    assert "a class of modules, a tuple of classes, a glob" in text
    assert found in text


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"police": 1}, TypeError, "police"),
        ({"engine": "fast"}, ValueError, "engine='fast'"),
        ({"every": 0}, ValueError, r"every=\.\.\.\): got 0\..* at least 1"),
        ({"every": 1.5}, TypeError, r"got 1\.5, of type float.* an int of at least 1"),
        ({"every": True}, TypeError, "got True, of type bool"),
    ],
)
def test_wrong_options(options, error, text):
    """Options are those of `remat`, and a wrong one leaves the model as it was."""
    model = a_model()

    with pytest.raises(error, match=text):
        modules.apply(model, Block, **options)
    assert regions_in(model) == []


@each_option
@pytest.mark.parametrize("where", ["layers.*", "layers.*.mlp", ""])
def test_steps_are_those_of_the_plain_model(where, options):
    """Outputs, gradients and buffers over several steps, training and not, are the same."""
    plain, model = a_model(), modules.apply(a_model(), where, **options)

    for seed, training in enumerate([True, True, False, True]):
        expected = a_step(plain.train(training), seed=seed)
        assert_bitwise(a_step(model.train(training), seed=seed), expected)


@each_option
def test_generators_end_where_they_would_have_ended(options):
    """Dropout is drawn again in the backward, and nobody else notices."""
    plain, model = a_model(), modules.apply(a_model(), Block, **options)
    a_step(plain)
    expected = torch.rand(2)

    a_step(model)

    assert_bitwise(torch.rand(2), expected)


def test_frozen_and_tied_weights():
    """Frozen weights get no gradient; a tied one gets both of its contributions."""

    def build():
        model: Any = Model()
        for layer in model.layers:
            layer.mlp.up.requires_grad_(False)
        model.layers[2].mlp.up.weight = model.layers[0].mlp.up.weight
        model.layers[1].mlp.down = model.layers[0].mlp.down
        return model

    plain, model = a_model(build), modules.apply(a_model(build), Block)
    expected, found = a_step(plain), a_step(model)

    assert found[2]["layers.0.mlp.up.weight"] is None
    # The tied weight's two contributions may be added in another order.
    assert_close(found, expected)
    assert_bitwise(found[0], expected[0])


def test_low_rank_adapters_inside():
    """Adapters that learn inside frozen layers, put there after `apply`."""

    class Adapted(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear.requires_grad_(False)
            self.down = nn.Parameter(seeded(2, linear.in_features))
            self.up = nn.Parameter(seeded(linear.out_features, 2))

        def forward(self, x):
            return self.linear(x) + x @ self.down.T @ self.up.T

    def adapted(model):
        model.requires_grad_(False)
        for layer in model.layers:
            layer.mlp.up = Adapted(layer.mlp.up)
        return model

    plain, model = adapted(a_model()), adapted(modules.apply(a_model(), Block))
    expected, found = a_step(plain), a_step(model)

    assert_bitwise(found, expected)
    assert sum(each is not None for each in found[2].values()) == 6


def test_retain_grad():
    """The gradient of a block's output is there if it is asked for."""
    kept = []
    for model in (a_model(), modules.apply(a_model(), Block)):
        torch.manual_seed(1)
        hidden = model.layers[0](model.embed(seeded(6, WIDTH)))
        hidden.retain_grad()
        model.layers[1](hidden).square().sum().backward()
        kept.append(hidden.grad)

    assert_bitwise(*kept)


def test_under_torch_func():
    """A model with regions is a function of its parameters, as before."""
    plain, model = a_model().eval(), modules.apply(a_model(), Block).eval()
    parameters = dict(model.named_parameters())
    xs = seeded(4, 3, WIDTH)

    def per_example(net):
        def loss(parameters, x):
            return torch.func.functional_call(net, parameters, (x,)).square().sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, xs)

    assert_close(per_example(model), per_example(plain))


def held_and_recomputed(model):
    """Bytes held between forward and backward, and operators that the backward runs."""
    a_step(model)
    x = seeded(6, WIDTH).requires_grad_()
    with LiveBytes() as memory:
        loss = model(x).square().sum()
        held = memory.live
    with OperatorCounter() as backward:
        loss.backward()
    return held, backward.counts


def test_held_bytes():
    """A block of matmuls and tanh holds its input alone, which its neighbor made."""
    value = 6 * WIDTH * 8

    def build():
        return nn.Sequential(*(Mlp() for _ in range(4)))

    plain, _ = held_and_recomputed(a_model(build))
    held, counts = held_and_recomputed(modules.apply(a_model(build), Mlp))

    # The outputs of four blocks, and the loss; without regions also two wide values each.
    assert held == 4 * value + 8
    assert plain == held + 4 * 2 * 4 * value
    assert counts["aten.tanh"] == 4


def test_every_other_layer_holds_in_between():
    """The layers that are left out hold what they always held."""
    value = 6 * WIDTH * 8
    model = modules.apply(
        nn.Sequential(*(Mlp() for _ in range(4))).double(), Mlp, every=2
    )

    held, counts = held_and_recomputed(model)

    assert held == 4 * value + 8 + 2 * 2 * 4 * value
    assert counts["aten.tanh"] == 2


def test_nested_matches():
    """The outer region crosses with its input alone; the inner ones run inside it."""

    def build():
        return nn.Sequential(nn.Sequential(Mlp(), Mlp(), Mlp()))

    plain, model = a_model(build), a_model(build)
    modules.apply(model, "*")
    modules.apply(model, "*.*")

    assert_bitwise(a_step(model), a_step(plain))
    held, counts = held_and_recomputed(model)
    assert held == 6 * WIDTH * 8 + 8
    # Once for the outer's recomputation, of all but the last, and once for each inner one.
    assert counts["aten.tanh"] == 2 + 3


def test_equal_layers_share_one_trace():
    """Thirty-two layers of one class, with an index each, are traced once."""
    model = modules.apply(Model(32).double(), Block, verify=True, policy=policies.save_matmul_outputs)  # fmt: skip

    a_step(model)
    a_step(model)

    # The first layer's input is no different: embed's output requires grad as the others.
    info = cast("Any", model.layers[31].forward).cache_info()
    assert (info.misses, info.hits) == (1, 63)


def test_looking():
    """What a block holds is listed by the names that the block has for it."""
    model = modules.apply(a_model(), Block, policy=policies.save_matmul_outputs)
    x = seeded(6, WIDTH).requires_grad_()

    residuals = model.layers[0].forward.saved_residuals(x)

    paths = {each.path for each in residuals if each.path}
    assert {"x", "self.mlp.up.weight", "self.norm.weight"} <= paths
    ops = Counter(each.op for each in residuals if not each.path)
    assert ops == {"aten.addmm": 2, "aten.clone": 3, "remat.rng_state": 1}
    # Two in each of three layers, and the output of the embedding.
    assert sum(each.op == "aten.addmm" for each in saved_residuals(model, x)) == 7


def test_names_and_classes():
    """State dict, parameter names, classes and the printed model do not change."""
    plain, model = a_model(), modules.apply(a_model(), Block)

    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]  # fmt: skip
    assert [n for n, _ in model.named_modules()] == [
        n for n, _ in plain.named_modules()
    ]
    assert all(type(layer) is Block for layer in model.layers)
    assert repr(model) == repr(plain)
    model.load_state_dict(copy.deepcopy(plain.state_dict()), assign=True)
    assert_bitwise(a_step(model), a_step(plain))


def test_remove_undoes_it():
    """Each module's attributes are those of before."""
    model = a_model()
    before = [dict(vars(each)) for each in model.modules()]

    modules.remove(modules.apply(modules.apply(model, Block), "layers.*.mlp"))

    assert [dict(vars(each)) for each in model.modules()] == before


def test_remove_leaves_what_others_put_there():
    """A `forward` that somebody had assigned is wrapped, and comes back."""
    model = a_model().eval()
    layer = model.layers[0]
    own = layer.forward

    def doubled(x):
        return own(x, scale=2.0)

    layer.forward = doubled
    expected = a_step(model)[0]
    modules.apply(model, Block)

    assert_bitwise(a_step(model)[0], expected)
    modules.remove(model)
    assert vars(layer)["forward"] is doubled
    assert regions_in(model) == ["layers.0"]


def test_applied_again_the_options_are_new():
    """The second `apply` takes the place of the first; it is not nested in it."""
    model = modules.apply(nn.Sequential(Mlp(), Mlp()).double(), Mlp)

    modules.apply(model, Mlp, policy=policies.everything_saveable)
    _, counts = held_and_recomputed(model)

    assert counts["aten.tanh"] == 0
    assert regions_in(modules.remove(model)) == []


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: torch.load(_saved(model), weights_only=False),
}


def _saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies(copied):
    """A copy has regions of its own, which run its own parameters."""
    model = modules.apply(a_model(), Block, policy=policies.save_matmul_outputs)
    plain = a_model()

    twin = copied(model)
    with torch.no_grad():
        for each in (*twin.parameters(), *plain.parameters()):
            each.mul_(1.5)

    assert regions_in(twin) == LAYERS
    assert twin.layers[0].forward.settings == model.layers[0].forward.settings
    assert_bitwise(a_step(twin), a_step(plain))
    assert all(each.grad is None for each in model.parameters())


def test_a_shallow_copy_gets_its_own_by_apply():
    """`copy.copy` shares the attribute `forward`, until `apply` looks at the copy."""
    model = modules.apply(a_model(), Block)
    twin = copy.copy(model.layers[0])

    modules.apply(twin, "")

    assert twin.forward.__wrapped__.__self__ is twin
    assert model.layers[0].forward.__wrapped__.__self__ is model.layers[0]


def test_to_another_dtype():
    """`to` changes the parameters, and the region follows."""
    plain, model = a_model(), modules.apply(a_model(), Block)

    for dtype in (torch.float64, torch.float32):
        for net in (plain, model):
            net.to(dtype).zero_grad()
        assert_bitwise(a_step(model), a_step(plain))


def test_on_the_meta_device():
    """Nothing is drawn there, and there is no generator to keep the state of."""
    model = modules.apply(a_model(), Block).to("meta")
    out = model(torch.empty(4, WIDTH, device="meta"))
    out.sum().backward()

    assert out.device.type == "meta"
    assert all(each.grad.device.type == "meta" for each in model.parameters())


def test_lazy_modules_are_called_once_before():
    """A trace has no tensors to make parameters of; a region on the lazy module itself has."""
    x = torch.randn(3, 5)
    model = nn.Sequential(nn.Sequential(nn.LazyLinear(4), nn.Tanh()))
    modules.apply(model, "0")
    with pytest.raises(TraceError, match=r"with remat\.disabled"):
        model(x)
    with disabled():
        model(x)
    model(x).sum().backward()
    alone = modules.apply(nn.Sequential(nn.LazyLinear(4)), "0")
    alone(x).sum().backward()

    for each in (model, alone):
        weight, bias = [p.grad for p in each.parameters()]
        assert weight is not None
        assert bias is not None
        assert (weight.shape, bias.shape) == ((4, 5), (4,))


def test_hooks_of_a_module_with_a_region():
    """They run around the region, once a call and once a backward, with real tensors."""
    model = modules.apply(a_model(), Block)
    seen = Counter()

    def note(kind):
        def hook(module, *tensors):
            seen[kind] += 1
            assert not any(
                each.is_meta for each in tensors[0] if isinstance(each, Tensor)
            )

        return hook

    layer = model.layers[1]
    layer.register_forward_pre_hook(note("before"))
    layer.register_forward_hook(note("after"))
    layer.register_full_backward_pre_hook(note("before the backward"))
    layer.register_full_backward_hook(note("after the backward"))
    a_step(model)
    a_step(model)

    assert set(seen.values()) == {2}
    assert len(seen) == 4


def test_hooks_inside_a_region_are_traced():
    """One that computes is part of the function; one that keeps a tensor is refused."""
    plain, model = a_model(), modules.apply(a_model(), Block)
    for net in (plain, model):
        net.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 2)
    assert_bitwise(a_step(model), a_step(plain))

    kept = []
    model.layers[0].mlp.register_forward_hook(
        lambda module, args, out: kept.append(out)
    )
    with pytest.raises(SideEffectError, match="kept"):
        a_step(model)


def _doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_torch_jit_script_is_told_what_to_script():
    """It compiles the Python code of a method, and a region is an object."""
    model = modules.apply(nn.Sequential(nn.Linear(2, 2)), "0")

    with pytest.raises(AttributeError, match=r"no plain function.*modules\.remove"):
        torch.jit.script(model)

    x = seeded(3, 2).float()
    expected = model(x)
    assert_bitwise(torch.jit.script(modules.remove(model))(x), expected)
    assert_bitwise(torch.jit.script(remat(_doubled))(x), x * 2)


def test_torch_func_of_a_module_with_a_hook_inside_is_refused():
    """torch.func takes no full backward hook; one on the region's own module runs around it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    inner = model[1].register_full_backward_hook(lambda *_: None)
    modules.apply(model, lambda name, _: not name)
    x = seeded(3, 2).float()
    with pytest.raises(TraceError, match=r"full backward hook.*region of its own"):
        torch.func.jvp(model, (x,), (x,))

    inner.remove()
    model.register_full_backward_hook(lambda *_: None)
    found = torch.func.jvp(model, (x,), (x,))

    assert_bitwise(found[0], model(x))
