"""Code that runs outside of every transform and every mode of the caller.

Obsolete when torch has one public context for that.
"""

# pyright: reportPrivateUsage=false
import contextlib
import logging
from collections.abc import Generator
from typing import Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from remat._torch.attributes import attributes_as
from remat._torch.autograd import without_lifting
from remat._torch.levels import dual_levels, leave_functorch, shared_dual_level

_logger_of_fakes = logging.getLogger("torch._subclasses.fake_tensor")


@contextlib.contextmanager
def isolated() -> Generator[None]:
    """Runs the body outside every transform and every mode of the caller."""
    with (
        leave_functorch(),
        without_lifting(),
        without_inference_mode(),
        _disable_current_modes(),
        shared_dual_level(),
        dual_levels._set_fwd_grad_enabled(True),
        # Its checks for nan read numbers, which fake tensors do not have.
        torch.autograd.set_detect_anomaly(False),
        # Fake tensors log a traceback of each failure before they raise it.
        attributes_as(_logger_of_fakes, disabled=True),
        _without_saving_hooks(),
    ):
        yield


@contextlib.contextmanager
def without_inference_mode() -> Generator[None]:
    """Lets autograd record, whether or not the caller is in inference mode.

    The caller cannot be asked: inside a level of torch.func the mode reports that it is off,
    although the dispatch keys that it excludes still are excluded outside the level. Obsolete
    when torch undoes both. Leaving the mode also lets backwards use autograd's own threads.
    """
    records = torch.is_grad_enabled()
    has_threads = torch.autograd.is_multithreading_enabled()
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(records),
        torch.autograd.set_multithreading_enabled(has_threads),
    ):
        yield


@contextlib.contextmanager
def _without_saving_hooks() -> Generator[None]:
    """Takes the caller's saved-tensor hooks away: they would be given fake tensors."""
    autograd: Any = cast("Any", torch._C)._autograd
    with contextlib.ExitStack() as undo:
        while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
            undo.callback(autograd._push_saved_tensors_default_hooks, *top)
            autograd._pop_saved_tensors_default_hooks()
        yield
