"""What a function reaches is found by path, fetched fresh, and checked at each call."""

# Objects are given attributes that their classes do not declare: that is the subject.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportMissingImports=false

import enum
import functools
import gc
import math
import sys
import threading
import types
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from remat._captures import (
    Covered,
    code_key,
    cover,
    look,
    recording,
    survey,
)
from remat._errors import RecomputationError

X = torch.ones(2, 2)
W = torch.ones(2, 2)
SCALE = 2.0
RATES = [0.1, 0.2]
TABLE = {"w": torch.ones(2, 2), "gain": 3}
HOLDER = types.SimpleNamespace(w=torch.ones(2, 2), gain=1, unread=5)


@pytest.fixture(autouse=True)
def fresh_globals(monkeypatch):
    """Each test may change the globals above."""
    for name in ("W", "SCALE"):
        monkeypatch.setitem(globals(), name, globals()[name])
    monkeypatch.setitem(globals(), "RATES", [0.1, 0.2])
    monkeypatch.setitem(globals(), "TABLE", dict(TABLE))
    monkeypatch.setitem(globals(), "HOLDER", types.SimpleNamespace(**vars(HOLDER)))


def bake(*roots, run=None) -> Covered:
    """Surveys, runs, and covers, with every reached tensor counted as used."""
    seen = survey(roots)
    with recording(seen) as reads:
        (run or roots[0])(X)
    return cover(seen, reads, [*seen.tensors])


def reads_of(root, run=None):
    seen = survey((root,))
    with recording(seen) as reads:
        (run or root)(X)
    return set(reads[id(root)])


# --- functions to reach from --------------------------------------------------------


def inner_helper(x):
    return x * SCALE


def outer_helper(x):
    return inner_helper(x) + RATES[0]


def through_helpers(x):
    return outer_helper(x)


def uses_global(x):
    return x @ W


def uses_table(x):
    return x @ TABLE["w"] * TABLE["gain"]


def uses_holder(x):
    return x @ HOLDER.w * HOLDER.gain


def has_default(x, w=W, scale=2.0):
    return x @ w * scale


def has_kwdefault(x, *, w=W, scale=2.0):
    return x @ w * scale


def weighted(w, x, scale=1.0):
    return x @ w * scale


def closure(w, scale=1.0):
    def inner(x):
        return x @ w * scale

    return inner


class Affine:
    """A callable object of the user's."""

    offset = 0.5

    def __init__(self, w):
        self.w = w
        self.scale = 2.0
        self.unread = 1

    def __call__(self, x):
        return self.method(x)

    def method(self, x):
        return x @ self.w * self.scale + self.offset


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("scale", "w")

    def __init__(self, w):
        self.w = w
        self.scale = 2.0

    def __call__(self, x):
        return x @ self.w * self.scale


@dataclass
class Config:
    """A configuration that a module carries."""

    gain: float
    unread: int = 0


class Block(nn.Module):
    """A module with what modules usually have."""

    def __init__(self, layer_idx=0, gain=2.0):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("mean", torch.zeros(2))
        self.layer_idx = layer_idx
        self.config = Config(gain)
        self.sizes = [1, 2]
        self.bias = None

    def forward(self, x):
        if self.bias is not None:
            x = x + self.bias
        x = self.drop(self.linear(x)) + self.mean
        return x * self.config.gain + sum(self.sizes)


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
        seen = survey(roots)
        covered = bake(*roots)

        assert seen.tensors
        for identity, paths in seen.tensors.items():
            for path in paths:
                assert id(functools.reduce(look, path.way, roots)) == identity
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
        seen = survey((block,))

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
        globals()["SCALE"] = 3.0
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

        _set("SCALE", 4.0)

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

        _set("SCALE", 4.0)

        assert not covered.check((fun,))

    def test_construction_is_not_followed_for_objects_that_exist(self):
        """A counter that only `__init__` of a reached object touches is ignored."""

        class Counted(nn.Module):
            def __init__(self):
                super().__init__()
                _set("SCALE", SCALE + 1)

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

        seen = survey((fun,))
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


def _set(name, value):
    globals()[name] = value


