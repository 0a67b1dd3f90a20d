"""Attention to keys and values that lie in pages: decoding, and prompts that come in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from torch import Tensor

from ..domains import Pages
from ..errors import ShapeError
from ..stored_vectors import Vectors
from . import checks
from .attention import AttentionOutput, Window, attention

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
