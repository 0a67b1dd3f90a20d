"""Choosing classes by a linear head: sampling, the k best, the best."""

from __future__ import annotations

import math
from typing import NamedTuple, no_type_check

import torch
from torch import Tensor

from . import checks, heads
from . import language as mr


class Sample(NamedTuple):
    """What :func:`linear_sample` returns: the class drawn for each row, and the logarithm of its probability.

    >>> import torch, monoidreduce as mr
    >>> drawn = mr.ops.linear_sample(torch.zeros(2, 4), torch.zeros(1, 4), seed=0)  # of one class
    >>> drawn.index, drawn.log_prob
    (tensor([0, 0]), tensor([0., 0.]))
    """

    index: Tensor  # type: ignore[assignment]  # the name of a method of tuples
    log_prob: Tensor


class TopK(NamedTuple):
    """What :func:`linear_topk` returns: the values of the k best classes, best first, and the classes.

    >>> import torch, monoidreduce as mr
    >>> best = mr.ops.linear_topk(torch.eye(2), torch.tensor([[1.0, 4.0], [2.0, 3.0]]), 1)
    >>> best.values, best.indices
    (tensor([[2.],
            [4.]]), tensor([[1],
            [0]]))
    """

    values: Tensor
    indices: Tensor


@mr.op
@no_type_check
def _sample(
    x: mr.Row["d"],
    weight: mr.Col["d"],
    seed: int,
    bias: mr.Col | None = None,
    softcap: float | None = None,
    temperature: float | None = None,
):
    s = heads.logits(x, weight, bias, softcap, temperature)
    drawn = mr.argmax(s + mr.gumbel(seed))
    logit = mr.sum(torch.where(mr.col_index == drawn, s, 0.0))
    return Sample(drawn, torch.where(drawn < 0, -math.inf, logit - mr.logsumexp(s)))


@checks.public_layer(rows={"x": "first"}, cols={"weight": "vectors", "bias": "numbers"})
def linear_sample(
    x: Tensor,
    weight: Tensor,
    seed: int | Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
) -> Sample:
    """Draw one class for each row from ``softmax((x @ weight.T + bias) / temperature)``, with its log-probability.

    Distributed as ``torch.multinomial(torch.softmax(F.linear(x, weight, bias) / temperature, -1), 1)``, without ever
    allocating the M × V logits, their softmax or the noise: one pass over the pairs finds the largest logit plus Gumbel
    noise. The noise is a function of (seed, row, class) alone, so the same seed draws the same classes on every device
    and for every tile; use a new seed for each draw. The log-probability is differentiable, the index is not. For
    16-bit inputs it is float32.

    Shapes: ``x`` [..., D], ``weight`` [V, D], ``bias`` [V] give ``index`` (int64) and ``log_prob``, both [...]; rows
    are counted through all leading dimensions. ``seed`` is an integer or a 0-dim tensor; ``softcap`` and
    ``temperature`` as in :func:`linear_cross_entropy`. Where there is nothing to draw (no classes, or all of minus
    infinite bias) the index is -1 and the log-probability minus infinity.

    Raises :class:`ArgumentError` for a seed that is no integer or a temperature that is not above 0,
    :class:`ShapeError`, :class:`DTypeError` or :class:`DeviceError` for arguments that do not fit each other.

    >>> import torch
    >>> from monoidreduce.ops import linear_sample
    >>> x, weight = torch.randn(6, 4), torch.randn(9, 4)
    >>> index, log_prob = linear_sample(x, weight, 7)
    >>> expected = torch.log_softmax(x @ weight.T, -1).gather(-1, index[:, None])[:, 0]
    >>> torch.allclose(log_prob, expected, atol=1e-5)
    True
    """
    head = heads.check(x, weight, bias, softcap, temperature)
    checks.whole("seed", seed)
    rows = checks.flatten_rows(x)
    return Sample(*(checks.unflatten_rows(value, x, rows) for value in _sample(rows, weight, seed, **head)))


