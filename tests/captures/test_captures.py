"""What a function reaches is found by path, fetched fresh, and checked at each call."""

# Objects are given attributes that their classes do not declare: that is the subject.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportMissingImports=false

import enum
import functools
import math
import sys
import types
from collections import OrderedDict, namedtuple
from fractions import Fraction

import pytest
import torch
from torch import nn

from remat._captures.bake_spots import cover
from remat._captures.contents import code_key
from remat._captures.places import read_place
from remat._captures.reads import recording
from remat._captures.walk import Survey
from tests.captures.reached import (
    Affine,
    Block,
    Slotted,
    W,
    X,
    bake,
    closure,
    inner_helper,
    set_global,
    uses_global,
    uses_holder,
    uses_table,
)


def has_default(x, w=W, scale=2.0):
    return x @ w * scale


def has_kwdefault(x, *, w=W, scale=2.0):
    return x @ w * scale


def weighted(w, x, scale=1.0):
    return x @ w * scale


SCALE = 2.0


@pytest.fixture(autouse=True)
def fresh_scale(monkeypatch):
    """Each test may change the global above."""
    monkeypatch.setitem(globals(), "SCALE", SCALE)


REACHES = {
    "global": lambda: uses_global,
    "global dict": lambda: uses_table,
    "object attribute": lambda: uses_holder,
    "default": lambda: has_default,
    "keyword default": lambda: has_kwdefault,
    "closure": lambda: closure(torch.ones(2, 2)),
    "lambda in a list": lambda: closure([torch.ones(2, 2)][0]),
    "partial": lambda: functools.partial(weighted, torch.ones(2, 2), scale=2.0),
    "partial keyword": lambda: functools.partial(has_default, w=torch.ones(2, 2)),
    "callable object": lambda: Affine(torch.ones(2, 2)),
    "method": lambda: Affine(torch.ones(2, 2)).method,
    "slots": lambda: Slotted(torch.ones(2, 2)),
    "wrapped": lambda: torch.no_grad()(closure(torch.ones(2, 2))),
    "module": Block,
    "module method": lambda: Block().forward,
}


