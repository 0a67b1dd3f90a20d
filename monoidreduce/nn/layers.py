"""Perceptrons and losses as modules: weights and options, and one call of a function of :mod:`monoidreduce.ops`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..domains import Edges
from ..errors import ArgumentError


class _Perceptron(nn.Module):
    """What perceptrons share: linear layers by name, the inner ones side by side; a dropout that training alone has."""

    def __init__(
        self,
        inner: tuple[str, ...],
        outer: str,
        in_features: int,
        hidden_features: int,
        out_features: int | None,
        activation: Any,
        dropout: float,
        **how: Any,
    ) -> None:
        super().__init__()
        for name in inner:
            self.add_module(name, nn.Linear(in_features, hidden_features, **how))
        self.add_module(outer, nn.Linear(hidden_features, in_features if out_features is None else out_features, **how))
        self.activation, self.dropout = activation, dropout

    @property
    def _options(self) -> dict[str, Any]:
        return {"activation": self.activation, "dropout_p": self.dropout if self.training else 0.0}

    def extra_repr(self) -> str:
        return f"activation={self.activation}, dropout={self.dropout}"


class MLP(_Perceptron):
    """:func:`monoidreduce.ops.mlp` with weights of its own: ``fc2(dropout(activation(fc1(x))))``, no hidden layer kept.

    Call it with x [..., in]; it gives [..., out]. Worth it where the hidden layer is what fills the memory.
    State dict: ``fc1.weight`` [hidden, in], ``fc2.weight`` [out, hidden], and their biases. ``activation`` is a name or
    a function (a named one where the module is to be pickled).

    >>> import torch
    >>> from monoidreduce.nn import MLP
    >>> MLP(16, 4096, activation="gelu")(torch.randn(2, 7, 16)).shape
    torch.Size([2, 7, 16])
    """

    fc1: nn.Linear
    fc2: nn.Linear

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        bias: bool = True,
        activation: Any = "relu",
        dropout: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        sizes = (in_features, hidden_features, out_features)
        super().__init__(("fc1",), "fc2", *sizes, activation, dropout, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        return ops.mlp(
            x,
            self.fc1.weight,
            self.fc2.weight.T,
            bias=self.fc1.bias,
            out_bias=self.fc2.bias,
            **self._options,
        )


class GatedMLP(_Perceptron):
    """:func:`monoidreduce.ops.gated_mlp` with weights of its own: ``down_proj(activation(gate_proj(x)) * up_proj(x))``.

    Call it with x [..., in]; it gives [..., out].
    State dict: ``gate_proj.weight`` and ``up_proj.weight`` [hidden, in], ``down_proj.weight`` [out, hidden], and their
    biases if asked for: the names that most models with such a layer have.

    >>> import torch
    >>> from monoidreduce.nn import GatedMLP
    >>> GatedMLP(16, 4096)(torch.randn(2, 7, 16)).shape
    torch.Size([2, 7, 16])
    """

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        bias: bool = False,
        activation: Any = "silu",
        dropout: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        inner, sizes = ("gate_proj", "up_proj"), (in_features, hidden_features, out_features)
        super().__init__(inner, "down_proj", *sizes, activation, dropout, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        return ops.gated_mlp(
            x,
            self.gate_proj.weight,
            self.up_proj.weight,
            self.down_proj.weight.T,
            gate_bias=self.gate_proj.bias,
            up_bias=self.up_proj.bias,
            out_bias=self.down_proj.bias,
            **self._options,
        )


class ContrastiveLoss(nn.Module):
    """:func:`monoidreduce.ops.contrastive_loss` with a learned scale, as CLIP and SigLIP have it.

    State dict: ``logit_scale``, the logarithm of the scale (``learned=False``: a buffer), and for ``kind="siglip"``
    ``logit_bias``. The scale is at most ``max_scale``.

    >>> import torch
    >>> from monoidreduce.nn import ContrastiveLoss
    >>> loss = ContrastiveLoss(temperature=0.07)
    >>> loss(torch.randn(32, 16), torch.randn(32, 16)).shape
    torch.Size([])
    """

    logit_scale: Tensor
    logit_bias: Tensor | None

    def __init__(
        self,
        kind: ops.contrastive.Kind = "clip",
        *,
        temperature: float = 0.07,
        bias: float = -10.0,
        learned: bool = True,
        max_scale: float = 100.0,
        normalize: bool = True,
        hard_negatives: float = 0.0,
        reduction: Any = "mean",
        device: Any = None,
    ) -> None:
        super().__init__()
        if kind not in ("clip", "infonce", "siglip"):
            raise ArgumentError(detail=f"kind was given {kind!r}", fix="Use one of 'clip', 'infonce', 'siglip'")
        if not temperature > 0:
            raise ArgumentError(detail=f"temperature was given {temperature!r}", fix="Give a number above 0")
        self.kind, self.max_scale, self.normalize = kind, max_scale, normalize
        self.hard_negatives, self.reduction = hard_negatives, reduction
        self._number("logit_scale", -math.log(temperature), learned, device)
        if kind == "siglip":
            self._number("logit_bias", bias, learned, device)
        else:
            self.logit_bias = None

    def _number(self, name: str, value: float, learned: bool, device: Any) -> None:
        number = torch.tensor(float(value), device=device)
        if learned:
            self.register_parameter(name, nn.Parameter(number))
        else:
            self.register_buffer(name, number)

    def forward(self, x: Tensor, y: Tensor | None = None, labels: Any = None) -> Tensor:
        """The loss of x [..., M, D] and y [..., N, D]; of x alone with ``labels``."""
        return ops.contrastive_loss(
            x,
            y,
            kind=self.kind,
            scale=self.logit_scale.exp().clamp(max=self.max_scale),
            bias=self.logit_bias,
            normalize=self.normalize,
            labels=labels,
            hard_negatives=self.hard_negatives,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        return f"kind={self.kind}, normalize={self.normalize}, hard_negatives={self.hard_negatives}"


class _Options(nn.Module):
    """A function of :mod:`monoidreduce.ops` whose options are the module's attributes."""

    names: tuple[str, ...] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__()
        for name in self.names:
            setattr(self, name, options[name])

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.names}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._options().items())


