"""The decorator: its forms, what it keeps of `fun`, its options, what it answers.

"Bare decorator, decorator factory, call form, on functions, methods, nn.Module
instances. Keeps `__wrapped__`, name, doc, signature, types; pickles where `fun` does."
"""

import abc
import copy
import functools
import inspect
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import register_pytree_node

from remat import (
    RematWarning,
    TraceError,
    checkpoint_name,
    disabled,
    modules,
    policies,
    remat,
)
from tests.support import assert_bitwise, backward_operators, grads, seeded, swept


def double_sine(x: Tensor, factor: float = 1.0) -> Tensor:
    """Two sines."""
    return torch.sin(torch.sin(x) * factor)


@remat
def bare(x: Tensor, factor: float = 1.0) -> Tensor:
    """Two sines, decorated."""
    return torch.sin(torch.sin(x) * factor)


@remat(policy=policies.everything_saveable)
def factory(x: Tensor, factor: float = 1.0) -> Tensor:
    """Two sines, decorated by a factory."""
    return torch.sin(torch.sin(x) * factor)


class Methods:
    """A class with each kind of method."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    @remat
    def method(self, x: Tensor) -> Tensor:
        return double_sine(x, self.factor)

    @staticmethod
    @remat
    def static(x: Tensor) -> Tensor:
        return double_sine(x, 2.0)

    @classmethod
    @remat()
    def of_class(cls, x: Tensor) -> Tensor:
        return double_sine(x, 2.0 if cls is Methods else 3.0)

    @remat
    @staticmethod
    def static_inside(x: Tensor) -> Tensor:
        return double_sine(x, 2.0)

    @remat()
    @classmethod
    def of_class_inside(cls, x: Tensor) -> Tensor:
        return double_sine(x, 2.0 if cls is Methods else 3.0)

    @remat
    def __call__(self, x: Tensor) -> Tensor:
        return double_sine(x, self.factor)


class Child(Methods):
    """A subclass."""

    @remat
    def method(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return super().method(x) * 2


FORMS: dict[str, tuple[Any, Any]] = {
    "bare": (bare, double_sine),
    "factory": (factory, double_sine),
    "call": (remat(double_sine), double_sine),
    "call_of_factory": (remat()(double_sine), double_sine),
    "twice": (remat(remat(double_sine)), double_sine),
    "method": (Methods(2.0).method, lambda x: double_sine(x, 2.0)),
    "bound": (remat(Methods(2.0).method), lambda x: double_sine(x, 2.0)),
    "unbound": (lambda x: Methods.method(Methods(2.0), x), lambda x: double_sine(x, 2.0)),
    "static": (Methods.static, lambda x: double_sine(x, 2.0)),
    "static_on_instance": (Methods(1.0).static, lambda x: double_sine(x, 2.0)),
    "class": (Methods.of_class, lambda x: double_sine(x, 2.0)),
    "class_of_child": (Child(1.0).of_class, lambda x: double_sine(x, 3.0)),
    "above_static": (Methods.static_inside, lambda x: double_sine(x, 2.0)),
    "above_static_on_instance": (Child(1.0).static_inside, lambda x: double_sine(x, 2.0)),
    "above_class": (Methods.of_class_inside, lambda x: double_sine(x, 2.0)),
    "above_class_of_child": (Child(1.0).of_class_inside, lambda x: double_sine(x, 3.0)),
    "super": (Child(2.0).method, lambda x: double_sine(x, 2.0) * 2),
    "dunder_call": (Methods(2.0), lambda x: double_sine(x, 2.0)),
    "partial": (remat(functools.partial(double_sine, factor=2.0)), lambda x: double_sine(x, 2.0)),
    "builtin": (remat(torch.sin), torch.sin),
}  # fmt: skip


@pytest.mark.contract
@pytest.mark.parametrize(("region", "fun"), FORMS.values(), ids=FORMS)
def test_each_form_is_a_region(region: Any, fun: Any) -> None:
    """Every form gives plain's gradients."""
    assert_bitwise(grads(region, [seeded(3)]), grads(fun, [seeded(3)]))


