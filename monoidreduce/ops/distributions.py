"""Cross-entropy against distributions, given or parameterised, and the entropy of a linear head."""

from __future__ import annotations

import math
from typing import Any, no_type_check

import torch
from torch import Tensor

from . import checks
from . import language as mr

_CHUNK = 2**19  # elements of a 16-bit matrix that are raised to float32 at a time


@mr.op
@no_type_check
def _log_normaliser(x: mr.Row["d"], weight: mr.Col["d"], bias: mr.Col | None = None):
    return mr.logsumexp(x @ weight if bias is None else x @ weight + bias)


@checks.together
def cross_entropy_given(
    x: Tensor,
    weight: Tensor,
    probs: Tensor,
    *,
    bias: Tensor | None = None,
    reduction: checks.Reduction = "mean",
) -> Tensor:
    """Cross-entropy of the logits ``x @ weight.T + bias`` against a distribution that the caller holds as a matrix.

    The same as ``F.cross_entropy(F.linear(x, weight, bias), probs, ...)``, without ever allocating the M × V logits,
    their softmax or their gradient: Σ_j p_j s_j = ⟨x, Σ_j p_j w_j⟩ + Σ_j p_j b_j is one product of size M × D, and the
    rest is a fold. The rows of ``probs`` need not add up to 1; if it requires a gradient, that is as large as itself.
    The loss is exact to the rounding of a logit, however small it is. For 16-bit inputs it is float32.

    Shapes: ``x`` [..., D], ``weight`` [V, D], ``bias`` [V], ``probs`` [..., V] give one number, or [...] with
    ``reduction="none"``; the mean is over all rows.

    Raises :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for arguments that
    do not fit.

    >>> import torch, torch.nn.functional as F
    >>> from monoidreduce.ops import cross_entropy_given
    >>> x, weight, probs = torch.randn(6, 4), torch.randn(9, 4), torch.rand(6, 9)
    >>> torch.allclose(cross_entropy_given(x, weight, probs), F.cross_entropy(x @ weight.T, probs), rtol=1e-4)
    True
    """
    checks.reduction(reduction)
    checks.head(x, weight, bias)
    checks.probabilities(x, weight, probs)
    rows, given = checks.flat(x), checks.flat(probs)
    z = _log_normaliser(rows, weight, bias)
    expected = ((given @ weight).to(z.dtype) * rows).sum(-1)
    if bias is not None:
        expected = expected + (given @ bias).to(z.dtype)
    loss = z * _row_sums(given, z.dtype) - expected
    return checks.reduced(checks.unflat(loss, x, rows), reduction)


def _row_sums(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Σ_j p_ij in ``dtype``; torch would raise all of a 16-bit matrix at once, this raises a few rows at a time."""
    if p.dtype == dtype or not p.numel():
        return p.sum(-1, dtype=dtype)
    return torch.cat([part.sum(-1, dtype=dtype) for part in p.split(max(1, _CHUNK // p.shape[-1]))])


@no_type_check
def _shifted(s, careful):
    """Logits less their logsumexp, held constant: a loss that no shift changes then is no gap of two large numbers.

    It costs one more pass, and is left out for 16-bit inputs, whose rounding is larger than that of the gap.
    """
    if not careful:
        return s
    z = torch.detach(mr.logsumexp(s))
    return s - torch.where(z == -math.inf, 0.0, z)


def _careful(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype.itemsize > 2


@mr.op
@no_type_check
def _cross_entropy_distributions(p: mr.Row["d"], c: mr.Col["d"], q: mr.Row["e"], t: mr.Col["e"], careful: bool):
    student, teacher = _shifted(p @ c, careful), q @ t
    return mr.logsumexp(student) - mr.softmax_mean(teacher, student)


@checks.together
def cross_entropy_distributions(
    p: Tensor, c: Tensor, q: Tensor, t: Tensor, *, reduction: checks.Reduction = "mean"
) -> Tensor:
    """Cross-entropy of the logits ``p @ c.T`` against the distribution ``softmax(q @ t.T)``, as in distillation.

    The same as ``F.cross_entropy(p @ c.T, torch.softmax(q @ t.T, -1), ...)``, without ever allocating either M × N
    matrix of logits, a softmax or a gradient of one. All four arguments have gradients. For 16-bit inputs the loss is
    float32; for wider ones a first pass over ``p`` and ``c`` keeps the digits of a small loss.

    Shapes: ``p`` [..., M, d], ``c`` [..., N, d], ``q`` [..., M, e], ``t`` [..., N, e] give one number, or [..., M] with
    ``reduction="none"``; leading dimensions broadcast; the mean is over all rows.

    Raises :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for arguments that
    do not fit.

    >>> import torch, torch.nn.functional as F
    >>> from monoidreduce.ops import cross_entropy_distributions
    >>> p, c, q, t = torch.randn(6, 4), torch.randn(9, 4), torch.randn(6, 3), torch.randn(9, 3)
    >>> expected = F.cross_entropy(p @ c.T, torch.softmax(q @ t.T, -1))
    >>> torch.allclose(cross_entropy_distributions(p, c, q, t), expected, rtol=1e-4)
    True
    """
    checks.reduction(reduction)
    return checks.reduced(_cross_entropy_distributions(p, c, q, t, _careful(p)), reduction)


@mr.op
@no_type_check
def _entropy(x: mr.Row["d"], weight: mr.Col["d"], careful: bool, bias: mr.Col | None = None):
    s = _shifted(x @ weight if bias is None else x @ weight + bias, careful)
    value = s if bias is None else torch.where(s == -math.inf, 0.0, s)  # 0 · log 0 = 0
    z = mr.logsumexp(s)
    return torch.where(z == -math.inf, 0.0, z - mr.softmax_mean(s, value))


@checks.together
def entropy(x: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """The entropy, in nats, of ``softmax(x @ weight.T + bias)`` for each row.

    The same as ``torch.distributions.Categorical(logits=F.linear(x, weight, bias)).entropy()``, without ever allocating
    the M × V logits, their softmax or their gradient. A class whose bias is minus infinity does not take part; with no
    classes the entropy is 0. For 16-bit inputs the entropy is float32; for wider ones a first pass keeps the digits of
    a small entropy.

    Shapes: ``x`` [..., D], ``weight`` [V, D], ``bias`` [V] give [...].

    Raises :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for arguments that
    do not fit.

    >>> import torch
    >>> from monoidreduce.ops import entropy
    >>> x, weight = torch.randn(6, 4), torch.randn(9, 4)
    >>> expected = torch.distributions.Categorical(logits=x @ weight.T).entropy()
    >>> torch.allclose(entropy(x, weight), expected, atol=1e-5)
    True
    """
    checks.head(x, weight, bias)
    rows = checks.flat(x)
    return checks.unflat(_entropy(rows, weight, _careful(x), bias), x, rows)