class MaxSim(_Options):
    """:func:`monoidreduce.ops.maxsim`: the late-interaction score of queries and documents.

    >>> import torch
    >>> from monoidreduce.nn import MaxSim
    >>> MaxSim(all_pairs=True)(torch.randn(3, 5, 8), torch.randn(7, 20, 8)).shape
    torch.Size([3, 7])
    """

    names = ("normalize", "all_pairs")

    def __init__(self, *, normalize: bool = False, all_pairs: bool = False) -> None:
        super().__init__(normalize=normalize, all_pairs=all_pairs)

    def forward(self, q: Tensor, d: Tensor, q_lengths: Tensor | None = None, d_lengths: Tensor | None = None) -> Tensor:
        """Scores of q [..., M, f] and d [..., N, f]."""
        return ops.maxsim(q, d, q_lengths=q_lengths, d_lengths=d_lengths, **self._options())


class ChamferLoss(_Options):
    """:func:`monoidreduce.ops.chamfer`: how far two clouds are apart, point by point.

    >>> import torch
    >>> from monoidreduce.nn import ChamferLoss
    >>> ChamferLoss(reduction="none")(torch.randn(4, 60, 3), torch.randn(4, 50, 3)).shape
    torch.Size([4])
    """

    names = ("metric", "points", "reduction")

    def __init__(self, *, metric: Any = "sqeuclidean", points: Any = "mean", reduction: Any = "mean") -> None:
        super().__init__(metric=metric, points=points, reduction=reduction)

    def forward(self, x: Tensor, y: Tensor, x_lengths: Tensor | None = None, y_lengths: Tensor | None = None) -> Tensor:
        """The distance of x [..., M, D] and y [..., N, D]."""
        return ops.chamfer(x, y, x_lengths=x_lengths, y_lengths=y_lengths, **self._options())


class SinkhornLoss(_Options):
    """:func:`monoidreduce.ops.sinkhorn`: what it costs to carry one cloud to another.

    >>> import torch
    >>> from monoidreduce.nn import SinkhornLoss
    >>> SinkhornLoss(eps=0.1)(torch.randn(4, 60, 3), torch.randn(4, 50, 3)).shape
    torch.Size([4])
    """

    names = ("eps", "iterations", "tolerance", "cost", "scaling")

    def __init__(
        self,
        *,
        eps: float,
        iterations: int = 100,
        tolerance: float = 0.0,
        cost: Any = "sqeuclidean",
        scaling: float = 1.0,
    ) -> None:
        super().__init__(eps=eps, iterations=iterations, tolerance=tolerance, cost=cost, scaling=scaling)

    def forward(self, x: Tensor, y: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> Tensor:
        """The cost [...] of x [..., M, D] and y [..., N, D] with masses a and b."""
        return ops.sinkhorn(x, y, a, b, **self._options()).value


# Graph attention as a module: PyG's weights, a fold over edges.


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
