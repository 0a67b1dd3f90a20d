"""Max-pooling over a product."""

from __future__ import annotations

from typing import Literal, NamedTuple, no_type_check, overload

from torch import Tensor

from . import checks
from . import language as mr


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
