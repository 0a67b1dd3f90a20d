"""Log-probabilities of given tokens, and the entropy, of a linear head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, no_type_check, overload

import torch
from torch import Tensor

from ..errors import ArgumentError, ShapeError
from ..stored_vectors import Vectors
from . import checks, heads
from . import language as mr

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LogProbs(NamedTuple):
    """What :func:`linear_logprobs` returns with any of its options; None for what was not asked.

    >>> import torch, monoidreduce as mr
    >>> found = mr.ops.linear_logprobs(torch.zeros(2, 4), torch.zeros(8, 4), torch.tensor([0, 7]), return_entropy=True)
    >>> found.log_prob, found.entropy, found.argmax
    (tensor([-2.0794, -2.0794]), tensor([2.0794, 2.0794]), None)
    """

    log_prob: Tensor
    entropy: Tensor = None  # type: ignore[assignment]  # None where it was not asked for
    argmax: Tensor = None  # type: ignore[assignment]  # None where it was not asked for
    topk_log_probs: Tensor = None  # type: ignore[assignment]  # None where it was not asked for
    topk_indices: Tensor = None  # type: ignore[assignment]  # None where it was not asked for
    ids_log_probs: Tensor = None  # type: ignore[assignment]  # None where it was not asked for
    lse: Tensor = None  # type: ignore[assignment]  # None where it was not asked for


@mr.op
@no_type_check
def _logprobs(
    x: mr.Row["d"],
    weight: mr.Col["d"],
    ignore_index: int,
    careful: bool,
    entropy: bool,
    argmax: bool,
    k: int,
    lse: bool,
    target: mr.Row | None = None,
    ids: mr.Row["k"] | None = None,
    bias: mr.Col | None = None,
    softcap: float | None = None,
    temperature: float | None = None,
    row_temperature: mr.Row | None = None,
    wide_temperature: mr.Pair | None = None,
    low_rows: mr.Row["r"] | None = None,
    low_cols: mr.Col["r"] | None = None,
):
    each = wide_temperature if row_temperature is None else row_temperature
    whole = heads.logits(x, weight, bias, softcap, temperature if each is None else each, low_rows, low_cols)
    shift = heads.shift(whole) if entropy and careful else 0.0
    s = whole - shift
    z = mr.logsumexp(s)
    found = {}
    if target is not None:
        log_prob = mr.sum(torch.where(mr.col_index == target, s, 0.0)) - z
        found["log_prob"] = heads.mask_ignored(target, ignore_index, log_prob)
    if entropy:
        found["entropy"] = heads.entropy(s, bias is not None)
    if argmax:
        found["argmax"] = mr.argmax(whole)
    if k:
        best = mr.topk(whole, k)
        found["topk_log_probs"], found["topk_indices"] = best.values - shift - z, best.indices
    if ids is not None:
        log_probs = mr.sum(torch.where(mr.col_index == ids, s, 0.0)) - z
        found["ids_log_probs"] = heads.mask_ignored(ids, ignore_index, log_probs)
    if lse:
        found["lse"] = z + shift
    return found


class _LogProbsOptions(TypedDict, total=False):
    bias: Tensor | None
    softcap: float | Tensor | None
    temperature: float | Tensor
    ignore_index: int
    mask: Tensor | None
    low_rank: tuple[Tensor, Tensor] | None


class _Asked(_LogProbsOptions, total=False):
    """With any of these a record is returned: truth values that only a run knows are taken to be True."""

    ids: Tensor | None
    return_entropy: bool
    return_argmax: bool
    return_lse: bool
    top_k: int


@overload
def linear_logprobs(
    x: Vectors,
    weight: Vectors,
    target: Tensor | None = None,
    *,
    ids: None = None,
    return_entropy: Literal[False] = False,
    return_argmax: Literal[False] = False,
    return_lse: Literal[False] = False,
    top_k: Literal[0] = 0,
    **options: Unpack[_LogProbsOptions],
) -> Tensor: ...
@overload
def linear_logprobs(
    x: Vectors, weight: Vectors, target: Tensor | None = None, **options: Unpack[_Asked]
) -> LogProbs: ...
@checks.public_layer(
    rows={"x": "first", "target": "first", "ids": "first"}, cols={"weight": "vectors", "bias": "numbers"}
)
def linear_logprobs(
    x: Vectors,
    weight: Vectors,
    target: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    softcap: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    ids: Tensor | None = None,
    mask: Tensor | None = None,
    return_entropy: bool = False,
    return_argmax: bool = False,
    return_lse: bool = False,
    top_k: int = 0,
    low_rank: tuple[Tensor, Tensor] | None = None,
) -> Any:
    """The log-probability of each row's token, as PPO, GRPO and DPO need it, and of K given tokens a row.

    The same as ``torch.log_softmax(F.linear(x, weight, bias) / temperature, -1).gather(-1, target[..., None])``,
    without ever allocating the M × V logits, their softmax or their gradient. All options are of the same pass over
    the pairs, but the entropy of inputs wider than 16 bits, which takes a second one to keep its digits. For 16-bit
    inputs log-probabilities, entropy and logsumexp are float32, the top-k's log-probabilities of the inputs' type.

    Shapes: ``x`` [..., D], ``weight`` [V, D], ``bias`` [V] and integers ``target`` [...] give [...]. A token equal to
    ``ignore_index`` has log-probability 0 and no gradient. ``softcap`` as in :func:`linear_cross_entropy`;
    ``temperature`` too, or one for each row [...], of any floating type.

    - ``ids`` [..., K]: integers, the log-probabilities of these tokens of each row are ``ids_log_probs`` [..., K] (a
      teacher's top-k, a verifier's candidates). Their K × D products a row are gathered in chunks; nothing of size
      M × K × D exists. An id equal to ``ignore_index`` has 0 and no gradient.
    - ``mask`` [...]: truth values, the rows that count. Others have 0 everywhere (-1 as an index) and no gradient,
      whatever they hold. On a CPU they cost nothing: they are left out before the fold. So are rows whose target is
      ignored, where nothing but the target's log-probability is asked.
    - ``return_entropy``, ``return_argmax`` (int64), ``return_lse`` (the logsumexp): [...] each.
    - ``top_k``: the largest log-probabilities and their classes [..., top_k], best first.
    - ``low_rank``: rows [..., r] and columns [V, r] of a term that is added to the logits, as in
      :func:`linear_cross_entropy`.

    With any of the last four, or with ``ids``, a :class:`LogProbs` is returned, with None for what was not asked
    (``log_prob`` too, without a target). All but indices are differentiable, to any order.

    Raises :class:`LabelError` for a token outside 0 … V - 1 before any work (on a GPU, where looking would cost a
    synchronisation, its log-probability is NaN), :class:`TopKError` where there are fewer than ``top_k`` classes,
    :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for arguments that do not
    fit.

    >>> import torch
    >>> from monoidreduce.ops import linear_logprobs
    >>> x, weight, target = torch.randn(6, 4), torch.randn(9, 4), torch.tensor([3, 1, 7, 8, 0, 3])
    >>> log_p = torch.log_softmax(x @ weight.T, -1)
    >>> got = linear_logprobs(x, weight, target, ids=torch.arange(12).view(6, 2) % 9, return_entropy=True, top_k=2)
    >>> torch.allclose(got.log_prob, log_p.gather(-1, target[:, None])[:, 0], atol=1e-5)
    True
    >>> torch.allclose(got.topk_log_probs, log_p.topk(2).values, atol=1e-5)
    True
    >>> torch.allclose(got.ids_log_probs, log_p.gather(-1, torch.arange(12).view(6, 2) % 9), atol=1e-5)
    True
    """
    head = _check_head(x, weight, bias, softcap, temperature)
    checks.whole("ignore_index", ignore_index)
    checks.whole("top_k", top_k, least=0)
    checks.at_most(top_k, weight.shape[0])
    wanted = {"entropy": bool(return_entropy), "argmax": bool(return_argmax), "k": int(top_k), "lse": bool(return_lse)}
    alone = ids is None and not any(wanted.values())
    if target is None and alone:
        raise ArgumentError(
            detail="neither target nor ids were given, and no option asks for anything else",
            fix="Give target [...] or ids [..., K], or ask by return_entropy, return_argmax, return_lse or top_k",
        )
    if mask is not None:
        checks.truths("mask", mask, x)
    labels = _check_tokens(x, weight, target, ids, ignore_index, mask)
    rows, (low_rows, low_cols) = checks.flatten_rows(x), heads.check_low_rank(x, weight, low_rank)
    kept = _rows_that_count(None if mask is None else mask.reshape(-1), labels[0] if alone else None)
    given = {"target": None if labels[0] is None else labels[0].classes, "ids": labels[1], **_row_numbers(head, x)}
    if low_rank is not None:
        given.update(low_rows=checks.flatten_rows(low_rows), low_cols=low_cols)
    if kept is not None:
        rows, given = rows.index_select(0, kept), {n: _select_rows(y, n, kept) for n, y in given.items()}
    elif mask is not None:  # what rows that do not count hold must not reach a gradient
        clear = lambda y, to=0.0: y.masked_fill(~mask.reshape(-1, *(1,) * (y.dim() - 1)), to)
        neutral = {"low_rows": 0.0, "row_temperature": 1.0, "wide_temperature": 1.0}
        rows, given = clear(rows), {**given, **{n: clear(given[n], to) for n, to in neutral.items() if n in given}}
    no_ids = ids is not None and ids.shape[-1] == 0
    if no_ids:
        given["ids"] = None
    found = {}
    if not no_ids or target is not None or any(wanted.values()):
        found = _logprobs(rows, weight, ignore_index, heads.needs_shift(x), **wanted, **checks.drop_unset(given))
    if no_ids:
        found["ids_log_probs"] = _nothing_of(rows)
    seen = mask if kept is None and mask is not None else None
    found = {name: _restore_rows(y, x, kept, seen) for name, y in found.items()}
    return found["log_prob"] if alone else LogProbs(**{"log_prob": None, **found})


def _check_head(x: Any, weight: Any, bias: Any, softcap: Any, temperature: Any) -> dict[str, Any]:
    """Check a head whose temperature may be one number a row; the keyword arguments of an op."""
    if not isinstance(temperature, Tensor) or temperature.dim() == 0:
        return heads.check(x, weight, bias, softcap, temperature)
    head = heads.check(x, weight, bias, softcap)
    checks.per_row("temperature", temperature, x)
    checks.floating(temperature=temperature)
    return {**head, "temperature": temperature}


def _check_tokens(x: Any, weight: Any, target: Any, ids: Any, ignore_index: Any, mask: Any) -> tuple[Any, Any]:
    """The targets (:class:`checks.Labels`) and the ids as int64 [M, K], None for what was not given.

    Rows that do not count may hold anything: theirs are ``ignore_index``.
    """
    labels = wanted = None
    if target is not None:
        checks.classes(x, weight, target)
        if mask is not None:
            target = target.long().masked_fill(~mask, ignore_index)
        labels = checks.labels(target, len(weight), ignore_index)
    if ids is not None:
        checks.tensor("ids", ids, "[..., K]", 1)
        checks.integers("ids", ids)
        if ids.shape[:-1] != x.shape[:-1]:
            raise ShapeError(
                detail=f"ids has shape {tuple(ids.shape)}, but x {tuple(x.shape)} asks for "
                f"({', '.join(map(str, x.shape[:-1]))}{', ' if x.dim() > 1 else ''}K)",
                fix="Give K tokens for each row of x",
            )
        checks.one_device({"x": x, "ids": ids})
        rows = math.prod(ids.shape[:-1])
        if mask is not None:
            ids = ids.long().masked_fill(~mask[..., None], ignore_index)
        wanted = checks.labels(ids, len(weight), ignore_index).classes.reshape(rows, ids.shape[-1])
    return labels, wanted


def _nothing_of(rows: Any) -> Tensor:
    """The log-probabilities of no ids [M, 0], of which the rows' gradient is 0."""
    if not isinstance(rows, Tensor):
        return torch.zeros(len(rows), 0, device=rows.device)
    return rows[:, :0].to(torch.float64 if rows.dtype is torch.float64 else torch.float32)