CHANGES = {
    "global through two helpers": (
        through_helpers,
        lambda: _set("SCALE", 3.0),
        "global `SCALE` was 2.0 and is 3.0",
    ),
    "list item through a helper": (
        through_helpers,
        lambda: RATES.__setitem__(0, 1.0),
        "global `RATES[0]` was 0.1 and is 1.0",
    ),
    "list appended": (
        through_helpers,
        lambda: RATES.append(1),
        "global `RATES` was a list of 2 items and has changed",
    ),
    "dict item": (
        uses_table,
        lambda: TABLE.__setitem__("gain", 4),
        "global `TABLE['gain']` was 3 and is 4",
    ),
    "dict key added": (
        uses_table,
        lambda: TABLE.__setitem__("more", 4),
        "global `TABLE` was a dict with the keys ('w', 'gain') and has changed",
    ),
    "attribute of a global": (
        uses_holder,
        lambda: setattr(HOLDER, "gain", 2),
        "global `HOLDER.gain` was 1 and is 2",
    ),
    "tensor gone": (
        uses_global,
        lambda: _set("W", None),
        "global `W` was a Tensor and is None",
    ),
    "global deleted": (
        through_helpers,
        lambda: globals().__delitem__("SCALE"),
        "global `SCALE` was 2.0 and is gone",
    ),
}


class TestState:
    """A change of what the trace read is noticed, and only that."""

    @pytest.mark.parametrize(
        ("fun", "change", "words"), CHANGES.values(), ids=CHANGES.keys()
    )
    def test_noticed_and_said(self, fun, change, words):
        """The check fails, and the first difference is put in words."""
        covered = bake(fun)
        assert covered.check((fun,))
        assert covered.explain((fun,)).startswith("nothing")

        change()

        assert not covered.check((fun,))
        assert covered.gather((fun,)) is None
        assert covered.explain((fun,)) == words

    def test_replaced_helper(self, monkeypatch):
        """A helper function with other code is another function."""
        covered = bake(through_helpers)
        monkeypatch.setitem(globals(), "inner_helper", lambda x: x)

        assert not covered.check((through_helpers,))

    @pytest.mark.parametrize(
        "change",
        [
            lambda b: b.eval(),
            lambda b: setattr(b.config, "gain", 5.0),
            lambda b: setattr(b, "config", types.SimpleNamespace(gain=2.0)),
            lambda b: b.sizes.append(3),
            lambda b: setattr(b.drop, "p", 0.5),
            lambda b: setattr(b, "bias", 1.0),
            lambda b: setattr(b, "bias", nn.Parameter(torch.ones(2))),
            lambda b: b.linear.register_forward_hook(lambda *a: None),
            lambda b: b.register_forward_pre_hook(lambda *a: None),
            lambda b: setattr(b.linear, "bias", None),
            lambda b: setattr(b, "linear", nn.Identity()),
            lambda b: setattr(b, "forward", lambda x: x),
            lambda b: setattr(b.linear, "forward", lambda x: x),
        ],
    )
    def test_changes_of_a_module(self, change):
        """Flags, read attributes, hooks, children and patched methods are covered."""
        block = Block()
        covered = bake(block)
        assert covered.check((block,)), covered.explain((block,))

        change(block)

        assert not covered.check((block,))
        assert not covered.explain((block,)).startswith("nothing")

    @pytest.mark.parametrize(
        "change",
        [
            lambda b: setattr(b, "layer_idx", 9),
            lambda b: setattr(b.config, "unread", 9),
            lambda b: setattr(b, "cache", object()),
            lambda b: b.register_state_dict_post_hook(lambda *a: None),
        ],
    )
    def test_what_was_not_read_is_not_covered(self, change):
        """So equal layers share one trace."""
        block = Block()
        covered = bake(block)

        change(block)

        assert covered.check((block,)), covered.explain((block,))

    @pytest.mark.parametrize("place", ["instance", "class", "base"])
    def test_missing_attributes_that_were_asked_for(self, place):
        """A `hasattr` that said no must still say no, whoever has it since."""

        class Base(nn.Module):
            pass

        class Lazy(Base):
            def forward(self, x):
                return self.extra(x) if hasattr(self, "extra") else x

        module = Lazy()
        covered = bake(module)
        assert covered.check((module,))
        owner = {"instance": module, "class": Lazy, "base": Base}[place]
        owner.extra = nn.Identity()

        assert not covered.check((module,))
        assert covered.explain((module,)) == (
            "self.extra was not there and is an object of type Identity"
        )

    @pytest.mark.parametrize("where", [Affine, "instance"])
    def test_class_constants(self, where, monkeypatch):
        """A constant of the class is covered, in the class and when shadowed."""
        instance = Affine(W)
        covered = bake(instance)
        assert covered.check((instance,))

        monkeypatch.setattr(instance if where == "instance" else where, "offset", 0.7)

        assert not covered.check((instance,))

    def test_reading_the_whole_dictionary(self):
        """`vars(self)` reads every attribute, and which there are."""

        class Whole:
            def __init__(self):
                self.scale = 1.0

            def __call__(self, x):
                return x * sum(vars(self).values())

        instance = Whole()
        covered = bake(instance)
        assert covered.check((instance,))
        instance.more = 2.0
        assert not covered.check((instance,))
        del instance.more
        assert covered.check((instance,))
        instance.scale = 2.0

        assert not covered.check((instance,))

    def test_own_getattr(self):
        """A class that looks elsewhere for what it lacks is covered there."""

        class Proxy:
            def __init__(self, target):
                self.target = target

            def __getattr__(self, name):
                return getattr(self.target, name)

            def __call__(self, x):
                return x * self.scale

        instance = Proxy(Affine(W))
        covered = bake(instance)
        assert covered.check((instance,))
        instance.target.unread = 9
        assert covered.check((instance,))
        instance.target.scale = 9.0

        assert not covered.check((instance,))

    def test_slots(self):
        """Slots that were read are covered."""
        instance = Slotted(W)
        covered = bake(instance)
        assert covered.check((instance,))

        instance.scale = 3.0

        assert covered.explain((instance,)) == "self.scale was 2.0 and is 3.0"
        assert not covered.check((instance,))

    def test_sequential_reads_all_its_children(self):
        """A container that iterates over its children is covered as a whole."""
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        covered = bake(model)
        model.append(nn.ReLU())

        assert not covered.check((model,))

    def test_odd_roots_are_no_error(self):
        """A check answers False where a path leads nowhere."""
        covered = bake(Block())

        assert not covered.check((object(),))
        assert not covered.check(())


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, tied=True):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.unread = nn.Linear(2, 2)
        if tied:
            self.second.weight = self.first.weight
            self.unread.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


