"""Attention, with everything that is done to its scores; its form for decoding, and attention to keys and
values that lie in pages: decoding again, and prompts that come in chunks.
"""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, no_type_check, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ..domains import Domain, Jagged, Pages
from ..errors import ArgumentError, DTypeError, ShapeError
from ..stored_vectors import Scaled, Vectors
from . import checks, grouping
from . import language as mr

if TYPE_CHECKING:
    from typing_extensions import Unpack

Causal = bool | Literal["upper_left", "lower_right"]
Window = int | tuple[int | None, int | None]
Documents = Tensor | tuple[Tensor, Tensor]


class AttentionOutput(NamedTuple):
    """What :func:`attention` returns with ``return_lse``: the values, and the logsumexp of each row's scores.

    >>> import torch, monoidreduce as mr
    >>> y, lse = mr.ops.attention(torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(3, 5), return_lse=True)
    >>> y.shape, lse.exp()
    (torch.Size([2, 5]), tensor([3., 3.]))
    """

    values: Tensor
    lse: Tensor


@no_type_check
def scores(
    q,
    k,
    scale,
    *,
    softcap=None,
    bias=None,
    attn_mask=None,
    mask="adds",
    alibi_slopes=None,
    lower_right=False,
    causal=False,
    left=None,
    right=None,
    lengths=None,
    row_documents=None,
    col_documents=None,
    row_blocks=None,
    col_blocks=None,
    row_shift=None,
):
    """In a body: a pair's score, minus infinity where it is hidden; what it is before anything is hidden by index,
    length, document or a boolean mask; and how far the row's position lies after the column's."""
    s = q @ k * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    if attn_mask is not None and mask == "adds":
        s = s + attn_mask
    i, j = mr.row_index, mr.col_index
    if lower_right:  # the last row stands beside the last column
        i = i + ((mr.num_cols if lengths is None else lengths) - mr.num_rows if row_shift is None else row_shift)
    if alibi_slopes is not None:
        s = s - alibi_slopes * (i - j).abs()
    shown = s
    if causal and row_blocks is None:
        s = torch.where(j <= i, s, -torch.inf)
    if causal and row_blocks is not None:
        s = torch.where((j <= i) | (row_blocks == col_blocks), s, -torch.inf)
    if left is not None:
        s = torch.where(j >= i - left, s, -torch.inf)
    if right is not None:
        s = torch.where(j <= i + right, s, -torch.inf)
    if lengths is not None:
        s = torch.where(j < lengths, s, -torch.inf)
    if row_documents is not None:
        s = torch.where(row_documents == col_documents, s, -torch.inf)
    if attn_mask is not None and mask != "adds":
        s = torch.where(attn_mask if mask == "shows" else ~attn_mask, s, -torch.inf)
    return s, shown, i - j


@mr.op
@no_type_check
def _attention(
    q: mr.Row["f"],
    k: mr.Col["f"],
    v: mr.Col["d"],
    scale: float,
    return_lse: bool,
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
    row_blocks: mr.Row | None = None,
    col_blocks: mr.Col | None = None,
    dropout_p: float | None = None,
    seed: int | None = None,
    sinks: mr.Batch | None = None,
    row_shift: mr.Row | None = None,
):
    s, *_ = scores(
        q,
        k,
        scale,
        softcap=softcap,
        bias=bias,
        attn_mask=attn_mask,
        mask=mask,
        alibi_slopes=alibi_slopes,
        lower_right=lower_right,
        causal=causal,
        left=left,
        right=right,
        lengths=lengths,
        row_documents=row_documents,
        col_documents=col_documents,
        row_blocks=row_blocks,
        col_blocks=col_blocks,
        row_shift=row_shift,
    )
    y = mr.softmax_mean(s, v if dropout_p is None else mr.dropout(v, dropout_p, seed))
    if sinks is None:
        return AttentionOutput(y, mr.logsumexp(s)) if return_lse else y
    z = mr.logsumexp(s)
    share = torch.exp(-F.softplus(sinks - z, threshold=50))  # 1 / (1 + exp(sinks - z)); its slope keeps its digits
    y = y * torch.where(z == -torch.inf, 0.0, share)
    return AttentionOutput(y, torch.logaddexp(z, sinks)) if return_lse else y