def _rows_that_count(mask: Tensor | None, labels: checks.Labels | None) -> Tensor | None:
    """The rows to compute, None for all of them: read from values where that is free."""
    if mask is not None and not checks.can_inspect(mask):
        return None
    ignored = None if labels is None else labels.kept
    if mask is None or bool(mask.all()):
        return ignored
    if ignored is None:
        return mask.nonzero().squeeze(1)
    return ignored[mask[ignored]]


def _row_numbers(head: dict[str, Any], x: Any) -> dict[str, Any]:
    """The head's options for the op: one temperature a row is a number of the row, or, beside inputs of another type,
    a matrix of one column, which keeps its own."""
    each = head["temperature"]
    if not isinstance(each, Tensor) or (each.dim() == 0 and x.dim() > 1):
        return head
    rest = {name: value for name, value in head.items() if name != "temperature"}
    if each.dtype == x.dtype:
        return {**rest, "row_temperature": each.reshape(-1)}
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    return {**rest, "wide_temperature": each.reshape(-1, 1).to(wide)}


_PER_ROW = ("target", "ids", "row_temperature", "wide_temperature", "low_rows")


def _select_rows(y: Any, name: str, kept: Tensor) -> Any:
    return y.index_select(0, kept) if name in _PER_ROW and y is not None else y


