"""What the tests of the laws share: counters of operators and bytes, bitwise equality.

Nothing here imports `remat`: these are the oracles, and they must be right without it.
The functions that the laws are tried on stand in `tests/functions.py`.
"""

import contextlib
import importlib
import itertools
import sys
import textwrap
import weakref
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

Cotangents = Sequence[Tensor] | Callable[[Tensor], Tensor] | None

#: Operators that move or rename bits: a recomputation may run any number of them.
_ALIASES = (
    "alias as_strided detach diagonal expand permute select slice split "
    "split_with_sizes squeeze t transpose unbind unsqueeze view _unsafe_view"
)
ALIASING = frozenset(f"aten.{name}" for name in _ALIASES.split(" "))
#: Products of matrices and vectors.
_PRODUCTS = "mm bmm addmm baddbmm dot mv addmv"
PRODUCTS = frozenset(f"aten.{name}" for name in _PRODUCTS.split(" "))


@contextlib.contextmanager
def installed(
    name: str, source: str, place: Path, patch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A module where packages are installed: what a function reaches is not followed there."""
    folder = place / "site-packages"
    folder.mkdir()
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    patch.syspath_prepend(folder)
    yield importlib.import_module(name)
    del sys.modules[name]


def swept(cases: Iterable[Any]) -> list[Any]:
    """Parameters that only a sweep tries: they repeat what others of their test state."""
    return [pytest.param(case, marks=pytest.mark.sweep) for case in cases]


def daily(cases: Mapping[str, Any], names: Collection[str]) -> list[Any]:
    """Parameters by their names, of which those not named are left to a sweep."""
    return [
        pytest.param(case, id=name, marks=() if name in names else pytest.mark.sweep)
        for name, case in cases.items()
    ]


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor holds bytes: neither fake nor on the meta device."""
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a pytree, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class OperatorCounter(TorchDispatchMode):
    """Counts the ATen operators that run on real tensors, by packet ("aten.sin")."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if all(is_real(tensor) for tensor in tensors_in((args, kwargs, result))):
            self.counts[str(func.overloadpacket)] += 1
        return result


class Heard(TorchDispatchMode):
    """The packets of the ATen operators that run, in order; the two kinds of view are one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # What sets them apart is autograd's alone.
        self.names.append(str(func.overloadpacket).replace("_unsafe_view", "view"))
        return func(*args, **(kwargs or {}))


def count_operators(fn: Callable[..., Any], *args: Any) -> Counter[str]:
    """The operators that `fn(*args)` runs on real tensors; what a trace does is not counted."""
    with OperatorCounter() as counter:
        fn(*args)
    return counter.counts


def let_autograd_finish() -> None:
    """Waits until autograd's thread for the default device has ended its last task.

    A backward returns when its last gradient is there; the thread lets go of the task's
    tensors a moment later, and before it takes another.
    """
    if torch.get_default_device().type != "cpu":
        with _disable_current_modes():
            torch.zeros((), requires_grad=True).clone().backward()


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made inside and are still alive, and their peak.

    Each storage counts once, whatever the number of its views; fake and meta tensors
    and storages that are older than the context do not count. Storages are seen below
    the transforms of `torch.func`; a weak reference notices when one is freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live = 0
        self.peak = 0
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def live(self) -> int:
        """Bytes alive now, when autograd's thread for the device has let go of its own."""
        let_autograd_finish()
        return self._live

    def reset_peak(self) -> None:
        """Lets the peak start again from what is alive now."""
        self.peak = self._live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._watch(tensors_in((args, kwargs)), born_here=False)
        result = func(*args, **kwargs)
        self._watch(tensors_in(result), born_here=True)
        return result

    def _watch(self, tensors: Iterable[Tensor], *, born_here: bool) -> None:
        for tensor in tensors:
            if not is_real(tensor) or tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            known = self._seen.get(id(storage))
            if known is None or known() is not storage:
                self._add(storage, storage.nbytes() if born_here else 0)

    def _add(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        key = id(storage)

        def freed(reference: weakref.ref[torch.UntypedStorage]) -> None:
            self._live -= size_bytes
            if self._seen.get(key) is reference:
                del self._seen[key]

        self._seen[key] = weakref.ref(storage, freed)
        self._live += size_bytes
        self.peak = max(self.peak, self._live)


def graphs_of_torch_compile() -> tuple[Any, list[Counter[str]]]:
    """A backend of torch.compile that runs graphs as they are, and what each is made of."""
    graphs: list[Counter[str]] = []

    def noted(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=noted, bw_compiler=noted), graphs


def is_differentiable(leaf: object) -> bool:
    """Whether a leaf is a tensor that can carry a gradient."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def clone_exactly(tensor: Tensor) -> Tensor:
    """A detached copy with the same strides, offset and conjugate bit, even expanded."""
    if tensor.layout != torch.strided:
        return tensor.detach().clone()
    storage = tensor.untyped_storage().clone()
    with torch.no_grad():
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            storage, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        copy = copy.conj() if tensor.is_conj() else copy
        copy = torch.ops.aten._neg_view(copy) if tensor.is_neg() else copy
    return copy.detach()


def fresh(args: Any, *, requires_grad: bool = True) -> Any:
    """Copies of the tensors in `args`; leaves to differentiate require grad.

    These are the ones that require grad in `args` if any does, else every floating one.
    """
    explicit = any(tensor.requires_grad for tensor in tensors_in(args))

    def copy(tensor: Tensor) -> Tensor:
        wanted = tensor.requires_grad if explicit else is_differentiable(tensor)
        return clone_exactly(tensor).requires_grad_(wanted and requires_grad)

    return tree_map_only(Tensor, copy, args)


def random_cotangent(output: Tensor, seed: int = 0) -> Tensor:
    """A contiguous cotangent for `output`, the same at every call."""
    generator = torch.Generator().manual_seed(seed + 1009)
    wide = torch.complex128 if output.is_complex() else torch.float64
    drawn = torch.randn(output.shape, generator=generator, dtype=wide, device="cpu")
    return drawn.to(output.device, output.dtype)


def _pulled(outputs: Any, cotangents: Cotangents) -> tuple[list[Tensor], list[Tensor]]:
    roots = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    if cotangents is None:
        return roots, [random_cotangent(t, seed=i) for i, t in enumerate(roots)]
    if callable(cotangents):
        return roots, [cotangents(root) for root in roots]
    return roots, list(cotangents)


def run(
    f: Callable[..., Any], args: Sequence[Any], cotangents: Cotangents = None
) -> tuple[Any, list[Tensor | None]]:
    """The outputs of `f` and, by plain `.backward()`, its gradients.

    Args:
        f: any function of pytrees.
        args: its arguments; `f` gets copies that keep strides.
        cotangents: one for each output that requires grad, or a function from such an
            output to its cotangent; random ones of a fixed seed by default.

    Returns:
        The outputs, detached, and one gradient (or None) for each tensor in `args`.
    """
    leaves = fresh(tuple(args))
    outputs = f(*leaves)
    roots, pulled = _pulled(outputs, cotangents)
    if roots:
        torch.autograd.backward(roots, pulled)
    return (
        tree_map_only(Tensor, Tensor.detach, outputs),
        [tensor.grad if tensor.is_leaf else None for tensor in tensors_in(leaves)],
    )


def grads(
    f: Callable[..., Any], args: Sequence[Any], cotangents: Cotangents = None
) -> list[Tensor | None]:
    """The gradients of `f` by plain `.backward()`: the second half of `run`."""
    return run(f, args, cotangents)[1]


def backward_operators(f: Callable[..., Any], *args: Any) -> Counter[str]:
    """The operators that the backward of `f` runs; a first round pays for the traces."""
    grads(f, args)
    leaves = fresh(tuple(args))
    wanted = [tensor for tensor in tensors_in(leaves) if tensor.requires_grad]
    roots, pulled = _pulled(f(*leaves), None)
    return count_operators(
        lambda: torch.autograd.grad(roots, wanted, pulled, allow_unused=True)
    )


def forward_operators(f: Callable[..., Any], *args: Any) -> Counter[str]:
    """The operators that one call of `f` runs, once it is traced."""
    grads(f, args)
    return count_operators(f, *fresh(tuple(args)))


def held_bytes(f: Callable[..., Any], *args: Any) -> int:
    """Bytes alive between forward and backward, without arguments and outputs.

    The outputs are subtracted because the caller holds them in any case; a saved value
    that shares an output's storage costs nothing.
    """
    grads(f, args)
    leaves = fresh(tuple(args))
    with LiveBytes() as memory:
        outputs = f(*leaves)
        held = memory.live
    own = {t.untyped_storage().data_ptr(): t for t in tensors_in(outputs)}
    inputs = {t.untyped_storage().data_ptr() for t in tensors_in(leaves)}
    return held - sum(
        tensor.untyped_storage().nbytes()
        for pointer, tensor in own.items()
        if pointer not in inputs
    )


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if not flat.is_floating_point():
        return flat
    flat = torch.where(flat.isnan(), torch.full_like(flat, float("nan")), flat)
    return flat.view(getattr(torch, f"int{8 * flat.element_size()}"))


def _assert_same_leaf(place: str, one: Any, other: Any) -> None:
    assert isinstance(one, Tensor) == isinstance(other, Tensor), (
        f"{place}: {one!r} != {other!r}"
    )
    if not isinstance(one, Tensor):
        assert type(one) is type(other), f"{place}: {one!r} != {other!r}"
        assert one == other, f"{place}: {one!r} != {other!r}"
        return
    assert one.dtype == other.dtype, f"{place}: {one.dtype} != {other.dtype}"
    assert one.shape == other.shape, f"{place}: {one.shape} != {other.shape}"
    different = _bits(one) != _bits(other)
    if different.any():
        gap = (one - other).abs().max() if one.dtype != torch.bool else "bool"
        raise AssertionError(
            f"{place}: {int(different.sum())} of {different.numel()} words differ, "
            f"by at most {gap}"
        )


def assert_bitwise(one: Any, other: Any) -> None:
    """Two pytrees have one structure, and leaves of one dtype, shape and bits.

    NaN equals NaN; -0.0 does not equal 0.0.
    """
    leaves, spec = tree_flatten(one)
    other_leaves, other_spec = tree_flatten(other)
    assert spec == other_spec, f"structures differ: {spec} != {other_spec}"
    for index, (a, b) in enumerate(zip(leaves, other_leaves, strict=True)):
        _assert_same_leaf(f"leaf {index}", a, b)


def assert_close(one: Any, other: Any) -> None:
    """Two pytrees agree to rounding, by the defaults of `torch.testing`."""
    torch.testing.assert_close(tree_leaves(one), tree_leaves(other), equal_nan=True)


def scalar_loss(f: Callable[..., Any]) -> Callable[..., Tensor]:
    """`f` made a function to a real number, each output weighted at random.

    By linearity its gradients are those of `f` with `random_cotangent` as cotangents.
    """

    def loss(*args: Any) -> Tensor:
        outputs = [t for t in tensors_in(f(*args)) if is_differentiable(t)]
        terms = [
            (out * random_cotangent(out, seed=i).to(out.device)).sum()
            for i, out in enumerate(outputs)
        ]
        terms = [term.real if term.is_complex() else term for term in terms]
        return torch.stack([term.to(torch.float64) for term in terms]).sum()

    return loss


def on_tensors(
    f: Callable[..., Any], args: Sequence[Any]
) -> tuple[Callable[..., Any], list[Tensor]]:
    """`f` as a function of its differentiable tensors alone, and these tensors."""
    leaves, spec = tree_flatten(tuple(args))
    places = [i for i, leaf in enumerate(leaves) if is_differentiable(leaf)]

    def flat(*tensors: Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return f(*tree_unflatten(filled, spec))

    return flat, [leaves[i] for i in places]


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases, fewer than the product's, in which any two values of two axes meet.

    What breaks for one value, or for two together, breaks in one of them; three axes of
    like lengths have about as many as two. Next comes whichever case of the product has the
    most pairs that are new.
    """
    left = list(itertools.product(*(list(enumerate(axis)) for axis in axes)))

    def pairs(case: tuple[Any, ...]) -> set[Any]:
        places = enumerate(index for index, _ in case)
        return set(itertools.combinations(places, 2))

    met: set[Any] = set()
    found: list[tuple[Any, ...]] = []
    while left:
        best = max(left, key=lambda case: len(pairs(case) - met))
        if pairs(best) <= met:
            break
        met |= pairs(best)
        left.remove(best)
        found.append(tuple(value for _, value in best))
    return found


def in_turn(*axes: Iterable[Any]) -> list[Any]:
    """Parameters: all cases of a product, of which those are daily in which each value has a turn.

    As many as the longest axis has values: what breaks for one value breaks in one of them.
    What takes two together may be left to a sweep, or to other tests.
    """
    given = [list(axis) for axis in axes]
    turns = range(max(map(len, given)))
    places = {tuple(turn % len(axis) for axis in given) for turn in turns}
    return [
        pytest.param(*case, marks=() if place in places else pytest.mark.sweep)
        for case, place in zip(
            itertools.product(*given),
            itertools.product(*(range(len(axis)) for axis in given)),
            strict=True,
        )
    ]


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A standard normal tensor, the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def default_generator() -> torch.Generator:
    """That of the device on which the tests make their tensors."""
    home = torch.get_default_device()
    known = getattr(torch.get_device_module(home), "default_generators", None)
    return known[home.index] if known else torch.default_generator


def name_of_generator() -> str:
    """What messages call it."""
    home = torch.get_default_device()
    return f"the default generator{'' if home.type == 'cpu' else f' of {home}'}"


@contextlib.contextmanager
def deterministic(enabled: bool = True, *, warn_only: bool = False) -> Iterator[None]:
    """Deterministic algorithms, for a while."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)


class FakeDevice:
    """What `torch.cuda` offers for generators, without a device behind it."""

    def __init__(self) -> None:
        self.states = {0: torch.zeros(16, dtype=torch.uint8, device="cpu")}

    def is_available(self) -> bool:
        return True

    def get_rng_state(self, device: torch.device) -> Tensor:
        return self.states[device.index].clone()

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        self.states[device.index] = state.clone()