def test_each_form_recomputes() -> None:
    """And every form is a region, not the function: something is recomputed."""
    for name in set(FORMS) - {"factory", "builtin"}:
        assert backward_operators(FORMS[name][0], seeded(3))["aten.sin"] > 0, name


@pytest.mark.contract
@pytest.mark.parametrize("region", [bare, factory, remat(double_sine), Methods.method])
def test_it_looks_like_the_function(region: Any) -> None:
    """Name, doc, module, signature, annotations and `__wrapped__` are the function's."""
    fun = region.__wrapped__

    assert inspect.isfunction(fun)
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
        assert getattr(region, attribute) == getattr(fun, attribute)
    assert inspect.signature(region) == inspect.signature(fun)
    assert inspect.getfullargspec(region) == inspect.getfullargspec(fun)
    assert inspect.get_annotations(region) == inspect.get_annotations(fun)


def test_a_wrapped_method_calls_through_inspect() -> None:
    """The signature of a bound decorated method has no `self`."""
    layer = modules.apply(nn.Linear(3, 3), "")
    for method, names in ((Methods(1.0).method, ["x"]), (layer.forward, ["input"])):
        assert list(inspect.signature(method).parameters) == names
        assert inspect.getfullargspec(method).args == names


def test_what_has_no_signature_has_none_as_a_region() -> None:
    """As of some functions in C; a region's class has that of its own."""
    with pytest.raises(ValueError, match="signature"):
        inspect.signature(remat(torch.sin))
    assert "fun" in inspect.signature(type(bare)).parameters


class Inner(nn.Module):
    """A module to put into a region."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()


@remat
def twice_sine(x: Tensor) -> Tensor:
    return x.sin().sin()


class Around(Inner):
    """A module that calls a function which is a region."""

    def forward(self, x: Tensor) -> Tensor:
        return twice_sine(self.linear(x)).cos()


class Scaled(nn.Module):
    """A module whose forward is a region."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    @remat
    def forward(self, x: Tensor, *, scale: float = 2.0) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.linear(x).sin() * scale


class Plain(nn.Linear):
    """A module of three inputs whose forward has an argument of the name `x`."""

    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x).sin()


