"""Reads are noted while a recording lasts, and nothing of the user's is kept alive."""

# Objects are given attributes that their classes do not declare: that is the subject.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportMissingImports=false

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from remat._captures.bake_spots import cover
from remat._captures.reads import recording
from remat._captures.walk import Survey
from tests.captures.reached import Affine, Block, Tied, W, X, bake, closure


def reads_of(root, run=None):
    seen = Survey((root,))
    with recording(seen) as reads:
        (run or root)(X)
    return set(reads[id(root)])


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
        seen = Survey((instance,))
        with recording(seen) as reads:
            thread = threading.Thread(target=lambda: instance.unread)
            thread.start()
            thread.join()

        assert not reads[id(instance)]

    def test_restored_after_an_exception(self):
        """An error in the traced function leaves the classes as they were."""

        class Own:
            def __getattribute__(self, name):
                return object.__getattribute__(self, name)

            def __call__(self, x):
                raise ArithmeticError

        module, own = Block(), Own()
        before = Own.__dict__["__getattribute__"]
        with pytest.raises(ArithmeticError), recording(Survey((module, own))):
            own(X)

        assert "__getattribute__" not in vars(Block)
        assert "__getattribute__" not in vars(nn.Linear)
        assert Own.__dict__["__getattribute__"] is before

    def test_nested_recordings_both_note(self):
        """An inner trace's reads are the outer's as well."""
        instance = Affine(W)
        seen = Survey((instance,))
        with recording(seen) as outer:
            with recording(Survey((instance,))) as inner:
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
        seen = Survey((block,))
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
        with recording(Survey((block,))):
            seen = Survey((block,))
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
        seen = Survey((pair,))
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

        seen = Survey((Local(),))
        with recording(seen):
            pass
        dead = weakref.ref(Local)

        del seen, Local
        gc.collect()

        assert dead() is None
