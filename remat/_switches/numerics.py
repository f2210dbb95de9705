"""The switches that change what operators compute: read, compared, put back.

They belong to a call's signature (law 12), and a recomputation runs under the forward's: autocast,
the default device and dtype, torch-function modes, deterministic algorithms, matmul precision, and
the choice of attention kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import torch

from remat._torch import guards, modes
from remat._torch.autocast import autocast_devices


class Numerics(NamedTuple):
    """The numerics switches of this thread; a tuple, because each call compares and hashes one."""

    #: (device type, dtype) for each device type that autocasts.
    autocast: tuple[tuple[str, torch.dtype], ...]
    #: The default device of what factories make, and torch-function modes of the user's.
    functions: modes.FunctionModes
    #: What each device type casts to once code switches autocast on, whether it is on or not.
    autocast_dtypes: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool  # whether a cast of a weight is kept for its next use
    default_dtype: torch.dtype  # what factories make
    deterministic: tuple[bool, bool]  # (algorithms, warn only)
    matmul_precision: guards.Precision  # of float32
    switches: tuple[bool, ...]  # backends that may be chosen

    @classmethod
    def current(cls) -> Numerics:
        """The switches of this thread; the same object as long as nothing changes."""
        kernels, functions = guards.kernel_choices(), modes.function_modes()
        known = _known.get(torch.is_grad_enabled())
        if known is not None and known[1:3] == (kernels, functions) and known[0]():
            return known[3]
        precision, *switches = kernels
        dtypes = tuple(
            (device, torch.get_autocast_dtype(device)) for device in autocast_devices()
        )
        current = cls(
            tuple(pair for pair in dtypes if torch.is_autocast_enabled(pair[0])),
            functions,
            dtypes,
            torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(),
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            precision,
            tuple(switches),
        )
        known = (guards.state_guard(), kernels, functions, current)
        _known[torch.is_grad_enabled()] = known
        return current

    def are_met_by(self, found: Numerics) -> bool:
        """Whether a program, which names the devices of what it makes, computes the same there."""
        return not found.autocast and (found is self or found[_OTHERS] == self[_OTHERS])

    @contextlib.contextmanager
    def applied(self) -> Generator[None]:
        """Runs the body under these switches, autocast included, as for a trace.

        Autocast caches its casts of weights until the outermost block ends. The casts that
        the body made are not of the caller's weights, so the cache is cleared; the caller's
        own casts are made again at their next use.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.settled())
            stack.enter_context(self.functions.applied())
            for device, dtype in self.autocast_dtypes:
                is_on = (device, dtype) in self.autocast
                stack.enter_context(
                    torch.autocast(device, dtype, is_on, self.autocast_cache)
                )
            if self.autocast:
                torch.clear_autocast_cache()
                stack.callback(torch.clear_autocast_cache)
            yield

    @contextlib.contextmanager
    def settled(self) -> Generator[Callable[[bool], None] | None]:
        """Runs the body under these switches, autocast off: a program holds its casts.

        Yields:
            What puts these in force for a step that repeats the forward's, and those of outside for
            one of the backward's own, as plain autograd does. None where they are the same.
        """
        found = Numerics.current()
        if self.are_met_by(found):
            yield None
            return

        in_force = self

        def turn(is_repeat: bool) -> None:
            nonlocal in_force
            wanted = self if is_repeat else found
            if wanted is in_force:
                return
            wanted.put_in_force()
            if wanted.matmul_precision != in_force.matmul_precision:
                guards.set_matmul_precision(wanted.matmul_precision)
            in_force = wanted

        with guards.with_matmul_precision(self.matmul_precision):
            try:
                self.put_in_force()
                with contextlib.ExitStack() as stack:
                    for device, dtype in found.autocast:
                        off = torch.autocast(device, dtype, enabled=False)
                        stack.enter_context(off)
                    yield None if found[_OTHERS] == self[_OTHERS] else turn
            finally:
                found.put_in_force()

    def put_in_force(self) -> None:
        """Sets the switches that no context sets, as one does for autocast and for products."""
        torch.set_default_dtype(self.default_dtype)
        algorithms, warn_only = self.deterministic
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
        guards.choose_attention(self.switches)


# The fields by which a program computes otherwise that holds its casts and names its devices.
_OTHERS = slice(3, None)

# By grad mode, which the guard looks at too: when it holds, the kernels and the functions that
# it goes with, and what was found then.
_known: dict[
    bool, tuple[Callable[[], bool], tuple[Any, ...], modes.FunctionModes, Numerics]
] = {}