class _AttentionOptions(TypedDict, total=False):
    scale: float | Tensor | None
    enable_gqa: bool
    mask_hides: bool
    causal: Causal
    window: Window | None
    softcap: float | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    documents: Documents | None
    lengths: Tensor | None
    sinks: Tensor | None
    seed: int | None
    cols: Domain | None


class _DecodeOptions(TypedDict, total=False):
    scale: float | Tensor | None
    window: Window | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


@overload
def attention(
    q: Vectors,
    k: Vectors,
    v: Vectors,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_AttentionOptions],
) -> Tensor: ...
@overload
def attention(
    q: Vectors,
    k: Vectors,
    v: Vectors,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    return_lse: Literal[True],
    **options: Unpack[_AttentionOptions],
) -> AttentionOutput: ...
@overload
def attention(
    q: Vectors,
    k: Vectors,
    v: Vectors,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    return_lse: bool,
    **options: Unpack[_AttentionOptions],
) -> Tensor | AttentionOutput: ...
@checks.public_layer(
    rows={"q": "vectors"}, cols={"k": "vectors", "v": "vectors", "attn_mask": "numbers", "bias": "numbers"}
)
def attention(
    q: Vectors,
    k: Vectors,
    v: Vectors,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
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
    sinks: Tensor | None = None,
    seed: int | None = None,
    return_lse: bool = False,
    cols: Domain | None = None,
) -> Any:
    """Softmax attention: each row's mean of the values, weighted by the softmax of its scaled products with the keys.

    The same as ``torch.softmax(q @ k.mT * scale, -1) @ v``, and by position ``F.scaled_dot_product_attention``, without
    ever allocating the M × N matrix of scores, forward or backward. What indices, lengths or document numbers hide is
    not computed either: whole tiles of it are skipped.

    Shapes: ``q`` [..., M, f], ``k`` [..., N, f], ``v`` [..., N, d] give [..., M, d]; leading dimensions (batch, heads)
    broadcast. A row that sees nothing gives 0, with zero gradients. Each option is left out of the computation unless
    it is used; what is added to the scores is added in this order:

    - ``scale``: a number or a 0-dim tensor, 1/√f if left out.
    - ``softcap`` c: the scaled scores become c tanh(s / c).
    - ``bias`` and a floating ``attn_mask`` [..., M, N] are added. They are read where they lie and may have axes of
      size 1; their gradients are as large as themselves. They may be float32 beside 16-bit inputs.
    - ``alibi_slopes``, a number per head [..., H]: minus slope × |i - j|.
    - ``causal`` (or ``is_causal``): row i sees columns j ≤ i. For M ≠ N that is torch's ``"upper_left"``;
      ``"lower_right"`` puts the last row beside the last column (beside the last of ``lengths``), for causal, window
      and slopes alike.
    - ``window`` w: row i sees |i - j| ≤ w; a pair (left, right) sees from i - left to i + right, None being no limit.
    - ``lengths``: how many columns each sequence has, integers [B] or [B, H]: padding is not seen.
    - ``documents``: which document each token belongs to, integers [L] or [B, L], or a pair of them for rows and
      columns: tokens see their own document only (:func:`document_ids` makes them from packed lengths).
    - a boolean ``attn_mask`` [..., M, N]: True is seen (with ``mask_hides`` hidden, as nn.MultiheadAttention has it).
    - ``dropout_p``: weights are dropped with this probability, the others scaled by 1/(1 - p). The mask depends on
      ``seed`` alone (drawn from torch's generator if left out, so ``torch.manual_seed`` repeats it).
    - ``sinks``, a logit per head [..., H]: takes part in the softmax's total, with no value of its own.

    ``cols``: which pairs exist, as lists. ``mr.blocks``: block-sparse attention, with lists per head
    [..., H, row blocks, most] (or per head of the keys), or for all. ``mr.jagged``: packed sequences, in which causal,
    windows and slopes count from each sequence's start (with ``"lower_right"`` back from its end). ``mr.pages``: keys
    and values in pages, for which :func:`attention_paged` is the shorter call. ``mr.edges``: a graph, where ``bias``
    and ``attn_mask`` are a number an edge.

    ``enable_gqa``: q has H heads, k and v fewer, each shared by H / Hkv of q's; nothing is repeated in memory.
    ``return_lse`` also returns the logsumexp of the scores [..., M] (float32 for 16-bit inputs), sinks included.

    Raises :class:`ShapeError`, :class:`DTypeError` or :class:`DeviceError` where the arguments do not fit each other,
    :class:`ArgumentError` for an option that is out of range.

    >>> import torch, torch.nn.functional as F
    >>> from monoidreduce.ops import attention
    >>> q, k, v = torch.randn(2, 5, 4), torch.randn(2, 7, 4), torch.randn(2, 7, 3)
    >>> seen = torch.rand(5, 7) > 0.5
    >>> seen[:, 0] = True
    >>> torch.allclose(attention(q, k, v, seen), F.scaled_dot_product_attention(q, k, v, seen), atol=1e-6)
    True
    """
    return _attend(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        mask_hides=mask_hides,
        causal=causal,
        window=window,
        softcap=softcap,
        bias=bias,
        alibi_slopes=alibi_slopes,
        documents=documents,
        lengths=lengths,
        sinks=sinks,
        seed=seed,
        return_lse=return_lse,
        cols=cols,
    )