class TestAliases:
    """Shared tensors and objects stay shared, or the check says no."""

    def test_all_paths_of_a_tied_weight_are_known(self):
        """The survey lists each way."""
        model = Tied()

        paths = survey((model,)).tensors[id(model.first.weight)]

        assert {str(path.label) for path in paths} == {
            "self.first.weight",
            "self.second.weight",
            "self.unread.weight",
        }

    def test_a_tied_weight_is_reached_once(self):
        """`reached` lists tensors, not ways."""
        model = Tied()

        reached = survey((model,)).reached

        assert sorted(map(id, reached)) == sorted(map(id, model.parameters()))

    def test_untying_is_noticed(self):
        """Where both ways were read."""
        model = Tied()
        covered = bake(model)
        assert covered.check((model,))
        assert not covered.check((Tied(tied=False),))

        model.second.weight = nn.Parameter(model.second.weight.detach().clone())

        assert not covered.check((model,))
        assert "shared" in covered.explain((model,))

    def test_cycles(self):
        """An object that holds itself is walked once."""
        first, second = Affine(W), Affine(X)
        first.scale = 2.0
        first.other, second.other = second, first
        items = [first]
        items.append(items)

        def fun(x):
            return items[0].other.other(x)

        covered = bake(fun)

        assert covered.check((fun,)), covered.explain((fun,))
        second.other = second
        assert not covered.check((fun,))

    def test_deep_nesting(self):
        """A thousand modules inside each other need no recursion."""
        deepest = model = nn.Sequential(nn.Linear(2, 2))
        for _ in range(1000):
            model = nn.Sequential(model)
        # Running it would recurse in torch: only the innermost is run.
        covered = bake(model, run=deepest)

        assert covered.check((model,))
        assert covered.fetch((model,))[0] is deepest[0].weight
        deepest[0].weight = None
        assert not covered.check((model,))