sample = linear_sample
"""The older name of :func:`linear_sample`.

>>> from monoidreduce import ops
>>> ops.sample is ops.linear_sample
True
"""


@mr.op
@no_type_check
def _topk(
    x: mr.Row["d"],
    weight: mr.Col["d"],
    k: int,
    largest: bool,
    log_probs: bool,
    bias: mr.Col | None = None,
    softcap: float | None = None,
    temperature: float | None = None,
):
    s = heads.logits(x, weight, bias, softcap, temperature)
    best = mr.topk(s, k, largest=largest)
    return TopK(best.values - mr.logsumexp(s) if log_probs else best.values, best.indices)


@checks.public_layer(rows={"x": "first"}, cols={"weight": "vectors", "bias": "numbers"})
def linear_topk(
    x: Tensor,
    weight: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    softcap: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    largest: bool = True,
    log_probs: bool = False,
) -> TopK:
    """The k largest logits of each row, or log-probabilities, best first, and their classes.

    The same as ``torch.topk(F.linear(x, weight, bias), k)``, with ``log_probs`` of the logits' ``log_softmax``, without
    ever allocating the M × V logits or their gradient. The values are differentiable. Among equal logits, which classes
    stand at the edge is not defined. A place that only saw minus infinity has the index -1.

    Shapes: ``x`` [..., D], ``weight`` [V, D], ``bias`` [V] give ``values`` and ``indices`` (int64), both [..., k];
    values come in the type of x. ``softcap`` and ``temperature`` as in :func:`linear_cross_entropy`. With
    ``largest=False`` the k smallest, smallest first.

    Raises :class:`TopKError` for more than V classes, :class:`ArgumentError` for a k that is no integer above 0,
    :class:`ShapeError`, :class:`DTypeError` or :class:`DeviceError` for arguments that do not fit each other.

    >>> import torch
    >>> from monoidreduce.ops import linear_topk
    >>> x, weight = torch.randn(6, 4), torch.randn(9, 4)
    >>> values, indices = linear_topk(x, weight, 3)
    >>> expected = (x @ weight.T).topk(3)
    >>> torch.allclose(values, expected.values, atol=1e-5), torch.equal(indices, expected.indices)
    (True, True)
    """
    head = heads.check(x, weight, bias, softcap, temperature)
    checks.whole("k", k, least=1)
    rows = checks.flatten_rows(x)
    found = _topk(rows, weight, int(k), bool(largest), bool(log_probs), **head)
    return TopK(*(checks.unflatten_rows(value, x, rows) for value in found))


@mr.op
@no_type_check
def _argmax(x: mr.Row["d"], weight: mr.Col["d"], bias: mr.Col | None = None):
    return mr.argmax(heads.logits(x, weight, bias, None, None))


@checks.public_layer(rows={"x": "first"}, cols={"weight": "vectors", "bias": "numbers"})
def linear_argmax(x: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """The class of the largest logit of each row, the first of equals, as greedy decoding takes it.

    The same as ``F.linear(x, weight, bias).argmax(-1)``, without ever allocating the M × V logits. (A softcap or a
    temperature changes no argmax.) Where there is nothing to choose from, no classes or all of minus infinite bias, it
    is -1.

    Shapes: ``x`` [..., D], ``weight`` [V, D], ``bias`` [V] give int64 [...].

    Raises :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for arguments that
    do not fit.

    >>> import torch
    >>> from monoidreduce.ops import linear_argmax
    >>> x, weight = torch.randn(6, 4), torch.randn(9, 4)
    >>> torch.equal(linear_argmax(x, weight), (x @ weight.T).argmax(-1))
    True
    """
    checks.head(x, weight, bias)
    rows = checks.flatten_rows(x)
    return checks.unflatten_rows(_argmax(rows, weight, bias), x, rows)
