"""Cross-entropy of a linear head, against class indices or given probabilities."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, no_type_check, overload

import torch
from torch import Tensor

from ..engines.common.shard import find_chunk, gather_chunks
from ..engines.ranks import agreement
from ..errors import ArgumentError, ShapeError
from ..runtime import recorder
from ..runtime.dispatch import label_share, label_share_kernel
from ..stored_vectors import Vectors
from . import checks, heads
from . import language as mr

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CrossEntropy(NamedTuple):
    """What :func:`linear_cross_entropy` returns with ``return_lse`` or ``return_accuracy``; what was not asked is None.

    ``lse``: the logsumexp of each row's logits; ``accuracy``: the share of rows whose largest logit is the target's.

    >>> import torch, monoidreduce as mr
    >>> x, w = torch.eye(3), torch.eye(3)
    >>> mr.ops.linear_cross_entropy(x, w, torch.tensor([0, 1, 0]), return_accuracy=True).accuracy
    tensor(0.6667)
    """

    loss: Tensor
    lse: Tensor = None  # type: ignore[assignment]  # None where it was not asked for
    accuracy: Tensor = None  # type: ignore[assignment]  # None where it was not asked for


@mr.op
@no_type_check
def _against_classes(
    x: mr.Row["d"],
    weight: mr.Col["d"],
    target: mr.Row,
    ignore_index: int,
    all_count: bool,
    lse: bool,
    accuracy: bool,
    near: mr.Row | None = None,
    smoothing: float | None = None,
    z_loss: float | None = None,
    class_weights: mr.Col | None = None,
    bias: mr.Col | None = None,
    softcap: float | None = None,
    temperature: float | None = None,
    share_of_row: float | None = None,
    low_rows: mr.Row["r"] | None = None,
    low_cols: mr.Col["r"] | None = None,
):
    whole = heads.logits(x, weight, bias, softcap, temperature, low_rows, low_cols)
    s = whole if near is None else whole - near
    z, hit = mr.logsumexp(s), mr.col_index == target
    loss = z - mr.sum(torch.where(hit, s, 0.0))
    if class_weights is not None:
        share = mr.sum(torch.where(hit, class_weights, 0.0))
        loss = share * loss
    if smoothing is not None:
        loss = (1 - smoothing) * loss + smoothing * _mean_surprise(s, z, class_weights)
    counting = lambda y, none=0.0: y if all_count else torch.where(target == ignore_index, none, y)
    loss = loss if all_count else heads.mask_ignored(target, ignore_index, loss)
    rows = {"loss": loss if share_of_row is None else loss * share_of_row}
    z = z if near is None else z + near
    if lse:
        rows["lse"] = z
    if z_loss is not None:
        rows["penalty"] = counting(z_loss * z * z)
    if accuracy:
        rows["right"] = counting(mr.argmax(whole) == target, False)
    if class_weights is not None:
        rows["share"] = counting(share)
    if not all_count and share_of_row is None:
        rows["counted"] = counting(1.0)
    return rows


@no_type_check
def _mean_surprise(s, z, class_weights):
    """Σ_j w_j (z - s_j) / V: what label smoothing asks of every class alike."""
    if class_weights is None:
        return z - mr.sum(s) / mr.num_cols
    return (z * mr.sum(class_weights) - mr.sum(class_weights * s)) / mr.num_cols


@mr.op
@no_type_check
def _against_probabilities(
    x: mr.Row["d"],
    weight: mr.Col["d"],
    given: mr.Pair,
    lse: bool,
    accuracy: bool,
    near: mr.Row | None = None,
    best: mr.Row | None = None,
    smoothing: float | None = None,
    z_loss: float | None = None,
    class_weights: mr.Col | None = None,
    bias: mr.Col | None = None,
    softcap: float | None = None,
    temperature: float | None = None,
    low_rows: mr.Row["r"] | None = None,
    low_cols: mr.Col["r"] | None = None,
):
    whole = heads.logits(x, weight, bias, softcap, temperature, low_rows, low_cols)
    s = whole if near is None else whole - near
    if smoothing is not None:
        given = (1 - smoothing) * given + smoothing / mr.num_cols
    if class_weights is not None:
        given = given * class_weights
    z = mr.logsumexp(s)
    rows = {"loss": z * mr.sum(given) - mr.sum(given * s)}
    z = z if near is None else z + near
    if lse:
        rows["lse"] = z
    if z_loss is not None:
        rows["penalty"] = z_loss * z * z
    if accuracy:
        rows["right"] = mr.argmax(whole) == best
    return rows


class _HeadOptions(TypedDict, total=False):
    bias: Tensor | None
    class_weights: Tensor | None
    ignore_index: int | None
    label_smoothing: float
    z_loss: float
    softcap: float | Tensor | None
    temperature: float | Tensor
    token_weights: Tensor | None
    reduction: checks.Reduction
    shift: int
    low_rank: tuple[Tensor, Tensor] | None


@overload
def linear_cross_entropy(
    x: Vectors,
    weight: Vectors,
    target: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_accuracy: Literal[False] = False,
    **options: Unpack[_HeadOptions],
) -> Tensor: ...
@overload
def linear_cross_entropy(
    x: Vectors,
    weight: Vectors,
    target: Tensor,
    *,
    return_lse: Literal[True],
    return_accuracy: bool = False,
    **options: Unpack[_HeadOptions],
) -> CrossEntropy: ...
@overload
def linear_cross_entropy(
    x: Vectors,
    weight: Vectors,
    target: Tensor,
    *,
    return_lse: bool = False,
    return_accuracy: Literal[True],
    **options: Unpack[_HeadOptions],
) -> CrossEntropy: ...
@overload
def linear_cross_entropy(
    x: Vectors,
    weight: Vectors,
    target: Tensor,
    *,
    return_lse: bool = False,
    return_accuracy: bool = False,
    **options: Unpack[_HeadOptions],
) -> Tensor | CrossEntropy: ...
@checks.public_layer(
    rows={"x": "first", "target": "first", "token_weights": "first"},
    cols={"weight": "vectors", "bias": "numbers", "class_weights": "numbers"},
    dense_only={"shift": "Give the target of each row: t[shift:] of each sequence t, then ignore_index"},
)
def linear_cross_entropy(
    x: Vectors,
    weight: Vectors,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weights: Tensor | None = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    token_weights: Tensor | None = None,
    reduction: checks.Reduction = "mean",
    return_lse: bool = False,
    return_accuracy: bool = False,
    shift: int = 0,
    low_rank: tuple[Tensor, Tensor] | None = None,
) -> Any:
    """Cross-entropy of the logits ``x @ weight.T + bias`` against class indices or given probabilities.

    The same as ``F.cross_entropy(F.linear(x, weight, bias).flatten(0, -2), target.flatten(), weight=class_weights,
    ...)``, without ever allocating the M × V logits, their softmax or their gradient, whatever the options. For 16-bit
    inputs the loss is float32.

    Shapes: ``x`` [..., D], ``weight`` [V, D], ``bias`` and ``class_weights`` [V], ``target`` integers [...] or floating
    probabilities [..., V] (rows need not add up to 1) give one number, or [...] with ``reduction="none"``.

    - ``ignore_index`` (-100 if left out): rows with this label have loss 0 and no gradient, and do not count in the
      mean, which is NaN where none is left. On a CPU they cost nothing: they are left out before the fold.
    - ``class_weights``, ``label_smoothing``, ``reduction``: torch's definitions. The mean over class indices is
      divided by the weights of the labels, that over probabilities by the number of rows.
    - ``softcap``: a logit s becomes ``softcap * tanh(s / softcap)``; then ``temperature`` divides it. Numbers or 0-dim
      tensors, which get gradients.
    - ``z_loss``: adds ``z_loss * lse²`` to each row's loss; its mean is over the rows that count, each once.
    - ``token_weights`` [...]: multiply the rows' losses; the mean is divided by their sum too.
    - ``shift``: row t is to predict token t + shift, as ``x[..., :-shift, :]`` against ``target[..., shift:]``
      (``token_weights`` go with the target).
    - ``low_rank``: rows [..., r] and columns [V, r], whose product is added to the logits before bias and softcap, as
      LoRA on a head does (``(scale * dropout(x) @ A.T, B)``). Neither ``weight + B @ A`` nor a gradient of ``weight``
      that nobody asked for is computed.
    - ``return_lse``, ``return_accuracy``: return a :class:`CrossEntropy` with the rows' logsumexp [...], and the share
      of rows, of those not ignored, whose largest logit is the target's (with ``reduction="sum"`` their number, with
      ``"none"`` 0 or 1 for each).

    Coming from elsewhere, the first three arguments stay as they are:
    ``F.linear_cross_entropy(input, linear_weight, target, linear_bias=b, weight=c)`` has ``bias=b, class_weights=c`` (a
    ``linear_weight`` of more than two dimensions is not taken). ``LigerFusedLinearCrossEntropyLoss(ce_weight=c,
    lse_square_scale=z, return_token_accuracy=a)(weight, x, target, bias)`` has x first, and ``class_weights=c,
    z_loss=z, return_accuracy=a``. Cut Cross-Entropy's ``linear_cross_entropy(e, c, targets, bias, ignore_index,
    softcap, reduction, shift)`` has the same names, given by keyword, and no filter: gradients are exact.

    Raises :class:`LabelError` for a label outside 0 … V - 1, before any work. On a GPU looking would cost a
    synchronisation: there such a row's loss is NaN, never finite. :class:`ShapeError`, :class:`DTypeError`,
    :class:`DeviceError` or :class:`ArgumentError` for arguments that do not fit.

    >>> import torch, torch.nn.functional as F
    >>> from monoidreduce.ops import linear_cross_entropy
    >>> x, weight, target = torch.randn(6, 4), torch.randn(9, 4), torch.tensor([3, 1, -100, 8, 0, 3])
    >>> loss = linear_cross_entropy(x, weight, target, label_smoothing=0.1)
    >>> torch.allclose(loss, F.cross_entropy(x @ weight.T, target, label_smoothing=0.1))
    True
    >>> linear_cross_entropy(x, weight, target, return_lse=True).lse.shape
    torch.Size([6])
    """
    head = (x, weight, bias, softcap, temperature)
    given = _check(*head, target, class_weights, ignore_index, label_smoothing, z_loss, token_weights, reduction, shift)
    low_rows, low_cols = heads.check_low_rank(x, weight, low_rank)
    if shift:
        x, target, token_weights = _next_tokens(x, target, token_weights, int(shift), given)
        low_rows = None if low_rows is None else low_rows[..., : x.shape[-2], :]
    options = {
        "smoothing": label_smoothing or None,
        "z_loss": z_loss or None,
        "class_weights": class_weights,
        "low_rows": None if low_rows is None else checks.flatten_rows(low_rows),
        "low_cols": low_cols,
        **heads.options(bias, softcap, temperature),
    }
    options = {**checks.drop_unset(options), "lse": bool(return_lse), "accuracy": bool(return_accuracy)}
    rows, kept, alone = checks.flatten_rows(x), None, False
    if given:
        found = _fold_against_probabilities(rows, weight, checks.flatten_rows(target), options)
    else:
        ignored = -100 if ignore_index is None else ignore_index
        labels = checks.labels(target, len(weight), ignored, first=int(shift))
        alone = reduction != "none" and token_weights is None and not return_lse and not return_accuracy
        alone = alone and not z_loss and checks.is_undivided()
        found, kept = _fold_against_labels(rows, weight, labels, ignored, options, reduction if alone else "none")
    weights = None if token_weights is None else _select_rows(token_weights.reshape(-1), kept)
    loss = _loss_from_sums(found, reduction) if alone else _reduce_loss_and_penalty(found, weights, reduction)
    accuracy = _accuracy(found, reduction) if return_accuracy else None
    if reduction == "none":
        loss, accuracy = _restore_rows(loss, x, kept), None if accuracy is None else _restore_rows(accuracy, x, kept)
    if not return_lse and not return_accuracy:
        return loss
    lse = _restore_rows(found["lse"], x) if return_lse else None
    return CrossEntropy(loss, lse, accuracy)  # type: ignore[arg-type]


cross_entropy = linear_cross_entropy
"""The older name of :func:`linear_cross_entropy`.

