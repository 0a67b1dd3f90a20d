"""Two-layer perceptrons, plain and gated; and the activations that have names."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ArgumentError
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
def _mlp(x: mr.Row["d"], p: mr.Col["d"], q: mr.Col["n"], activation: Callable):
    return mr.sum(activation(x @ p) * q)


@checks.together
def mlp(x: Tensor, p: Tensor, q: Tensor, *, activation: Activation = torch.relu) -> Tensor:
    """A two-layer perceptron: ``activation(x @ p.T) @ q``.

    The same as that expression in plain torch, without ever allocating the M × K hidden layer, before or after the
    activation, or its gradient.

    Shapes: ``x`` [..., D], ``p`` [K, D], ``q`` [K, N] give [..., N]; where ``p`` or ``q`` have leading dimensions too,
    all broadcast. ``activation`` is a name (``"gelu"``) or a function in torch, written for one number; a function is
    traced when it is first seen, so define it once and not in the call.

    Raises :class:`ArgumentError` for an unknown name, :class:`UnknownFunctionError` for a function that the pair
    language cannot say, :class:`ShapeError`, :class:`DTypeError` or :class:`DeviceError` for arguments that do not fit
    each other.

    >>> import torch
    >>> from monoidreduce.ops import mlp
    >>> x, p, q = torch.randn(5, 4), torch.randn(16, 4), torch.randn(16, 3)
    >>> torch.allclose(mlp(x, p, q, activation="tanh"), torch.tanh(x @ p.T) @ q, atol=1e-5)
    True
    """
    rows = checks.flat(x, p, q)
    return checks.unflat(_mlp(rows, p, q, _function(activation)), x, rows)


@mr.op
@no_type_check
def _gated_mlp(x: mr.Row["d"], gate: mr.Col["d"], up: mr.Col["d"], down: mr.Col["n"], activation: Callable):
    return mr.sum(activation(x @ gate) * (x @ up) * down)


@checks.together
def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, activation: Activation = "silu") -> Tensor:
    """A gated perceptron (SwiGLU, GEGLU, ...): ``(activation(x @ gate.T) * (x @ up.T)) @ down``.

    The same as that expression in plain torch, without ever allocating the M × K hidden layers, their product or a
    gradient of one.

    Shapes: ``x`` [..., D], ``gate`` and ``up`` [K, D], ``down`` [K, N] give [..., N]; where the weights have leading
    dimensions too, all broadcast. ``activation`` as in :func:`mlp`.

    Raises :class:`ArgumentError` for an unknown name, :class:`UnknownFunctionError` for a function that the pair
    language cannot say, :class:`ShapeError`, :class:`DTypeError` or :class:`DeviceError` for arguments that do not fit
    each other.

    >>> import torch, torch.nn.functional as F
    >>> from monoidreduce.ops import gated_mlp
    >>> x, gate, up, down = torch.randn(5, 4), torch.randn(16, 4), torch.randn(16, 4), torch.randn(16, 3)
    >>> torch.allclose(gated_mlp(x, gate, up, down), (F.silu(x @ gate.T) * (x @ up.T)) @ down, atol=1e-5)
    True
    """
    rows = checks.flat(x, gate, up, down)
    return checks.unflat(_gated_mlp(rows, gate, up, down, _function(activation)), x, rows)