class TestRecording:
    """Reads are noted on this thread, while it lasts, and leave no trace."""

    def test_notes_library_reads(self):
        """What torch's own code reads decides what runs, too."""
        names = reads_of(nn.Dropout(0.0))

        assert {"training", "p", "_forward_hooks"} <= names
        assert "__dict__" not in names

    def test_other_threads_pass_through(self):
        """A read on another thread is not this trace's."""
        instance = Affine(W)
        seen = survey((instance,))
        with recording(seen) as reads:
            thread = threading.Thread(target=lambda: instance.unread)
            thread.start()
            thread.join()

        assert not reads[id(instance)]

    def test_overlapping_threads_restore_the_class(self):
        """The last recording to end puts the class back."""
        instance, original = Affine(W), Affine.__getattribute__
        seen = survey((instance,))
        inside, leave = threading.Event(), threading.Event()

        def other():
            with recording(seen):
                inside.set()
                leave.wait(10)

        with recording(seen) as reads:
            thread = threading.Thread(target=other)
            thread.start()
            inside.wait(10)
        leave.set()
        thread.join()

        assert not reads[id(instance)]
        assert Affine.__getattribute__ is original
        assert "__getattribute__" not in vars(Affine)

    def test_restored_after_an_exception(self):
        """An error in the traced function leaves the classes as they were."""

        class Own:
            def __getattribute__(self, name):
                return object.__getattribute__(self, name)

            def __call__(self, x):
                raise ArithmeticError

        module, own = Block(), Own()
        before = Own.__dict__["__getattribute__"]
        with pytest.raises(ArithmeticError), recording(survey((module, own))):
            own(X)

        assert "__getattribute__" not in vars(Block)
        assert "__getattribute__" not in vars(nn.Linear)
        assert Own.__dict__["__getattribute__"] is before

    def test_nested_recordings_both_note(self):
        """An inner trace's reads are the outer's as well."""
        instance = Affine(W)
        seen = survey((instance,))
        with recording(seen) as outer:
            with recording(survey((instance,))) as inner:
                instance(X)
            _ = instance.unread

        assert "scale" in inner[id(instance)]
        assert "scale" in outer[id(instance)]
        assert "unread" in outer[id(instance)]
        assert "unread" not in inner[id(instance)]

    def test_a_check_reads_for_an_outer_recording(self):
        """A region that finds its trace in the cache still tells what it rests on."""
        block = Block()
        covered = bake(block)
        seen = survey((block,))
        with recording(seen) as reads:
            assert covered.check((block,))

        assert {"config", "linear"} <= set(reads[id(block)])
        assert "layer_idx" not in reads[id(block)]
        assert "__dict__" not in reads[id(block)]
        assert "gain" in reads[id(block.config)]
        assert "weight" in reads[id(block.linear)]

    def test_baked_inside_another_recording(self):
        """What is baked while an outer trace records holds after it, too."""
        block = Block()
        with recording(survey((block,))):
            seen = survey((block,))
            with recording(seen) as reads:
                block(X)
            assert seen.changes(reads) is None
            covered = cover(seen, reads, [*seen.tensors])
            assert covered.check((block,)), covered.explain((block,))

        assert covered.check((block,)), covered.explain((block,))
        assert seen.changes(reads) is None

    def test_subclass_of_a_watched_class(self):
        """A class and its base may both be watched."""

        class Wide(Block):
            pass

        pair = nn.ModuleList([Block(), Wide()])
        seen = survey((pair,))
        with recording(seen) as reads:
            pair[1](X)

        assert "__dict__" not in reads[id(pair[1])]
        assert "config" in reads[id(pair[1])]
        assert not reads[id(pair[0])]


class TestLifetime:
    """Baked knowledge keeps nothing of the user's alive."""

    @pytest.mark.parametrize(
        "make",
        [Block, Tied, lambda: Affine(torch.ones(2, 2)), lambda: closure(torch.ones(2))],
    )
    def test_the_callable_dies(self, make):
        """Once the caller drops it."""
        root = make()
        covered = bake(root)
        dead = weakref.ref(root)

        del root
        gc.collect()

        assert dead() is None
        assert covered._spots

    def test_a_survey_keeps_no_class(self):
        """A class made on the spot dies once the survey does."""

        class Local(nn.Module):
            def forward(self, x):
                return x

        seen = survey((Local(),))
        with recording(seen):
            pass
        dead = weakref.ref(Local)

        del seen, Local
        gc.collect()

        assert dead() is None


