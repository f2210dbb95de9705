"""Ten bugs for the engine, each planted by patching it, and a hunt for each.

`python -m tests.planted` prints every bug with the smallest function that hypothesis found
against it, by the property, strategies and budget of `tests/test_properties.py`.
"""

import contextlib
import sys
from unittest import mock

import torch
from hypothesis import Phase, given, settings

from remat._calls import decorated, entry
from remat._captures import covered
from remat._graph import numbering, values
from remat._regions import rules, traced
from remat._torch import tracer
from remat._tracing import in_place_operators, naming, thread
from remat.testing.strategies import _program
from tests.properties import budget, cases, check


def residual_treated_as_constant():
    """A derivative of the backward sees its operands as constants."""
    honest = traced.pullback

    def pullback(function, pull, **options):
        gradients = honest(function, pull, **options)

        def constant(tensors):
            count = pull.num_operands
            operands = [each.detach() for each in tensors[:count]]
            wanted = set(pull.wanted)
            operands = [
                each.requires_grad_() if place in wanted else each
                for place, each in enumerate(operands)
            ]
            return gradients([*operands, *tensors[count:]])

        return constant

    operands_of = traced.operands_of

    def constants_of(graph, wants):
        return operands_of(graph, (*(False for _ in wants[:-1]), wants[-1]))

    return mock.patch.multiple(traced, pullback=pullback, operands_of=constants_of)


def lost_detach():
    """A user's detach is overlooked in the trace."""
    honest = thread.UserCalls.__torch_function__

    def overlook(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.detach and tracer.proxy_is_active():
            return args[0]
        return honest(self, func, types, args, kwargs)

    return mock.patch.object(thread.UserCalls, "__torch_function__", overlook)


def contiguous_cotangents():
    """The backward reads the memory of every cotangent as if it were contiguous."""
    honest = rules._PlainFunction.backward

    def backward(ctx, *cotangents):
        return honest(
            ctx, *(each if each is None else flat(each) for each in cotangents)
        )

    return mock.patch.object(rules._PlainFunction, "backward", staticmethod(backward))


def flat(cotangent):
    """What is found where a contiguous tensor of this shape would lie."""
    memory = cotangent.new_zeros(cotangent.numel())
    there = cotangent.as_strided((min(memory.numel(), held(cotangent)),), (1,))
    memory[: there.numel()] = there
    return memory.view(cotangent.shape)


def held(tensor):
    """How many elements lie in memory from a tensor's first one on."""
    return tensor.untyped_storage().size() // tensor.itemsize - tensor.storage_offset()


def in_place_left_in():
    """In-place operators stay in the graph, and the check lets them pass."""
    stack = contextlib.ExitStack()
    stack.enter_context(
        mock.patch.object(in_place_operators, "has_mutations", return_value=False)
    )
    stack.enter_context(
        mock.patch.object(values.operators, "is_mutable", return_value=False)
    )
    return stack


@contextlib.contextmanager
def opaque_name():
    """A named value is a copy of what it names."""
    honest = naming.checkpoint_name

    def copying(value, name):
        return honest(value.clone(), name)

    with (
        mock.patch.object(naming, "checkpoint_name", copying),
        mock.patch.dict(_program.NAMESPACE, {"checkpoint_name": copying}),
    ):
        yield


def dropped_capture():
    """A captured tensor enters the trace without its gradient."""
    honest = thread._capture_tensor

    def capture(running, tensor):
        return honest(running, tensor).detach()

    return mock.patch.object(thread, "_capture_tensor", capture)


def buffers_twice():
    """What a function did to its buffers is done again after the call."""
    honest = entry.Entry.call

    def call(self, roots, tensors, numerics):
        found = honest(self, roots, tensors, numerics)
        if self.written:
            honest(self, roots, tensors, numerics)
        return found

    return mock.patch.object(entry.Entry, "call", call)


def merged_draws():
    """Two draws of the same arguments count as one value."""
    honest = numbering._numbering_key

    def key(index, value, numbers):
        found = honest(index, value, numbers)
        return found[:-1] if found[0] == "draw" else found

    return mock.patch.object(numbering, "_numbering_key", key)


def wrong_index_of_output():
    """A value that is saved and handed out is looked for at the first output."""
    honest = traced.forward_graph

    def forward_graph(joint, saved):
        outputs = [ref.index for ref in joint.outputs]
        moved = [outputs[0] if index in outputs else index for index in saved]
        return honest(joint, moved)

    return mock.patch.object(traced, "forward_graph", forward_graph)


def stale_global():
    """What a trace rested on is not looked at again."""
    return mock.patch.object(covered, "clause", return_value="True")


#: The bugs by the kind of functions that they break: hunts among others find nothing.
BREAKS = {
    "known": (
        residual_treated_as_constant,
        lost_detach,
        contiguous_cotangents,
        opaque_name,
        wrong_index_of_output,
    ),
    "pure": (in_place_left_in, dropped_capture, stale_global),
    "effects": (buffers_twice, merged_draws),
}
BUGS = {bug.__name__: (bug, kind) for kind, bugs in BREAKS.items() for bug in bugs}


def hunt(bug, kind, *, shrink):
    """What the property finds against a planted bug: an exception, or None."""
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]

    @settings(budget(kind), phases=phases, report_multiple_bugs=False)
    @given(cases(kind))
    def hunted(case):
        try:
            check(case)
        except Exception as error:
            error.add_note(repr(case))
            raise

    decorated._caches.clear()
    try:
        with bug():
            hunted()
    except Exception as error:  # noqa: BLE001  # whatever was found is the answer
        return error
    finally:
        decorated._caches.clear()
    return None


def main():
    """Prints what was found against each bug."""
    torch.set_num_threads(1)
    for name in sys.argv[1:] or BUGS:
        bug, kind = BUGS[name]
        error = hunt(bug, kind, shrink=True)
        print(f"\n=== {name}: {bug.__doc__}")
        if error is None:
            print("NOT FOUND")
        else:
            print(f"{error.__notes__[0]}{type(error).__name__}: {str(error)[:300]}")


if __name__ == "__main__":
    import warnings

    import tests.running  # noqa: F401  # hypothesis draws what it draws in the suite

    warnings.simplefilter("ignore")
    main()
