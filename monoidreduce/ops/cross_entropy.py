"""Cross-entropy of a linear head against class indices."""

from __future__ import annotations

import math
from typing import no_type_check

import torch
from torch import Tensor

from . import checks
from . import language as mr


@mr.op
@no_type_check
def _cross_entropy(x: mr.Row["d"], weight: mr.Col["d"], target: mr.Row, ignore_index: int, bias: mr.Col | None = None):
    s = x @ weight if bias is None else x @ weight + bias
    loss = mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0))
    known = (target >= 0) & (target < mr.num_cols)
    return torch.where(target == ignore_index, 0.0, torch.where(known, loss, math.nan))


@checks.together
def cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: checks.Reduction = "mean",
) -> Tensor:
    """Cross-entropy of the logits ``x @ weight.T + bias`` against class indices.

    The same as ``F.cross_entropy(F.linear(x, weight, bias).flatten(0, -2), target.flatten(), ...)``, without ever
    allocating the M × V logits, their softmax or their gradient. For 16-bit inputs the loss is float32.

    Shapes: ``x`` [..., D], ``weight`` [V, D], ``bias`` [V] and integers ``target`` [...] give one number, or [...] with
    ``reduction="none"``. Rows whose label is ``ignore_index`` have loss 0 and no gradient, and do not count in the
    mean, which is NaN where none is left. On a CPU ignored rows cost nothing: they are left out before the fold.

    Raises :class:`LabelError` for a label outside 0 … V - 1, before any work. On a GPU looking would cost a
    synchronisation: there such a row's loss is NaN, never finite. :class:`ShapeError`, :class:`DTypeError`,
    :class:`DeviceError` or :class:`ArgumentError` for arguments that do not fit.

    >>> import torch, torch.nn.functional as F
    >>> from monoidreduce.ops import cross_entropy
    >>> x, weight, target = torch.randn(6, 4), torch.randn(9, 4), torch.tensor([3, 1, -100, 8, 0, 3])
    >>> torch.allclose(cross_entropy(x, weight, target), F.cross_entropy(x @ weight.T, target))
    True
    """
    checks.reduction(reduction)
    checks.whole("ignore_index", ignore_index)
    checks.head(x, weight, bias)
    labels = checks.labels(x, weight, target, ignore_index)
    rows, seen, kept = checks.flat(x), labels != ignore_index, None
    if checks.visible(labels) and not bool(seen.all()):
        kept = seen.nonzero().squeeze(1)
        rows, labels = rows.index_select(0, kept), labels[kept]
    loss = _cross_entropy(rows, weight, labels, ignore_index, bias)
    if reduction == "mean":
        return checks.total(loss) / checks.total(seen)
    if reduction == "sum":
        return checks.total(loss)
    whole = loss if kept is None else loss.new_zeros(seen.shape).index_copy(0, kept, loss)
    return whole.reshape(target.shape)
