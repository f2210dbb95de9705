"""What an error of the package leaves behind in the process: nothing.

After each test that met such an error, torch's switches are what they were, its own features
work, and no tensor of a trace is left.
"""

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from remat import RematError
from remat._calls import decorated
from remat._torch.fakes import _FakeMode
from remat.layers._links import _stage_stand_ins

_torch: Any = torch


def forget_retraces() -> None:
    """Tests share the traces of functions that they share, but not how many there were."""
    for cache in decorated._caches.values():
        cache.histories.clear()


class Errors:
    """The errors of the package and the fake modes that were made, in any thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.modes: list[weakref.ref[_FakeMode]] = []
        make_mode = _FakeMode.__init__

        def make_error(error: RematError, *args: object) -> None:
            self.count += 1
            super(RematError, error).__init__(*args)

        def note_mode(mode: _FakeMode, *args: Any, **kwargs: Any) -> None:
            make_mode(mode, *args, **kwargs)
            self.modes.append(weakref.ref(mode))

        monkeypatch.setattr(RematError, "__init__", make_error)
        monkeypatch.setattr(_FakeMode, "__init__", note_mode)


def fakes_left(errors: Errors) -> list[Tensor]:
    """Tensors without data that are alive, made in a mode that was noted."""
    _stage_stand_ins.cache_clear()  # these stay on purpose, for the next call
    for generation in (1, 2):  # most of them are young, and to look at all takes long
        if all(mode() is None for mode in errors.modes):
            return []
        gc.collect(generation)
    modes = [found for mode in errors.modes if (found := mode()) is not None]
    holders = gc.get_referrers(*modes) if modes else []
    owners = gc.get_referrers(*holders) if holders else []
    return [each for each in [*holders, *owners] if isinstance(each, FakeTensor)]


def state() -> dict[str, Any]:
    """The switches, modes and methods that a trace changes while it runs."""
    autocast = {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    }
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": autocast,
        "autocast cache": torch.is_autocast_cache_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "multithreading": _torch._C._is_multithreading_enabled(),
        "view replay": _torch._C._is_view_replay_enabled(),
        "dispatch modes": [*_get_current_dispatch_mode_stack()],
        "function modes": _torch._C._len_torch_function_stack(),
        "torch functions": _torch._C._get_torch_function_state(),
        "torch.func": _torch._C._functorch.peek_interpreter_stack(),
        "forward mode": forward_ad._current_level,
        "saved-tensor hooks": _torch._C._autograd._top_saved_tensors_default_hooks(
            True
        ),
        "tracing": _torch.fx._symbolic_trace.is_fx_symbolic_tracing(),
        "compiling": torch.compiler.is_compiling(),
        "tracing context": _torch._guards.TracingContext.try_get(),
        "compile context": _torch._guards.CompileContext.try_get(),
        "stance": eval_frame._stance,
        "nested traces": _torch._dynamo.config.error_on_nested_fx_trace,
        "module calls": nn.Module.__call__,
        "module attributes": nn.Module.__getattr__,
        "module conversions": nn.Module._apply,
        # transformers adds a method when it makes its first model, Python 3.14 its annotations
        # when these are read.
        "module class": sorted(
            vars(nn.Module).keys() - {"smart_apply", "__annotations_cache__"}
        ),
        "function calls": vars(torch.autograd.Function)["apply"],
        "parametrizations": (parametrize._cache_enabled, len(parametrize._cache)),
        "logs of fakes": logging.getLogger("torch._subclasses.fake_tensor").disabled,
    }


def _sine(x: Tensor) -> Tensor:
    return x.sin()


def _cosine(x: Tensor) -> Tensor:
    return x.cos()


@torch.compile(backend="eager", fullgraph=True)
def _doubled(x: Tensor) -> Tensor:
    return x.sin() * 2.0


def use_torch() -> None:
    """Uses features of torch once each; it fails if a trace has spoiled one of them."""
    x = torch.ones(3, dtype=torch.float64)
    assert torch.equal(torch.func.grad(lambda x: (x * x).sum())(x), 2 * x)
    assert torch.equal(torch.vmap(torch.sin)(x), x.sin())
    assert torch.equal(torch.cond(x.sum() > 0, _sine, _cosine, (x,)), x.sin())
    assert torch.equal(_doubled(x), x.sin() * 2.0)
    matrix = torch.ones(2, 2)
    with torch.autocast(matrix.device.type, dtype=torch.bfloat16):
        assert torch.mm(matrix, matrix).dtype == torch.bfloat16
    assert torch.mm(matrix, matrix).dtype == torch.float32
    layer = nn.Linear(2, 2)
    layer(matrix).sum().backward()
    assert layer.weight.grad is not None


def use_torch_at_length() -> None:
    """Uses features that take longer: a graph that is new, the gradient of a branch."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    branch: Any = torch.cond(x.sum() > 0, _sine, _cosine, (x,))
    assert torch.equal(torch.autograd.grad(branch.sum(), x)[0], x.cos())
    y = x.detach()
    compiled = torch.compile(lambda x: _sine(x) + 1.0, backend="eager")
    assert torch.equal(compiled(y), y.sin() + 1.0)
    (counted,) = torch.while_loop(lambda x: x.sum() < 9, lambda x: (x + 1.0,), (y,))
    assert torch.equal(counted, y + 2.0)


@contextmanager
def nothing_left(errors: Errors) -> Iterator[None]:
    """Looks for what an error inside has left behind."""
    before, count = state(), errors.count
    errors.modes.clear()
    yield
    if errors.count == count:
        return
    after = state()
    changed = {
        name: (before[name], after[name])
        for name in before
        if before[name] != after[name]
    }
    assert not changed, f"an error has left changed: {changed}"
    left = fakes_left(errors)
    assert not left, f"an error has left tensors without data: {left}"
    use_torch()
