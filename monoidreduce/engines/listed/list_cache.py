"""The lists of domains that were read before, by their tensors: a backward, and the next layer, read the same ones.

Only the tensors' place in memory and version are looked at. Entries go when a tensor does, and few are held.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common.evaluate import Sizes
from ..common.listed_pairs import restore_domain
from .lists import Lists, make_lists

_MOST = 16
_lock = threading.Lock()
_known: OrderedDict[tuple, tuple[tuple[weakref.ref, ...], Any]] = OrderedDict()


@dataclass(frozen=True, eq=False)
class PageLists:
    """The pages of each sequence in the form of ``domains.ColumnLists``, read from the table as it is: ``ends`` says
    how many columns a sequence has, and the folded index counts along its list (``logical``)."""

    offsets: Tensor
    items: Tensor
    row_block: int
    col_block: int
    batch: tuple[int, ...]
    ends: Tensor
    logical: bool = True
    entry: None = None


def find_lists(form: tuple, tensors: Sequence[Tensor], rows: int, cols: int, over: str, ordered: bool) -> Lists:
    """The lists of a domain for one direction (``lists.py``), made once for the same tensors."""
    make = lambda: make_lists(form, tensors, rows, cols, over, ordered)
    return _find((form, rows, cols, over, ordered), tensors, make)


def find_column_lists(form: tuple, tensors: Sequence[Tensor], sizes: Sizes, over: str) -> Any:
    """The same as kernels read them."""
    rows, cols = sizes.rows, sizes.cols

    def make() -> Any:
        if form[0] != "pages":
            domain = restore_domain(form, tensors)
            return domain.listing(rows, cols) if over == "cols" else domain.transposed(rows, cols)
        table, lengths = tensors
        count, most = lengths.numel(), table.shape[-1]
        offsets = torch.arange(count + 1, dtype=torch.int64, device=table.device) * most
        batch = tuple(lengths.shape)
        return PageLists(offsets, table.reshape(-1), max(rows, 1), form[1], batch, lengths.reshape(-1))

    return _find((form, rows, cols, over), tensors, make)


def _find(key: tuple, tensors: Sequence[Tensor], make: Callable[[], Any]) -> Any:
    if any(t.is_inference() for t in tensors):  # these have no version
        return make()
    places = tuple((t.data_ptr(), tuple(t.shape), t.stride(), t.dtype, t.device, t._version) for t in tensors)
    with _lock:
        found = _known.get((*key, places))
        if found is not None and all(owner() is not None for owner in found[0]):
            _known.move_to_end((*key, places))
            return found[1]
    lists = make()
    with _lock:
        for old in [k for k, (owners, _) in _known.items() if any(owner() is None for owner in owners)]:
            del _known[old]
        _known[(*key, places)] = tuple(weakref.ref(_owner(t)) for t in tensors), lists
        while len(_known) > _MOST:
            _known.popitem(last=False)
    return lists


def _owner(t: Tensor) -> Tensor:
    """The tensor whose memory this is a view of: views of it are made anew in every call."""
    return t if t._base is None else t._base
