"""Contrastive losses: InfoNCE, CLIP's symmetric form, SigLIP, and the supervised ones with several positives."""

from __future__ import annotations

import itertools
from typing import Any, Literal, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engines.ranks import agreement
from ..errors import ArgumentError, ShapeError
from . import checks
from . import language as mr
from .streaming import BothWays, LayerStreams, count_entries

Kind = Literal["clip", "infonce", "siglip"]
Labels = Tensor | tuple[Tensor, Tensor]


@no_type_check
def _info_nce(s, same, labelled, alone, hard, over):
    """For each row (or column): -log softmax of its positives, on average, and how many they are."""
    hit = mr.sum(torch.where(same, s, 0.0), over=over)
    z = mr.logsumexp(s, over=over) if hard is None else None
    if not labelled and hard is None:
        return z - hit, None
    count = mr.count(same, over=over) if labelled else 1
    some = torch.clamp(count, min=1) if labelled else 1
    if hard is None:
        return torch.where(count > 0, z - hit / some, 0.0), count
    others = (mr.num_cols if over == "cols" else mr.num_rows) - count - (1 if alone else 0)
    apart = torch.where(same, -torch.inf, s)
    gap = mr.logsumexp((1 + hard) * apart, over=over) - mr.logsumexp(hard * apart, over=over)
    against = torch.where(others > 0, gap + torch.log(torch.clamp(others, min=1)), -torch.inf)
    if not labelled:
        return torch.logaddexp(hit, against) - hit, None
    each = torch.where(same, torch.logaddexp(s, against) - s, 0.0)
    return mr.sum(each, over=over) / some, count


@mr.op
@no_type_check
def _contrastive_loss(
    x: mr.Row["d"],
    y: mr.Col["d"],
    scale: float,
    normalize: bool,
    kind: str,
    alone: bool,
    bias: float | None = None,
    hard: float | None = None,
    row_labels: mr.Row | None = None,
    col_labels: mr.Col | None = None,
):
    if normalize:
        x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    s = x @ y * scale
    own, labelled = mr.row_index == mr.col_index, row_labels is not None
    same = row_labels == col_labels if labelled else own
    same = same & ~own if alone else same
    if kind == "siglip":
        s = s if bias is None else s + bias
        each = F.softplus(torch.where(same, -s, s))
        return [mr.sum(torch.where(own, 0.0, each) if alone else each)], []
    s = torch.where(own, -torch.inf, s) if alone else s
    ways = [_info_nce(s, same, labelled, alone, hard, over) for over in ("cols", "rows")[: 1 + (kind == "clip")]]
    return [loss for loss, _ in ways], [count for _, count in ways if count is not None]


def _stream_contrastive_loss(
    x: Any, *, kind: Kind = "clip", reduction: checks.Reduction = "mean", **options: Any
) -> Any:
    """One way is a stream as any other; both ways are two, with x and y exchanged."""
    checks.one_of("kind", kind, ("clip", "infonce", "siglip"))
    if options.get("labels") is not None:
        raise ArgumentError(detail="contrastive_loss.stream was given labels", fix="Call it with x and y in memory")
    one_way = LayerStreams(contrastive_loss.__wrapped__, {"x": "vectors"}, {"y": "vectors"})  # type: ignore[attr-defined]
    if kind != "clip":
        return one_way.stream(x, kind=kind, reduction=reduction, **options)

    def run(x: Any, y: Any, quiet: bool) -> Tensor:
        count_equal(x, y)
        ways = [
            one_way.stream(rows, kind="infonce", reduction=reduction, **options).over(cols, quiet=quiet)
            for rows, cols in ((x, y), (y, x))
        ]
        return (ways[0] + ways[1]) / 2

    def count_equal(x: Any, y: Any) -> None:
        m, n = count_entries("x", x), count_entries("y", y)
        if m != n:
            raise ShapeError(
                detail=f"x has {m} vectors, but y has {n}", fix="The i-th x belongs to the i-th y: give equally many"
            )

    return BothWays("contrastive_loss", x, run)


