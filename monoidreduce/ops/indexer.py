"""The lightning indexer of sparse attention: which columns each row should look at, by several small products."""

from __future__ import annotations

from typing import no_type_check

import torch
from torch import Tensor

from . import checks
from . import language as mr
from .sampling import TopK


@mr.op
@no_type_check
def _lightning_indexer(q: mr.Row["h", "f"], k: mr.Col["f"], weight: mr.Row["h"], best: int, causal: bool):
    s = (weight * torch.relu(q @ k)).sum()
    return mr.topk(torch.where(mr.col_index <= mr.row_index, s, -torch.inf) if causal else s, best)


@checks.public_layer(rows={"q": "several", "weight": "vectors"}, cols={"k": "vectors"})
def lightning_indexer(q: Tensor, k: Tensor, weight: Tensor, best: int, *, causal: bool = False) -> TopK:
    """The ``best`` columns of each row by a weighted sum of its heads' positive products, best first.

    With ``s = torch.einsum("...mhf,...nf->...mnh", q, k).relu()`` the same as
    ``(s * weight.unsqueeze(-2)).sum(-1).topk(best)``, without ever allocating the M × N × H products, the M × N scores
    or their gradient. The values are differentiable. It selects the columns that a sparse attention reads
    (:func:`rerank` and ``cols=mr.edges(...)`` take its indices).

    Shapes: ``q`` [..., M, H, f], ``k`` [..., N, f] and ``weight`` [..., M, H] give values and int64 indices
    [..., M, best]; leading dimensions broadcast. With ``causal`` row i sees columns j ≤ i; a place for which a row sees
    no column has the value minus infinity and the index -1.

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
    return TopK(*_lightning_indexer(q, k, weight, int(best), bool(causal)))
