"""A graph compiled by Inductor.

Obsolete when `torch._inductor.compile` loses its underscore.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

#: Inductor would move the gradients of weights to the end, and keep all their inputs until
#: then. The order of a program already holds least. The look-up has checked the sizes.
_INDUCTOR = {
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "size_asserts": False,
}


def inductor(
    module: fx.GraphModule, inputs: Sequence[Tensor], *, wrapper_in_cpp: bool
) -> Callable[..., Any]:
    """A graph compiled for tensors like these; takes one list of them, which it empties.

    The code that calls the kernels is written in Python or in C++. C++ takes seconds more to
    compile, and saves microseconds at each call of a kernel.

    A caller holds the arguments of a call until it returns, so compiled code can free only
    tensors in a list. It takes a list if the module is in Dynamo's wrapper. Obsolete when
    `torch._inductor.compile`, which torch documents, loses its underscore and has a way to
    give inputs away.
    """
    compiler: Any = importlib.import_module("torch._inductor")
    dynamo: Any = importlib.import_module("torch._dynamo.utils")
    from_list = dynamo.GmWrapper(module, list)
    options = {**_INDUCTOR, "cpp_wrapper": wrapper_in_cpp}
    return compiler.compile(from_list, list(inputs), options=options)
