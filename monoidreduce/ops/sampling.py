"""Sampling from a linear head."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, no_type_check

import torch
from torch import Tensor

from . import checks
from . import language as mr


class Sample(NamedTuple):
    """What :func:`sample` returns: the class drawn for each row, and the logarithm of its probability."""

    index: Any
    log_prob: Any


@mr.op
@no_type_check
def _sample(x: mr.Row["d"], weight: mr.Col["d"], seed: int, temperature: float, bias: mr.Col | None = None):
    s = x @ weight / temperature
    if bias is not None:
        s = s + bias / temperature
    drawn = mr.argmax(s + mr.gumbel(seed))
    logit = mr.sum(torch.where(mr.col_index == drawn, s, 0.0))
    return Sample(drawn, torch.where(drawn < 0, -math.inf, logit - mr.logsumexp(s)))


@checks.together
def sample(
    x: Tensor, weight: Tensor, seed: int | Tensor, *, bias: Tensor | None = None, temperature: float | Tensor = 1.0
) -> Sample:
    """Draw one class for each row from ``softmax((x @ weight.T + bias) / temperature)``, with its log-probability.

    Distributed as ``torch.multinomial(torch.softmax(F.linear(x, weight, bias) / temperature, -1), 1)``, without ever
    allocating the M × V logits, their softmax or the noise: one pass over the pairs finds the largest logit plus Gumbel
    noise. The noise is a function of (seed, row, class) alone, so the same seed draws the same classes on every device
    and for every tile; use a new seed for each draw. The log-probability is differentiable, the index is not. For
    16-bit inputs it is float32.

    Shapes: ``x`` [..., D], ``weight`` [V, D], ``bias`` [V] give ``index`` (int64) and ``log_prob``, both [...]; rows
    are counted through all leading dimensions. ``seed`` and ``temperature`` are numbers or 0-dim tensors. Where there
    is nothing to draw (no classes, or all of minus infinite bias) the index is -1 and the log-probability minus
    infinity.

    Raises :class:`ArgumentError` for a seed that is no integer or a temperature that is not above 0,
    :class:`ShapeError`, :class:`DTypeError` or :class:`DeviceError` for arguments that do not fit each other.

    >>> import torch
    >>> from monoidreduce.ops import sample
    >>> x, weight = torch.randn(6, 4), torch.randn(9, 4)
    >>> index, log_prob = sample(x, weight, 7)
    >>> expected = torch.log_softmax(x @ weight.T, -1).gather(-1, index[:, None])[:, 0]
    >>> torch.allclose(log_prob, expected, atol=1e-5)
    True
    """
    checks.head(x, weight, bias)
    checks.whole("seed", seed)
    checks.positive("temperature", temperature)
    rows = checks.flat(x)
    drawn = _sample(rows, weight, seed, temperature, bias)
    return Sample(*(checks.unflat(value, x, rows) for value in drawn))
