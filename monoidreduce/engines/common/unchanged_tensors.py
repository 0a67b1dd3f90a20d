"""What was computed from tensors that have not changed since: document numbers meet many layers and two passes each.

A tensor is recognised by its storage, which must still be alive, its place in it and its version, which torch moves
with every change in place (as autograd itself relies on). Nothing is remembered while a CUDA graph is captured, whose
replays may find other numbers in the same place, nor of tensors that have no version.

A compiler that captures graphs (``torch.compile(mode="reduce-overhead")``) runs our operator once before, with a pool
of memory for whatever its thread allocates, in which nothing may stay. So what is remembered from inside the operator
is made in another thread (:func:`allocate_in_own_thread`).
"""

from __future__ import annotations

import contextlib
import contextvars
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_MAX_ENTRIES = 256
_cache: OrderedDict[tuple, tuple[list[StorageWeakRef], Any]] = OrderedDict()
_in_own_thread: contextvars.ContextVar[bool] = contextvars.ContextVar("apart", default=False)


@contextlib.contextmanager
def allocate_in_own_thread() -> Iterator[None]:
    """What is remembered from inside the block is no memory of this thread."""
    token = _in_own_thread.set(True)
    try:
        yield
    finally:
        _in_own_thread.reset(token)


def _make_key(parts: Sequence[Any]) -> tuple | None:
    found: list[Any] = []
    for part in parts:
        if isinstance(part, Tensor):
            if part.is_inference() or (part.is_cuda and torch.cuda.is_current_stream_capturing()):
                return None
            at = part.untyped_storage()._cdata
            found += [at, part._version, part.dtype, part.shape, part.stride(), part.storage_offset()]
        else:
            found.append(part)
    return tuple(found)


def compute_once(parts: Sequence[Any], make: Callable[[], Any], device: torch.device) -> Any:
    """What was made from equal parts, if the tensors among them are still the same; else it is made, and kept."""
    key = _make_key(parts)
    if key is None:
        return make()
    found = _cache.get(key)
    if found is None or any(ref.expired() for ref in found[0]):
        made = _run_in_thread(make, device) if _in_own_thread.get() else make()
        found = [StorageWeakRef(p.untyped_storage()) for p in parts if isinstance(p, Tensor)], made
        _cache[key] = found
        while len(_cache) > _MAX_ENTRIES:
            _cache.popitem(last=False)
    return found[1]


def _run_in_thread(make: Callable[[], Any], device: torch.device) -> Any:
    """What ``make`` returns, made in a thread of its own, on the stream of this one."""
    here = contextvars.copy_context()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def made() -> Any:
        with torch.no_grad(), torch.cuda.stream(stream):
            return here.run(make)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(made).result()
