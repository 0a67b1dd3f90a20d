"""Keys and values in pages, with the pages' bookkeeping: what a small serving loop needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..domains import Pages
from ..errors import ArgumentError
from ..ops.attention import AttentionOutput


class PagedCache(nn.Module):
    """A key-value cache of pages that sequences take as they grow and give back when they end.

    Sequences are numbered by the user, in any order. ``append`` writes new tokens, taking pages that are free, and
    ``attend`` folds them: :func:`monoidreduce.ops.attention_paged`. Which page belongs to whom is kept on the host, so
    nothing waits for the device.

    >>> import torch
    >>> from monoidreduce.nn import PagedCache
    >>> cache = PagedCache(pages=8, page=16, heads=2, head_dim=4)
    >>> q, k, v = torch.randn(2, 6, 20, 4), torch.randn(2, 2, 20, 4), torch.randn(2, 2, 20, 4)
    >>> cache.append([7, 3], k, v)
    >>> cache.attend([7, 3], q).shape, cache.lengths
    (torch.Size([2, 6, 20, 4]), {7: 20, 3: 20})
    >>> cache.free(7)
    >>> cache.pages_left
    6
    """

    keys: Tensor
    values: Tensor

    def __init__(
        self, pages: int, page: int, heads: int, head_dim: int, *, value_dim: int | None = None, **how: Any
    ) -> None:
        super().__init__()
        self.page = page
        width = head_dim if value_dim is None else value_dim
        self.register_buffer("keys", torch.zeros(pages, page, heads, head_dim, **how), persistent=False)
        self.register_buffer("values", torch.zeros(pages, page, heads, width, **how), persistent=False)
        self.lengths: dict[int, int] = {}
        self._owned: dict[int, list[int]] = {}
        self._left = list(range(pages))[::-1]  # the lowest number is taken first

    @property
    def pages_left(self) -> int:
        """How many pages belong to no sequence."""
        return len(self._left)

    def pages(self, sequences: Sequence[int]) -> Pages:
        """The pages of these sequences, as ``cols=`` of an op takes them."""
        owned = [self._owned.get(s, []) for s in sequences]
        most = max(map(len, owned), default=0)
        table = torch.tensor([o + [0] * (most - len(o)) for o in owned], dtype=torch.int32).view(len(owned), most)
        lengths = torch.tensor([self.lengths.get(s, 0) for s in sequences], dtype=torch.int32)
        return Pages(table.to(self.keys.device), lengths.to(self.keys.device), self.page)

    @torch.no_grad()
    def append(self, sequences: Sequence[int], k: Tensor, v: Tensor, counts: Sequence[int] | None = None) -> None:
        """Write the new tokens k, v [S, heads, T, f] of these sequences (the first ``counts`` of each, if given).

        Raises :class:`ArgumentError` where too few pages are free or a sequence is named twice, and as
        ``mr.Pages.append`` does; nothing is then written or taken.
        """
        each = [k.shape[2]] * len(sequences) if counts is None else list(counts)
        if len(set(sequences)) < len(sequences):
            raise ArgumentError(detail=f"sequences was given {list(sequences)}", fix="Name each sequence once")
        longer = {s: self.lengths.get(s, 0) + n for s, n in zip(sequences, each, strict=True)}
        wanted = {s: -(-n // self.page) - len(self._owned.get(s, [])) for s, n in longer.items()}
        short = sum(max(n, 0) for n in wanted.values()) - self.pages_left
        if short > 0:
            raise ArgumentError(
                detail=f"{short} more pages are needed than are free", fix="Free a sequence, or make a larger cache"
            )
        before = {s: list(owned) for s, owned in self._owned.items()}, list(self._left)
        for s, n in wanted.items():
            self._owned.setdefault(s, []).extend(self._left.pop() for _ in range(n))
        ragged = None if counts is None else torch.tensor(each, dtype=torch.int32).to(self.keys.device)
        try:
            self.pages(sequences).append((self.keys, self.values), (k, v), ragged)
        except Exception:
            self._owned, self._left = before
            raise
        self.lengths.update(longer)

    def attend(self, sequences: Sequence[int], q: Tensor, **options: Any) -> Tensor | AttentionOutput:
        """Attention of these sequences' newest tokens q [S, H, M, f]; the options of ``ops.attention_paged``."""
        return ops.attention_paged(q, self.keys, self.values, self.pages(sequences), **options)

    def free(self, sequence: int) -> None:
        """Give a sequence's pages back."""
        self._left.extend(reversed(self._owned.pop(sequence, [])))
        self.lengths.pop(sequence, None)

    def extra_repr(self) -> str:
        return f"pages={len(self.keys)}, page={self.page}, {self.pages_left} free"