class TestRestored:
    """A backward may see covered state as it was."""

    @pytest.mark.parametrize(
        ("fun", "change", "words"),
        [CHANGES[name] for name in CHANGES if name != "tensor gone"],
        ids=[name for name in CHANGES if name != "tensor gone"],
    )
    def test_puts_back_and_undoes(self, fun, change, words):
        """Inside the block the check holds; after it, the change is there again."""
        covered = bake(fun)
        change()

        with pytest.raises(ArithmeticError), covered.restored((fun,)):  # noqa: PT012
            assert covered.check((fun,)), covered.explain((fun,))
            raise ArithmeticError

        assert covered.explain((fun,)) == words

    def test_cells_defaults_flags_and_slots(self):
        """Every owner that can be written is."""
        block, slotted, scale = Block(), Slotted(W), 1.0

        def fun(x, shift=1.0):
            return slotted(block(x)) * scale + shift

        covered = bake(fun)
        block.eval()
        slotted.scale, scale = 9.0, 2.0
        fun.__defaults__ = (3.0,)
        block.linear.extra = 5

        with covered.restored((fun,)):
            assert covered.check((fun,)), covered.explain((fun,))
            assert (block.drop.training, slotted.scale, scale) == (True, 2.0, 1.0)
            assert fun.__defaults__ == (1.0,)
        assert (block.drop.training, slotted.scale, scale) == (False, 9.0, 2.0)
        assert fun.__defaults__ == (3.0,)

    def test_takes_hooks_off_for_a_while(self):
        """A hook that was hung on after the forward does not run in the backward."""
        block = Block()
        covered = bake(block)
        handle = block.linear.register_forward_hook(lambda *a: None)

        with covered.restored((block,)):
            assert covered.check((block,))
            assert not block.linear._forward_hooks
        assert list(block.linear._forward_hooks) == [handle.id]

    def test_refuses_what_cannot_be_put_back(self):
        """A tensor that is gone is an error, and nothing stays half restored."""
        block = Block()
        covered = bake(block)
        block.eval()
        block.linear.weight = None

        with (
            pytest.raises(RecomputationError, match=r"self\.linear\.weight"),
            covered.restored((block,)),
        ):
            pass
        assert not block.training
        assert not block.drop.training


class TestChanges:
    """What a trace does to covered state is found, said and undone."""

    @pytest.mark.parametrize(
        ("act", "words"),
        [
            (lambda b: setattr(b, "layer_idx", 1), "self.layer_idx was 0 and became 1"),
            (lambda b: b.sizes.append(3), "self.sizes[2] was not there and became 3"),
            (
                lambda b: setattr(b, "cache", torch.ones(1)),
                "self.cache was not there and became an object of type Tensor",
            ),
            (
                lambda b: setattr(b.config, "gain", 3.0),
                "self.config.gain was 2.0 and became 3.0",
            ),
            (lambda b: delattr(b, "bias"), "self.bias was None and became not there"),
            (
                lambda b: b.mean.__class__ and b.register_buffer("more", torch.ones(1)),
                "self.more was not there and became an object of type Tensor",
            ),
        ],
    )
    def test_says_and_restores(self, act, words):
        """Before and after are named; afterwards the object is as it was."""
        block = Block()
        before = dict(vars(block))
        seen = survey((block,))
        assert seen.changes() is None

        act(block)

        assert seen.changes() == words
        seen.restore()
        assert seen.changes() is None
        assert vars(block) == before
        assert block.sizes == [1, 2]

    def test_globals_and_cells(self):
        """A counter in a global or a cell is put back."""
        count = 0

        def fun(x):
            nonlocal count
            count += 1
            _set("SCALE", SCALE + 1)
            return x

        seen = survey((fun,))
        fun(X)

        assert "closure variable `count` was 0 and became 1" in str(seen.changes())
        seen.restore()
        assert (count, SCALE) == (0, 2.0)

    def test_unread_simple_writes_are_left(self):
        """With reads given, a write that nothing rests on is no change; a leak is."""

        class Notes(nn.Module):
            def forward(self, x):
                self.last_shape = tuple(x.shape)
                return x

        class Leaks(nn.Module):
            def forward(self, x):
                self.last = [x + 1]
                return x

        told = []
        for module in (Notes(), Leaks()):
            seen = survey((module,))
            with recording(seen) as reads:
                module(X)
            told.append(seen.changes(reads))

        assert told == [
            None,
            "self.last was not there and became an object of type list",
        ]

    def test_a_counter_in_an_unwatchable_object(self):
        """All that a namespace holds counts as read."""

        def fun(x):
            HOLDER.gain += 1
            return x

        seen = survey((fun,))
        with recording(seen) as reads:
            fun(X)

        assert seen.changes(reads) == "global `HOLDER.gain` was 1 and became 2"

    def test_leaked_value_type(self):
        """A Tensor put where another stood is a change."""
        block = Block()
        seen = survey((block,))
        original = block.mean
        block.mean = torch.ones(2)

        assert isinstance(original, Tensor)
        assert "self.mean" in str(seen.changes({}))
        seen.restore()
        assert block.mean is original
