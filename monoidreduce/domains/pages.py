"""Columns that lie in pages: the key-value cache of a serving engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from ..errors import ArgumentError, ColumnListError, DTypeError, ShapeError, shown
from . import base
from .base import ColumnLists, pack


@dataclass(frozen=True, eq=False, repr=False)
class Pages(base.Domain):
    """Sequence s has ``lengths[s]`` columns, which lie in the pages ``table[s]``, ``page`` to each.

    ``table`` [S, most] holds numbers of pages, ``lengths`` [S] the columns of each sequence; entries of ``table``
    beyond a sequence's length are not read. Column tensors are pages [pages, page, heads, features], as vLLM and
    FlashInfer lay them out; row tensors [S, heads, M, features]. ``mr.col_index`` is the position in the sequence,
    and the M rows are the sequence's last M positions: ``mr.row_index`` is ``lengths[s] - M + i``, so that
    ``mr.col_index <= mr.row_index`` is causal while decoding and in a chunk of a prompt. Sequences may share pages (a
    common prefix); their gradients then add up.

    Raises :class:`ArgumentError`, :class:`DTypeError`, :class:`ShapeError` or :class:`DeviceError` for tensors that
    are no such table, and :class:`ColumnListError` for pages that do not exist or that one sequence has twice, and for
    lengths beyond a sequence's pages (see ``mr.use(check=True)``).

    >>> import torch, monoidreduce as mr
    >>> mr.pages(torch.tensor([[3, 0], [1, 0]]), torch.tensor([100, 64]), page=64)
    mr.pages(2 sequences, at most 2 pages of 64 each)
    """

    kind = "pages"
    table: Tensor
    lengths: Tensor
    page: int = 64

    def __post_init__(self) -> None:
        base.check_whole_number("page", self.page)
        self.take_arrays("table", "lengths")
        base.check_integers("table", self.table, "[S, most]", 2, 2)
        base.check_integers("lengths", self.lengths, "[S]", 1, 1)
        base.check_one_device(table=self.table, lengths=self.lengths)
        if len(self.table) != len(self.lengths):
            raise ShapeError(
                detail=f"table has {len(self.table)} sequences and lengths {len(self.lengths)}",
                fix="Give one length for each row of the table",
            )

    def tensors(self) -> tuple[Tensor, ...]:
        """``table`` and ``lengths``."""
        return (self.table, self.lengths)

    @property
    def form(self) -> tuple:
        return (self.kind, self.page)

    @classmethod
    def _restore(cls, form: tuple, tensors: tuple[Tensor, ...]) -> Pages:
        return base.build(cls, table=tensors[0], lengths=tensors[1], page=form[1])

    @property
    def batch(self) -> tuple[int, ...]:
        return (len(self.table),)

    @property
    def most(self) -> int:
        """How many columns a sequence has room for."""
        return self.table.shape[1] * self.page

    def _check_values(self, rows: int, cols: int) -> None:
        """``cols``: places in all pages, pages × page."""
        _check_lengths("lengths", self.lengths, self.most)
        used = self._find_used_slots(self.lengths)
        base.check_range("table", self.table, cols // self.page - 1, "pages", used)
        owned = torch.where(used, self.table, -1 - torch.arange(self.table.shape[1], device=self.device))
        owned = owned.sort(-1).values
        twice = owned[:, 1:] == owned[:, :-1]
        if bool(twice.any()):
            s, at = twice.nonzero()[0].tolist()
            raise ColumnListError(
                detail=f"sequence {s} has page {int(owned[s, at])} twice", fix="Give each position a page of its own"
            )

    def _find_used_slots(self, lengths: Tensor) -> Tensor:
        first = torch.arange(self.table.shape[1], device=self.device) * self.page
        return first < lengths.unsqueeze(1)

    def _make_listing(self, rows: int, cols: int) -> ColumnLists:
        offsets, items = pack(self.table, (self.lengths + (self.page - 1)) // self.page)
        return ColumnLists(offsets, items, max(rows, 1), self.page)  # no batch: pages belong to all sequences

    def mask(self, rows: int, cols: int) -> Tensor:
        """Which places of all pages each sequence folds: [S, rows, cols] with ``cols`` = pages × page."""
        count = self.lengths.unsqueeze(1) - torch.arange(self.table.shape[1], device=self.device) * self.page
        inside = torch.arange(self.page, device=self.device) < count.clamp(0, self.page).unsqueeze(-1)
        at = torch.where(inside, self.table.unsqueeze(-1) * self.page + torch.arange(self.page, device=self.device), 0)
        found = torch.zeros(len(self.table), cols, dtype=torch.int64, device=self.device)
        if cols:
            found.scatter_add_(1, at.flatten(1).long(), inside.flatten(1).long())
        return found.unsqueeze(1).expand(-1, rows, -1)

    def gather(self, store: Tensor) -> Tensor:
        """The columns of each sequence from pages [pages, page, heads, f], as [S, heads, most, f]; what is beyond a
        sequence's length is 0. A copy, for tests and small sizes.

        >>> import torch, monoidreduce as mr
        >>> pages = torch.arange(4.0).view(2, 2, 1, 1)
        >>> mr.pages(torch.tensor([[1, 0]]), torch.tensor([3]), page=2).gather(pages).flatten()
        tensor([2., 3., 0., 0.])
        """
        self._check_store("store", store)
        seen = torch.arange(self.most, device=self.device) < self.lengths.unsqueeze(1)
        table = torch.where(self._find_used_slots(self.lengths), self.table, 0)
        found = store[table.long()].flatten(1, 2)  # [S, most, heads, f]
        return torch.where(seen[..., None, None], found, 0).transpose(1, 2)

    @overload
    def append(self, store: Tensor, new: Tensor, counts: Tensor | None = None) -> Pages: ...
    @overload
    def append(self, store: tuple[Tensor, ...], new: tuple[Tensor, ...], counts: Tensor | None = None) -> Pages: ...
    def append(
        self, store: Tensor | tuple[Tensor, ...], new: Tensor | tuple[Tensor, ...], counts: Tensor | None = None
    ) -> Pages:
        """Write new columns behind those that each sequence has, in place, and return the longer sequences' pages.

        ``store``: pages [pages, page, heads, f], or several such (keys and values); ``new``: as many tensors
        [S, heads, T, f]. With ``counts`` [S], sequence s gains the first ``counts[s]`` of the T only. The table must
        already name the pages that are written; what this object says stays as it is, use the one that is returned.
        One write for all sequences, without a host sync.

        Raises :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for tensors
        that do not fit, and :class:`ColumnListError` where a sequence has no room, or would write to a page that
        another has too (values are looked at as ``mr.use(check=True)`` says).

        >>> import torch, monoidreduce as mr
        >>> keys = torch.zeros(3, 2, 1, 4)  # three pages of two places, one head
        >>> held = mr.pages(torch.tensor([[2, 0], [1, 0]]), torch.tensor([1, 0]), page=2)
        >>> held = held.append(keys, torch.ones(2, 1, 2, 4), counts=torch.tensor([2, 1]))
        >>> held.lengths, keys[..., 0].flatten()
        (tensor([3, 1]), tensor([1., 0., 1., 0., 0., 1.]))
        """
        stores = store if isinstance(store, tuple) else (store,)
        news = new if isinstance(new, tuple) else (new,)
        if len(stores) != len(news) or not stores:
            raise ArgumentError(
                detail=f"append was given {len(stores)} stores and {len(news)} tensors of new columns",
                fix="Give as many of one as of the other",
            )
        steps = self._check_new(stores, news, counts)
        count = self.lengths.new_full((len(self.lengths),), steps) if counts is None else counts.to(self.lengths.dtype)
        lengths = self.lengths + count
        longer = type(self)._restore(self.form, (self.table, lengths))
        if not steps or not len(self.lengths):
            return longer
        if base.can_inspect(self.table, self.lengths, count):
            self._check_room(lengths, len(stores[0]))
        place = torch.arange(steps, device=self.device)
        position = self.lengths.unsqueeze(1) + place
        at = (position // self.page).clamp(max=self.table.shape[1] - 1).long()
        page, slot = self.table.gather(1, at).flatten().long(), (position % self.page).flatten().long()
        written = None
        if counts is not None:  # what is not written repeats the first write, so that nothing waits for the host
            valid = (place < count.unsqueeze(1)).flatten()
            first = valid.to(torch.uint8).argmax()
            source = torch.where(valid, torch.arange(valid.shape[0], device=self.device), first)
            page, slot = page[source].clamp(0, len(stores[0]) - 1), slot[source]
            written = source, valid.any()
        for held, fresh in zip(stores, news, strict=True):
            values = fresh.transpose(1, 2).flatten(0, 1)  # [S · T, heads, f]
            if written is not None:
                values = torch.where(written[1], values[written[0]], held[page, slot])
            held.index_put_((page, slot), values)
        return longer

    def _check_store(self, name: str, store: Tensor) -> None:
        if not isinstance(store, Tensor) or store.dim() != 4:
            raise ShapeError(
                detail=f"{name} was given {shown(store)}", fix="[pages, page, heads, features] was expected"
            )
        if store.shape[1] != self.page:
            raise ShapeError(
                detail=f"{name} has shape {tuple(store.shape)}, but a page holds {self.page}",
                fix="[pages, page, heads, features] was expected; mr.pages(page=) says the size of a page",
            )
        base.check_one_device(cols=self.table, **{name: store})  # no parameter of an op is called cols

    def _check_new(self, stores: tuple[Tensor, ...], news: tuple[Tensor, ...], counts: Tensor | None) -> int:
        """How many columns come."""
        sequences = len(self.lengths)
        for held, fresh in zip(stores, news, strict=True):
            self._check_store("store", held)
            if held.is_leaf and held.requires_grad and torch.is_grad_enabled():
                raise ArgumentError(
                    detail=f"the store {shown(held)} requires gradients, and is written in place",
                    fix="Write under torch.no_grad(), or append to store.clone()",
                )
            if not isinstance(fresh, Tensor) or fresh.dim() != 4:
                raise ShapeError(detail=f"new was given {shown(fresh)}", fix="[S, heads, T, features] was expected")
            wanted = (sequences, held.shape[2], news[0].shape[2], held.shape[3])
            if fresh.shape != wanted or len(held) != len(stores[0]):
                raise ShapeError(
                    detail=f"new has shape {tuple(fresh.shape)} beside pages {tuple(held.shape)}",
                    fix=f"[S, heads, T, features] = {wanted} was expected, and equally many pages in each store",
                )
            if fresh.dtype != held.dtype:
                raise DTypeError(detail=f"new is {shown(fresh)}, but the pages are {shown(held)}")
            base.check_one_device(store=held, new=fresh)
        steps = news[0].shape[2]
        if counts is not None:
            base.check_integers("counts", counts, "[S]", 1, 1)
            base.check_one_device(table=self.table, counts=counts)
            if len(counts) != sequences:
                raise ShapeError(detail=f"counts has {len(counts)} numbers", fix=f"Give one a sequence: {sequences}")
            if base.can_inspect(counts):
                _check_lengths("counts", counts, steps)
        return steps

    def _check_room(self, lengths: Tensor, pages: int) -> None:
        """Raise unless the positions from the old to the new lengths have pages, of which each is one sequence's."""
        _check_lengths("the new lengths", lengths, self.most)
        used = self._find_used_slots(lengths)
        base.check_range("table", self.table, pages - 1, "pages", used)
        touched = used & (
            torch.arange(1, self.table.shape[1] + 1, device=self.device) * self.page > self.lengths[:, None]
        )
        owners = torch.zeros(pages, dtype=torch.int64, device=self.device)
        owners.index_add_(0, self.table[used].long(), torch.ones_like(self.table[used], dtype=torch.int64))
        grown = (lengths > self.lengths).unsqueeze(1)
        shared = touched & grown & (owners[self.table.long().clamp(0, pages - 1)] > 1)
        if bool(shared.any()):
            s, at = shared.nonzero()[0].tolist()
            raise ColumnListError(
                detail=f"sequence {s} would write to page {int(self.table[s, at])}, which is listed more than once",
                fix="Copy a shared page before writing to it, and give the sequence the copy",
            )

    def _sizes(self) -> str:
        return f"{len(self.table)} sequences, at most {self.table.shape[1]} pages of {self.page} each"


def _check_lengths(name: str, lengths: Tensor, most: int) -> None:
    low, high = map(int, torch.aminmax(lengths)) if lengths.numel() else (0, 0)
    if low < 0 or high > most:
        raise ColumnListError(
            detail=f"{name} holds {low if low < 0 else high}, but there is room for {most}",
            fix=f"Give numbers from 0 to {most}, or more pages to a sequence",
        )
