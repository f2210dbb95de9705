"""A stand-in for an accelerator: a device of torch's own kind, "standin", that needs no GPU.

`load()` builds it with the C++ compiler at hand and registers it. Its operators compute by the
CPU's kernels on its own memory; its two devices have streams, events, page-locked memory and
generators. What a real device does only at bad luck, it does always: a copy that is not waited
for has not arrived, and memory that is freed under a reader is overwritten (`runtime.h`).
"""

import functools
import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration, cpp_extension

from tests.accelerator import device_module

NAME = "standin"
_HERE = Path(__file__).parent


class Counts:
    """What the device counts, by the names in `runtime.h`."""

    def of(self, *names: str) -> Any:
        """One count, or several."""
        counted = load().counted()
        found = [counted[name] for name in names]
        return tuple(found) if len(found) > 1 else found[0]

    def forget(self) -> None:
        """Starts all counts from 0."""
        load().forget_counts()


def missing() -> str | None:
    """What it takes to build the device and is not here, in words; None if all is."""
    for tool in (cpp_extension.get_cxx_compiler(), "ninja"):
        if shutil.which(tool) is None:
            return f"the stand-in device needs {tool} to be built"
    return None


@functools.cache
def load() -> Any:
    """The compiled device, which is built if it is not yet, and registered with torch."""
    library = _built()
    backend_registration.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device_module)
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    numbers = range(device_module.DEVICE_COUNT)
    device_module.default_generators = tuple(map(library.default_generator, numbers))
    return library


def _built() -> Any:
    """Builds once for each version of torch and of the sources.

    Of several processes, too: torch locks the folder. Those of xdist start after the one that
    has started them has built.
    """
    sources = sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.h")])
    content = b"".join(path.read_bytes() for path in sources)
    key = hashlib.sha256(torch.__version__.encode() + content).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"remat-standin-{key}")
    folder.mkdir(exist_ok=True)
    return cpp_extension.load(
        NAME,
        [str(path) for path in sources if path.suffix == ".cpp"],
        extra_cflags=["-O1"],
        build_directory=str(folder),
    )
