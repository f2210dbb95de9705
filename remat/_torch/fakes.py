"""Tensors without data, and the mode that makes them.

Obsolete when both can be told by public names; a function that says so itself has an end
of its own.
"""

# pyright: reportPrivateUsage=false
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
import torch.optim.optimizer as optimizers
from torch import Tensor, _meta_registrations
from torch._dispatch.python import enable_python_dispatcher
from torch._higher_order_ops import utils as taking_utils
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from remat._torch import loops
from remat._torch.attributes import attributes_as
from remat._torch.dtensor import local_part
from remat._torch.levels import no_dual_level, unwrapped
from remat._torch.taking_functions import takes_functions
from remat._torch.tensors import copy_attributes, is_in_parts, parts_of
from remat._torch.trees import map_tensors, tensor_leaves

_optimizers: Any = optimizers
_registrations: Any = _meta_registrations
_taking: Any = taking_utils
_META = torch.device("meta")
_HALVES = frozenset({torch.bfloat16, torch.float16})
_MOST_REMEMBERED = 4096  # calls of operators, at two kilobytes each
aten: Any = torch.ops.aten
#: CPU kernels that give their first output the memory format of an argument, and which argument. A
#: fake mode copies the argument's strides instead. Obsolete when torch's test of fake against real
#: strides includes these operators with transposed inputs.
_LAID_OUT_BY: dict[Any, int] = {
    aten.native_batch_norm.default: 0,
    aten.native_batch_norm_backward.default: 1,
    aten.native_group_norm.default: 0,
    aten.native_group_norm_backward.default: 1,
}
#: CPU kernels that keep statistics, results 1 and 2, in the dtype of their weight or of a running
#: statistic. A fake mode gives them that of the input, which differs under autocast. Obsolete when
#: torch's test of fake against real dtypes includes norms in half precision with float weights.
_STATISTICS_OF_PARAMETERS = frozenset(
    {
        aten.native_layer_norm.default,
        aten.native_group_norm.default,
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
    }
)
#: Kernels whose output has the strides of a sum of tensors among their arguments: which ones, in
#: this order; none for a contiguous output. A fake mode decomposes these operators, and where
#: inputs are laid out in two ways it takes other strides. Obsolete as `_LAID_OUT_BY`.
_LAID_OUT_LIKE: dict[Any, tuple[int, ...]] = {
    aten.softplus_backward.default: (0, 1),
    aten.elu_backward.default: (0, 1),
    aten.hardtanh_backward.default: (0, 1),
    aten.hardswish_backward.default: (0, 1),
    aten.hardsigmoid_backward.default: (0, 1),
    aten.logit_backward.default: (0, 1),
    aten.binary_cross_entropy_backward.default: (1,),
    aten.mse_loss_backward.default: (),
    aten.smooth_l1_loss_backward.default: (),
    aten.huber_loss_backward.default: (),
    aten._log_softmax_backward_data.default: (),
    aten.pow.Scalar: (),
    aten.threshold_backward.default: (1, 0),
    aten.leaky_relu_backward.default: (1, 0),
    aten.log_sigmoid_backward.default: (0,),
}
#: A fake mode gives dimensions of size one other strides than kernels do, from which these tell the
#: memory format. Obsolete when torch's test of fake against real strides includes such views.
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})
# What errors say that stand for values which a trace has not.
_OF_VMAP = "We do not support batching operators that can support dynamic shape"
# The second where an operator, such as torch.from_file, is given no tensor.
_LACKING_FAKE = ("There was no fake impl registered", "there was no fake impl or Meta")
_LACKING_VALUES = (
    "trying to get a value out of a tracing tensor",
    "Cannot access data pointer of Tensor",
    "data is not allocated yet",
    ".numpy() is not supported",
    "passed to FakeTensor.__format__",
    "Can't call numpy()",
    # Nested tensors compute their lengths from values.
    "does not support tracing with fx.symbolic_trace",
)