@checks.public_layer(rows={}, cols={}, stream=_stream_contrastive_loss)
def contrastive_loss(
    x: Tensor,
    y: Tensor | None,
    *,
    kind: Kind = "clip",
    temperature: float | Tensor | None = None,
    scale: float | Tensor | None = None,
    bias: float | Tensor | None = None,
    normalize: bool = False,
    labels: Labels | None = None,
    hard_negatives: float = 0.0,
    reduction: checks.Reduction = "mean",
) -> Tensor:
    """Contrastive loss: each x is to find its own y among all, and each y its own x.

    With ``s = x @ y.T / temperature`` and ``t = torch.arange(N)`` the same as ``(F.cross_entropy(s, t) +
    F.cross_entropy(s.T, t)) / 2``, without ever allocating the N × N similarities, their softmaxes or their gradients:
    one pass folds rows and columns at once. For 16-bit inputs the loss is float32.

    - ``kind``: ``"clip"`` looks both ways, as above; ``"infonce"`` only from x to y, and y may have more vectors than
      x, negatives for all; ``"siglip"`` is Σ_j softplus(∓(s + bias)) for each x, minus for its own, plus for others.
    - ``temperature`` divides, ``scale`` (CLIP's learned one) multiplies: give one of them. They and SigLIP's ``bias``
      are numbers, or 0-dim tensors, with a gradient if they ask for one. ``normalize`` divides the vectors by their
      lengths first, as ``F.normalize``.
    - ``labels``, integers [..., N] (or a pair of them, for x and y): every y of x's label is its own, and a row's loss
      is the mean over them (SupCon). Rows without any have loss 0 and do not count in the mean. With ``y=None`` x is
      taken against itself, each vector's own left out.
    - ``hard_negatives`` β: negatives weighted by their softmax(β s) instead of equally.

    Shapes: ``x`` [..., M, D] and ``y`` [..., N, D], the i-th of one belonging to the i-th of the other, give one
    number, or [..., M] with ``reduction="none"``; leading dimensions broadcast, each a batch of its own.

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
    checks.one_of("kind", kind, ("clip", "infonce", "siglip"))
    checks.between("hard_negatives", hard_negatives, 0, float("inf"))
    factor = _scale(temperature, scale)
    if kind != "siglip" and bias is not None:
        raise ArgumentError(detail=f'bias was given for kind="{kind}"', fix="A softmax does not see it: drop bias")
    if kind == "siglip" and hard_negatives:
        raise ArgumentError(detail='hard_negatives was given for kind="siglip"', fix="Use infonce or clip")
    alone = y is None
    y = x if y is None else y
    checks.tensor("x", x, "[..., M, D]", 2)
    checks.tensor("y", y, "[..., N, D]", 2)
    checks.floating(x=x, y=y)
    marks = _labels(labels, x, y, alone)
    _check_counts(x, y, kind, labelled=bool(marks))
    hard = hard_negatives or None
    losses, counts = _contrastive_loss(x, y, factor, bool(normalize), kind, alone, bias, hard, **marks)
    ways = [
        _reduce_way(loss, count, reduction, axis)
        for loss, count, axis in itertools.zip_longest(losses, counts, ("rows", "cols")[: len(losses)])
    ]
    return ways[0] if len(ways) == 1 else (ways[0] + ways[1]) / 2


def _reduce_way(loss: Tensor, count: Tensor | None, reduction: checks.Reduction, axis: str) -> Tensor:
    """A way's loss, of each row or each column: its mean is over those that belong to any."""
    share = (count > 0).to(loss.dtype) if count is not None and reduction == "mean" else None
    return checks.reduce_numbers(loss, share, None, reduction, axis)


def _scale(temperature: Any, scale: Any) -> Any:
    if scale is not None:
        if temperature is not None:
            raise ArgumentError(
                detail="both temperature and scale were given", fix="Give one: scale is 1 / temperature"
            )
        checks.positive("scale", scale)
        return scale
    if temperature is None:
        return 1.0
    checks.positive("temperature", temperature)
    return 1 / temperature


def _labels(labels: Any, x: Tensor, y: Tensor, alone: bool) -> dict[str, Tensor]:
    if labels is None:
        if alone:
            raise ArgumentError(
                detail="y=None takes x against itself, but without labels nothing belongs together",
                fix="Give labels, or the other view as y",
            )
        return {}
    rows, cols = labels if isinstance(labels, (tuple, list)) and len(labels) == 2 else (labels, labels)
    for side, given, name in ((x, rows, "x"), (y, cols, "y")):
        checks.tensor("labels", given, "[..., N]", 1)
        checks.integers("labels", given)
        if given.shape[-1] != side.shape[-2]:
            raise ShapeError(
                detail=f"labels has {given.shape[-1]} numbers, but {name} has {side.shape[-2]} vectors",
                fix="Give one label for each, as a pair where x and y differ",
            )
    return {"row_labels": rows, "col_labels": cols}


def _check_counts(x: Tensor, y: Tensor, kind: str, labelled: bool) -> None:
    streamed = agreement.streamed_call()
    if streamed is not None and streamed.totals[1] is None:
        return  # it is looked at again when all columns have come
    m, n = agreement.total_sizes(x.shape[-2], y.shape[-2])
    fits = m == n or (kind != "clip" and (labelled or (kind == "infonce" and m < n)))
    if not fits:
        raise ShapeError(
            detail=f"x has {m} vectors, but y has {n}",
            fix="The i-th x belongs to the i-th y: give equally many"
            + (" (only infonce may have more y, as negatives)" if kind != "clip" else ""),
        )
