"""From a kernel's text to a function that can be launched.

Triton reads a function's source from its file, so the text is written to a private folder, under the hash of its
content. What runs is the text that was just written here, never whatever the file may hold.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import linecache
import os
import tempfile
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def folder() -> Path:
    """The private folder of kernels: ``$MONOIDREDUCE_CACHE``, else in the user's cache, else a temporary one."""
    asked = os.environ.get("MONOIDREDUCE_CACHE")
    base = Path(asked) if asked else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "monoidreduce"
    place = base / "kernels"
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        place.chmod(0o700)
    except OSError:  # no home, a read-only one, or another user's
        return _temporary()
    return place


@functools.cache
def _temporary() -> Path:
    return Path(tempfile.mkdtemp(prefix="monoidreduce-"))


def write(text: str) -> Path:
    """The file of a text: written whole or not at all."""
    path = folder() / f"k{hashlib.sha256(text.encode()).hexdigest()[:24]}.py"
    if not path.exists() or path.read_text() != text:
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    return path


@functools.lru_cache(maxsize=1024)
def load(text: str) -> Any:
    """The module of a text. Triton is imported by the text itself: nothing else here needs it."""
    path = str(write(text))
    module = types.ModuleType(Path(path).stem)
    module.__file__ = path
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def on(device: torch.device) -> Any:
    """A kernel is launched on the current device: make it this one (the interpreter has none)."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@dataclass(frozen=True)
class Descriptor:
    """A matrix that a kernel reads in blocks by a tensor descriptor, before Triton is asked to make one."""

    base: Tensor
    block_shape: tuple[int, int]


def described(module: Any, arguments: Sequence[Any]) -> list[Any]:
    """Arguments with Triton's own descriptors, which a text that needs them imports."""
    return [
        module.TensorDescriptor(v.base, list(v.base.shape), list(v.base.stride()), list(v.block_shape))
        if isinstance(v, Descriptor)
        else v
        for v in arguments
    ]


def again(compiled: Any, grid: int, constants: tuple[Any, ...]) -> Callable[..., Any] | None:
    """A compiled kernel's own launcher, without the look-up of a normal launch; None where this Triton has none.

    It is right only for arguments of the same types, the same integers and pointers of the same alignment.
    """
    if not hasattr(compiled, "packed_metadata") or version() < (3, 4):  # interpreted, or constants not passed
        return None
    launch = compiled[(grid, 1, 1)]
    return lambda *arguments: launch(*arguments, *constants)


@functools.cache
def version() -> tuple[int, ...]:
    """Triton's."""
    return tuple(int(part) for part in importlib.metadata.version("triton").split("+")[0].split(".")[:2])
