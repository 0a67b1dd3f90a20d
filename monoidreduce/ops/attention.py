"""Attention."""

from __future__ import annotations

import math
from typing import no_type_check

import torch
from torch import Tensor

from . import checks
from . import language as mr


@mr.op
@no_type_check
def _attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"], scale: float, causal: bool):
    s = q @ k * scale
    if causal:
        s = torch.where(mr.col_index <= mr.row_index, s, -torch.inf)
    return mr.softmax_mean(s, v)


@checks.together
def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | Tensor | None = None, causal: bool = False) -> Tensor:
    """Softmax attention: each row's mean of the values, weighted by the softmax of its scaled products with the keys.

    The same as ``torch.softmax(q @ k.mT * scale, -1) @ v``, without ever allocating the M × N matrix of scores, forward
    or backward; with ``causal`` row i sees columns j ≤ i, as ``F.scaled_dot_product_attention(is_causal=True)``, and
    what lies wholly above the diagonal is not computed.

    Shapes: ``q`` [..., M, f], ``k`` [..., N, f], ``v`` [..., N, d] give [..., M, d]; leading dimensions broadcast.
    ``scale`` is a number or a 0-dim tensor, 1/√f if left out. With no columns the result is 0.

    Raises :class:`ShapeError`, :class:`DTypeError` or :class:`DeviceError` where the arguments do not fit each other.

    >>> import torch
    >>> from monoidreduce.ops import attention
    >>> q, k, v = torch.randn(2, 5, 4), torch.randn(2, 7, 4), torch.randn(2, 7, 3)
    >>> expected = torch.softmax(q @ k.mT / 2, -1) @ v
    >>> torch.allclose(attention(q, k, v), expected, atol=1e-6)
    True
    """
    if scale is None:  # without features every score is 0, and so is the scale's part in it
        features = q.shape[-1] if isinstance(q, Tensor) and q.dim() else 1
        scale = 1 / math.sqrt(max(features, 1))
    return _attention(q, k, v, scale, bool(causal))