def _mode_of(tensor: Tensor) -> FakeTensorMode | None:
    """The mode that made a tensor, or a DTensor's part, which has no data below all wrappers."""
    innermost = local_part(unwrapped(tensor))
    return innermost.fake_mode if isinstance(innermost, FakeTensor) else None


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor, or a DTensor's part, has no data, below all wrappers."""
    return _mode_of(tensor) is not None


def set_on(tensor: Tensor) -> set[str]:
    """The attributes of a tensor without data that are not its class's own."""
    return vars(tensor).keys() - FakeTensor.__annotations__.keys()


def is_fake_of(tensor: Tensor, mode: FakeTensorMode) -> bool:
    """Whether a tensor, or a DTensor's part, was made by this fake mode."""
    return _mode_of(tensor) is mode


def require_own_threads(tensors: Iterable[Tensor]) -> None:
    """Refuses tensors without data of a trace that another thread makes."""
    for mode in map(_mode_of, tensors):
        if isinstance(mode, _FakeMode):
            mode.require_own_thread()


def hides_its_number(tensor: Tensor) -> bool:
    """Whether a tensor without data, of a trace, has no number that Python could read.

    torch reads the numbers of small constants, which fake tensors remember.
    """
    innermost = unwrapped(tensor)
    return isinstance(innermost, FakeTensor) and innermost.constant is None


def wraps_fakes(tensor: Tensor) -> bool:
    """Whether a tensor of a subclass is made of fake ones, as a DTensor in a trace is."""
    return is_in_parts(tensor) and any(map(is_fake, parts_of(tensor)))


