"""Parses a command line: `model.py:loss x=8,256:bfloat16 heads==4`."""

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from remat import policies
from remat._errors import RematError
from remat.policies import AbstractPolicy, as_policy

_TENSOR = re.compile(r"([\w.]+)=(\d+(?:,\d+)*|)(?::(\w+))?(?:<(\d+))?")
_LITERAL = re.compile(r"([\w.]+)==(.+)")


def load_target(target: str, device: str = "cpu") -> Callable[..., Any]:
    """The function, module or region that "package.module:name" or "file.py:name" names.

    A class of modules is made one without arguments, on a device: on "meta" without memory.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise _refused_word(target, "is not MODULE:FUNCTION.", "Write model.py:loss.")
    thing: Any = _import_target(place, target)
    for part in name.split("."):
        if not hasattr(thing, part):
            what = f"`{place}` has no `{part}`."
            raise _refused_word(target, what, "Correct the name after the colon.")
        thing = getattr(thing, part)
    if not callable(thing):
        raise _refused_word(target, "cannot be called.", "Name a function or a module.")
    if isinstance(thing, type) and issubclass(thing, nn.Module):
        with torch.device(device):
            return thing()
    return cast("Any", thing)


def policy_of_word(word: str) -> AbstractPolicy:
    """The policy that a word names: `nothing_saveable`, `budget("20MiB")`, `policies.py:mine`."""
    if ":" in word.partition("(")[0]:
        return as_policy(load_target(word), word)
    name, called, rest = word.partition("(")
    if name not in policies.__all__:
        what = f"`remat.policies` has no `{name}`."
        do = "Write save_matmul_outputs, for example, or MODULE:POLICY."
        raise _refused_word(word, what, do)
    found: Any = getattr(policies, name)
    if called:
        found = found(*_literal_of_word(f"({rest.removesuffix(')')},)", word))
    return as_policy(found, word)


def _import_target(place: str, target: str) -> Any:
    if not place.endswith(".py"):
        _search_folder(Path.cwd())
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise
            what = f"there is no module `{place}`."
            raise _refused_word(target, what, "Correct it, or name a file.") from error
    path = Path(place)
    if not path.is_file():
        raise _refused_word(target, f"there is no file `{place}`.", "Correct the path.")
    return _module_of_file(path.resolve())


def _search_folder(folder: Path) -> None:
    """Has imports look into a folder first, as Python does for a script's own."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _module_of_file(path: Path) -> Any:
    """The module that a file is, run once; it hides no other of its name."""
    loaded = sys.modules.get(path.stem)
    is_taken = loaded is not None and getattr(loaded, "__file__", None) != str(path)
    name = str(path) if is_taken else path.stem
    if name in sys.modules:
        return sys.modules[name]
    _search_folder(path.parent)
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def keywords(words: Sequence[str], device: str) -> dict[str, Any]:
    """The keyword arguments that some words describe.

    Args:
        words: `x=8,256:bfloat16` is a tensor of that shape and dtype (float32 if none is
            named; `s=` has no dimension); `ids=8,256:int64<50257` has whole numbers below
            a bound (2 if none is named); `heads==4` is a Python literal; a dotted name,
            `params.w=3,4`, goes into a dict.
        device: where the tensors are made; "meta" for none.
    """
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    for word in words:
        literal, tensor = _LITERAL.fullmatch(word), _TENSOR.fullmatch(word)
        if literal is not None:
            name, value = literal[1], _literal_of_word(literal[2], word)
        elif tensor is not None:
            name = tensor[1]
            value = _tensor_of_word(tensor, device, generator, word)
        else:
            do = "Write x=8,256:bfloat16 for a tensor, heads==4 for a value."
            raise _refused_word(word, "is not an argument.", do)
        *path, last = name.split(".")
        owner: Any = found
        for part in path:
            owner = cast("dict[str, Any]", owner).setdefault(part, {})
            if not isinstance(owner, dict):
                what = f"`{part}` is already a value, not a dict."
                raise _refused_word(word, what, "Give it one name or the other.")
        if last in owner:
            raise _refused_word(word, f"`{name}` is given twice.", "Leave one out.")
        owner[last] = value
    return found


def _literal_of_word(text: str, word: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        what = f"`{text}` is not a Python literal."
        raise _refused_word(word, what, "Quote strings: name=='gelu'.") from error


def _tensor_of_word(
    found: re.Match[str], device: str, generator: torch.Generator, word: str
) -> Tensor:
    sizes = [int(size) for size in found[2].split(",") if size]
    dtype: Any = getattr(torch, found[3] or "float32", None)
    if not isinstance(dtype, torch.dtype):
        what = f"`{found[3]}` is not a dtype."
        raise _refused_word(word, what, "Write bfloat16, for example.")
    is_number = dtype.is_floating_point or dtype.is_complex
    if is_number and found[4]:
        what = f"has a bound, {found[4]}, for normal numbers."
        raise _refused_word(
            word, what, "Leave the bound out, or write int64 before it."
        )
    if device == "meta":
        return torch.empty(sizes, dtype=dtype, device="meta")
    if is_number:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        made = torch.randn(sizes, generator=generator, dtype=wide, device="cpu")
    else:
        most = int(found[4] or 2)
        made = torch.randint(most, sizes, generator=generator, device="cpu")
    return made.to(device=device, dtype=dtype)


def _refused_word(where: str, what: str, do: str) -> RematError:
    return RematError.of(
        where=where,
        what=what,
        why="The command line names a function and its arguments.",
        do=do,
    )