>>> from monoidreduce import ops
>>> ops.cross_entropy is ops.linear_cross_entropy
True
"""


@checks.cache_check
def _check(
    x: Any,
    weight: Any,
    bias: Any,
    softcap: Any,
    temperature: Any,
    target: Any,
    class_weights: Any,
    ignore_index: Any,
    label_smoothing: Any,
    z_loss: Any,
    token_weights: Any,
    reduction: Any,
    shift: Any,
) -> bool:
    """Check all but the labels; whether the target is given as probabilities."""
    checks.reduction(reduction)
    heads.check(x, weight, bias, softcap, temperature)
    given = checks.is_distribution(x, weight, target)
    checks.between("label_smoothing", label_smoothing, 0, 1)
    checks.between("z_loss", z_loss, 0, math.inf)
    checks.whole("shift", shift, least=0)
    if shift:
        checks.tensor("x", x, "[..., T, D] (it is to be shifted)", 2)
    if class_weights is not None:
        checks.per_class("class_weights", class_weights, weight)
    if token_weights is not None:
        checks.per_row("token_weights", token_weights, x)
    if ignore_index is not None:
        checks.whole("ignore_index", ignore_index)
    if given:
        checks.probabilities("target", x, weight, target)
        if ignore_index is not None:
            raise ArgumentError(
                detail=f"ignore_index was given {ignore_index!r} with a target of probabilities",
                fix="Only class indices can be ignored; give such rows a token weight of 0",
            )
    else:
        checks.classes(x, weight, target)
    return given


def _next_tokens(x: Any, target: Tensor, weights: Tensor | None, shift: int, given: bool) -> tuple[Any, Any, Any]:
    """Each row with the target ``shift`` places later."""
    later = target[..., shift:, :] if given else target[..., shift:]
    return x[..., : max(x.shape[-2] - shift, 0), :], later, None if weights is None else weights[..., shift:]


def _fold_against_labels(
    rows: Tensor, weight: Any, labels: checks.Labels, ignore_index: int, options: dict[str, Any], reduction: str
) -> tuple[dict[str, Tensor], Tensor | None]:
    """The numbers of each row, or (unless ``reduction`` is "none") their sums, and which rows they are of.

    Where looking is free, ignored rows are left out. Sums take their gradient in the forward; of a mean each row takes
    its share there, so that a gradient is not read and written again to be divided."""
    kept = None if options["lse"] else labels.kept
    rows, index = _select_rows(rows, kept), _select_rows(labels.classes, kept)
    if "low_rows" in options:
        options["low_rows"] = _select_rows(options["low_rows"], kept)
    if "smoothing" in options and heads.needs_shift(rows) and len(weight) and not agreement.divides_cols():
        options["near"] = _likeliest_logit(rows, weight, index.clamp(0, len(weight) - 1), options)
    all_count = labels.seen and labels.kept is kept
    if reduction == "none":
        return _against_classes(rows, weight, index, ignore_index, all_count, **options), kept
    share: Any = None
    if reduction == "mean" and "class_weights" not in options and rows.shape[0]:
        wide = torch.float64 if rows.dtype is torch.float64 else torch.float32
        share = 1 / len(rows) if all_count else _share(index, ignore_index, wide)
        options["share_of_row"] = share
    sums = _against_classes.total(rows, weight, index, ignore_index, all_count, **options)
    if share is not None:
        return {"mean": sums["loss"]}, kept
    if all_count and "share" not in sums:
        sums["counted"] = sums["loss"].new_full((), len(rows))
    return sums, kept


_share = recorder.step(label_share, label_share_kernel)


def _select_rows(y: Tensor, kept: Tensor | None) -> Tensor:
    return y if kept is None else y.index_select(0, kept)


def _restore_rows(y: Tensor, x: Any, kept: Tensor | None = None) -> Tensor:
    """A number for each row of x, 0 for those that were left out."""
    if kept is not None:
        y = y.new_zeros(math.prod(x.shape[:-1])).index_copy(0, kept, y)
    return y if x.dim() == 2 else y.reshape(x.shape[:-1])


def _fold_against_probabilities(rows: Tensor, weight: Any, given: Tensor, options: dict[str, Any]) -> dict[str, Tensor]:
    """The numbers of each row against given probabilities."""
    near = best = None
    if agreement.divides_cols():  # other ranks have other classes, and perhaps the likeliest
        best = _likeliest(given) if options["accuracy"] else None
    elif not given.shape[-1]:  # no class is any row's likeliest
        best = given.new_full(given.shape[:-1], -2, dtype=torch.int64)
    elif options["accuracy"] or heads.needs_shift(rows):
        best = given.argmax(-1)
        near = _likeliest_logit(rows, weight, best, options) if heads.needs_shift(rows) else None
    return _against_probabilities(rows, weight, given, near=near, best=best, **options)


def _likeliest(given: Tensor) -> Tensor:
    """Each row's likeliest class, where classes are divided over ranks: in a ring every rank has all of its rows'."""
    return given.argmax(-1) if agreement.pairs_have_all_columns() else _argmax(given)


@mr.op
@no_type_check
def _argmax(given: mr.Pair):
    return mr.argmax(given)


@torch.no_grad()
def _likeliest_logit(rows: Tensor, weight: Tensor, best: Tensor, options: dict[str, Any]) -> Tensor:
    """The logit of each row's likeliest class, a constant: measured from there, no loss is a gap of large numbers."""
    s = (rows * weight[best]).sum(-1)
    if "low_rows" in options:
        s = s + (options["low_rows"] * options["low_cols"][best]).sum(-1)
    if "bias" in options:
        s = s + options["bias"][best]
    s = heads.apply_softcap(s, options.get("softcap"), options.get("temperature"))
    return torch.where(s.isfinite(), s, 0.0)