@pytest.mark.contract
@pytest.mark.parametrize("strict", [False, *swept([True])])
@pytest.mark.parametrize(
    "wrap",
    [Scaled, Around, lambda: modules.apply(Plain(), "")],
    ids=["a method", "inside", "modules.apply"],
)
def test_a_model_with_regions_can_be_exported(
    wrap: Callable[[], nn.Module], strict: bool
) -> None:
    """For fixed sizes and open ones, as the operators that it has without regions."""
    model, x = wrap(), torch.linspace(-1, 1, 12).view(4, 3)
    open_sizes = {"x": {0: torch.export.Dim("rows", min=2)}}

    for sizes in (None, open_sizes):
        found = torch.export.export(model, (x,), dynamic_shapes=sizes, strict=strict)
        with disabled():
            plain = torch.export.export(
                model, (x,), dynamic_shapes=sizes, strict=strict
            )
        assert str(found.graph) == str(plain.graph)
        assert_bitwise(found.module()(x), model(x))
    assert_bitwise(found.module()(x[:2]), model(x[:2]))


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize("num_calls", [0, 3])
def test_torchscript_records_the_plain_function(num_calls: int) -> None:
    """Also of a region that is called the short way by then."""
    region, x = remat(double_sine), seeded(3).requires_grad_()
    for _ in range(num_calls):
        region(x)

    script: Any = torch.jit.trace(region, (x,))

    assert "PythonOp" not in str(script.graph)
    y = seeded(3, seed=1).requires_grad_()
    assert_bitwise(grads(script, [y]), grads(double_sine, [y]))


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "auto", "rerun"])
def test_a_symbolic_trace_records_the_plain_function(engine: Any) -> None:
    """Of a module and of a function, to whose regions it passes proxies."""
    model, x = nn.Sequential(Plain(), Plain()), torch.linspace(-1, 1, 12).view(4, 3)
    plain = torch.fx.symbolic_trace(model)
    function = remat(double_sine, engine=engine)

    found = torch.fx.symbolic_trace(modules.apply(model, Plain, engine=engine))

    assert found.code == plain.code
    assert_bitwise(grads(found, [x.requires_grad_()]), grads(plain, [x]))
    whole = torch.fx.symbolic_trace(lambda x: function(x))
    assert_bitwise(grads(whole, [x]), grads(double_sine, [x]))


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:.*runs the function again in its backward")
@pytest.mark.parametrize("engine", ["trace", "auto", "rerun"])
def test_sizes_that_make_fx_leaves_open(engine: Any) -> None:
    """They are refused before anything is looked up by them; a run again takes them."""
    region, x = remat(double_sine, engine=engine), seeded(3)
    other = seeded(5, seed=1)

    def both(fun: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        return lambda x: (fun(x), torch.func.grad(lambda x: fun(x).sum())(x))

    if engine == "trace":
        with pytest.raises(
            TraceError, match="the argument `x`: has sizes that a trace"
        ):
            make_fx(both(region), tracing_mode="symbolic")(x)
    else:
        graph = make_fx(both(region), tracing_mode="symbolic")(x)
        assert_bitwise(graph(other), both(double_sine)(other))
    assert_bitwise(both(region)(x), both(double_sine)(x))


@pytest.mark.contract
def test_a_module_stays_a_module() -> None:
    """Parameters, state dict, training, device moves and attributes are the module's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.BatchNorm1d(3)).double()
    region: Any = remat(model)
    x = seeded(2, 3)

    assert [id(p) for p in region.parameters()] == [id(p) for p in model.parameters()]
    assert list(region.state_dict()) == list(model.state_dict())
    region.eval()
    assert not model.training
    assert_bitwise(grads(region, [x]), grads(model, [x]))
    region.train()
    assert model[2].training


def test_a_module_prints_as_the_call_that_decorates_it() -> None:
    """With the module inside, as it prints itself, also within a model."""
    region: Any = remat(nn.Linear(3, 2), policy=policies.save_matmul_outputs)
    shown = "remat(Linear(in_features=3, out_features=2, bias=True), policy=save_matmul_outputs)"

    assert repr(region) == shown
    assert shown in repr(nn.Sequential(region))


def test_a_bound_method_prints_as_a_region() -> None:
    """With its object, as Python prints a bound method, and the policy."""

    class Waves:
        @remat(policy=policies.everything_saveable)
        def sine(self, x: Tensor) -> Tensor:
            return x.sin()

    shown = repr(Waves().sine)

    assert shown.startswith("remat(<bound method ")
    assert shown.endswith(">, policy=everything_saveable)")


def test_an_abstract_method_stays_abstract() -> None:
    """As under `functools.wraps`."""

    class Shape(abc.ABC):
        @remat
        @abc.abstractmethod
        def area(self, x: Tensor) -> Tensor: ...

    with pytest.raises(TypeError, match="abstract method"):
        Shape()  # pyright: ignore[reportAbstractUsage]


def test_programs_print_as_python_where_they_are_shown() -> None:
    """At a prompt, and both in one tuple."""
    forward, backward = programs = bare.programs(seeded(3))

    assert repr(forward) == str(forward)
    assert f"{forward}, {backward}" in str(programs)


@pytest.mark.parametrize("fun", [bare, factory], ids=["bare", "factory"])
def test_a_decorated_function_pickles(fun: Any) -> None:
    """A module-level decorated function comes back as itself."""
    assert pickle.loads(pickle.dumps(fun)) is fun


def test_a_region_made_by_a_call_pickles_where_its_function_does() -> None:
    """`remat(fun, ...)` comes back as an equal region, options included."""
    region = remat(double_sine, policy=policies.save_only_these_names("a"))

    again = pickle.loads(pickle.dumps(region))

    assert again.__wrapped__ is double_sine
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RematWarning)
        assert_bitwise(grads(again, [seeded(3)]), grads(double_sine, [seeded(3)]))


@pytest.mark.parametrize("form", ["method", "bound", "class"])
@pytest.mark.parametrize(
    "duplicate",
    [lambda region: pickle.loads(pickle.dumps(region)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deepcopy"],
)
def test_a_decorated_method_pickles_with_its_object(form: str, duplicate: Any) -> None:
    """What a decorated method of an object is comes back, and so do copies of it."""
    region, fun = FORMS[form]

    assert_bitwise(grads(duplicate(region), [seeded(3)]), grads(fun, [seeded(3)]))


@pytest.mark.contract
def test_cache_info_and_clear() -> None:
    """One miss a signature, hits afterwards, and nothing after a clear."""
    region = remat(lambda x: double_sine(x) * 2)
    for shape in (3, 3, 4, 3):
        region(seeded(shape).requires_grad_())
    info = region.cache_info()
    assert (info.misses, info.hits, info.currsize) == (2, 2, 2)

    region.cache_clear()
    assert (region.cache_info().misses, region.cache_info().currsize) == (0, 0)


@pytest.mark.contract
def test_disabled_runs_the_function_as_it_is() -> None:
    """Inside `disabled()` nothing is recomputed, and afterwards it is again."""
    with disabled():
        assert backward_operators(bare, seeded(3))["aten.sin"] == 0
        with disabled():
            pass
        assert backward_operators(bare, seeded(3))["aten.sin"] == 0
    assert backward_operators(bare, seeded(3))["aten.sin"] > 0


RUNS_BY_VALUE = {"1": 2, "0": 1, "": 1}
#: Imports torch once, and then the package in a process for each value of the variable.
BY_VALUE = f"""
import os, sys, torch._dynamo
for value in {[*RUNS_BY_VALUE]!r}:
    print(f"value {{value}}", flush=True)
    process = os.fork()
    if not process:
        os.environ["REMAT_DISABLE"] = value
        from remat import remat
        @remat
        def f(x):
            print("runs", flush=True)
            return torch.sin(torch.sin(x))
        for _ in range(2):
            f(torch.ones(2, requires_grad=True)).backward(torch.ones(2))
        print("scipy.optimize" in sys.modules, flush=True)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def printed_by_value() -> dict[str, str]:
    """What a function prints in two calls, by the value of the environment variable."""
    done = subprocess.run(
        [sys.executable, "-c", BY_VALUE],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    parts = (part.partition("\n") for part in done.stdout.split("value ")[1:])
    return {value: printed for value, _, printed in parts}


@pytest.mark.parametrize(("value", "runs"), RUNS_BY_VALUE.items())
def test_the_environment_variable_disables(
    value: str, runs: int, printed_by_value: dict[str, str]
) -> None:
    """`REMAT_DISABLE=1` does the same for a whole process."""
    assert printed_by_value[value].count("runs") == runs


def test_a_region_does_without_what_planners_need(
    printed_by_value: dict[str, str],
) -> None:
    """To load it takes longer than the rest of the package."""
    assert printed_by_value["0"].endswith("False\n")


def test_checkpoint_name_is_identity_on_pytrees() -> None:
    """Outside a trace the very leaves come back, tensors or not."""
    tree = {"a": seeded(3), "b": [seeded(2), None, 3]}

    named = checkpoint_name(tree, "tree")

    assert named["a"] is tree["a"]
    assert named["b"][0] is tree["b"][0]
    assert named["b"][1:] == [None, 3]


def value_branch(x: Tensor) -> Tensor:
    """Branches on a value."""
    if x.sum() > 0:
        return torch.sin(x)
    return torch.cos(x)


@pytest.mark.contract
@pytest.mark.parametrize(
    "fun",
    [
        value_branch,
        lambda x: x * x.max().item(),
        lambda x: x * len(x.nonzero()),
        lambda x: x * float(f"{x.mean():.3f}"),
    ],
)
def test_a_value_branch_says_where_and_what_to_do(fun: Callable[..., Tensor]) -> None:
    """The trace error has the user's file:line, and names the other engine."""
    with pytest.raises(TraceError, match='engine="rerun"') as error:
        remat(fun)(seeded(3).requires_grad_())

    _, line = inspect.getsourcelines(fun)
    assert any(f"test_api.py:{line + i}" in str(error.value) for i in range(3))


@pytest.mark.parametrize("name", ["<stdin>", "<python-input-3>", "<doctest a[0]>"])
def test_a_value_branch_that_was_typed_at_a_prompt_says_where(name: str) -> None:
    """Its lines are the user's, though they are in no file."""
    found: dict[str, Any] = {}
    text = "\ntyped = lambda x: x.sin() if x.sum() > 0 else x"
    exec(compile(text, name, "exec"), found)
    fun: Callable[[Tensor], Tensor] = found["typed"]

    with pytest.raises(TraceError, match=f"^{re.escape(name)}:2: the function cannot"):
        remat(fun)(seeded(3).requires_grad_())


@pytest.mark.contract
def test_a_value_branch_of_torchs_says_where() -> None:
    """Where no line is the user's, the text has that of the module that asks for the value."""
    norm = nn.BatchNorm1d(3, momentum=None)  # type: ignore[arg-type]

    with pytest.raises(TraceError, match=r"^batchnorm\.py:\d+: the function cannot"):
        remat(norm)(seeded(2, 3).requires_grad_())


class Pair:
    """A type that torch's pytree is told of, without names for its parts."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.parts = (x, y)


register_pytree_node(Pair, lambda pair: ([*pair.parts], None), lambda c, _: Pair(*c))


@pytest.mark.contract
@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_a_registered_type_without_keys(engine: Any) -> None:
    """Its parts are called by number where they are named."""

    def fun(pairs: dict[str, Pair]) -> Pair:
        x, y = pairs["p"].parts
        return Pair(torch.sin(x) * y, y)

    x, y = seeded(3).requires_grad_(), seeded(3, seed=1).requires_grad_()
    region = remat(fun, engine=engine)

    found = torch.autograd.grad(region({"p": Pair(x, y)}).parts[0].sum(), [x, y])
    expected = torch.autograd.grad(fun({"p": Pair(x, y)}).parts[0].sum(), [x, y])
    assert_bitwise(found, expected)
    paths = [each.path for each in remat(fun).saved_residuals({"p": Pair(x, y)})]
    assert {each for each in paths if each} == {"pairs.p.0", "pairs.p.1"}


@pytest.mark.parametrize("engine", ["trace", "rerun"])
def test_an_argument_may_have_any_name(engine: Any) -> None:
    """That of a method's first parameter, too."""

    def fun(self: Tensor, *, args: Tensor) -> Tensor:
        return self.sin() * args

    region = remat(fun, engine=engine)
    x, y = seeded(3).requires_grad_(), seeded(3, seed=1)

    assert_bitwise(region(self=x, args=y), fun(x, args=y))
    assert region.saved_residuals(self=x, args=y)


def yields(x: Tensor) -> Iterator[Tensor]:
    yield x.sin()


async def awaits(x: Tensor) -> Tensor:
    return x.sin()


async def yields_later(x: Tensor) -> AsyncIterator[Tensor]:
    yield x.sin()


@pytest.mark.parametrize("options", [{}, {"engine": "rerun"}])
@pytest.mark.parametrize(
    ("fun", "text"),
    [
        (yields, r"yields\): makes a generator\..*Return a list"),
        (functools.partial(yields), r"makes a generator\."),
        (yields_later, r"makes a generator\."),
        (awaits, r"awaits\): makes a coroutine\..*Decorate the function that computes"),
    ],
)
def test_what_works_after_its_call_is_no_function(
    fun: Any, text: str, options: dict[str, Any]
) -> None:
    """Nothing of it would be recomputed."""
    with pytest.raises(TypeError, match=text):
        remat(fun, **options)


@pytest.mark.parametrize("options", [{}, {"engine": "rerun"}])
def test_a_class_is_no_function(options: dict[str, Any]) -> None:
    """Objects of it would not be regions: calls of a decorated module class were plain."""

    class Block(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    with pytest.raises(TypeError, match=r"Block\): is a class\..*modules\.apply"):
        remat(Block, **options)
