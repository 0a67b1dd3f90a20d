"""Attention over the edges of a graph (GAT)."""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from torch import Tensor

from ..domains import Edges
from . import checks
from . import language as mr


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
    PyG edge index). ``bias`` [..., E], a number an edge, is added to the scores. The result is [..., M, d]; a node
    without edges gets 0. ``dropout_p`` drops weights, as in :func:`attention`.

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
        options |= {"dropout_p": float(dropout_p), "seed": checks.draw_seed() if seed is None else seed}
    return _graph_attention(target, source, values, float(negative_slope), **options, cols=cols)
