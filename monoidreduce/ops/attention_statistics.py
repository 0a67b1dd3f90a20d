"""What attention's weights look like, without the weights: entropy, expected distance, column sums, and the divergence
of two attentions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, no_type_check

import torch
from torch import Tensor

from ..domains import Domain
from ..errors import ArgumentError, ShapeError
from . import checks, grouping
from . import language as mr
from .attention import Causal, Documents, Window, chosen_options, default_scale, list_options, score_options, scores

Statistic = Literal["lse", "entropy", "distance", "column_sums"]
_STATISTICS: tuple[Statistic, ...] = ("lse", "entropy", "distance", "column_sums")


class AttentionStatistics(NamedTuple):
    """What :func:`attention_statistics` returns: what was asked for, None for the rest.

    >>> import torch, monoidreduce as mr
    >>> q, k = torch.zeros(2, 4), torch.zeros(3, 4)
    >>> found = mr.ops.attention_statistics(q, k, statistics=["entropy", "column_sums"])
    >>> found.entropy.exp().round(), found.column_sums, found.values
    (tensor([3., 3.]), tensor([0.6667, 0.6667, 0.6667]), None)
    """

    values: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None
    distance: Tensor | None
    column_sums: Tensor | None


@no_type_check
def _finite(s, shown, options):
    """A score as a value: finite where it is hidden and weighs nothing. Only what is added may hold infinities."""
    adds = options["bias"] is not None or (options["attn_mask"] is not None and options["mask"] == "adds")
    return torch.where(s == -torch.inf, 0.0, shown) if adds else shown


@mr.op
@no_type_check
def _statistics(
    q: mr.Row["f"],
    k: mr.Col["f"],
    scale: float,
    wanted: str,
    v: mr.Col["d"] | None = None,
    softcap: float | None = None,
    bias: mr.Pair | None = None,
    attn_mask: mr.Pair | None = None,
    mask: str = "adds",
    alibi_slopes: mr.Batch | None = None,
    lower_right: bool = False,
    causal: bool = False,
    left: int | None = None,
    right: int | None = None,
    lengths: mr.Batch | None = None,
    row_documents: mr.Row | None = None,
    col_documents: mr.Col | None = None,
    row_shift: mr.Row | None = None,
):
    options = {
        "softcap": softcap, "bias": bias, "attn_mask": attn_mask, "mask": mask, "alibi_slopes": alibi_slopes,
        "lower_right": lower_right, "causal": causal, "left": left, "right": right, "lengths": lengths,
        "row_documents": row_documents, "col_documents": col_documents, "row_shift": row_shift,
    }  # fmt: skip
    s, shown, ahead = scores(q, k, scale, **options)
    z, names = mr.logsumexp(s), wanted.split()
    found = []
    if v is not None:
        found.append(mr.softmax_mean(s, v))
    if "lse" in names:
        found.append(z)
    if "entropy" in names:
        found.append(torch.where(z == -torch.inf, 0.0, z - mr.softmax_mean(s, _finite(s, shown, options))))
    if "distance" in names:
        found.append(mr.softmax_mean(s, ahead.abs().float()))
    if "column_sums" in names:  # a row that sees nothing has no weights
        found.append(mr.sum(torch.exp(s - torch.where(z == -torch.inf, torch.inf, z)), over="rows"))
    return tuple(found)


@checks.public_layer(
    rows={"q": "vectors"},
    cols={"k": "vectors", "v": "vectors", "attn_mask": "numbers", "bias": "numbers"},
    col_results=["column_sums"],
)
def attention_statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    attn_mask: Tensor | None = None,
    *,
    statistics: Sequence[Statistic] = _STATISTICS,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    mask_hides: bool = False,
    causal: Causal = False,
    window: Window | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    documents: Documents | None = None,
    lengths: Tensor | None = None,
    cols: Domain | None = None,
) -> AttentionStatistics:
    """Statistics of attention's weights p, with the attention itself where ``v`` is given.

    ``statistics`` names those that are computed, of

    - ``"lse"``: log Σ_j exp s_ij, of each row;
    - ``"entropy"``: -Σ_j p_ij log p_ij of each row, in nats;
    - ``"distance"``: Σ_j p_ij |i - j|, how far each row looks on average;
    - ``"column_sums"``: Σ_i p_ij of each column, how much attention each key gets (heavy hitters, attention sinks).

    The same as ``p = torch.softmax(q @ k.mT * scale, -1)`` and sums of it, without ever allocating the M × N matrix,
    forward or backward. All have gradients. Values, lse, entropy and distance are one pass over the scores; column sums
    need the rows' lse first, so they are a second one.

    Shapes: ``q`` [..., M, f], ``k`` [..., N, f] and ``v`` [..., N, d] give numbers [..., M], column sums [..., N] and
    values [..., M, d]. A row that sees nothing has entropy and distance 0, and adds nothing to the column sums. The
    other options are those of :func:`attention`; with ``enable_gqa`` there are statistics for each head of the queries.
    ``cols`` (``mr.blocks``, ``mr.jagged`` or ``mr.edges``): of listed pairs alone.

    Raises :class:`ArgumentError` for a statistic that there is not, and otherwise as :func:`attention`.

    >>> import torch
    >>> from monoidreduce.ops import attention_statistics
    >>> q, k = torch.randn(2, 5, 4), torch.randn(2, 7, 4)
    >>> p = torch.softmax(q @ k.mT / 2, -1)
    >>> found = attention_statistics(q, k, statistics=["entropy", "column_sums"])
    >>> torch.allclose(found.entropy, -(p * p.log()).sum(-1), atol=1e-5)
    True
    >>> torch.allclose(found.column_sums, p.sum(-2), atol=1e-5)
    True
    """
    names = _check_statistics(statistics, v)
    checks.floating(q=q, k=k, v=v)
    options: dict[str, Any] = dict(chosen_options(causal, False, window, softcap, 0.0))
    options.update(score_options(
        q, k, attn_mask, mask_hides, bias, cols, softcap=softcap, alibi_slopes=alibi_slopes, lengths=lengths,
        documents=documents,
    ))  # fmt: skip
    list_options(cols, q, options, lengths=lengths)
    scale = default_scale(q) if scale is None else scale
    layout = grouping.Groups.of(q, k, k if v is None else v) if enable_gqa else None
    if layout is not None:
        q, k, value, options = layout.split(q, k, k if v is None else v, options)
        v = None if v is None else value
    if v is not None:
        options["v"] = v
    found = iter(_statistics(q, k, scale, " ".join(names), **options))
    values = None if v is None else next(found)
    result = AttentionStatistics(values, *(next(found) if name in names else None for name in _STATISTICS))
    return result if layout is None else layout.merged(result)


def _check_statistics(statistics: Any, v: Any) -> tuple[str, ...]:
    given = (statistics,) if isinstance(statistics, str) else statistics
    if (
        not isinstance(given, Sequence)
        or any(name not in _STATISTICS for name in given)
        or not (given or v is not None)
    ):
        raise ArgumentError(
            detail=f"statistics was given {checks.describe_value(statistics)}",
            fix=f"Name one or more of {', '.join(_STATISTICS)}",
        )
    return tuple(name for name in _STATISTICS if name in given)


@mr.op
@no_type_check
def _kl(
    q: mr.Row["f"],
    k: mr.Col["f"],
    teacher_q: mr.Row["g"],
    teacher_k: mr.Col["g"],
    scale: float,
    teacher_scale: float,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    attn_mask: mr.Pair | None = None,
    mask: str = "shows",
    lower_right: bool = False,
    causal: bool = False,
    left: int | None = None,
    right: int | None = None,
    lengths: mr.Batch | None = None,
    row_documents: mr.Row | None = None,
    col_documents: mr.Col | None = None,
    row_shift: mr.Row | None = None,
):
    hides = {
        "attn_mask": attn_mask, "mask": mask, "lower_right": lower_right, "causal": causal, "left": left,
        "right": right, "lengths": lengths, "row_documents": row_documents, "col_documents": col_documents,
        "row_shift": row_shift,
    }  # fmt: skip
    s, shown, _ = scores(q, k, scale, softcap=softcap, **hides)
    t, teacher, _ = scores(teacher_q, teacher_k, teacher_scale, softcap=teacher_softcap, **hides)
    seen = mr.logsumexp(t)
    gap = mr.softmax_mean(t, teacher - shown)
    return torch.where(seen == -torch.inf, 0.0, gap + (mr.logsumexp(s) - seen))


@checks.public_layer(
    rows={"q": "vectors", "teacher_q": "vectors"},
    cols={"k": "vectors", "teacher_k": "vectors", "attn_mask": "numbers"},
)
def attention_kl(
    q: Tensor,
    k: Tensor,
    teacher_q: Tensor,
    teacher_k: Tensor,
    attn_mask: Tensor | None = None,
    *,
    scale: float | Tensor | None = None,
    teacher_scale: float | Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    direction: Literal["forward", "reverse"] = "forward",
    enable_gqa: bool = False,
    mask_hides: bool = False,
    causal: Causal = False,
    window: Window | None = None,
    documents: Documents | None = None,
    lengths: Tensor | None = None,
    cols: Domain | None = None,
) -> Tensor:
    """The Kullback-Leibler divergence KL(teacher ‖ student) of two attentions, row by row; in reverse KL(student ‖
    teacher).

    The same as ``(p * (p.log() - q.log())).sum(-1)`` of the two softmaxes, without ever allocating either M × N matrix,
    forward or backward: one pass over both. Gradients go to whichever arguments ask for one. What is hidden is hidden
    from both; a row that sees nothing gives 0.

    To distil the attention of several heads into one cheap indexer, give the indexer one head: its divergence from the
    mean of the heads' weights has, for the indexer, the gradient of the mean over the heads of this.

    Shapes: ``q`` [..., M, f], ``k`` [..., N, f], ``teacher_q`` [..., M, g], ``teacher_k`` [..., N, g] give [..., M];
    leading dimensions (batch, heads) broadcast. ``scale`` and ``teacher_scale`` are 1/√f and 1/√g if left out;
    ``attn_mask`` is boolean. With ``enable_gqa``, both sides may have fewer heads of keys than of queries. The other
    options are those of :func:`attention`, ``cols`` as in :func:`attention_statistics`.

    Raises :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for arguments that
    do not fit.

    >>> import torch
    >>> from monoidreduce.ops import attention_kl
    >>> q, k, teacher_q, teacher_k = torch.randn(5, 4), torch.randn(7, 4), torch.randn(5, 8), torch.randn(7, 8)
    >>> log_q = torch.log_softmax(q @ k.T / 2, -1)
    >>> log_p = torch.log_softmax(teacher_q @ teacher_k.T / 8**0.5, -1)
    >>> expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    >>> torch.allclose(attention_kl(q, k, teacher_q, teacher_k), expected, atol=1e-5)
    True
    """
    checks.floating(q=q, k=k, teacher_q=teacher_q, teacher_k=teacher_k)
    checks.one_of("direction", direction, ("forward", "reverse"))
    if teacher_softcap is not None:
        checks.positive("teacher_softcap", teacher_softcap)
    if attn_mask is not None and getattr(attn_mask, "dtype", None) is not torch.bool:
        raise ArgumentError(
            detail="attn_mask holds numbers to add", fix="Give truth values: a mask hides pairs from both attentions"
        )
    options: dict[str, Any] = dict(chosen_options(causal, False, window, softcap, 0.0))
    options.update(score_options(q, k, attn_mask, mask_hides, None, cols, lengths=lengths, documents=documents))
    list_options(cols, q, options, lengths=lengths)
    student = (q, k, default_scale(q) if scale is None else scale, softcap)
    teacher = (
        teacher_q,
        teacher_k,
        default_scale(teacher_q) if teacher_scale is None else teacher_scale,
        teacher_softcap,
    )
    layout = None
    if enable_gqa:
        layout, student, teacher, options = _split_heads(student, teacher, options)
    ours, theirs = (teacher, student) if direction == "reverse" else (student, teacher)
    caps = {"softcap": ours[3], "teacher_softcap": theirs[3]}
    options.update({name: cap for name, cap in caps.items() if cap is not None})
    loss = _kl(*ours[:2], *theirs[:2], ours[2], theirs[2], **options)
    return loss if layout is None else loss.flatten(-3, -2)


def _split_heads(student: tuple, teacher: tuple, options: dict[str, Any]) -> tuple[Any, tuple, tuple, dict[str, Any]]:
    """The heads of both sides as [shared, group]: a side has one head for all, or as many as the other."""
    tensors = {"q": student[0], "k": student[1], "teacher_q": teacher[0], "teacher_k": teacher[1]}
    for name, t in tensors.items():
        checks.tensor(name, t, "[..., heads, length, features]", 3)
    counts = {name: t.shape[-3] for name, t in tensors.items()}
    many, few = max(counts["q"], counts["teacher_q"]), max(counts["k"], counts["teacher_k"])
    fits = all(counts[n] in (1, many) for n in ("q", "teacher_q"))
    if not fits or not few or many % few or any(counts[n] not in (1, few) for n in ("k", "teacher_k")):
        given = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise ShapeError(
            detail=f"heads do not go into each other: {given}",
            fix="q and teacher_q have equally many heads or one, k and teacher_k too, and the former a multiple",
        )
    if many == few:
        return None, student, teacher, options
    layout = grouping.Groups(few, many // few)
    split = lambda q: q.unsqueeze(-3) if q.shape[-3] == 1 else q.unflatten(-3, (few, many // few))
    student, teacher = ((split(q), k.unsqueeze(-3), *rest) for q, k, *rest in (student, teacher))
    return layout, student, teacher, layout.split_options(options)
