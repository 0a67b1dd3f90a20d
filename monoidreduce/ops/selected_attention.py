"""Attention to the blocks of keys that score best: choose blocks by their means, then fold those only."""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from ..domains import Blocks, Domain, Edges
from ..errors import ArgumentError
from . import checks, grouping
from . import language as mr
from .attention import AttentionOutput, Causal, attention
from .sampling import TopK


@mr.op
@no_type_check
def _best_blocks(q: mr.Row["f"], k: mr.Col["f"], first: mr.Row, last: mr.Row, block: int, sinks: int, count: int):
    j = mr.col_index
    s = torch.where((j * block + block > first) | (j < sinks), torch.inf, q @ k)  # its own blocks, and the first ones
    return mr.topk(torch.where(j * block <= last, s, -torch.inf), count)


@checks.public_layer
def select_blocks(
    q: Tensor,
    k: Tensor,
    count: int,
    *,
    block: int = 64,
    rows: int | None = None,
    causal: Causal = False,
    enable_gqa: bool = False,
    sinks: int = 1,
) -> Blocks:
    """The ``count`` blocks of keys that each block of queries scores best, as ``mr.blocks``.

    A block's score is the product of the mean of its queries with the mean of its keys. With ``causal``, blocks that
    lie after a query block are not chosen, and the blocks in which its own positions lie always are. The first
    ``sinks`` blocks are always chosen too. All of these count towards ``count``. The choice has no gradient. It is made
    without ever allocating the scores of all blocks.

    Shapes: ``q`` [..., M, f] and ``k`` [..., N, f] give lists [..., row blocks, count]; with ``enable_gqa`` one list
    for each head of the keys, by the mean of the queries that share it. ``rows`` is the size of a block of queries
    (``block`` if left out).

    Raises :class:`ArgumentError` for a count that its own blocks would exceed, and otherwise as :func:`attention`.

    >>> import torch, monoidreduce as mr
    >>> q = k = torch.eye(4).repeat_interleave(8, 0)
    >>> mr.ops.select_blocks(q, k, 1, block=8, sinks=0).index.flatten()
    tensor([0, 1, 2, 3])
    """
    checks.floating(q=q, k=k)
    for name, value in (("count", count), ("block", block), ("rows", block if rows is None else rows)):
        checks.whole(name, value, 1)
    checks.whole("sinks", sinks, 0)
    checks.one_of("causal", causal, (False, True, "upper_left", "lower_right"))  # type: ignore[arg-type]
    rows = block if rows is None else rows
    for name, t in (("q", q), ("k", k)):
        checks.tensor(name, t, "[..., length, features]", 2)
    size, cols = q.shape[-2], k.shape[-2]
    own = -(-rows // block) + bool(causal and rows % block)
    least = own + sinks if causal else sinks
    if count < least:
        has = f"a causal block of {rows} queries has up to {own} blocks of its own, and " if causal else ""
        raise ArgumentError(
            detail=f"count was given {count}, but {has}{sinks} come first", fix=f"Give at least {least}"
        )
    with torch.no_grad():
        queries = _means(q, rows)
        keys = _means(k, block)
        if not enable_gqa:
            checks.own_keys(q, k)
        else:
            layout = grouping.Groups.of(q, k, k)
            queries = queries if layout is None else queries.unflatten(-3, (layout.shared, layout.group)).mean(-3)
        start = torch.arange(queries.shape[-2], device=q.device) * rows
        start = start + (cols - size if causal == "lower_right" else 0)
        end = start + (rows - 1) if causal else torch.full_like(start, cols)
        mine = start if causal else torch.full_like(start, cols + block)
        count = min(count, keys.shape[-2])
        if not count:
            return Blocks(
                torch.zeros(*queries.shape[:-1], 0, dtype=torch.int64, device=q.device), rows=rows, cols=block
            )
        values, index = _best_blocks(queries, keys, mine, end, block, sinks, count)
        used = (values > -torch.inf).sum(-1)
    return Blocks(index.clamp(min=0), used, rows, block)


def _means(x: Tensor, size: int) -> Tensor:
    """The mean of each ``size`` vectors of x [..., L, f]; of those that are there, in the last."""
    length = x.shape[-2]
    blocks = -(-length // size)
    wide = x if x.dtype.itemsize > 2 else x.float()
    whole = F.pad(wide, (0, 0, 0, blocks * size - length)).unflatten(-2, (blocks, size)).sum(-2)
    there = (length - torch.arange(blocks, device=x.device) * size).clamp(max=size)
    return whole / there.unsqueeze(-1)


@checks.public_layer
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    count: int,
    *,
    block: int = 64,
    rows: int | None = None,
    causal: Causal = False,
    enable_gqa: bool = False,
    sinks: int = 1,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    blocks: Blocks | None = None,
    return_lse: bool = False,
) -> Tensor | AttentionOutput:
    """Attention of each block of queries to the ``count`` blocks of keys that it scores best.

    Compress, choose, fold: the selected branch of native sparse attention, and block-sparse attention whose blocks the
    data choose. The same as :func:`attention` with ``cols=select_blocks(q, k, count, ...)``, with gradients of q, k and
    v through the chosen blocks; the choice has none. What is not chosen is not computed, and all is done without ever
    allocating the M × N scores. ``blocks``: lists that were chosen otherwise.

    Shapes: ``q`` [..., M, f], ``k`` [..., N, f] and ``v`` [..., N, d] give [..., M, d]. ``block``, ``rows``, ``sinks``
    and ``enable_gqa`` as in :func:`select_blocks`; ``causal``, ``scale``, ``softcap`` and ``return_lse`` as in
    :func:`attention`.

    Raises :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or :class:`ArgumentError` for arguments that
    do not fit.

    >>> import torch, monoidreduce as mr
    >>> q, k, v = torch.randn(3, 2, 100, 8)
    >>> all_blocks = mr.ops.selected_attention(q, k, v, 7, block=16, causal=True)
    >>> torch.allclose(all_blocks, mr.ops.attention(q, k, v, causal=True), atol=1e-5)
    True
    """
    if blocks is None:
        choose: dict[str, Any] = dict(block=block, rows=rows, causal=causal, enable_gqa=enable_gqa, sinks=sinks)
        blocks = select_blocks(q, k, count, **choose)
    else:
        checks.domain("blocks", blocks, "blocks")
    return attention(
        q,
        k,
        v,
        causal=causal,
        enable_gqa=enable_gqa,
        scale=scale,
        softcap=softcap,
        return_lse=bool(return_lse),
        cols=blocks,
    )


# The lightning indexer of sparse attention: which columns each row should look at, by several small products.


@mr.op
@no_type_check
def _lightning_indexer(q: mr.Row["h", "f"], k: mr.Col["f"], weight: mr.Row["h"], best: int, causal: bool):
    s = (weight * torch.relu(q @ k)).sum()
    return mr.topk(torch.where(mr.col_index <= mr.row_index, s, -torch.inf) if causal else s, best)


@checks.public_layer(rows={"q": "several", "weight": "vectors"}, cols={"k": "vectors"})
def lightning_indexer(
    q: Tensor, k: Tensor, weight: Tensor, best: int, *, causal: bool = False, cols: Domain | None = None
) -> TopK:
    """The ``best`` columns of each row by a weighted sum of its heads' positive products, best first.

    With ``s = torch.einsum("...mhf,...nf->...mnh", q, k).relu()`` the same as
    ``(s * weight.unsqueeze(-2)).sum(-1).topk(best)``, without ever allocating the M × N × H products, the M × N scores
    or their gradient. The values are differentiable. It selects the columns that a sparse attention reads
    (:func:`rerank` and ``cols=mr.edges(...)`` take its indices).

    Shapes: ``q`` [..., M, H, f], ``k`` [..., N, f] and ``weight`` [..., M, H] give values and int64 indices
    [..., M, best]; leading dimensions broadcast. With ``causal`` row i sees columns j ≤ i; a place for which a row sees
    no column has the value minus infinity and the index -1. ``cols``: which columns a row chooses among: of packed
    sequences (``mr.jagged``) the indices are those of the packed columns, of ``mr.pages`` positions in the sequence.

    Raises :class:`TopKError` where ``best`` > N, :class:`ShapeError`, :class:`DTypeError`, :class:`DeviceError` or
    :class:`ArgumentError` for arguments that do not fit.

    >>> import torch
    >>> from monoidreduce.ops import lightning_indexer
    >>> q, k, weight = torch.randn(6, 4, 8), torch.randn(9, 8), torch.rand(6, 4)
    >>> s = torch.einsum("mhf,nf->mnh", q, k).relu()
    >>> expected = (s * weight.unsqueeze(-2)).sum(-1).topk(3)
    >>> torch.equal(lightning_indexer(q, k, weight, 3).indices, expected.indices)
    True
    """
    checks.floating(q=q, k=k, weight=weight)
    checks.whole("best", best, 1)
    return TopK(*_lightning_indexer(q, k, weight, int(best), bool(causal), **checks.listed(cols)))


# Attention over the edges of a graph (GAT).


@mr.op
@no_type_check
def _graph_attention(
    target: mr.Row,
    source: mr.Col,
    values: mr.Col["d"],
    negative_slope: float,
    bias: mr.Pair | None = None,
    dropout_p: float | None = None,
    seed: int | None = None,
):
    s = target + source if bias is None else target + source + bias
    kept = values if dropout_p is None else mr.dropout(values, dropout_p, seed)
    return mr.softmax_mean(torch.where(s > 0, s, s * negative_slope), kept)


@checks.public_layer
def graph_attention(
    target: Tensor,
    source: Tensor,
    values: Tensor,
    cols: Edges,
    *,
    negative_slope: float = 0.2,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
) -> Tensor:
    """Each node's mean of its neighbours' values, weighted by softmax_j(leaky_relu(target_i + source_j)).

    The message passing of a graph attention network (GAT), as a fold over edges: the same as gathering a score and a
    value for each edge, a softmax over the edges of each target and a scatter of the products, without ever allocating
    a value for each edge. Gradients of the sources fold the same edges the other way, in a fixed order, without
    atomics.

    Shapes: ``target`` [..., M] and ``source`` [..., N] are a score for each node, ``values`` [..., N, d]; leading
    dimensions are heads. ``cols`` is ``mr.edges``: row i folds its neighbours (``mr.edges.from_edge_index`` converts a
    PyG edge index). ``bias`` [..., E], a number an edge, is added to target_i + source_j, as PyG adds that of edge
    features. The result is [..., M, d]; a node without edges gets 0. ``dropout_p`` drops weights, as in
    :func:`attention`.

    Raises :class:`ColumnListError` for edges that do not fit, :class:`ShapeError`, :class:`DTypeError`,
    :class:`DeviceError` or :class:`ArgumentError` for other arguments that do not.

    >>> import torch, monoidreduce as mr
    >>> ring = mr.edges.from_neighbours(torch.tensor([[1, 3], [0, 2], [1, 3], [2, 0]]))
    >>> mr.ops.graph_attention(torch.zeros(4), torch.zeros(4), torch.eye(4), ring)[0]
    tensor([0.0000, 0.5000, 0.0000, 0.5000])
    """
    checks.floating(target=target, source=source, values=values)
    checks.domain("cols", cols, "edges", "blocks", "jagged")
    checks.between("negative_slope", negative_slope, 0, 1)
    checks.between("dropout_p", dropout_p, 0, 1)
    options: dict[str, Any] = {} if bias is None else {"bias": bias}
    if dropout_p > 0:
        checks.whole("seed", 0 if seed is None else seed)
        options.update(dropout_p=float(dropout_p), seed=checks.draw_seed() if seed is None else seed)
    return _graph_attention(target, source, values, float(negative_slope), **options, cols=cols)
