"""What was computed from tensors that have not changed since: document numbers meet many layers and two passes each.

A tensor is recognised by its storage, which must still be alive, its place in it and its version, which torch moves
with every change in place (as autograd itself relies on). Nothing is remembered while a CUDA graph is captured, whose
replays may find other numbers in the same place, nor of tensors that have no version.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_MOST = 256
_kept: OrderedDict[tuple, tuple[list[StorageWeakRef], Any]] = OrderedDict()


def _key(parts: Sequence[Any]) -> tuple | None:
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


def remembered(parts: Sequence[Any], make: Callable[[], Any]) -> Any:
    """What was made from equal parts, if the tensors among them are still the same; else it is made, and kept."""
    key = _key(parts)
    if key is None:
        return make()
    found = _kept.get(key)
    if found is None or any(ref.expired() for ref in found[0]):
        found = [StorageWeakRef(p.untyped_storage()) for p in parts if isinstance(p, Tensor)], make()
        _kept[key] = found
        while len(_kept) > _MOST:
            _kept.popitem(last=False)
    return found[1]