class _FakeMode(FakeTensorMode):
    """Fake tensors of one home device.

    Under vmap of jvp, torch asks for zeros on "meta", the device of a fake tensor's inside,
    instead of on the device that it stands for. Obsolete when functorch's wrappers tell the
    fake device.

    With open sizes, torch's shape functions in Python are used. Those in C++ need numbers in
    some places, as `constant_pad_nd` does for each size. Obsolete when a fake mode with a
    shape environment uses them by itself.
    """

    supports_higher_order_operators = True

    def __init__(self, home: torch.device, shape_env: Any) -> None:
        super().__init__(allow_non_fake_inputs=False, shape_env=shape_env)
        self._home = home
        #: Where to note the tensors that operators make, if anywhere.
        self.made: list[weakref.ref[Tensor]] | None = None
        #: Gives what refuses an operator on another thread, which no trace follows, if anything.
        self.refuses: Callable[[], Any] = lambda: None
        self._thread = threading.get_ident()
        self._in_python = (
            contextlib.nullcontext if shape_env is None else enable_python_dispatcher
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.require_own_thread()
        kwargs = kwargs or {}
        if takes_functions(func):
            return self._call_taking_functions(func, args, kwargs)
        is_stray = kwargs.get("device") == _META and self._home != _META
        if is_stray and not self.in_kernel_invocation and not tensor_leaves(args):
            kwargs = kwargs | {"device": self._home}
        if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            return self._grouped_product(*args, **kwargs)
        with no_dual_level(), self._in_python(), self._as_remembered(func, args):
            found: Any = super().__torch_dispatch__(func, types, args, kwargs)
            found = self._as_of_floats(func, args, kwargs, found)
            if self._home.type == "cpu":
                found = self._as_of_cpu(func, args, found)
            found = self._as_laid_out_by_kernels(func, args, found)
        if self.made is not None:
            self.made.extend(map(weakref.ref, tensor_leaves(found)))
        return found

    def _as_remembered(
        self, func: Any, args: Any
    ) -> contextlib.AbstractContextManager[Any]:
        """Where torch may take the result from its memory of earlier calls.

        Of a view of zeros without memory, as forward mode has them, it remembers a tensor that is
        none; so a trace would have other steps than one before. Of the tangent of a view it does
        not remember how much memory that had, and asserts later that it is the primal's. Obsolete
        when the memory tells these apart.
        """
        is_zero = args and isinstance(args[0], Tensor) and args[0]._is_zerotensor()
        if not is_zero and func is not aten._new_zeros_with_same_feature_meta.default:
            return contextlib.nullcontext()
        return fake_tensor.disable_fake_tensor_cache(self)

    def require_own_thread(self) -> None:
        """Refuses to go on, on another thread than the one that traces."""
        if threading.get_ident() != self._thread:
            found = self.refuses()
            if found is not None:
                found.refuse_elsewhere()

    def _call_taking_functions(self, op: Any, args: Any, kwargs: Any) -> Any:
        """An operator that takes functions; torch's cache of results would hold these."""
        function = _taking.registered_hop_fake_fns.get(op)
        if op is torch.ops.higher_order.while_loop:
            function = loops.shapes_of
        if function is None:
            return op.python_key_table[FakeTensorMode](self, *args, **kwargs)
        with self:
            return function(*args, **kwargs)

    def _grouped_product(
        self,
        left: Tensor,
        right: Tensor,
        offsets: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """What torch 2.13 refuses to make without data for any dtype but one of its kernel's."""
        del bias
        with self:
            return _registrations._create_grouped_mm_output_tensor(
                left, right, offsets, out_dtype
            )

    def _as_of_floats(self, func: Any, args: Any, kwargs: Any, found: Any) -> Any:
        """The layout of a pointwise result in half precision, where an operand is expanded.

        torch finds it for floats that it makes of the operands, densely; kernels make none.
        Obsolete when its shape functions keep the strides of what they convert.
        """
        if not isinstance(found, Tensor) or found.dtype not in _HALVES:
            return found
        given = [each for each in tensor_leaves((args, kwargs)) if each.dim()]
        is_expanded = any(0 in each.stride() for each in given)
        is_pure = torch.Tag.pointwise in func.tags and not func._schema.is_mutable
        kinds = {each.dtype for each in given if each.is_floating_point()}
        if not (is_expanded and is_pure and kinds == {found.dtype}):
            return found

        def as_float(tensor: Tensor) -> Tensor:
            if tensor.dtype not in _HALVES:
                return tensor
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=torch.float32, device=tensor.device
            )

        with self:
            args, kwargs = map_tensors(as_float, (args, kwargs))
            return torch.empty_like(func(*args, **kwargs), dtype=found.dtype)

    def _as_of_cpu(self, func: Any, args: Any, found: Any) -> Any:
        """What kernels of a CPU alone make otherwise than a fake mode says."""
        if func is aten.log_sigmoid_forward.default:
            dense = torch.contiguous_format
            return tuple(torch.empty_like(each, memory_format=dense) for each in found)
        if func in _STATISTICS_OF_PARAMETERS:
            result, *statistics = found
            for parameter in tensor_leaves(args[1:])[:1]:
                statistics = [each.to(parameter.dtype) for each in statistics]
            return (result, *statistics)
        return found

    def _viewed(self, given: Tensor, found: Tensor) -> Tensor:
        """A view with the strides that a tensor without data, but of a kernel, has."""
        like = torch.empty_strided(given.shape, given.stride(), device=_META)
        strides = like.view(found.shape).stride()
        if found.stride() == strides:
            return found
        with self:
            return given.as_strided(found.shape, strides, given.storage_offset())

    def _as_laid_out_by_kernels(self, func: Any, args: Any, found: Any) -> Any:
        if func in _VIEWS and self.shape_env is None and 1 in found.shape:
            return self._viewed(args[0], found)
        source = _LAID_OUT_BY.get(func)
        is_on_cpu = source is not None and args[source].device.type == "cpu"
        is_of_groups = func is aten.native_group_norm_backward.default
        if source is not None and (is_on_cpu or is_of_groups):
            first, *rest = found
            if first is not None:
                # Elsewhere it is contiguous, whatever the argument.
                layout = torch.contiguous_format
                if is_on_cpu:
                    layout = suggest_memory_format(args[source])
                first = torch.empty_like(
                    first, dtype=args[source].dtype, memory_format=layout
                )
            return (first, *rest)
        if func is aten.multilabel_margin_loss_forward.default and args[0].dim() < 2:
            with self:  # of one row it is one number, and not a row of one
                return found[0].new_empty(()), found[1]
        summed = _LAID_OUT_LIKE.get(func)
        if summed is None:
            return found
        with self:
            if not summed:
                return torch.empty_like(found, memory_format=torch.contiguous_format)
            given = tensor_leaves(args)
            like = functools.reduce(torch.add, [given[place] for place in summed])
            # Another size is one that the kernel resizes to, where vmap maps a part alone.
            is_resized = like.shape != found.shape
            return found if is_resized else torch.empty_like(like, dtype=found.dtype)


def fake_mode(home: torch.device, shape_env: Any = None) -> FakeTensorMode:
    """A fresh mode for one trace: real tensors are refused.

    Sizes are constants, except symbols of a shape environment. What torch remembers of the
    operators on fake tensors has no bound of its own: a number of traces is remembered here.
    """
    if len(FakeTensorMode.cache) > _MOST_REMEMBERED:
        FakeTensorMode.cache.clear()
    return _FakeMode(home, shape_env)


def forget_operators() -> None:
    """Forgets what torch remembers of operators on fake tensors.

    After a trace that failed between levels of torch.func, it gives later ones tensors of another
    layout than the operators would ("has_fw_view() INTERNAL ASSERT FAILED"). Obsolete when the
    memory tells these apart.
    """
    FakeTensorMode.cache_clear()


@contextlib.contextmanager
def faked(tree: Any) -> Generator[Any]:
    """A tree with fake leaves for its tensors, in a mode that makes more; fakes stay theirs."""
    given = [each for each in tensor_leaves(tree) if isinstance(each, FakeTensor)]
    mode = given[0].fake_mode if given else FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, Tensor] = {}

    def leaf(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            # torch asks for the gradient of what it converts, and warns if that is no leaf.
            like = tensor.detach()
            like = like if isinstance(like, FakeTensor) else mode.from_tensor(like)
            made[id(tensor)] = like.requires_grad_(tensor.requires_grad)
            # A storage of inputs asks for instance whether this is a parameter.
            copy_attributes(tensor, made[id(tensor)])
        return made[id(tensor)]

    stand_ins = map_tensors(leaf, tree)
    with mode:
        yield stand_ins


def zeros_like_results(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a call returns, with zeros for its numbers, computed without data."""
    with faked((args, kwargs)) as (args, kwargs):
        results = function(*args, **kwargs)

    def zeros(fake: Tensor) -> Tensor:
        like: dict[str, Any] = {"dtype": fake.dtype, "device": fake.device}
        made = torch.empty_strided(fake.shape, fake.stride(), **like).zero_()
        return made.requires_grad_(fake.requires_grad)

    return map_tensors(zeros, results)


def updated_as_real() -> contextlib.AbstractContextManager[None]:
    """Inside, optimizers choose for fake tensors how to update tensors of their device.

    On an accelerator that is all parameters by one call, unless they are told otherwise. Obsolete
    when they ask for the device alone.
    """
    kinds = [*_optimizers._foreach_supported_types, FakeTensor]
    return attributes_as(_optimizers, _foreach_supported_types=kinds)


def lacking(error: Exception) -> str | None:
    """What an error says that a trace lacked, None if it says something else.

    A "fake implementation" of an operator of the user's, a "shape" that depends on data, or
    "values"; or it met a "tensor outside", which is no fake of its mode.
    """
    text = str(error)
    is_unsupported = isinstance(error, fake_tensor.UnsupportedOperatorException)
    if is_unsupported or any(words in text for words in _LACKING_FAKE):
        return "fake implementation"
    if isinstance(error, fake_tensor.DynamicOutputShapeException) or _OF_VMAP in text:
        return "shape"
    if "Please convert all Tensors to FakeTensors first" in text:
        return "tensor outside"
    kinds = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.UnsupportedFakeTensorException,
    )
    lacks_values = any(words in text for words in _LACKING_VALUES)
    return "values" if isinstance(error, kinds) or lacks_values else None