def _reduce_loss_and_penalty(found: dict[str, Tensor], weights: Tensor | None, reduction: str) -> Tensor:
    """The loss, and the penalty where there is one: each with what its mean is divided by (None: every row once)."""
    counted = found.get("counted")
    if weights is not None and counted is not None:
        weights = checks.drop_weights(weights, counted > 0)
    loss = checks.reduce_numbers(found["loss"], found.get("share", counted), weights, reduction)
    if "penalty" not in found:
        return loss
    return loss + checks.reduce_numbers(found["penalty"], counted, weights, reduction)


def _loss_from_sums(sums: dict[str, Tensor], reduction: str) -> Tensor:
    """The loss from the sums over rows of it and of what its mean is divided by, unless that is done."""
    if "mean" in sums or reduction == "sum":
        return sums["mean" if "mean" in sums else "loss"]
    return sums["loss"] / sums["share" if "share" in sums else "counted"]


def _accuracy(found: dict[str, Tensor], reduction: str) -> Tensor:
    return checks.reduce_numbers(found["right"].to(found["loss"].dtype), found.get("counted"), None, reduction)


@checks.public_layer(rows={"x": "first"}, cols={"weight": "vectors", "probs": "numbers", "bias": "numbers"})
def cross_entropy_given(
    x: Tensor,
    weight: Tensor,
    probs: Tensor,
    *,
    bias: Tensor | None = None,
    reduction: checks.Reduction = "mean",
) -> Tensor:
    """:func:`linear_cross_entropy` against a distribution that the caller holds as a matrix, ``probs`` [..., V].

    The same as ``F.cross_entropy(F.linear(x, weight, bias), probs, ...)``, without ever allocating the M × V logits,
    their softmax or their gradient. The rows of ``probs`` need not add up to 1; if it requires a gradient, that is as
    large as itself.

    Raises what :func:`linear_cross_entropy` does.

    >>> import torch, torch.nn.functional as F
    >>> from monoidreduce.ops import cross_entropy_given
    >>> x, weight, probs = torch.randn(6, 4), torch.randn(9, 4), torch.rand(6, 9)
    >>> torch.allclose(cross_entropy_given(x, weight, probs), F.cross_entropy(x @ weight.T, probs), rtol=1e-4)
    True
    """
    checks.head(x, weight, bias)
    checks.probabilities("probs", x, weight, probs)
    return linear_cross_entropy(x, weight, probs, bias=bias, reduction=reduction)


# Vocabulary-parallel cross-entropy of tokens, from this rank's logits or from its shard of a head's weights.
#
# What ``integrations/megatron.py`` offers under Megatron's names: Megatron's label smoothing, padded vocabularies, and
# sequence parallelism, in which hidden states travel round a ring.

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
    return gather_chunks(loss, 0, len(target), group) if sequence_parallel and group.size() > 1 else loss


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
