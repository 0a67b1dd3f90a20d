"""The form in which users hold results: shapes, types and strides.

Whoever allocates a result and whoever only says what it will be (a compiler's fake tensors) ask the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engines.common.evaluate import Form, Sizes
from ..engines.common.result_layout import find_model, find_strides
from ..program.expression import Expr, topological
from ..program.lower import Lowered
from ..reductions import outputs_of


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
    if out is not None and e.feature is not None and e.dtype == "float" and not _is_list_of_numbers(e):
        kind = out
    return (*sizes.batch, *tail), kind


def _is_list_of_numbers(e: Expr) -> bool:
    """True where only integers have this feature, as the numbers at a row's given indices: no vector of the inputs."""
    named = [n.dtype for n in topological([e]) if n.feature == e.feature and not n.args]
    return bool(named) and all(dtype == "int" for dtype in named)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as torch counts them: an axis of size 0 as one of size 1."""
    found: list[int] = []
    step = 1
    for length in reversed(shape):
        found.append(step)
        step = step * torch.sym_max(length, 1)
    return tuple(reversed(found))


def output_strides(program: Lowered, output: int, shape: tuple[int, ...], inputs: Mapping[str, Any]) -> tuple[int, ...]:
    """The strides of an output of a program of one pass, as its engine allocates it: in the memory order of an input,
    where it belongs to that input (``engines/common/result_layout.py``)."""
    (one,) = program.passes
    e = program.outputs[output]
    leaves = [inputs[str(x.attrs[0])] if x.op == "input" else None for x in one.feeds]
    at = next((k for k, users in enumerate(one.results) if e in users), None)
    if at is None:  # arithmetic of one side, laid out as the vectors that it reads: results of the fold, if any
        own = [
            (r, k) for r, k in one.fold.outputs if outputs_of(r)[k][0] == e.feature and (r.rows, r.cols) == e.axes[:2]
        ]
    else:
        own = [one.fold.outputs[at]]
    model = find_model(one.fold, *own[0], leaves) if own and e.feature is not None else None
    return find_strides(shape, model) or contiguous_strides(shape)


def gradient_strides(leaf: Tensor) -> tuple[int, ...]:
    """The strides of the gradient of an input: in its memory order."""
    return find_strides(tuple(leaf.shape), leaf) or contiguous_strides(leaf.shape)
