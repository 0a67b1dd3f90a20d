"""The form in which users hold results: shapes, types and strides.

Whoever allocates a result and whoever only says what it will be (a compiler's fake tensors) ask the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..engines.common.evaluate import Form, Sizes
from ..program.expression import Expr


def output_form(e: Expr, sizes: Sizes, out: torch.dtype | None, total: bool = False) -> Form:
    """An output as users hold it: every axis of its kind and the whole batch, or no axis where it is a sum of numbers
    per row; vectors in the inputs' type ``out``.

    Numbers stay in the type they were accumulated in: rounding a loss or a logsumexp to 16 bits would cost 1e-3.
    """
    tail = (*((sizes.rows,) if e.rows else ()), *((sizes.cols,) if e.cols else ()))
    tail += () if e.feature is None else (sizes.of(str(e.feature)),)
    kind = {"bool": torch.bool, "int": torch.int64}.get(e.dtype, sizes.compute)
    if total:
        return (), kind if e.dtype == "float" else torch.int64
    return (*sizes.batch, *tail), out if out is not None and e.feature is not None and e.dtype == "float" else kind


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as torch counts them: an axis of size 0 as one of size 1."""
    found: list[int] = []
    step = 1
    for length in reversed(shape):
        found.append(step)
        step = step * torch.sym_max(length, 1)
    return tuple(reversed(found))


def output_strides(e: Expr, shape: Sequence[int], inputs: Sequence[Tensor]) -> tuple[int, ...]:
    """The strides of an output of this shape, given the tensors that the program reads."""
    return contiguous_strides(shape)


def gradient_strides(leaf: Tensor) -> tuple[int, ...]:
    """The strides of the gradient of an input."""
    return contiguous_strides(leaf.shape)