class TestReach:
    """Every kind of reach is found, fetched and named."""

    @pytest.mark.parametrize("make", REACHES.values(), ids=REACHES.keys())
    def test_fetches_what_the_paths_say(self, make):
        """At the end of each path is the tensor; so is what `fetch` gives."""
        roots = (make(),)
        seen = Survey(roots)
        covered = bake(*roots)

        assert seen.tensors
        for identity, paths in seen.tensors.items():
            for path in paths:
                steps = [step for _, step in path.path]
                assert id(functools.reduce(read_place, steps, roots)) == identity
        assert [id(t) for t in covered.fetch(roots)] == [*seen.tensors]
        assert covered.check(roots)
        assert len(covered.gather(roots) or ()) == len(covered.labels)

    @pytest.mark.parametrize(
        ("make", "labels"),
        [
            (lambda: uses_global, ("global `W`",)),
            (lambda: uses_holder, ("global `HOLDER.w`",)),
            (lambda: uses_table, ("global `TABLE['w']`",)),
            (lambda: closure(torch.ones(2, 2)), ("closure variable `w`",)),
            (lambda: has_default, ("default of `w`",)),
            (Block, ("self.mean", "self.linear.weight", "self.linear.bias")),
            (lambda: Slotted(W), ("self.w",)),
        ],
    )
    def test_labels_are_the_users_words(self, make, labels):
        """Labels say cell, global, default or attribute."""
        assert sorted(bake(make()).labels) == sorted(labels)

    def test_static_arguments_are_roots(self):
        """A module that is an argument is reached from the second root."""
        block = Block()
        roots = (lambda x: block(x) if False else x, block)

        covered = bake(*roots, run=block)
        again = (roots[0], block)

        assert covered.check(again)
        block.config.gain = 7.0
        assert not covered.check(again)

    def test_buffers_are_told_from_parameters(self):
        """`is_buffer` knows what a module registered."""
        block = Block()
        seen = Survey((block,))

        assert seen.is_buffer(id(block.mean))
        assert not seen.is_buffer(id(block.linear.weight))

    def test_class_methods_reach_globals(self):
        """A global that only a method of the user's class mentions is covered."""

        class Uses(nn.Module):
            def forward(self, x):
                return inner_helper(x)

        module = Uses()
        covered = bake(module)

        assert covered.check((module,))
        set_global("SCALE", 3.0)
        assert covered.explain((module,)) == "global `SCALE` was 2.0 and is 3.0"

    def test_user_modules_are_reached_by_name(self, monkeypatch):
        """Of a configuration module, what code mentions is covered, and no more."""
        config = types.ModuleType("my_config")
        config.gain, config.other = 2.0, 1
        monkeypatch.setitem(globals(), "config", config)

        def fun(x):
            return x * config_gain()

        def config_gain():
            return globals_config.gain

        globals_config = config
        covered = bake(fun)

        config.other = 2
        assert covered.check((fun,))
        config.gain = 3.0
        assert not covered.check((fun,))

    def test_imports_inside_functions(self, monkeypatch):
        """A module that the function imports when it runs is reached by its name."""
        config = types.ModuleType("remat_test_config")
        config.weight, config.gain = torch.ones(2, 2), 2.0
        monkeypatch.setitem(sys.modules, "remat_test_config", config)

        def fun(x):
            from remat_test_config import gain, weight

            return x @ weight * gain

        covered = bake(fun)

        assert covered.labels == ("import `remat_test_config.weight`",)
        assert covered.check((fun,))
        config.gain = 3.0
        assert not covered.check((fun,))

    def test_imports_of_a_neighbor(self, monkeypatch):
        """A relative one is found by the package of the function that it is written in."""
        near = types.ModuleType("remat_test_package.near")
        near.gain = 2.0
        monkeypatch.setitem(sys.modules, "remat_test_package", types.ModuleType("p"))
        monkeypatch.setitem(sys.modules, near.__name__, near)
        lines = ["def fun(x):", "    from .near import gain", "    return x * gain"]
        space = {"__package__": "remat_test_package"}
        exec("\n".join(lines), space)
        fun = space["fun"]
        covered = bake(fun)

        assert covered.check((fun,))
        near.gain = 3.0
        assert not covered.check((fun,))

    @pytest.mark.parametrize("kind", ["static", "classy", "computed", "cached"])
    def test_every_kind_of_method(self, kind):
        """Static and class methods, properties and cached functions are followed."""

        class Uses:
            @staticmethod
            def static(x):
                return x * SCALE

            @classmethod
            def classy(cls, x):
                return x * SCALE

            @property
            def computed(self):
                return SCALE

            @functools.lru_cache  # noqa: B019
            def cached(self):
                return SCALE

        def fun(x):
            instance = holder[0]
            if kind == "static":
                return instance.static(x)
            if kind == "classy":
                return instance.classy(x)
            return x * (instance.computed if kind == "computed" else instance.cached())

        holder = [Uses()]
        covered = bake(fun)
        assert covered.check((fun,)), covered.explain((fun,))

        globals()["SCALE"] = 4.0

        assert not covered.check((fun,))

    def test_classes_as_namespaces(self):
        """Constants of a class that code mentions are covered."""

        class Constants:
            gain, other = 2.0, 1

        def fun(x):
            return x * Constants.gain

        covered = bake(fun)

        Constants.other = 2
        assert covered.check((fun,))
        Constants.gain = 3.0
        assert not covered.check((fun,))

    def test_making_objects_is_followed(self):
        """`__init__` of a class that the function calls reads globals, too."""

        class Made:
            def __init__(self):
                self.scale = SCALE

        def fun(x):
            return x * Made().scale

        covered = bake(fun)
        assert covered.check((fun,))

        globals()["SCALE"] = 4.0

        assert not covered.check((fun,))

    def test_construction_is_not_followed_for_objects_that_exist(self):
        """A counter that only `__init__` of a reached object touches is ignored."""

        class Counted(nn.Module):
            def __init__(self):
                super().__init__()
                globals()["SCALE"] = SCALE + 1

            def forward(self, x):
                return x

        covered = bake(Counted())

        assert covered.check((Counted(),))

    def test_only_the_wrapped_function_of_our_own(self):
        """Of this package's functions nothing but `__wrapped__` is looked at."""
        space = {"cache": {}, "inner": closure(torch.ones(2, 2))}
        text = """
def make(cache, inner):
    def region(x):
        cache[len(cache)] = x
        return inner(x)
    region.__wrapped__ = inner
    return region
region = make(cache, inner)
"""
        exec(compile(text, "<remat region>", "exec"), space)
        region = space["region"]

        def fun(x):
            return region(x)

        covered = bake(fun)

        assert len(covered.labels) == 1
        assert covered.check((fun,)), covered.explain((fun,))

    def test_objects_of_our_own_are_not_watched(self):
        """A region's caches and options are nobody's state."""

        class Region:
            __module__ = "remat._regions.traced"

            def __init__(self, fun):
                self.__wrapped__, self.num_calls = fun, 0

            def __call__(self, x):
                self.num_calls += 1
                return self.__wrapped__(x)

        region = Region(closure(torch.ones(2, 2)))

        def fun(x):
            return region(x)

        seen = Survey((fun,))
        with recording(seen) as reads:
            fun(X)
        covered = cover(seen, reads, [*seen.tensors])

        assert seen.changes(reads) is None
        assert covered.check((fun,)), covered.explain((fun,))
        assert covered.labels == ("closure variable `w`",)
        region.__wrapped__ = uses_global
        assert not covered.check((fun,))

    def test_functional_call(self):
        """Parameters that are swapped for plain tensors are fetched as they are."""
        block = Block()
        covered = bake(block)
        given = {k: v.detach().clone() for k, v in block.named_parameters()}
        fetched = []
        inner = block.forward

        def forward(x):
            del block.forward
            fetched.extend(covered.gather((block,)) or ())
            return inner(x)

        block.forward = forward
        torch.func.functional_call(block, given, (X,))

        assert {id(t) for t in given.values()} <= {id(t) for t in fetched}

    @pytest.mark.parametrize("make", [dict, OrderedDict, type("Own", (dict,), {})])
    def test_kinds_of_dictionaries(self, make):
        """Subclasses too, with their items and attributes."""
        table = make(w=torch.ones(2, 2), gain=2.0)

        def fun(x):
            return x @ table["w"] * table["gain"]

        covered = bake(fun)
        assert covered.check((fun,)), covered.explain((fun,))
        assert covered.labels == ("closure variable `table['w']`",)

        table["gain"] = 3.0

        assert not covered.check((fun,))

    def test_named_tuples(self):
        """Their items are covered by place."""
        pair = namedtuple("pair", "w gain")

        def make(gain):
            params = pair(torch.ones(2, 2), gain)
            return lambda x: x @ params.w * params.gain

        covered = bake(make(2.0))

        assert covered.check((make(2.0),))
        assert not covered.check((make(3.0),))

    def test_tensors_as_keys_are_not_kept(self):
        """A dictionary keyed by a tensor is covered, and another tensor is no change."""
        table = {X: 1}

        def fun(x):
            return x * len(table)

        covered = bake(fun)
        assert covered.check((fun,))
        table.clear()
        table[W] = 1
        assert covered.check((fun,))
        table[X] = 2

        assert not covered.check((fun,))

    def test_objects_as_keys(self):
        """What is under them is found by the order of the dictionary."""
        keys = [object(), object()]
        table = {keys[0]: X, keys[1]: W}

        def fun(x):
            return x @ table[keys[1]]

        covered = bake(fun)
        assert covered.labels[1] == "closure variable `table.values()[1]`"
        assert covered.fetch((fun,)) == (X, W)
        table[keys[1]] = None

        assert not covered.check((fun,))
        assert "`table.values()[1]` was a Tensor and is None" in covered.explain((fun,))


