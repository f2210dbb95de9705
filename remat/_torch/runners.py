"""What runs a graph as a whole: code that Inductor compiles, and torch's own interpreter.

Obsolete when `torch._inductor.compile` loses its underscore, and torch has a public way to run
a list of operators in one call.
"""

# pyright: reportPrivateUsage=false
import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from remat._torch.schemas import OpOverload, schema_of

#: Inductor would move the gradients of weights to the end, and keep all their inputs until
#: then. The order of a program already holds least. The look-up has checked the sizes.
_INDUCTOR = dict.fromkeys(
    ("reorder_for_locality", "reorder_for_peak_memory", "size_asserts"), False
)


def inductor(
    module: fx.GraphModule, inputs: Sequence[Tensor], *, wrapper_in_cpp: bool
) -> Callable[..., Any]:
    """A graph compiled for tensors like these; takes one list of them, which it empties.

    The code that calls the kernels is written in Python or in C++. C++ takes seconds more to
    compile, and saves microseconds at each call of a kernel.

    A caller holds the arguments of a call until it returns, so compiled code can free only
    tensors in a list. It takes a list if the module is in Dynamo's wrapper. Obsolete when
    `torch._inductor.compile`, which torch documents, has a way to give inputs away.
    """
    compiler: Any = importlib.import_module("torch._inductor")
    dynamo: Any = importlib.import_module("torch._dynamo.utils")
    from_list = dynamo.GmWrapper(module, list)
    options = {**_INDUCTOR, "cpp_wrapper": wrapper_in_cpp}
    return compiler.compile(from_list, list(inputs), options=options)


_MEMORY_FORMATS = (
    torch.contiguous_format,
    torch.preserve_format,
    torch.channels_last,
    torch.channels_last_3d,
)
_interpreter: Any = torch._C


class Interpreted:
    """A graph for torch's own interpreter: no Python between operators, and no fusion."""

    def __init__(self) -> None:
        self._graph: Any = _interpreter.Graph()

    def inputs(self, count: int) -> list[Any]:
        """The tensors that the function takes, in the order of its list."""
        given = self._graph.addInput()
        given.setType(_interpreter.ListType.ofTensors())
        return self.unpack(given, count)[::-1]

    def call(self, op: OpOverload, arguments: Mapping[str, Any]) -> list[Any]:
        """The values that an operator makes of values and literals, all of them by name.

        Raises:
            LookupError: the interpreter finds another overload for these arguments.
        """
        schema = schema_of(op)
        given = [(arguments[each.name], each.type) for each in schema.arguments]
        inputs = [self._insert_argument(*each) for each in given]
        node = self._insert_node(schema.name, inputs, len(schema.returns))
        made = list(node.outputs())
        for each, declared in zip(made, schema.returns, strict=True):
            each.setType(declared.type)
        if node.schema() != str(schema):
            raise LookupError(f"the interpreter takes {node.schema()} for {schema}")
        return made

    def unpack(self, tensors: Any, count: int) -> list[Any]:
        return list(self._insert_node("prim::ListUnpack", [tensors], count).outputs())

    def function(
        self, outputs: Sequence[Any]
    ) -> Callable[[list[Tensor]], list[Tensor]]:
        """The graph as a function of a list, which it empties, that returns these values."""
        self._graph.registerOutput(
            self._insert_list(outputs, _interpreter.TensorType.get())
        )
        run: Any = _interpreter._create_function_from_graph("remat", self._graph)

        def as_written(inputs: list[Tensor]) -> list[Tensor]:
            found = _interpreter._get_graph_executor_optimize()
            _interpreter._set_graph_executor_optimize(False)
            # The interpreter reads all of them before it runs, and then is their only owner.
            drained = map(inputs.pop, itertools.repeat(-1, len(inputs)))
            try:
                return run(drained)
            finally:
                _interpreter._set_graph_executor_optimize(found)

        return as_written

    def _insert_node(self, kind: str, inputs: Sequence[Any], count: int) -> Any:
        return self._graph.insertNode(self._graph.create(kind, list(inputs), count))

    def _insert_argument(self, argument: Any, declared: Any) -> Any:
        if isinstance(argument, _interpreter.Value):
            return argument
        if argument is None:
            return self._graph.insertConstant(None)
        if isinstance(declared, _interpreter.OptionalType):
            declared = declared.getElementType()
        if isinstance(argument, (list, tuple)):
            items = cast("Sequence[Any]", argument)
            return self._insert_list(items, declared.getElementType())
        if isinstance(argument, torch.memory_format):
            argument = _MEMORY_FORMATS.index(argument)
        if str(declared) == "float":
            argument = float(argument)
        return self._graph.insertConstant(argument)

    def _insert_list(self, items: Sequence[Any], declared: Any) -> Any:
        made = [self._insert_argument(item, declared) for item in items]
        node = self._insert_node("prim::ListConstruct", made, 1)
        node.output().setType(_interpreter.ListType(declared))
        return node.output()
