"""Vocabulary-parallel cross-entropy of tokens, from this rank's logits or from its shard of a head's weights.

What ``integrations/megatron.py`` offers under Megatron's names: Megatron's label smoothing, padded vocabularies, and
sequence parallelism, in which hidden states travel round a ring.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from torch import Tensor

from ..engines.common.shard import GatherChunks, find_chunk
from ..engines.ranks import agreement
from ..errors import ArgumentError, ShapeError
from . import checks, heads
from . import language as mr
from .cross_entropy import linear_cross_entropy

_IGNORED = -100


@mr.op
@no_type_check
def _from_logits(logits: mr.Pair, target: mr.Row, smoothing: float | None = None):
    z = mr.logsumexp(logits)
    loss = z - mr.sum(torch.where(mr.col_index == target, logits, 0.0))
    if smoothing is not None:
        loss = (1 - smoothing) * loss + smoothing * (z - mr.sum(logits) / mr.num_cols)
    return heads.mask_ignored(target, _IGNORED, loss)


def loss_of_logits(logits: Tensor, target: Tensor, label_smoothing: float, group: Any) -> Tensor:
    """The loss of each token from this rank's logits [s, b, v]."""
    with agreement.shard(cols=group):
        return _fold_logits(logits, target, label_smoothing)


@checks.public_layer
def _fold_logits(logits: Tensor, target: Tensor, label_smoothing: float) -> Tensor:
    checks.tensor("vocab_parallel_logits", logits, "[s, b, v]", 2)
    checks.floating(vocab_parallel_logits=logits)
    checks.tensor("target", target, "[s, b]", 1)
    checks.integers("target", target)
    if logits.shape[:-1] != target.shape:
        raise ShapeError(
            detail=f"vocab_parallel_logits {tuple(logits.shape)} and target {tuple(target.shape)} differ in tokens",
            fix="Give logits [s, b, v] and a target [s, b]",
        )
    options = {"smoothing": _smoothing(label_smoothing, logits.shape[-1])} if label_smoothing else {}
    labels = checks.labels(target, logits.shape[-1], _IGNORED).classes
    wide = torch.float64 if logits.dtype is torch.float64 else torch.float32
    return _from_logits(logits.flatten(0, -2), labels, **options).view(target.shape).to(wide)


def loss_of_hidden(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    label_smoothing: float,
    sequence_parallel: bool,
    vocab_size: int | None,
    options: dict[str, Any],
    group: Any,
) -> Tensor:
    """The loss of each token from hidden states [s, b, h] and this rank's weights [v, h]."""
    with agreement.shard(rows=group if sequence_parallel else None, cols=group):
        loss = _fold_hidden(hidden, weight, target, label_smoothing, sequence_parallel, vocab_size, options, group)
    return GatherChunks.apply(loss, 0, len(target), group) if sequence_parallel and group.size() > 1 else loss


@checks.public_layer
def _fold_hidden(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    label_smoothing: float,
    sequence_parallel: bool,
    vocab_size: int | None,
    options: dict[str, Any],
    group: Any,
) -> Tensor:
    checks.head(hidden, weight, options["bias"])
    checks.tensor("target", target, "[s, b]", 1)
    tokens = len(target)
    start, count = find_chunk(tokens, group.size(), group.rank()) if sequence_parallel else (0, tokens)
    if hidden.shape[:-1] != (count, *target.shape[1:]):
        where = f" (rank {group.rank()} of {group.size()} has {count} of {tokens})" if sequence_parallel else ""
        raise ShapeError(
            detail=f"hidden {tuple(hidden.shape)} and target {tuple(target.shape)} differ in tokens{where}",
            fix="Give hidden [s, b, h], or with sequence_parallel=True this rank's part of s, and a target [s, b]",
        )
    if vocab_size is not None:
        weight, options = _drop_padding(weight, options, vocab_size, group)
    smoothing = _smoothing(label_smoothing, len(weight)) if label_smoothing else 0.0
    own = target.narrow(0, start, count)
    return linear_cross_entropy(
        hidden, weight, own, label_smoothing=smoothing, ignore_index=_IGNORED, reduction="none", **options
    )


def _smoothing(label_smoothing: float, classes: int) -> float:
    """Megatron's smoothing leaves the target out: alpha / (K - 1) for each of the other classes of all ranks."""
    checks.between("label_smoothing", label_smoothing, 0, 1)
    total = agreement.total_sizes(0, classes)[1]
    return min(label_smoothing * total / max(total - 1, 1), 1.0)


def _drop_padding(
    weight: Tensor, options: dict[str, Any], vocab_size: int, group: Any
) -> tuple[Tensor, dict[str, Any]]:
    """This rank's classes below ``vocab_size``; shards are of one size, as Megatron pads them."""
    checks.whole("vocab_size", vocab_size, least=1)
    if vocab_size > len(weight) * group.size():
        raise ArgumentError(
            detail=f"vocab_size is {vocab_size}, but {group.size()} ranks have {len(weight)} classes each",
            fix="Give the size of the vocabulary without its padding",
        )
    kept = min(max(vocab_size - group.rank() * len(weight), 0), len(weight))
    bias = options["bias"]
    return weight[:kept], {**options, "bias": None if bias is None else bias[:kept]}