def _attend(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
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
    sinks: Tensor | None = None,
    seed: int | None = None,
    return_lse: bool = False,
    blocks: tuple[Tensor, Tensor] | None = None,
    cols: Domain | None = None,
) -> Any:
    """:func:`attention`; with ``blocks``, of rows and columns, causal rows also see later columns of their block."""
    checks.floating(q=q, k=k, v=v)
    if cols is not None:
        _check_domain(cols, lengths=lengths, documents=documents, blocks=blocks, bias=bias, attn_mask=attn_mask)
    scale = default_scale(q) if scale is None else scale
    options: dict[str, Any] = dict(chosen_options(causal, is_causal, window, softcap, dropout_p))
    options.update(score_options(
        q, k, attn_mask, mask_hides, bias, cols, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        lengths=lengths, documents=documents,
    ))  # fmt: skip
    if blocks is not None:
        options["row_blocks"], options["col_blocks"] = _documents(blocks, q, k)
    if dropout_p > 0:
        checks.whole("seed", 0 if seed is None else seed)
        options["seed"] = checks.draw_seed() if seed is None else seed
        options["dropout_p"] = float(dropout_p)
    last = options.get("lower_right") if cols is None else cols.kind == "pages"
    if last and isinstance(q, Tensor) and q.shape[-2:-1] == (1,) and checks.is_undivided():
        _drop_implied(options)
    if cols is not None:
        _align(cols, options, q)
        options["cols"] = cols
    layout = grouping.Groups.of(q, k, v) if enable_gqa and (cols is None or cols.kind != "pages") else None
    if not enable_gqa and (cols is None or cols.kind != "pages"):
        checks.own_keys(q, k)
    if layout is not None:
        q, k, v, options = layout.split(q, k, v, options)
    result = _attention(q, k, v, scale, bool(return_lse), **options)
    return result if layout is None else layout.merged(result)


attention_in_blocks = checks.public_layer(_attend)


