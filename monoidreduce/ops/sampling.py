"""Choosing classes by a linear head: sampling, the k best, the best."""

from __future__ import annotations

import math
from typing import NamedTuple, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ArgumentError
from ..stored_vectors import Vectors
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


@mr.op
@no_type_check
def _sample_truncated(
    x: mr.Row["d"],
    weight: mr.Col["d"],
    seed: int,
    floor: float | None,
    top_p: float,
    draws: int,
    bias: mr.Col | None = None,
    softcap: float | None = None,
    temperature: float | None = None,
):
    """Draw from the classes that less than ``top_p`` of all mass is above (with ``draws`` of 0: from all), and whose
    logits are at least the largest plus ``floor``.

    A class is drawn by the largest logit plus noise of those that belong to the set. So the few largest of all are
    found, one more pass sums up the mass above each, and the first that belongs is taken: no order of all classes is
    needed. Should none belong, which has probability ``_MISSED``, it is the class of the largest logit, which does.
    """
    s = heads.logits(x, weight, bias, softcap, temperature)
    top, z = mr.argmax(s), mr.logsumexp(s)
    seen = s if floor is None else torch.where((s >= mr.max(s) + floor) | (mr.col_index == top), s, -math.inf)
    if draws:
        drawn = mr.topk(seen + mr.gumbel(seed), draws)
        logit, index = drawn.gather(s), top
        # a class is not above itself, whatever the rounding of a logit that is computed twice
        mass = lambda logit, own: mr.sum(torch.where((s > logit) & (mr.col_index != own), torch.exp(s - z), 0.0))
        if draws <= _FEW:  # a number each, which every kernel sums
            for f in reversed(range(draws)):
                own = drawn.indices[f]
                index = torch.where((mass(logit[f], own) < top_p) & (own >= 0), own, index)
        else:
            belongs = (mass(logit, drawn.indices) < top_p) & (drawn.indices >= 0)
            first = torch.where(belongs, drawn.values, -math.inf).amax(-1)
            found = torch.where(belongs & (drawn.values == first), drawn.indices, mr.num_cols).amin(-1)
            index = torch.where(found == mr.num_cols, top, found)
    else:
        index = mr.argmax(seen + mr.gumbel(seed))
    logit = mr.sum(torch.where(mr.col_index == index, s, 0.0))
    return Sample(index, torch.where(index < 0, -math.inf, logit - z))


@mr.op
@no_type_check
def _list_best(
    x: mr.Row["d"],
    weight: mr.Col["d"],
    seed: int,
    k: int,
    bias: mr.Col | None = None,
    softcap: float | None = None,
    temperature: float | None = None,
):
    s = heads.logits(x, weight, bias, softcap, temperature)
    best = mr.topk(s, k)
    return best.values, best.indices, best.gather(mr.gumbel(seed)), mr.logsumexp(s)


def _sample_from_list(best: tuple[Tensor, ...], floor: float | None, top_p: float | None) -> Sample:
    """Draw from the listed classes, best first, that are left by ``floor`` and ``top_p``."""
    values, indices, noise, z = best
    logits = values.detach()
    kept = indices >= 0
    if floor is not None:
        kept &= logits >= logits[..., :1] + floor
    if top_p is not None:
        probs = torch.softmax(logits, -1)
        before = probs.cumsum(-1) - probs
        again = F.pad(logits[..., 1:] == logits[..., :-1], (1, 0))  # equals share what is above the first of them
        kept &= before.masked_fill(again, 0.0).cummax(-1).values < top_p
    kept[..., :1] = indices[..., :1] >= 0  # whatever the rounding, the best
    at = (logits + noise).masked_fill(~kept, -math.inf).argmax(-1, keepdim=True)
    index = torch.where(kept.gather(-1, at), indices.gather(-1, at), -1).squeeze(-1)
    log_prob = values.gather(-1, at).squeeze(-1) - z
    return Sample(index, torch.where(index < 0, -math.inf, log_prob))


_MISSED = 2.0**-30  # how rarely none of the drawn classes may belong to a nucleus


_FEW = 16  # draws
_LEAST_P = 0.05  # below, every pair would be compared with more than 400 logits


def _count_draws(top_p: float, classes: int) -> int:
    """How many draws without replacement miss a nucleus of at least this mass with probability ``_MISSED`` at most."""
    if top_p < _LEAST_P:
        raise ArgumentError(
            detail=f"top_p is {top_p}, and there is no top_k: below {_LEAST_P} each pair is compared too often",
            fix="Give top_k as well (top_k=1000, say), or take the best class with linear_argmax",
        )
    return min(classes, math.ceil(math.log(_MISSED) / math.log1p(-top_p)))


@checks.public_layer(rows={"x": "first"}, cols={"weight": "vectors", "bias": "numbers"})
def linear_sample(
    x: Vectors,
    weight: Vectors,
    seed: int | Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
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

    ``top_k``, ``top_p`` and ``min_p`` leave only some classes to draw from, as decoders do, in this order and after the
    temperature: the ``top_k`` largest logits; of these the fewest, most probable first, whose probabilities sum to
    ``top_p`` (equal logits are in or out together); and those whose probability is at least ``min_p`` of the largest.
    The draw is that of the largest logit plus noise among them, the noise being the same as without. The
    log-probability stays that of the whole softmax, which a trainer compares with. ``min_p`` and ``top_p`` take one
    more pass each (a small ``top_p`` more work in it: about 21 / ``top_p`` comparisons a pair); beside ``top_k`` they
    cost nothing.

    Raises :class:`ArgumentError` for a seed that is no integer, a temperature that is not above 0, a ``top_k`` below 1,
    a ``top_p`` or ``min_p`` outside of 0 to 1, a ``top_p`` below 0.05 without ``top_k``, :class:`TopKError` where there
    are fewer than ``top_k`` classes, :class:`ShapeError`, :class:`DTypeError` or :class:`DeviceError` for arguments
    that do not fit each other.

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
    rows, classes = checks.flatten_rows(x), weight.shape[0]
    if top_k is not None:
        checks.whole("top_k", top_k, least=1)
        checks.at_most(top_k, classes)
    for name, share in (("top_p", top_p), ("min_p", min_p)):
        if share is not None:
            checks.between(name, share, 0.0, 1.0)
    top_p = None if top_p is None or top_p >= 1 else float(top_p)
    floor = math.log(min_p) if min_p else None
    if top_k is not None and top_k != classes:
        found = _sample_from_list(_list_best(rows, weight, seed, int(top_k), **head), floor, top_p)
    elif (top_p is not None or floor is not None) and classes:
        draws = 0 if top_p is None else _count_draws(top_p, classes)
        found = _sample_truncated(rows, weight, seed, floor, top_p or 1.0, draws, **head)
    else:
        found = _sample(rows, weight, seed, **head)
    return Sample(*(checks.unflatten_rows(value, x, rows) for value in found))


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
    x: Vectors,
    weight: Vectors,
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
    checks.at_most(k, weight.shape[0])
    rows = checks.flatten_rows(x)
    found = _topk(rows, weight, int(k), bool(largest), bool(log_probs), **head)
    return TopK(*(checks.unflatten_rows(value, x, rows) for value in found))


@mr.op
@no_type_check
def _argmax(x: mr.Row["d"], weight: mr.Col["d"], bias: mr.Col | None = None):
    return mr.argmax(heads.logits(x, weight, bias, None, None))


@checks.public_layer(rows={"x": "first"}, cols={"weight": "vectors", "bias": "numbers"})
def linear_argmax(x: Vectors, weight: Vectors, *, bias: Tensor | None = None) -> Tensor:
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
