"""The cache of prepared folds, and what its keys say of tensors. A call asks for both on every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from .kernels.prepared_fold import PreparedFold

_PREPARED: dict[tuple, PreparedFold] = {}


def prepared_folds() -> dict[tuple, PreparedFold]:
    """The cache of prepared folds; another object after it was cleared by replacing it."""
    return _PREPARED


def describe_leaves(leaves: Sequence[Any]) -> tuple:
    """What kernels depend on in leaves besides their values: dtype, shape, strides, alignment."""
    found: list[Any] = []
    for v in leaves:
        if isinstance(v, Tensor):
            found += (v.dtype, v.shape, v.stride(), v.data_ptr() & 15)
        else:
            found.append(type(v))
    return tuple(found)
