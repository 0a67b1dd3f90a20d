"""Two-layer perceptrons, plain and gated, and the activations that have names; max-pooling over a product."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, no_type_check, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ..domains import Domain
from ..errors import ArgumentError, ShapeError
from . import checks
from . import language as mr

Activation = str | Callable[[Tensor], Tensor]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _squared_relu(x: Tensor) -> Tensor:
    return torch.square(torch.relu(x))


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "elu": F.elu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
    "mish": F.mish,
    "relu": torch.relu,
    "relu6": F.relu6,
    "relu_squared": _squared_relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "tanh": torch.tanh,
}


def _function(activation: Activation) -> Callable[..., Tensor]:
    if callable(activation):
        return activation
    if activation not in ACTIVATIONS:
        near = difflib.get_close_matches(str(activation), ACTIVATIONS, n=1, cutoff=0.0)[0]
        raise ArgumentError(
            detail=f"activation was given {activation!r}",
            fix=f"Did you mean {near!r}? Give a function of one number, or one of {', '.join(ACTIVATIONS)}",
        )
    return ACTIVATIONS[activation]


@mr.op
@no_type_check
def _mlp(
    x: mr.Row["d"],
    p: mr.Col["d"],
    q: mr.Col["n"],
    activation: Callable,
    bias: mr.Col | None = None,
    dropout_p: float | None = None,
    seed: int | None = None,
):
    h = activation(x @ p if bias is None else x @ p + bias)
    return mr.sum((h if dropout_p is None else mr.dropout(h, dropout_p, seed)) * q)


@checks.public_layer(rows={"x": "first"}, cols={"p": "vectors", "q": "vectors", "bias": "numbers"})
def mlp(
    x: Tensor,
    p: Tensor,
    q: Tensor,
    *,
    activation: Activation = torch.relu,
    bias: Tensor | None = None,
    out_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    cols: Domain | None = None,
) -> Tensor:
    """A two-layer perceptron: ``activation(x @ p.T + bias) @ q + out_bias``.

    The same as that expression in plain torch, without ever allocating the M × K hidden layer, before or after the
    activation, its dropout mask or its gradient.

    Shapes: ``x`` [..., D], ``p`` [K, D], ``q`` [K, N], ``bias`` [K], ``out_bias`` [N] give [..., N]; where ``p`` or
    ``q`` have leading dimensions too, all broadcast. ``activation`` is a name (``"gelu"``) or a function in torch,
    written for one number; a function is traced when it is first seen, so define it once and not in the call.
    ``dropout_p`` drops hidden numbers with this probability and scales the others by 1/(1 - p); which ones depends on
    ``seed`` alone, drawn from torch's generator if left out. ``cols``: which hidden numbers each row has, such as
    ``mr.blocks`` of experts for blocks of sorted rows; x is then [..., M, D] with M rows in the lists.

    Raises :class:`ArgumentError` for an unknown name, :class:`UnknownFunctionError` for a function that the pair
    language cannot say, :class:`ShapeError`, :class:`DTypeError` or :class:`DeviceError` for arguments that do not fit
    each other.

    >>> import torch
    >>> from monoidreduce.ops import mlp
    >>> x, p, q = torch.randn(5, 4), torch.randn(16, 4), torch.randn(16, 3)
    >>> torch.allclose(mlp(x, p, q, activation="tanh"), torch.tanh(x @ p.T) @ q, atol=1e-5)
    True
    """
    checks.floating(x=x, p=p, q=q)
    out_bias = _out(out_bias, q, x, p)
    options = {"bias": _hidden("bias", bias), **_dropout(dropout_p, seed), **checks.listed(cols)}
    rows = checks.flatten_rows(x, p, q) if cols is None else x
    y = checks.unflatten_rows(_mlp(rows, p, q, _function(activation), **options), x, rows)
    return y if out_bias is None else y + out_bias.to(y.dtype)  # autocast casts what an op is given


@mr.op
@no_type_check
def _gated_mlp(
    x: mr.Row["d"],
    gate: mr.Col["d"],
    up: mr.Col["d"],
    down: mr.Col["n"],
    activation: Callable,
    gate_bias: mr.Col | None = None,
    up_bias: mr.Col | None = None,
    dropout_p: float | None = None,
    seed: int | None = None,
):
    g = x @ gate if gate_bias is None else x @ gate + gate_bias
    u = x @ up if up_bias is None else x @ up + up_bias
    h = activation(g) * u
    return mr.sum((h if dropout_p is None else mr.dropout(h, dropout_p, seed)) * down)


@checks.public_layer(
    rows={"x": "first"},
    cols={"gate": "vectors", "up": "vectors", "down": "vectors", "gate_bias": "numbers", "up_bias": "numbers"},
)
def gated_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    activation: Activation = "silu",
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    out_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    cols: Domain | None = None,
) -> Tensor:
    """A gated perceptron (SwiGLU, GEGLU, ...): ``(activation(x @ gate.T) * (x @ up.T)) @ down``, biases added.

    The same as that expression in plain torch, without ever allocating the M × K hidden layers, their product or a
    gradient of one.

    Shapes: ``x`` [..., D], ``gate`` and ``up`` [K, D], ``down`` [K, N] give [..., N]; where the weights have leading
    dimensions too, all broadcast. ``gate_bias`` and ``up_bias`` [K] are added before, ``out_bias`` [N] after. The other
    options are those of :func:`mlp`.

    Raises :class:`ArgumentError` for an unknown name, :class:`UnknownFunctionError` for a function that the pair
    language cannot say, :class:`ShapeError`, :class:`DTypeError` or :class:`DeviceError` for arguments that do not fit
    each other.

    >>> import torch, torch.nn.functional as F
    >>> from monoidreduce.ops import gated_mlp
    >>> x, gate, up, down = torch.randn(5, 4), torch.randn(16, 4), torch.randn(16, 4), torch.randn(16, 3)
    >>> torch.allclose(gated_mlp(x, gate, up, down), (F.silu(x @ gate.T) * (x @ up.T)) @ down, atol=1e-5)
    True
    """
    checks.floating(x=x, gate=gate, up=up, down=down)
    out_bias = _out(out_bias, down, x, gate, up)
    biases = {"gate_bias": _hidden("gate_bias", gate_bias), "up_bias": _hidden("up_bias", up_bias)}
    options = {**biases, **_dropout(dropout_p, seed), **checks.listed(cols)}
    rows = checks.flatten_rows(x, gate, up, down) if cols is None else x
    y = checks.unflatten_rows(_gated_mlp(rows, gate, up, down, _function(activation), **options), x, rows)
    return y if out_bias is None else y + out_bias.to(y.dtype)  # autocast casts what an op is given


def _hidden(name: str, bias: Any) -> Any:
    if bias is not None:
        checks.tensor(name, bias, "[K]", 1)
    return bias


def _dropout(p: Any, seed: Any) -> dict[str, Any]:
    checks.between("dropout_p", p, 0, 1)
    if p == 0:
        return {}
    checks.whole("seed", 0 if seed is None else seed)
    return {"dropout_p": float(p), "seed": checks.draw_seed() if seed is None else seed}


def _out(bias: Any, last: Any, x: Any, *weights: Any) -> Any:
    """A bias for the output features, those of the last weight; it may differ where the result has other axes."""
    if bias is not None:
        checks.tensor("out_bias", bias, "[N]", 1)
        checks.tensor("the last weight", last, "[K, N]", 2)
        checks.alike(**{"the last weight": last, "out_bias": bias})
        if bias.shape[-1] not in (1, last.shape[-1]):
            raise ShapeError(
                detail=f"out_bias has {bias.shape[-1]} numbers, but the result has {last.shape[-1]} features",
                fix="Give one for each output feature",
            )
        if bias.dim() > 1 and isinstance(x, Tensor):
            batch = [t.shape[:-2] for t in (x, *weights, last) if isinstance(t, Tensor)]
            whole = (*checks.largest_shape(batch), *x.shape[-2:-1], last.shape[-1])
            if not checks.expands(bias.shape, whole):
                raise ShapeError(
                    detail=f"out_bias has shape {tuple(bias.shape)}, but the result {whole}",
                    fix="Give [N], one number for each output feature, or axes of the result",
                )
    return bias


# Max-pooling over a product.


class MaxPool(NamedTuple):
    """What :func:`max_pool_product` returns with ``return_indices``: the largest products and their columns.

    >>> import torch, monoidreduce as mr
    >>> found = mr.ops.max_pool_product(torch.eye(2), torch.tensor([[1.0, 4.0], [2.0, 3.0]]), return_indices=True)
    >>> found.values, found.indices
    (tensor([2., 4.]), tensor([1, 0]))
    """

    values: Tensor
    indices: Tensor


@mr.op
@no_type_check
def _max_pool_product(x: mr.Row["d"], w: mr.Col["d"]):
    s = x @ w
    return MaxPool(mr.max(s), mr.argmax(s))


@overload
def max_pool_product(x: Tensor, w: Tensor, *, return_indices: Literal[False] = False) -> Tensor: ...
@overload
def max_pool_product(x: Tensor, w: Tensor, *, return_indices: Literal[True]) -> MaxPool: ...
@overload
def max_pool_product(x: Tensor, w: Tensor, *, return_indices: bool) -> Tensor | MaxPool: ...
@checks.public_layer(rows={"x": "first"}, cols={"w": "vectors"})
def max_pool_product(x: Tensor, w: Tensor, *, return_indices: bool = False) -> Tensor | MaxPool:
    """The largest product of each row with any column, ``max_j ⟨x_i, w_j⟩``.

    The same as ``(x @ w.mT).max(-1).values``, without ever allocating the M × N products or their gradient. The
    gradient of a tie goes to its first column. For 16-bit inputs the values are float32.

    Shapes: ``x`` [..., D] and ``w`` [N, D] give [...]; where ``w`` has leading dimensions too, they broadcast with
    those of x [..., M, D]. With ``return_indices`` also the columns (int64) are returned, as ``torch.max`` does. With
    no columns, or where every product is minus infinity, the value is minus infinity and the index -1.

    Raises :class:`ShapeError`, :class:`DTypeError` or :class:`DeviceError` for arguments that do not fit each other.

    >>> import torch
    >>> from monoidreduce.ops import max_pool_product
    >>> x, w = torch.randn(6, 4), torch.randn(9, 4)
    >>> torch.allclose(max_pool_product(x, w), (x @ w.T).max(-1).values)
    True
    """
    rows = checks.flatten_rows(x, w)
    pooled = MaxPool(*(checks.unflatten_rows(value, x, rows) for value in _max_pool_product(rows, w)))
    return pooled if return_indices else pooled.values
