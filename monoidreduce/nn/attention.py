"""Multi-head attention with torch's weights and torch's call, whose weights matrix is never there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..domains import Pages
from ..errors import ArgumentError, DTypeError, ShapeError
from ..ops.attention import AttentionOutput
from ..ops.checks import describe_value


class MultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention``: its constructor, its state dict, its call; no M × N matrix, forward or backward.

    It is a subclass, so that models that ask for torch's module take it. Two things differ. The attention weights
    cannot be returned, being that matrix: ``need_weights`` is False here, and True is refused; the second result is
    None. And a row that a mask hides whole attends to nothing (its heads give 0), where torch gives NaN.

    ``is_causal`` computes only what lies below the diagonal, and needs no ``attn_mask`` (one that is given is taken to
    be the causal one, as in torch). Masks are read where they lie, whatever their shape.

    >>> import torch
    >>> from monoidreduce.nn import MultiheadAttention
    >>> theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    >>> ours = MultiheadAttention(16, 4, batch_first=True)
    >>> _ = ours.load_state_dict(theirs.state_dict())
    >>> x = torch.randn(2, 7, 16)
    >>> torch.allclose(ours(x, x, x)[0], theirs(x, x, x, need_weights=False)[0], atol=1e-6)
    True
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, as torch does; the weights are None."""
        if need_weights:
            raise ArgumentError(
                detail="need_weights=True asks for the matrix of attention weights, which is never built",
                fix="Drop need_weights, or use torch.nn.MultiheadAttention where you need to look at them",
            )
        batched = self._check(query, key, value)
        if not batched:
            query, key, value = (t.unsqueeze(0) for t in (query, key, value))
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = self._projected(query, key, value)
        mask = None if is_causal else self._mask(attn_mask, q, k)
        padding = self._padding(key_padding_mask, q, k, batched)
        dropout = self.dropout if self.training else 0.0
        options: dict[str, Any] = {"bias": padding, "mask_hides": True, "dropout_p": dropout, "causal": bool(is_causal)}
        extra = self._extra(k, v)
        if extra is None:
            y = ops.attention(q, k, v, mask, **options)
        else:
            y = self._joined(q, ops.attention(q, k, v, mask, return_lse=True, **options), *extra)
        y = self.out_proj(y.transpose(1, 2).flatten(-2))
        if not batched:
            return y.squeeze(0), None
        return (y if self.batch_first else y.transpose(0, 1)), None

    def _check(self, query: Any, key: Any, value: Any) -> bool:
        """Whether the inputs have a batch; raises where they do not fit the module."""
        given = {"query": (query, self.embed_dim), "key": (key, self.kdim), "value": (value, self.vdim)}
        for name, (t, width) in given.items():
            if not isinstance(t, Tensor) or t.is_nested:
                raise ArgumentError(detail=f"{name} was given {type(t).__name__}", fix="Give a dense tensor")
            if t.dim() not in (2, 3) or t.dim() != query.dim() or t.shape[-1] != width:
                raise ShapeError(
                    detail=f"{name} has shape {tuple(t.shape)}",
                    fix=f"Expected [length, {width}], or three dimensions with a batch, for query, key and value alike",
                )
        return query.dim() == 3

    def _projected(self, *inputs: Tensor) -> list[Tensor]:
        """Queries, keys and values [batch, heads, length, head_dim]; views of what the linear layers return."""
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [self._heads(F.linear(*xwb)) for xwb in zip(inputs, weights, biases, strict=True)]

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(-2, -3)

    def _mask(self, mask: Any, q: Tensor, k: Tensor) -> Tensor | None:
        if mask is None:
            return None
        shape = (q.shape[-2], k.shape[-2])
        if not isinstance(mask, Tensor) or mask.shape not in (shape, (q.shape[0] * q.shape[1], *shape)):
            raise ShapeError(
                detail=f"attn_mask was given {describe_value(mask)}",
                fix=f"Give {list(shape)} or {[q.shape[0] * q.shape[1], *shape]}, one for each head of each sequence",
            )
        return mask if mask.dim() == 2 else mask.unflatten(0, (q.shape[0], q.shape[1]))

    def _padding(self, mask: Any, q: Tensor, k: Tensor, batched: bool) -> Tensor | None:
        """Numbers to add to each key's scores [batch, 1, 1, N]: minus infinity where it is padding."""
        if mask is None:
            return None
        shape = (k.shape[0], k.shape[-2]) if batched else (k.shape[-2],)
        if not isinstance(mask, Tensor) or mask.shape != shape:
            raise ShapeError(detail=f"key_padding_mask was given {describe_value(mask)}", fix=f"Give {list(shape)}")
        if not mask.is_floating_point() and mask.dtype is not torch.bool:
            raise DTypeError(detail=f"key_padding_mask is {str(mask.dtype)[6:]}", fix="Give truth values or numbers")
        if mask.dtype is torch.bool:
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=mask.device).masked_fill(mask, -torch.inf)
        return mask.view(-1, 1, 1, k.shape[-2]).to(q.dtype)

    def _extra(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """The keys and values that every sequence has besides its own: learned ones, zeros, both."""
        keys, values = [], []
        if self.bias_k is not None and self.bias_v is not None:
            keys.append(self._heads(self.bias_k))
            values.append(self._heads(self.bias_v))
        if self.add_zero_attn:
            zero = k.new_zeros(1, self.num_heads, 1, self.head_dim)
            keys.append(zero)
            values.append(zero)
        return (torch.cat(keys, -2), torch.cat(values, -2)) if keys else None

    def _joined(self, q: Tensor, seen: Any, keys: Tensor, values: Tensor) -> Tensor:
        """Attention to a sequence and to one or two keys more: two partial softmaxes, joined by their totals."""
        scores = (q @ keys.mT / self.head_dim**0.5).to(seen.lse.dtype)
        weights = torch.softmax(torch.cat([seen.lse.unsqueeze(-1), scores], -1), -1).to(q.dtype)
        own, rest = weights[..., :1], F.dropout(weights[..., 1:], self.dropout, self.training)
        return own * seen.values + rest @ values


# Keys and values in pages, with the pages' bookkeeping: what a small serving loop needs.


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
        table = torch.tensor([o + [0] * (most - len(o)) for o in owned], dtype=torch.int32, device="cpu")
        table = table.view(len(owned), most)
        lengths = torch.tensor([self.lengths.get(s, 0) for s in sequences], dtype=torch.int32, device="cpu")
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
        if len(each) != len(sequences):
            raise ArgumentError(
                detail=f"counts has {len(each)} numbers for {len(sequences)} sequences", fix="Give one for each"
            )
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
        ragged = None if counts is None else torch.tensor(each, dtype=torch.int32, device="cpu").to(self.keys.device)
        try:
            self.pages(sequences).append((self.keys, self.values), (k, v), ragged)
        except Exception:
            self._owned, self._left = before
            raise
        self.lengths.update(longer)

    def attend(self, sequences: Sequence[int], q: Tensor, **options: Any) -> Tensor | AttentionOutput:
        """Attention of these sequences' newest tokens q [S, H, M, f]; the options of ``ops.attention_paged``.

        Raises :class:`ArgumentError` for a sequence that was never appended to, or was given back."""
        if unknown := [s for s in sequences if s not in self.lengths]:
            raise ArgumentError(detail=f"the cache holds no sequences {unknown}", fix="Append their tokens first")
        return ops.attention_paged(q, self.keys, self.values, self.pages(sequences), **options)

    def free(self, sequence: int) -> None:
        """Give a sequence's pages back."""
        self._left.extend(reversed(self._owned.pop(sequence, [])))
        self.lengths.pop(sequence, None)

    def extra_repr(self) -> str:
        return f"pages={len(self.keys)}, page={self.page}, {self.pages_left} free"