class TestSharing:
    """One trace serves equal code with other objects."""

    def test_a_lambda_made_again(self):
        """The new closure's tensor is fetched, its constants are compared."""
        covered = bake(closure(torch.ones(2, 2)))
        fresh = torch.zeros(2, 2)
        again = closure(fresh)

        assert covered.check((again,))
        assert covered.fetch((again,)) == (fresh,)
        assert not covered.check((closure(fresh, scale=3.0),))

    def test_another_block_shares_but_for_what_is_read(self):
        """`layer_idx` is not read and may differ; `gain` is read and may not."""
        covered = bake(Block(layer_idx=0))
        other = Block(layer_idx=1)

        assert covered.check((other,))
        assert any(t is other.linear.weight for t in covered.fetch((other,)))
        assert not covered.check((Block(gain=3.0),))

    def test_another_bound_self(self):
        """Methods of two equal objects share."""
        covered = bake(Affine(torch.ones(2, 2)).method)

        assert covered.check((Affine(torch.zeros(2, 2)).method,))

    def test_a_replaced_parameter_is_fetched_fresh(self):
        """No tensor is kept."""
        block = Block()
        covered = bake(block)
        block.linear.weight = nn.Parameter(torch.zeros(2, 2))

        assert covered.check((block,))
        assert any(t is block.linear.weight for t in covered.fetch((block,)))

    def test_equal_values_that_are_other_objects(self):
        """Identity is the fast way only: equal floats, tuples, strings pass."""
        make = functools.partial(closure, torch.ones(2, 2))
        value = (float("1.5"), "a" * 3, 1000)
        twin = (float("1.5"), "".join(["a"] * 3), int("1000"))

        def fun_of(value):
            return lambda x: (make, value) and x

        covered = bake(fun_of(value))

        assert covered.check((fun_of(twin),))
        assert not covered.check((fun_of((1.5, "aaa", 1001)),))

    @pytest.mark.parametrize(
        ("left", "right", "equal"),
        [
            (uses_global, uses_global, True),
            (closure(W), closure(X), True),
            (uses_global, uses_table, False),
            (Affine(W).method, Affine(X).method, True),
            (Affine(W), Affine(X), True),
            (Block(), Block(), True),
            (Block(), nn.Linear(2, 2), False),
            (functools.partial(weighted, W), functools.partial(weighted, X), True),
            (functools.partial(weighted, W), functools.partial(weighted), False),
            (torch.sin, torch.sin, True),
            (torch.sin, torch.cos, False),
            ([].append, [1].append, True),
            ([].append, {}.get, False),
        ],
    )
    def test_code_key(self, left, right, equal):
        """Keys agree where a trace may be shared."""
        assert (code_key(left) == code_key(right)) is equal
        assert equal <= (hash(code_key(left)) == hash(code_key(right)))


