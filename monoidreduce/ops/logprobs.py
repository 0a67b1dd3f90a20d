"""Log-probabilities of given tokens, and the entropy, of a linear head."""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import torch
from torch import Tensor

from . import checks, heads
from . import language as mr


class LogProbs(NamedTuple):
    """What :func:`linear_logprobs` returns with any of its options; None for what was not asked.

    >>> import torch, monoidreduce as mr
    >>> found = mr.ops.linear_logprobs(torch.zeros(2, 4), torch.zeros(8, 4), torch.tensor([0, 7]), return_entropy=True)
    >>> found.log_prob, found.entropy, found.argmax
    (tensor([-2.0794, -2.0794]), tensor([2.0794, 2.0794]), None)
    """

    log_prob: Any
    entropy: Any = None
    argmax: Any = None
    topk_log_probs: Any = None
    topk_indices: Any = None


@mr.op
@no_type_check
def _logprobs(
    x: mr.Row["d"],
    weight: mr.Col["d"],
    target: mr.Row,
    ignore_index: int,
    careful: bool,
    entropy: bool,
    argmax: bool,
    k: int,
    bias: mr.Col | None = None,
    softcap: float | None = None,
    temperature: float | None = None,
):
    whole = heads.logits(x, weight, bias, softcap, temperature)
    shift = heads.shift(whole) if entropy and careful else 0.0
    s = whole - shift
    z = mr.logsumexp(s)
    log_prob = mr.sum(torch.where(mr.col_index == target, s, 0.0)) - z
    found = {"log_prob": heads.mask_ignored(target, ignore_index, log_prob)}
    if entropy:
        found["entropy"] = heads.entropy(s, bias is not None)
    if argmax:
        found["argmax"] = mr.argmax(whole)
    if k:
        best = mr.topk(whole, k)
        found["topk_log_probs"], found["topk_indices"] = best.values - shift - z, best.indices
    return found


@checks.public_layer
def linear_logprobs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_argmax: bool = False,
    top_k: int = 0,
) -> Any:
    """The log-probability of each row's token, as PPO, GRPO and DPO need it.

    The same as ``torch.log_softmax(F.linear(x, weight, bias) / temperature, -1).gather(-1, target[..., None])``,
    without ever allocating the M × V logits, their softmax or their gradient. All options are of the same pass over
    the pairs, but the entropy of inputs wider than 16 bits, which takes a second one to keep its digits. For 16-bit
    inputs log-probability and entropy are float32, the top-k's log-probabilities of the inputs' type.

    Shapes: ``x`` [..., D], ``weight`` [V, D], ``bias`` [V] and integers ``target`` [...] give [...]. A token equal to
    ``ignore_index`` has log-probability 0 and no gradient. ``softcap`` and ``temperature`` as in
    :func:`linear_cross_entropy`. With ``return_entropy``, ``return_argmax`` (int64) or ``top_k`` a :class:`LogProbs` is
    returned: entropy and argmax [...], the ``top_k`` largest log-probabilities and their classes [..., top_k], best
    first. Of these, all but the indices are differentiable.

    Raises :class:`LabelError` for a token outside 0 … V - 1 before any work (on a GPU, where looking would cost a
    synchronisation, its log-probability is NaN), :class:`TopKError` where there are fewer than ``top_k`` classes,
    :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for arguments that do not
    fit.

    >>> import torch
    >>> from monoidreduce.ops import linear_logprobs
    >>> x, weight, target = torch.randn(6, 4), torch.randn(9, 4), torch.tensor([3, 1, 7, 8, 0, 3])
    >>> log_p = torch.log_softmax(x @ weight.T, -1)
    >>> got = linear_logprobs(x, weight, target, return_entropy=True, top_k=2)
    >>> torch.allclose(got.log_prob, log_p.gather(-1, target[:, None])[:, 0], atol=1e-5)
    True
    >>> torch.allclose(got.topk_log_probs, log_p.topk(2).values, atol=1e-5)
    True
    """
    head = heads.check(x, weight, bias, softcap, temperature)
    checks.whole("ignore_index", ignore_index)
    checks.whole("top_k", top_k, least=0)
    checks.classes(x, weight, target)
    labels = checks.labels(target, len(weight), ignore_index).classes
    wanted = heads.needs_shift(x), bool(return_entropy), bool(return_argmax), int(top_k)
    rows = checks.flatten_rows(x)
    found = _logprobs(rows, weight, labels, ignore_index, *wanted, **head)
    found = {name: checks.unflatten_rows(y, x, rows) for name, y in found.items()}
    return LogProbs(**found) if len(found) > 1 else found["log_prob"]


@mr.op
@no_type_check
def _entropy(
    x: mr.Row["d"],
    weight: mr.Col["d"],
    careful: bool,
    bias: mr.Col | None = None,
    softcap: float | None = None,
    temperature: float | None = None,
):
    s = heads.logits(x, weight, bias, softcap, temperature)
    return heads.entropy(heads.subtract_shift(s, careful), bias is not None)


@checks.public_layer
def linear_entropy(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """The entropy, in nats, of ``softmax((x @ weight.T + bias) / temperature)`` for each row.

    The same as ``torch.distributions.Categorical(logits=F.linear(x, weight, bias)).entropy()``, without ever allocating
    the M × V logits, their softmax or their gradient. A class whose bias is minus infinity does not take part; with no
    classes the entropy is 0. For 16-bit inputs the entropy is float32; for wider ones a first pass keeps the digits of
    a small entropy.

    Shapes: ``x`` [..., D], ``weight`` [V, D], ``bias`` [V] give [...]. ``softcap`` and ``temperature`` as in
    :func:`linear_cross_entropy`.

    Raises :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for arguments that
    do not fit.

    >>> import torch
    >>> from monoidreduce.ops import linear_entropy
    >>> x, weight = torch.randn(6, 4), torch.randn(9, 4)
    >>> expected = torch.distributions.Categorical(logits=x @ weight.T).entropy()
    >>> torch.allclose(linear_entropy(x, weight), expected, atol=1e-5)
    True
    """
    head = heads.check(x, weight, bias, softcap, temperature)
    rows = checks.flatten_rows(x)
    return checks.unflatten_rows(_entropy(rows, weight, heads.needs_shift(x), **head), x, rows)


entropy = linear_entropy
"""The older name of :func:`linear_entropy`.

>>> from monoidreduce import ops
>>> ops.entropy is ops.linear_entropy
True
"""
