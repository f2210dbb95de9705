"""A change of what a function reaches is noticed, named, and put back where it is undone."""

# Objects are given attributes that their classes do not declare: that is the subject.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportMissingImports=false

import types

import pytest
import torch
from torch import Tensor, nn

from remat._captures.reads import recording
from remat._captures.walk import Survey
from remat._errors import RecomputationError
from tests.captures import reached
from tests.captures.reached import (
    CHANGES,
    Affine,
    Block,
    Slotted,
    Tied,
    W,
    X,
    adds_to_holder,
    bake,
    set_global,
    through_helpers,
)


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
        monkeypatch.setattr(reached, "inner_helper", lambda x: x)

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


class TestAliases:
    """Shared tensors and objects stay shared, or the check says no."""

    def test_all_paths_of_a_tied_weight_are_known(self):
        """The survey lists each way."""
        model = Tied()

        paths = Survey((model,)).tensors[id(model.first.weight)]

        assert {str(path.label) for path in paths} == {
            "self.first.weight",
            "self.second.weight",
            "self.unread.weight",
        }

    def test_a_tied_weight_is_reached_once(self):
        """`reached` lists tensors, not ways."""
        model = Tied()

        reached = Survey((model,)).reached

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
                lambda b: setattr(b, "sizes", [9]),
                "self.sizes was an object of type list and became another",
            ),
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
        seen = Survey((block,))
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
            set_global("SCALE", reached.SCALE + 1)
            return x

        seen = Survey((fun,))
        fun(X)

        assert "closure variable `count` was 0 and became 1" in str(seen.changes())
        seen.restore()
        assert (count, reached.SCALE) == (0, 2.0)

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
            seen = Survey((module,))
            with recording(seen) as reads:
                module(X)
            told.append(seen.changes(reads))

        assert told == [
            None,
            "self.last was not there and became an object of type list",
        ]

    def test_a_counter_in_an_unwatchable_object(self):
        """All that a namespace holds counts as read."""
        seen = Survey((adds_to_holder,))
        with recording(seen) as reads:
            adds_to_holder(X)

        assert seen.changes(reads) == "global `HOLDER.gain` was 1 and became 2"

    def test_leaked_value_type(self):
        """A Tensor put where another stood is a change."""
        block = Block()
        seen = Survey((block,))
        original = block.mean
        block.mean = torch.ones(2)

        assert isinstance(original, Tensor)
        assert "self.mean" in str(seen.changes({}))
        seen.restore()
        assert block.mean is original
