"""`modules.apply` where a module makes its weights anew: parametrizations, norms, pruning."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from remat import SideEffectError, chain, modules, remat, schedules
from tests.modules.models import WIDTH, a_model, a_step, each_option
from tests.support import assert_bitwise, assert_close, seeded

pytestmark = [
    pytest.mark.contract,
    # Forward mode itself compiles decompositions with torch.jit.script.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
]


@pytest.mark.parametrize(
    "normalized",
    [parametrizations.spectral_norm, parametrizations.weight_norm],
    ids=["spectral_norm", "weight_norm"],
)
@each_option
def test_parametrizations(normalized, options):
    """A power iteration advances once a forward, and not again in the recomputation."""

    def build():
        return nn.Sequential(
            nn.Sequential(normalized(nn.Linear(WIDTH, WIDTH)), nn.Tanh())
        )

    plain, model = a_model(build), modules.apply(a_model(build), "*", **options)

    for seed in range(3):
        assert_bitwise(a_step(model, seed=seed), a_step(plain, seed=seed))


@each_option
def test_parametrizations_that_are_kept(options):
    """Each region makes its own inside of torch's `cached()`, around a plain use of them."""

    def build():
        inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        parametrizations.weight_norm(inner[0])
        return nn.Sequential(inner, inner[0], inner)

    plain, model = a_model(build).double(), a_model(build).double()
    modules.apply(model, "0", **options)
    found = []
    for each in (plain, model):
        with parametrize.cached():
            loss = each(seeded(3, WIDTH)).sin().sum()
            found.append(torch.autograd.grad(loss, [*each.parameters()]))

    assert_close(*found)


def pruned(module: nn.Linear) -> nn.Linear:
    prune.l1_unstructured(module, "weight", 0.3)  # type: ignore[no-untyped-call]
    return module


OLDER = [nn.utils.spectral_norm, nn.utils.weight_norm, pruned]
ignores_age = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")


@ignores_age
@pytest.mark.parametrize("hooked", OLDER, ids=["spectral", "weight", "pruned"])
@pytest.mark.parametrize("where", ["*", nn.Linear], ids=["around", "own"])
@each_option
def test_a_weight_that_a_hook_of_torchs_assigns(where, hooked, options):
    """The older norms and pruning make an attribute anew at each call, as without regions."""

    def build():
        return nn.Sequential(nn.Sequential(hooked(nn.Linear(WIDTH, WIDTH)), nn.Tanh()))

    plain, model = a_model(build), modules.apply(a_model(build), where, **options)

    for seed, training in enumerate([True, False, True]):
        expected = a_step(plain.train(training), seed=seed)
        assert_bitwise(a_step(model.train(training), seed=seed), expected)
        assert_bitwise(model[0][0].weight.detach(), plain[0][0].weight.detach())


@ignores_age
@pytest.mark.parametrize("hooked", OLDER, ids=["spectral", "weight", "pruned"])
def test_who_reads_such_a_weight_gets_its_gradient(hooked):
    """The attribute is made of the parameters, as plain code leaves it; two modules too."""

    def build():
        return nn.Sequential(*(hooked(nn.Linear(WIDTH, WIDTH)) for _ in range(2)))

    def gradients(model):
        x = seeded(3, WIDTH)
        loss = model(x).sin().sum()
        for each in model:
            loss = loss + each.weight.square().sum()
        return torch.autograd.grad(loss, [*model.parameters()])

    plain, model = a_model(build).double(), a_model(build).double()
    modules.apply(model, nn.Linear)
    for _ in range(3):
        assert_close(gradients(model), gradients(plain))
    torch.func.grad(lambda x: model(x).sum())(seeded(3, WIDTH))


@ignores_age
@pytest.mark.parametrize("hooked", OLDER, ids=["spectral", "weight", "pruned"])
def test_a_hook_that_a_call_passes_by_makes_nothing(hooked):
    """As `module.forward` does: the attribute stays what the last call of the module left."""

    def build():
        return hooked(nn.Linear(WIDTH, WIDTH, dtype=torch.float64))

    plain, model = a_model(build), a_model(build)
    region, x = remat(model.forward), seeded(3, WIDTH)

    for _ in range(3):
        assert_bitwise(region(x), plain.forward(x))
        assert_bitwise(model.weight.detach(), plain.weight.detach())


def test_a_weight_that_the_module_assigns():
    """Any other tensor that a trace leaves in an attribute is refused."""

    class Assigning(nn.Linear):
        def forward(self, input):
            self.kept = input.sin()
            return super().forward(self.kept)

    model = nn.Sequential(Assigning(WIDTH, WIDTH))

    with pytest.raises(SideEffectError, match=r"self.kept was .* became"):
        modules.apply(model, "*")(seeded(6, WIDTH, dtype=torch.float32))


def test_a_scheduled_stack_refuses_such_a_weight():
    """Its stages run several times, and would leave the attribute as it was."""
    stages = [nn.Tanh(), nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))]
    x = seeded(6, WIDTH, dtype=torch.float32)

    with pytest.raises(SideEffectError, match="leave the schedule out"):
        chain(stages, schedules.Every(1))(x)
    chain(stages)(x).sum().backward()