@overload
def attention_decode(
    q: Vectors,
    k_cache: Vectors,
    v_cache: Vectors,
    lengths: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_DecodeOptions],
) -> Tensor: ...
@overload
def attention_decode(
    q: Vectors,
    k_cache: Vectors,
    v_cache: Vectors,
    lengths: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_DecodeOptions],
) -> AttentionOutput: ...
@overload
def attention_decode(
    q: Vectors,
    k_cache: Vectors,
    v_cache: Vectors,
    lengths: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[_DecodeOptions],
) -> Tensor | AttentionOutput: ...
@checks.public_layer(rows={"q": "vectors"}, cols={"k_cache": "vectors", "v_cache": "vectors"})
def attention_decode(
    q: Vectors,
    k_cache: Vectors,
    v_cache: Vectors,
    lengths: Tensor,
    *,
    scale: float | Tensor | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of the newest tokens to a cache that is longer than what it holds: few queries, many keys.

    The same as :func:`attention` of each sequence to its first ``lengths`` keys, its M queries being the last M of
    them (``causal="lower_right"``), without ever allocating the M × N scores, a mask, or repeated heads.

    Shapes: ``q`` [B, H, M, f], ``k_cache`` [B, Hkv, N, f] and ``v_cache`` [B, Hkv, N, d] with Hkv dividing H, integers
    ``lengths`` [B], the new tokens counted in, give [B, H, M, d]. The other options are those of :func:`attention`.
    What the caches hold beyond ``lengths`` does not matter, as long as it is finite.

    Raises :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` as
    :func:`attention` does.

    >>> import torch
    >>> from monoidreduce.ops import attention, attention_decode
    >>> q, keys, values = torch.randn(2, 8, 1, 4), torch.randn(2, 2, 100, 4), torch.randn(2, 2, 100, 4)
    >>> y = attention_decode(q, keys, values, torch.tensor([100, 37]))
    >>> second = attention(q[1], keys[1, :, :37], values[1, :, :37], enable_gqa=True)
    >>> torch.allclose(y[1], second, atol=1e-6)
    True
    """
    for name, t in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        checks.vectors(name, t, "[B, heads, length, features]", 4, 4)
    checks.tensor("lengths", lengths, "[B]", 1, 1)
    return attention(
        q,
        k_cache,
        v_cache,
        scale=scale,
        enable_gqa=True,
        causal="lower_right",
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        lengths=lengths,
        sinks=sinks,
        return_lse=return_lse,
    )


@checks.public_layer
def document_ids(lengths: Tensor) -> Tensor:
    """The document of every token of a packed sequence, from the documents' lengths.

    The same as ``torch.arange(D).repeat_interleave(lengths)``: what :func:`attention` takes as ``documents``, without
    ever allocating a mask. Shapes: ``lengths`` [D], integers, give [L] with L their sum.

    Raises :class:`ShapeError`, :class:`DTypeError` or :class:`ArgumentError` for what are no lengths.

    >>> import torch
    >>> from monoidreduce.ops import document_ids
    >>> document_ids(torch.tensor([2, 0, 3]))
    tensor([0, 0, 2, 2, 2])
    """
    checks.tensor("lengths", lengths, "[D]", 1, 1)
    checks.integers("lengths", lengths)
    if checks.can_inspect(lengths) and bool((lengths < 0).any()):
        raise ArgumentError(detail=f"lengths holds {int(lengths.min())}", fix="A document has 0 tokens or more")
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)


# Options --------------------------------------------------------------------------------------------------------------


def default_scale(q: Any) -> float:
    """1/√f. Without features every score is 0, and so is the scale's part in it."""
    features = q.shape[-1] if isinstance(q, (Tensor, Scaled)) and q.dim() else 1
    return 1 / math.sqrt(max(features, 1))


def score_options(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None,
    mask_hides: bool,
    bias: Tensor | None,
    cols: Domain | None = None,
    *,
    lengths: Tensor | None = None,
    documents: Documents | None = None,
    **per_head: Any,
) -> dict[str, Any]:
    """What is given as tensors and changes or hides scores, checked, as :func:`scores` takes it."""
    options: dict[str, Any] = {}
    for name, matrix in (("bias", bias), ("attn_mask", attn_mask)):
        if matrix is not None:
            options[name] = _matrix(name, matrix, name == "attn_mask", cols)
            options["mask"] = "adds" if matrix.dtype is not torch.bool else "hides" if mask_hides else "shows"
    options.update({name: value for name, value in per_head.items() if value is not None})
    for name in ("alibi_slopes", "sinks"):
        if isinstance(per_head.get(name), Tensor):
            grouping.check_per_head(name, per_head[name], q, k)
    if lengths is not None:
        options["lengths"] = grouping.lengths("lengths", lengths, k, q)
    if documents is not None:
        options["row_documents"], options["col_documents"] = _documents(documents, q, k)
    return options


@checks.cache_check
def chosen_options(causal: Any, is_causal: Any, window: Any, softcap: Any, dropout_p: Any) -> dict[str, Any]:
    """What is chosen by numbers and names, checked, without what is left out."""
    if softcap is not None:
        checks.positive("softcap", softcap)
    checks.between("dropout_p", dropout_p, 0, 1)
    (lower, last), (left, right) = _alignment(causal, is_causal), _limits(window)
    return checks.drop_unset({"causal": lower, "lower_right": last, "left": left, "right": right})


def _drop_implied(options: dict[str, Any]) -> None:
    """Leave out what says nothing of a single row that stands beside the last column: nothing lies after it."""
    for name in ("causal", "right"):
        options.pop(name, None)
    if "left" not in options and "alibi_slopes" not in options:
        options.pop("lower_right", None)


def _check_domain(cols: Any, **given: Any) -> None:
    """Refuse what a domain says already."""
    checks.domain("cols", cols)
    said = {"pages": tuple(given), "jagged": ("lengths",)}.get(cols.kind, ())
    for name in said:
        if given[name] is not None:
            raise ArgumentError(
                detail=f"{name} was given beside {cols!r}", fix=f"Drop {name}: cols says which columns a sequence has"
            )


def list_options(cols: Domain | None, q: Tensor, options: dict[str, Any], **given: Any) -> None:
    """Add what ``cols`` says to the options of a call that takes lists of columns in memory order."""
    if cols is not None:
        checks.domain("cols", cols, "blocks", "jagged", "edges")
        _check_domain(cols, **given)
        _align(cols, options, q)
        options["cols"] = cols


def _align(cols: Any, options: dict[str, Any], q: Tensor) -> None:
    """Put each sequence's last row beside its last column where that is asked."""
    if "lower_right" in options and cols.kind == "pages":  # rows are a sequence's last as it is
        del options["lower_right"]
    elif "lower_right" in options and isinstance(cols, Jagged):
        if cols.is_square:
            del options["lower_right"]
        else:
            more = (cols.col_offsets - cols.row_offsets).diff()
            more = torch.cat([more, more.new_zeros(1)])  # of rows that belong to no sequence
            options["row_shift"] = more[cols.row_sequences(q.shape[-2]).long()]


def _matrix(name: str, value: Any, boolean: bool, cols: Any) -> Tensor:
    edges = isinstance(cols, Domain) and cols.kind == "edges"
    checks.tensor(name, value, "[..., E]" if edges else "[..., M, N]", 1 if edges else 2)
    if not value.is_floating_point() and not (boolean and value.dtype is torch.bool):
        kinds = "truth values (True is seen) or numbers to add" if boolean else "numbers to add"
        raise DTypeError(detail=f"{name} is {str(value.dtype)[6:]}", fix=f"Give {kinds}")
    return value


def _alignment(causal: Any, is_causal: Any) -> tuple[bool, bool]:
    """Whether rows see only what lies before them, and whether the last row stands beside the last column."""
    if not isinstance(causal, (bool, int, str)) or causal not in (False, True, "upper_left", "lower_right"):
        raise ArgumentError(
            detail=f"causal was given {checks.describe_value(causal)}",
            fix='Use True, False, "upper_left" (as True) or "lower_right"',
        )
    if isinstance(is_causal, Tensor):
        raise ArgumentError(detail=f"is_causal was given {checks.describe_value(is_causal)}", fix="Give True or False")
    if is_causal and causal == "lower_right":
        raise ArgumentError(
            detail='is_causal=True, which is "upper_left", was given with causal="lower_right"', fix="Drop is_causal"
        )
    return bool(causal or is_causal), causal == "lower_right"


def _limits(window: Any) -> tuple[int | None, int | None]:
    sides = window if isinstance(window, tuple) and len(window) == 2 else (window, window)
    for side in sides:
        if side is not None and (
            not isinstance(side, numbers.Integral) or isinstance(side, bool) or not 0 <= int(side) < 2**31
        ):
            raise ArgumentError(
                detail=f"window was given {checks.describe_value(window)}",
                fix="Give a whole number from 0, or a pair (left, right) of such, None being no limit",
            )
    return sides


def _documents(documents: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(documents, (tuple, list)) and len(documents) == 2:
        rows, cols = documents
    else:
        rows = cols = documents
    shape = "[L] or [B, L], or a pair of them"
    row = grouping.per_sequence("documents", rows, shape, 1, q, k)
    col = row if cols is rows else grouping.per_sequence("documents", cols, shape, 1, q, k)
    if row.shape[-1] != q.shape[-2] or col.shape[-1] != k.shape[-2]:
        raise ShapeError(
            detail=f"documents has {row.shape[-1]} and {col.shape[-1]} tokens, but there are {q.shape[-2]} rows and "
            f"{k.shape[-2]} columns",
            fix="Give one number for each token, a pair of tensors where rows and columns are different tokens",
        )
    return row, col


if TYPE_CHECKING:
    from typing_extensions import Unpack


class _PagedOptions(TypedDict, total=False):
    scale: float | Tensor | None
    causal: bool
    window: Window | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


@overload
def attention_paged(
    q: Vectors,
    k_pages: Vectors,
    v_pages: Vectors,
    pages: Pages,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_PagedOptions],
) -> Tensor: ...
@overload
def attention_paged(
    q: Vectors,
    k_pages: Vectors,
    v_pages: Vectors,
    pages: Pages,
    *,
    return_lse: Literal[True],
    **options: Unpack[_PagedOptions],
) -> AttentionOutput: ...
@overload
def attention_paged(
    q: Vectors, k_pages: Vectors, v_pages: Vectors, pages: Pages, *, return_lse: bool, **options: Unpack[_PagedOptions]
) -> Tensor | AttentionOutput: ...
@checks.public_layer
def attention_paged(
    q: Vectors,
    k_pages: Vectors,
    v_pages: Vectors,
    pages: Pages,
    *,
    scale: float | Tensor | None = None,
    causal: bool = True,
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of each sequence's newest tokens to its keys, which lie in the pages that ``mr.pages`` names.

    The same as :func:`attention_decode` on the sequences' keys and values gathered into one padded tensor, without ever
    allocating that tensor or the scores. The M queries are the last M positions of their sequence (the new tokens are
    counted in its length), so one call decodes (M = 1) and another folds a chunk of a prompt (M = its size). With
    ``causal`` a query sees the positions up to its own. Attention to one sequence in several stores is merged by
    ``return_lse``.

    Shapes: ``q`` [S, H, M, f], ``k_pages`` [pages, page, Hkv, f] and ``v_pages`` [pages, page, Hkv, d], with Hkv
    dividing H, give [S, H, M, d]. The other options are those of :func:`attention`. What pages hold beyond a sequence's
    length is not read. ``pages.append`` writes new tokens. Pages may be stored in 8 bits: ``mr.scaled(numbers, scale)``
    with a scale for each token and head, [pages, page, Hkv].

    Raises :class:`ColumnListError` for pages that do not exist, :class:`ShapeError`, :class:`DTypeError`,
    :class:`DeviceError` or :class:`ArgumentError` as :func:`attention` does.

    >>> import torch, monoidreduce as mr
    >>> k, v = torch.randn(2, 5, 16, 2, 8)  # five pages of 16 tokens, two heads
    >>> pages = mr.pages(torch.tensor([[4, 1], [2, 0]]), torch.tensor([20, 3]), page=16)
    >>> q = torch.randn(2, 6, 1, 8)  # six heads of queries, one new token each
    >>> y = mr.ops.attention_paged(q, k, v, pages)
    >>> dense = mr.ops.attention_decode(q, pages.gather(k), pages.gather(v), pages.lengths)
    >>> torch.allclose(y, dense, atol=1e-6)
    True
    """
    checks.domain("pages", pages, "pages")
    checks.tensor("q", q, "[S, H, M, f]", 4, 4)
    for name, store in (("k_pages", k_pages), ("v_pages", v_pages)):
        checks.vectors(name, store, "[pages, page, heads, features]", 4, 4)
        if store.shape[1] != pages.page or store.shape[:3] != k_pages.shape[:3]:
            raise ShapeError(
                detail=f"k_pages has shape {tuple(k_pages.shape)} and v_pages {tuple(v_pages.shape)}, but a page holds "
                f"{pages.page}",
                fix="[pages, page, heads, features] was expected, alike but for the features",
            )
    return attention(
        q,
        k_pages,
        v_pages,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        return_lse=return_lse,
        cols=pages,
    )
