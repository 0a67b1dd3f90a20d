"""Multi-head attention with torch's weights and torch's call, whose weights matrix is never there."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..errors import ArgumentError, DTypeError, ShapeError
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