def _restore_rows(y: Tensor, x: Any, kept: Tensor | None, seen: Tensor | None) -> Tensor:
    """A result for each row of x: 0 (-1 for an index) for those that were left out, or that ``seen`` says do not
    count."""
    tail, nothing = y.shape[1:], 0 if y.is_floating_point() else -1
    if kept is not None:
        y = y.new_full((math.prod(x.shape[:-1]), *tail), nothing).index_copy(0, kept, y)
    elif seen is not None:
        y = torch.where(seen.reshape((-1, *(1,) * len(tail))), y, nothing)
    return y if x.dim() == 2 else y.reshape((*x.shape[:-1], *tail))


@mr.op
@no_type_check
def token_statistics(
    x: mr.Row["d"],
    weight: mr.Col["d"],
    target: mr.Row,
    entropy: bool,
    log_sum_sq_probs: bool,
    mean_logits: bool,
    is_top1: bool,
    bias: mr.Col | None = None,
    softcap: float | None = None,
    temperature: float | None = None,
    low_rows: mr.Row["r"] | None = None,
    low_cols: mr.Col["r"] | None = None,
):
    """What trainers ask of each token, in one pass: for integrations, whose names these are."""
    s = heads.logits(x, weight, bias, softcap, temperature, low_rows, low_cols)
    z = mr.logsumexp(s)
    found = {"log_probs": mr.sum(torch.where(mr.col_index == target, s, 0.0)) - z}
    if entropy:
        found["entropy"] = heads.entropy(s, bias is not None)
    if log_sum_sq_probs:  # of all classes, log Σ p²
        found["log_sum_sq_probs"] = mr.logsumexp(2 * s) - 2 * z
    if mean_logits:
        found["mean_logits"] = mr.sum(s) / mr.num_cols
    if is_top1:
        found["is_top1"] = mr.argmax(s) == target
    return found


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


@checks.public_layer(rows={"x": "first"}, cols={"weight": "vectors", "bias": "numbers"})
def linear_entropy(
    x: Vectors,
    weight: Vectors,
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
