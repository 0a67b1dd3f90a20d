"""Graph attention as a module: PyG's weights, a fold over edges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..domains import Edges


class GraphAttention(nn.Module):
    """A graph attention layer (GAT) with several heads, over the edges that a call gives.

    ``W x_j`` of the neighbours j of i is averaged with the weights softmax_j(leaky_relu(a·W x_i + b·W x_j)), by
    :func:`monoidreduce.ops.graph_attention`. The state dict is that of PyG's ``GATConv``: ``lin.weight``, ``att_src``,
    ``att_dst`` [1, heads, out] and ``bias``. Self-loops are edges like others: list them, if the graph shall have them.

    >>> import torch, monoidreduce as mr
    >>> ring = mr.edges.from_neighbours(torch.tensor([[1, 3], [0, 2], [1, 3], [2, 0]]))
    >>> mr.nn.GraphAttention(8, 16, heads=4)(torch.randn(4, 8), ring).shape
    torch.Size([4, 64])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        heads: int = 1,
        *,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        how: dict[str, Any] = {"device": device, "dtype": dtype}
        self.heads, self.concat, self.negative_slope, self.dropout = heads, concat, negative_slope, dropout
        self.lin = nn.Linear(in_features, heads * out_features, bias=False, **how)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_features, **how))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_features, **how))
        self.bias = nn.Parameter(torch.zeros(heads * out_features if concat else out_features, **how)) if bias else None
        for weight in (self.lin.weight, self.att_src, self.att_dst):
            nn.init.xavier_uniform_(weight)

    def forward(self, x: Tensor, cols: Edges) -> Tensor:
        """x [nodes, in] and the edges between them to [nodes, heads · out], or their mean over heads."""
        values = self.lin(x).unflatten(-1, (self.heads, -1))  # [nodes, heads, out]
        target, source = ((values * a).sum(-1).mT for a in (self.att_dst, self.att_src))
        dropout = self.dropout if self.training else 0.0
        y = ops.graph_attention(
            target, source, values.transpose(0, 1), cols, negative_slope=self.negative_slope, dropout_p=dropout
        )
        y = y.transpose(0, 1).flatten(1) if self.concat else y.mean(0)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"heads={self.heads}, concat={self.concat}, negative_slope={self.negative_slope}, dropout={self.dropout}"
