"""Losses and searches over a list of candidates for each row: sampled softmax, reranking."""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from ..domains import Edges
from ..domains.base import can_inspect, check_range
from ..errors import ShapeError, TopKError
from . import checks, heads
from . import language as mr
from .neighbours import METRICS, Metric, Neighbours, distance, root


@mr.op
@no_type_check
def _negatives(
    x: mr.Row["d"],
    weight: mr.Col["d"],
    target: mr.Row | None = None,
    ids: mr.Col | None = None,
    bias: mr.Col | None = None,
    log_q: mr.Pair | None = None,
    softcap: float | None = None,
    temperature: float | None = None,
):
    s = heads.logits(x, weight, bias, softcap, temperature)
    s = s if log_q is None else s - log_q
    if target is not None:  # a sample that is the row's own class is no negative
        s = torch.where((mr.col_index if ids is None else ids) == target, -torch.inf, s)
    return mr.logsumexp(s)


@checks.public_layer
def sampled_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    samples: Tensor,
    *,
    bias: Tensor | None = None,
    log_q: Tensor | None = None,
    remove_hits: bool = False,
    softcap: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int | None = None,
    token_weights: Tensor | None = None,
    reduction: checks.Reduction = "mean",
    sparse_grad: bool = False,
) -> Tensor:
    """Cross-entropy of each row's class against sampled classes only: a softmax over millions that touches thousands.

    With logits ``s = x @ weight.T + bias`` (capped and divided by ``temperature`` as in :func:`linear_cross_entropy`),
    the same as ``F.cross_entropy(torch.cat([s[target], s[samples]]), 0)`` for each row, without ever allocating the
    M × V logits, the M × K logits or the gathered M × K × D vectors, forward or backward. For 16-bit inputs the loss is
    float32.

    Shapes: ``x`` [..., D], ``weight`` [V, D], ``target`` [...]; ``samples`` [K], negatives for all rows together, or
    [..., K], negatives for each; they give one number, or [...] with ``reduction="none"``.

    - ``log_q`` [V]: the logarithm of how often each class is sampled, subtracted from its logit, so that the loss
      estimates that of the whole softmax. It may be float32 beside 16-bit inputs.
    - ``remove_hits``: a sample that is the row's own class is left out. A class that is sampled twice counts twice.
    - ``ignore_index`` (-100 if left out), ``token_weights``, ``reduction``: as in :func:`linear_cross_entropy`.
    - ``sparse_grad``: the gradient of ``weight`` is sparse, of the classes that took part, for
      ``torch.optim.SparseAdam`` and the like. Their vectors are then copied once for the call, each class once.

    Raises :class:`LabelError` and :class:`ColumnListError` for classes that do not exist (see ``mr.use(check=True)``),
    :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for arguments that do not
    fit.

    >>> import torch, torch.nn.functional as F, monoidreduce as mr
    >>> x, items = torch.randn(3, 4), torch.randn(1000, 4)
    >>> target, samples = torch.tensor([7, 0, 999]), torch.randint(1000, (3, 20))
    >>> loss = mr.ops.sampled_cross_entropy(x, items, target, samples)
    >>> chosen = torch.cat([target[:, None], samples], 1)
    >>> logits = torch.einsum("md,mkd->mk", x, items[chosen])
    >>> torch.allclose(loss, F.cross_entropy(logits, torch.zeros(3, dtype=torch.long)), atol=1e-5)
    True
    """
    checks.reduction(reduction)
    options = heads.check(x, weight, bias, softcap, temperature)
    checks.tensor("weight", weight, "[V, D]", 2, 2)
    checks.classes(x, weight, target)
    _check_samples(x, target, samples)
    wide = torch.float32 if x.dtype.itemsize == 2 else x.dtype
    if log_q is not None:
        checks.tensor("log_q", log_q, "[V]", 1, 1)
        checks.floating(log_q=log_q)
        log_q = log_q.to(wide)
        if len(log_q) != len(weight):
            raise ShapeError(detail=f"log_q has {len(log_q)} numbers", fix=f"Give one for each class: {len(weight)}")
    if token_weights is not None:
        checks.per_row("token_weights", token_weights, x)
    ignored = -100 if ignore_index is None else ignore_index
    checks.whole("ignore_index", ignored)
    labels = checks.labels(target, len(weight), ignored)
    rows, classes = checks.flatten_rows(x), labels.classes
    counted = classes != ignored
    classes = torch.where(counted, classes, 0) if len(weight) else classes
    shared = samples.dim() == 1
    chosen = samples.long() if shared else samples.reshape(len(rows), samples.shape[-1]).long()
    if can_inspect(samples):
        check_range("samples", samples, len(weight) - 1, "classes")
    if sparse_grad:
        used, place = torch.unique(torch.cat([classes, chosen.flatten()]), return_inverse=True)
        weight = F.embedding(used, weight, sparse=True)
        bias = None if bias is None else bias[used]
        log_q = None if log_q is None else log_q[used]
        classes, chosen = place[: len(classes)], place[len(classes) :].view(chosen.shape)
    options["bias"] = bias
    own = _own_logits(rows, weight, classes, log_q, options)
    if log_q is not None:  # a number for each pair
        options["log_q"] = log_q[chosen.unsqueeze(0) if shared else chosen.flatten()]
    if remove_hits:
        options["target"], options["ids"] = classes, chosen if shared else None
    if shared:
        weight, options["bias"] = heads.take_vectors(chosen, weight), None if bias is None else bias[chosen]
    else:
        options["cols"] = Edges.from_neighbours(chosen)
    rest = _negatives(rows, weight, **checks.drop_unset(options))
    loss = F.softplus(rest - own, threshold=50)  # log(exp own + exp rest) - own
    loss = torch.where(counted, loss, 0.0)
    weights = None if token_weights is None else checks.drop_weights(token_weights.reshape(-1), counted)
    found = checks.reduce_numbers(loss, counted.to(loss.dtype), weights, reduction)
    return checks.unflatten_rows(found, x, rows) if reduction == "none" else found


