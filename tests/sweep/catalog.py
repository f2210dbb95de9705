"""The operators that torch itself tests, and two small calls of each.

`op_db` is the list behind torch's own operator tests: some 700 entries, each with a maker
of sample arguments. Those with a gradient in double precision on a CPU are swept.
"""

import contextlib
import itertools
import random
import unittest.mock
from collections.abc import Generator, Iterator, Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tests.support import is_differentiable

#: Elements of one sample: the sweep asks about numbers and rules, not about size.
MAX_ELEMENTS = 3000
#: How many of its samples an operator's are chosen from: some makers give thousands.
MAX_LOOKED_AT = 60


class Call:
    """An operator as a function of the tensors of one sample, in their order.

    What it returns are the outputs that have a gradient, dense.
    """

    def __init__(self, op: OpInfo, sample: SampleInput) -> None:
        self.op = op.op
        # Makes the outputs of some decompositions those that are unique.
        self.process = sample.output_process_fn_grad
        tree = (sample.input, *sample.args), sample.kwargs
        leaves, self.spec = tree_flatten(tree)
        # A tensor kept here would be one that the function captures.
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [
            place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)
        ]

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        with _unseeded():
            return differentiable(self.process(self.op(*args, **kwargs)))


@contextlib.contextmanager
def _unseeded() -> Generator[None]:
    """Lets operators draw as users' calls do: some entries seed before each call.

    That is a side effect of the Python code, which a trace would run once.
    """
    with unittest.mock.patch.object(
        common_methods_invocations,
        "wrapper_set_seed",
        lambda op, *args, **kwargs: op(*args, **kwargs),
    ):
        yield


def differentiable(outputs: Any) -> list[Tensor]:
    """The floating and complex tensors among some outputs, as dense tensors."""
    return [
        leaf if leaf.layout == torch.strided else leaf.to_dense()
        for leaf in tree_leaves(outputs)
        if is_differentiable(leaf)
    ]


class Case(NamedTuple):
    """One call of one operator: the function, and its tensors.

    Those that require grad are differentiated.
    """

    call: Call
    tensors: tuple[Tensor, ...]


def operators(match: str = "*") -> list[OpInfo]:
    """The differentiable entries of `op_db`, one for each name and variant."""
    return [
        op for op in op_db if dtype_of(op) is not None and fnmatch(full_name(op), match)
    ]


def full_name(op: OpInfo) -> str:
    """The name of an entry with its variant: "linalg.norm/subgradients_at_zero"."""
    return f"{op.name}/{op.variant_test_name}" if op.variant_test_name else op.name


def dtype_of(op: OpInfo) -> torch.dtype | None:
    """Double precision, complex where there is no other; None without a gradient."""
    if not op.supports_autograd:
        return None
    found = op.supported_backward_dtypes("cpu")
    return next((d for d in (torch.float64, torch.complex128) if d in found), None)


def seed_all() -> None:
    """Puts every generator that makers of samples and operators draw from to one state."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def cases(op: OpInfo, count: int) -> Sequence[Case]:
    """The first and the last of the small samples that can be differentiated.

    Where none is small, the smallest.
    """
    seed_all()
    found = list(itertools.islice(_differentiable_cases(op), MAX_LOOKED_AT))
    small = [case for case in found if num_elements(case) <= MAX_ELEMENTS]
    if not small:
        return sorted(found, key=num_elements)[:count]
    return [small[0], small[-1]][:count] if len(small) > 1 else small


def num_elements(case: Case) -> int:
    """How many elements the tensors of a case have together."""
    return sum(tensor.numel() for tensor in case.tensors)


def _differentiable_cases(op: OpInfo) -> Iterator[Case]:
    for sample in op.sample_inputs("cpu", dtype_of(op), requires_grad=True):
        call = Call(op, sample)
        leaves = tree_leaves(((sample.input, *sample.args), sample.kwargs))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        case = Case(call, tensors)
        if num_elements(case) and any(tensor.requires_grad for tensor in tensors):
            yield case
