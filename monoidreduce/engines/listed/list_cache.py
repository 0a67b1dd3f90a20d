"""The lists of domains that were read before, by their tensors: a backward, and the next layer, read the same ones.

Only the tensors' identity and version are looked at. Entries go when a tensor does, and few are held.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from .lists import Lists, make_lists

_MOST = 16
_lock = threading.Lock()
_known: OrderedDict[tuple, tuple[tuple[weakref.ref, ...], Lists]] = OrderedDict()


def find_lists(form: tuple, tensors: Sequence[Tensor], rows: int, cols: int, over: str, ordered: bool) -> Lists:
    """The lists of a domain for one direction (``lists.py``), made once for the same tensors."""
    if any(t.is_inference() for t in tensors):  # these have no version
        return make_lists(form, tensors, rows, cols, over, ordered)
    places = tuple((t.data_ptr(), tuple(t.shape), t.stride(), t.dtype, t.device, t._version) for t in tensors)
    key = (form, places, rows, cols, over, ordered)
    with _lock:
        found = _known.get(key)
        if found is not None and all(storage() is not None for storage in found[0]):
            _known.move_to_end(key)
            return found[1]
    lists = make_lists(form, tensors, rows, cols, over, ordered)
    with _lock:
        for old in [k for k, (owners, _) in _known.items() if any(owner() is None for owner in owners)]:
            del _known[old]
        _known[key] = tuple(weakref.ref(_owner(t)) for t in tensors), lists
        while len(_known) > _MOST:
            _known.popitem(last=False)
    return lists


def _owner(t: Tensor) -> Tensor:
    """The tensor whose memory this is a view of: views of it are made anew in every call."""
    return t if t._base is None else t._base


def clear() -> None:
    """Forget all lists."""
    with _lock:
        _known.clear()