def _own_logits(rows: Tensor, weight: Tensor, classes: Tensor, log_q: Tensor | None, options: dict) -> Tensor:
    """The logit of each row's own class, which is one product a row; in float32 for 16-bit inputs."""
    wide = torch.float32 if rows.dtype.itemsize == 2 else rows.dtype
    if not len(weight):
        return rows.new_zeros(len(rows), dtype=wide)
    s = (rows.to(wide) * heads.take_vectors(classes, weight).to(wide)).sum(-1)
    s = s if options["bias"] is None else s + options["bias"][classes].to(wide)
    s = heads.apply_softcap(s, options["softcap"], options["temperature"])
    return s if log_q is None else s - log_q[classes]


def _check_samples(x: Tensor, target: Tensor, samples: Any) -> None:
    checks.tensor("samples", samples, "[K] or [..., K]", 1)
    checks.integers("samples", samples)
    checks.one_device({"x": x, "target": target, "samples": samples})
    if samples.dim() > 1 and samples.shape[:-1] != x.shape[:-1]:
        raise ShapeError(
            detail=f"samples has shape {tuple(samples.shape)} beside x {tuple(x.shape)}",
            fix=f"Give [K], for all rows, or [{', '.join(map(str, x.shape[:-1]))}, K], for each",
        )


@mr.op
@no_type_check
def _rerank(x: mr.Row["d"], y: mr.Col["d"], k: int, metric: str):
    euclidean, largest = metric == "euclidean", metric in ("dot", "cosine")
    values, indices = mr.topk(distance(x, y, "sqeuclidean" if euclidean else metric), k, largest=largest)
    return Neighbours(root(values) if euclidean else values, indices)


@checks.public_layer
def rerank(x: Tensor, y: Tensor, candidates: Tensor | Edges, k: int, *, metric: Metric = "dot") -> Neighbours:
    """The k best of each row's candidates, best first: the second stage of a search.

    The same as ``(x.unsqueeze(-2) * y[candidates]).sum(-1).topk(k)`` with the columns' own numbers as indices, without
    ever allocating the gathered vectors or their products. The values have gradients, indices have none. Where a row
    has fewer than k candidates, the rest of its values is minus infinity (infinity for distances) and of its indices
    -1.

    Shapes: ``x`` [M, D], ``y`` [N, D] and ``candidates`` [M, K], columns of each row, or ``mr.edges`` for lists of
    unequal lengths, give values and indices [M, k]. A candidate that is listed twice may be found twice. ``metric`` as
    in :func:`knn`.

    Raises :class:`TopKError` where k > K, :class:`ColumnListError` for candidates that do not exist,
    :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for other arguments that do
    not fit.

    >>> import torch, monoidreduce as mr
    >>> x, y = torch.randn(3, 8), torch.randn(1000, 8)
    >>> rough = mr.ops.knn(x[:, :4], y[:, :4], 50, metric="dot").indices
    >>> values, indices = mr.ops.rerank(x, y, rough, 5)
    >>> torch.allclose(values[0], y[indices[0]] @ x[0], atol=1e-5)
    True
    """
    checks.floating(x=x, y=y)
    checks.one_of("metric", metric, METRICS)
    checks.whole("k", k, 1)
    if isinstance(candidates, Tensor):
        checks.integers("candidates", candidates)
        checks.tensor("candidates", candidates, "[..., M, K]", 2)
        if k > candidates.shape[-1]:
            raise TopKError(k=k, size=candidates.shape[-1], axis="candidates")
        if x.dim() > 1 and candidates.shape[-2] != x.shape[-2]:
            raise ShapeError(
                detail=f"candidates has shape {tuple(candidates.shape)} beside x {tuple(x.shape)}",
                fix=f"Give [{x.shape[-2]}, K], a list for each row",
            )
        if y.dim() > 1 and can_inspect(candidates):
            check_range("candidates", candidates, y.shape[-2] - 1, "columns")
        candidates = Edges.from_neighbours(candidates.long())
    checks.domain("candidates", candidates, "edges", "blocks")
    return _rerank(x, y, int(k), metric, cols=candidates)
