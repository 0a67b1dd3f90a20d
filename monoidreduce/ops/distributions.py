"""Two linear heads over the same classes, student and teacher: cross-entropy, KL and Jensen-Shannon divergence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, no_type_check

import torch
from torch import Tensor

from ..errors import ShapeError
from . import checks, heads
from . import language as mr

Direction = Literal["forward", "reverse"]
_DIRECTIONS = ("forward", "reverse")


@mr.op
@no_type_check
def _two_heads(
    p: mr.Row["d"],
    c: mr.Col["d"],
    q: mr.Row["e"],
    t: mr.Col["e"],
    kind: str,
    careful: bool,
    beta: float | None = None,
    bias: mr.Col | None = None,
    softcap: float | None = None,
    teacher_bias: mr.Col | None = None,
    teacher_softcap: float | None = None,
    temperature: float | None = None,
    share_of_row: float | None = None,
):
    student = heads.logits(p, c, bias, softcap, temperature)
    teacher = heads.logits(q, t, teacher_bias, teacher_softcap, temperature)
    loss = _compare_heads(student, teacher, kind, careful, beta, teacher_bias is not None)
    return loss if share_of_row is None else loss * share_of_row


@no_type_check
def _compare_heads(student, teacher, kind, careful, beta, masked):
    if kind == "jsd":
        return _jsd(student, teacher, beta, masked)
    student = heads.subtract_shift(student, careful)
    if kind == "cross_entropy":
        return mr.logsumexp(student) - mr.softmax_mean(teacher, student)
    return _kl(student, heads.subtract_shift(teacher, careful), masked)


@no_type_check
def _kl(student, teacher, masked):
    """Σ_j p_j (log p_j - log q_j), the teacher's p and the student's q; ``masked``: where p may be 0, 0 log 0 = 0."""
    seen, gap = mr.logsumexp(teacher), teacher - student
    gap = torch.where(teacher == -math.inf, 0.0, gap) if masked else gap
    return torch.where(seen == -math.inf, 0.0, mr.softmax_mean(teacher, gap) + (mr.logsumexp(student) - seen))


@no_type_check
def _jsd(student, teacher, beta, masked):
    """β KL(teacher ‖ m) + (1 - β) KL(student ‖ m) with m = β teacher + (1 - β) student.

    log(p / m) = -log(β + (1 - β) q / p) is taken from the gap log q - log p, exact where the two are close. Beyond
    80 nats a gap is cut off: the rarer side's probability, and all it adds, is below 1e-34.
    """
    gap = _log_softmax(student) - _log_softmax(teacher)
    gap = torch.clamp(torch.where(teacher == -math.inf, 80.0, gap) if masked else gap, -80.0, 80.0)
    of_teacher = mr.softmax_mean(teacher, -torch.log1p((1 - beta) * torch.expm1(gap)))
    of_student = mr.softmax_mean(student, -torch.log1p(beta * torch.expm1(-gap)))
    return beta * of_teacher + (1 - beta) * of_student


@no_type_check
def _log_softmax(s):
    return s - heads.replace_minus_inf(mr.logsumexp(s))


def _divergence(
    kind: str,
    student: tuple[Any, Any, Any, Any],
    teacher: tuple[Any, Any, Any, Any],
    temperature: Any,
    token_weights: Any,
    reduction: checks.Reduction,
    *,
    reverse: bool = False,
    beta: float | None = None,
) -> Tensor:
    """Check two heads (x, weight, bias, softcap), fold one against the other, reduce over the rows.

    In reverse the two change places: the student's distribution is the one that weighs the classes.
    """
    checks.reduction(reduction)
    x, y = student[0], teacher[0]
    own, other = heads.check(*student, temperature), heads.check(*teacher, temperature, prefix="teacher_")
    checks.alike(x=x, teacher_x=y)
    if x.shape[:-1] != y.shape[:-1] or len(student[1]) != len(teacher[1]):
        raise ShapeError(
            detail=f"the student has x {tuple(x.shape)} and weight {tuple(student[1].shape)}, "
            f"the teacher x {tuple(y.shape)} and weight {tuple(teacher[1].shape)}",
            fix="Both need the same rows and the same classes; only their features may differ",
        )
    if token_weights is not None:
        checks.per_row("token_weights", token_weights, x)
    ours = (checks.flatten_rows(x), student[1], own["bias"], own["softcap"])
    theirs = (checks.flatten_rows(y), teacher[1], other["bias"], other["softcap"])
    first, second = (theirs, ours) if reverse else (ours, theirs)
    given = (*first[:2], *second[:2], kind, heads.needs_shift(x), beta, *first[2:], *second[2:], own["temperature"])
    return _fold_and_reduce(given, reduction, token_weights, lambda loss: checks.unflatten_rows(loss, x, ours[0]))


def _fold_and_reduce(
    given: tuple[Any, ...],
    reduction: checks.Reduction,
    token_weights: Tensor | None = None,
    shaped: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> Tensor:
    """Fold two heads and reduce over the rows; of a plain sum the gradient is taken in the forward, and of a mean each
    row takes its share there, so that a gradient is not read and written again to be divided."""
    rows = given[0]
    plain = reduction != "none" and token_weights is None and isinstance(rows, Tensor) and rows.dim() == 2
    if plain and checks.is_undivided():
        if reduction == "mean" and len(rows):
            return _two_heads.total(*given, share_of_row=1 / len(rows))
        loss = _two_heads.total(*given)
        return loss / len(rows) if reduction == "mean" else loss
    return checks.reduce_loss(shaped(_two_heads(*given)), reduction, token_weights)


@checks.public_layer(
    rows={"x": "first", "teacher_x": "first", "token_weights": "first"},
    cols={"weight": "vectors", "teacher_weight": "vectors", "bias": "numbers", "teacher_bias": "numbers"},
)
def linear_cross_entropy_soft(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    softcap: float | Tensor | None = None,
    teacher_softcap: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    direction: Direction = "forward",
    token_weights: Tensor | None = None,
    reduction: checks.Reduction = "mean",
) -> Tensor:
    """Cross-entropy of a head against the distribution of another, its teacher, as in distillation.

    The same as ``F.cross_entropy(F.linear(x, weight, bias) / temperature, torch.softmax(F.linear(teacher_x,
    teacher_weight, teacher_bias) / temperature, -1), ...)``, without ever allocating either M × V matrix of logits, a
    softmax or a gradient of one. With ``direction="reverse"`` the student's distribution is taken against the teacher's
    logits. Gradients go to whichever arguments ask for one, student's, teacher's or both; what asks for none costs
    nothing. For 16-bit inputs the loss is float32; for wider ones a first pass over the logits that are scored keeps
    the digits of a small loss.

    Shapes: ``x`` [..., D], ``weight`` [V, D], ``teacher_x`` [..., E], ``teacher_weight`` [V, E], ``bias`` and
    ``teacher_bias`` [V] give one number, or [...] with ``reduction="none"``; the mean is over rows. ``token_weights``
    [...] multiply the rows' losses, and the mean is divided by their sum. ``softcap``, ``teacher_softcap`` and
    ``temperature`` as in :func:`linear_cross_entropy`; nothing is multiplied by ``temperature²``.

    Raises :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for arguments that
    do not fit.

    >>> import torch, torch.nn.functional as F
    >>> from monoidreduce.ops import linear_cross_entropy_soft
    >>> x, weight, teacher_x, teacher = torch.randn(6, 4), torch.randn(9, 4), torch.randn(6, 3), torch.randn(9, 3)
    >>> expected = F.cross_entropy(x @ weight.T / 2, torch.softmax(teacher_x @ teacher.T / 2, -1))
    >>> torch.allclose(linear_cross_entropy_soft(x, weight, teacher_x, teacher, temperature=2), expected, rtol=1e-4)
    True
    """
    checks.one_of("direction", direction, _DIRECTIONS)
    student, teacher = (x, weight, bias, softcap), (teacher_x, teacher_weight, teacher_bias, teacher_softcap)
    reverse = direction == "reverse"
    return _divergence("cross_entropy", student, teacher, temperature, token_weights, reduction, reverse=reverse)


@checks.public_layer(
    rows={"x": "first", "teacher_x": "first", "token_weights": "first"},
    cols={"weight": "vectors", "teacher_weight": "vectors", "bias": "numbers", "teacher_bias": "numbers"},
)
def linear_kl(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    softcap: float | Tensor | None = None,
    teacher_softcap: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    direction: Direction = "forward",
    token_weights: Tensor | None = None,
    reduction: checks.Reduction = "mean",
) -> Tensor:
    """The Kullback-Leibler divergence KL(teacher ‖ student) of two heads, or in reverse KL(student ‖ teacher).

    The same as ``F.kl_div(log_softmax(F.linear(x, weight, bias)), log_softmax(F.linear(teacher_x, teacher_weight,
    teacher_bias)), reduction="batchmean", log_target=True)`` on rows, without ever allocating either M × V matrix of
    logits, a softmax or a gradient of one. A class that the weighing head gives no probability (a bias of minus
    infinity) adds 0. Everything else is as in :func:`linear_cross_entropy_soft`; for inputs wider than 16 bits a first
    pass over both heads keeps the digits of a small divergence.

    Raises :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for arguments that
    do not fit.

    >>> import torch, torch.nn.functional as F
    >>> from monoidreduce.ops import linear_kl
    >>> x, weight, teacher_x, teacher = torch.randn(6, 4), torch.randn(9, 4), torch.randn(6, 3), torch.randn(9, 3)
    >>> log_q, log_p = torch.log_softmax(x @ weight.T, -1), torch.log_softmax(teacher_x @ teacher.T, -1)
    >>> expected = F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    >>> torch.allclose(linear_kl(x, weight, teacher_x, teacher), expected, rtol=1e-4)
    True
    """
    checks.one_of("direction", direction, _DIRECTIONS)
    student, teacher = (x, weight, bias, softcap), (teacher_x, teacher_weight, teacher_bias, teacher_softcap)
    reverse = direction == "reverse"
    return _divergence("kl", student, teacher, temperature, token_weights, reduction, reverse=reverse)


@checks.public_layer(
    rows={"x": "first", "teacher_x": "first", "token_weights": "first"},
    cols={"weight": "vectors", "teacher_weight": "vectors", "bias": "numbers", "teacher_bias": "numbers"},
)
def linear_jsd(
    x: Tensor,
    weight: Tensor,
    teacher_x: Tensor,
    teacher_weight: Tensor,
    *,
    beta: float = 0.5,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    softcap: float | Tensor | None = None,
    teacher_softcap: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    token_weights: Tensor | None = None,
    reduction: checks.Reduction = "mean",
) -> Tensor:
    """The generalised Jensen-Shannon divergence of two heads, of student q and teacher p.

    The same as ``beta * KL(p ‖ m) + (1 - beta) * KL(q ‖ m)`` with the mixture ``m = beta * p + (1 - beta) * q``,
    without ever allocating an M × V matrix of logits, of either softmax, of the mixture or a gradient of one. With
    ``beta`` 0 it is KL(p ‖ q), with 1 KL(q ‖ p), as in generalised knowledge distillation. Everything else is as in
    :func:`linear_cross_entropy_soft`; the two logsumexps are a first pass.

    Raises :class:`ArgumentError` for a ``beta`` outside 0 … 1, :class:`ShapeError`, :class:`DTypeError`,
    :class:`DeviceError` or :class:`ArgumentError` for arguments that do not fit.

    >>> import torch, torch.nn.functional as F
    >>> from monoidreduce.ops import linear_jsd
    >>> x, weight, teacher_x, teacher = torch.randn(6, 4), torch.randn(9, 4), torch.randn(6, 3), torch.randn(9, 3)
    >>> q, p = torch.softmax(x @ weight.T, -1), torch.softmax(teacher_x @ teacher.T, -1)
    >>> m = (p + q) / 2
    >>> expected = ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)) / 2
    >>> torch.allclose(linear_jsd(x, weight, teacher_x, teacher, reduction="none"), expected, rtol=1e-3, atol=1e-6)
    True
    """
    checks.between("beta", beta, 0, 1)
    student, teacher = (x, weight, bias, softcap), (teacher_x, teacher_weight, teacher_bias, teacher_softcap)
    kind = "jsd" if 0 < beta < 1 else "kl"
    return _divergence(
        kind,
        student,
        teacher,
        temperature,
        token_weights,
        reduction,
        reverse=beta == 1,
        beta=float(beta) if kind == "jsd" else None,
    )


@checks.public_layer(rows={"p": "vectors", "q": "vectors"}, cols={"c": "vectors", "t": "vectors"})
def cross_entropy_distributions(
    p: Tensor, c: Tensor, q: Tensor, t: Tensor, *, reduction: checks.Reduction = "mean"
) -> Tensor:
    """Cross-entropy of the logits ``p @ c.mT`` against the distribution ``softmax(q @ t.mT)``, in batches.

    The same as ``F.cross_entropy(p @ c.T, torch.softmax(q @ t.T, -1), ...)``, without ever allocating either M × N
    matrix of logits, a softmax or a gradient of one: :func:`linear_cross_entropy_soft` without its options, and with
    leading dimensions that broadcast, each with classes of its own.

    Shapes: ``p`` [..., M, d], ``c`` [..., N, d], ``q`` [..., M, e], ``t`` [..., N, e] give one number, or [..., M] with
    ``reduction="none"``; the mean is over all rows.

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
    return _fold_and_reduce((p, c, q, t, "cross_entropy", heads.needs_shift(p)), reduction)
