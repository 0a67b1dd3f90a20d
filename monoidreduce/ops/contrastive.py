"""The symmetric contrastive loss."""

from __future__ import annotations

from typing import no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ShapeError
from . import checks
from . import language as mr


@mr.op
@no_type_check
def _contrastive_loss(x: mr.Row["d"], y: mr.Col["d"], temperature: float, normalize: bool):
    if normalize:
        x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    s = x @ y / temperature
    own = mr.sum(torch.where(mr.col_index == mr.row_index, s, 0.0))
    return mr.logsumexp(s), mr.logsumexp(s, over="rows"), own


@checks.together
def contrastive_loss(
    x: Tensor,
    y: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    normalize: bool = False,
    reduction: checks.Reduction = "mean",
) -> Tensor:
    """Symmetric InfoNCE: each x is to find its own y among all, and each y its own x.

    The same as ``(F.cross_entropy(s, t) + F.cross_entropy(s.T, t)) / 2`` with ``s = x @ y.T / temperature`` and
    ``t = torch.arange(N)``, without ever allocating the N × N similarities, their softmaxes or their gradients: one
    pass folds rows and columns at once. For 16-bit inputs the loss is float32.

    Shapes: ``x`` and ``y`` [..., N, D], the i-th of one belonging to the i-th of the other, give one number, or
    [..., N] with ``reduction="none"``; leading dimensions broadcast, each a batch of its own. ``temperature`` is a
    number above 0, or a 0-dim tensor, with a gradient if it asks for one; ``normalize`` divides the vectors by their
    lengths first, as ``F.normalize``.

    Raises :class:`ShapeError` where x and y differ in number, :class:`DTypeError`, :class:`DeviceError` or
    :class:`ArgumentError` for arguments that do not fit.

    >>> import torch, torch.nn.functional as F
    >>> from monoidreduce.ops import contrastive_loss
    >>> x, y, own = torch.randn(6, 4), torch.randn(6, 4), torch.arange(6)
    >>> s = x @ y.T / 0.5
    >>> expected = (F.cross_entropy(s, own) + F.cross_entropy(s.T, own)) / 2
    >>> torch.allclose(contrastive_loss(x, y, temperature=0.5), expected)
    True
    """
    checks.reduction(reduction)
    checks.positive("temperature", temperature)
    checks.tensor("x", x, "[..., N, D]", 2)
    checks.tensor("y", y, "[..., N, D]", 2)
    if x.shape[-2] != y.shape[-2]:
        raise ShapeError(
            detail=f"x has {x.shape[-2]} vectors, but y has {y.shape[-2]}",
            fix="The i-th x belongs to the i-th y: give equally many",
        )
    rows, cols, own = _contrastive_loss(x, y, temperature, bool(normalize))
    return checks.reduced((rows + cols) / 2 - own, reduction)