VALUES = [
    (1,) * 20,
    (1.0,) * 20,
    1,
    1.0,
    True,
    0.0,
    -0.0,
    False,
    None,
    "1",
    math.nan,
    (1,),
    (True,),
    1000,
    1j,
]


class Color(enum.Enum):
    """An enumeration of the user's."""

    RED, BLUE = 1, 2


class TestConstants:
    """Simple values are compared by type and bits."""

    @pytest.mark.parametrize("left", range(len(VALUES)), ids=map(repr, VALUES))
    def test_every_value_differs_from_every_other(self, left):
        """1, 1.0, True differ, so do 0.0 and -0.0; a NaN equals itself."""

        def make(value):
            return lambda x: (value, x)[1]

        covered = bake(make(VALUES[left]))

        for right, value in enumerate(VALUES):
            assert covered.check((make(value),)) is (left == right)
        if VALUES[left] != VALUES[left]:
            assert covered.check((make(float("nan")),))

    @pytest.mark.parametrize(
        ("value", "other"),
        [
            (torch.float32, torch.float64),
            (torch.device("cpu"), torch.device("meta")),
            (torch.Size([1]), torch.Size([2])),
            (slice(1), slice(True)),
            (nn.ReLU, nn.GELU),
            (torch.relu, torch.sin),
            (torch, math),
            (nn.functional.relu, nn.functional.gelu),
            (Fraction(1, 2), Fraction(1, 3)),
            (Color.RED, Color.BLUE),
            (functools.partial(weighted, scale=1.0), functools.partial(weighted)),
            (frozenset({1}), frozenset({2})),
            (torch.ops.aten.sin.default, torch.ops.aten.cos.default),
        ],
    )
    def test_torch_values(self, value, other):
        """dtypes, devices, sizes, classes, operators, library functions and modules."""

        def make(value):
            return lambda x: (value, x)[1]

        covered = bake(make(value))

        assert covered.check((make(value),))
        assert not covered.check((make(other),))
