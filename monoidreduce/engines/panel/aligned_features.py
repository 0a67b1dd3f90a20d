"""16-bit vectors whose number of features is no multiple of 16 bytes: one padded copy of each, for GEMMs at full speed.

Neither the vendor's fast GEMMs nor tensor descriptors take rows that begin anywhere (300 features). Zeros behind the
features of all vectors change no product; results lose them again. The copies are part of a budget: where they would
take more than half of it, the vectors are read as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...plan import budget, panel_layout
from ...program.expression import Expr, topological
from ...program.lower import Lowered
from ..common import matmul
from ..common.evaluate import Sizes

_ALIGNED = 8  # 16-bit numbers of 16 bytes
# what makes vectors, or a number of vectors, from vectors and leaves zeros where all have zeros
_KEEPS_ZEROS = ("input", "leaf", "dot", "sqdist", "reduce", "result", "neg", "detach", "cast")


def pad(program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, limit: int) -> tuple[Mapping[str, Any], Sizes, int]:
    """The inputs and sizes with aligned features, and the bytes left of ``limit`` or the budget (0: there is none).

    All the same where all features are aligned, where zeros would be seen, and where the limit has no room for copies.
    """
    odd = [f for f in _letters(program) if sizes.of(f) > panel_layout.NARROW and sizes.of(f) % _ALIGNED]
    nodes = [e for e in _nodes(program) if e.op == "input" and str(e.feature) in odd]
    given = [inputs[str(e.attrs[0])] for e in nodes]
    if not odd or any(not isinstance(v, Tensor) or v.dtype not in matmul.SIXTEEN for v in given):
        return inputs, sizes, limit
    more = {f: -(-sizes.of(f) // _ALIGNED) * _ALIGNED for f in odd}
    copies = sum(v.numel() // v.shape[-1] * more[str(e.feature)] * 2 for e, v in zip(nodes, given, strict=True))
    results = [e for e in program.outputs if e.feature is not None and str(e.feature) in odd]
    copies += sum((sizes.rows if e.rows else sizes.cols) * more[str(e.feature)] * 2 for e in results)
    room = (limit or budget.requested() or 0) // budget.shrink_factor()
    if room and copies > room // 2:
        return inputs, sizes, limit
    padded = {
        str(e.attrs[0]): F.pad(v, (0, more[str(e.feature)] - v.shape[-1])) for e, v in zip(nodes, given, strict=True)
    }
    return {**inputs, **padded}, replace(sizes, letters={**sizes.letters, **more}), room and room - copies


def cut(values: Sequence[Any], program: Lowered, sizes: Sizes) -> list[Any]:
    """Results with as many features as ``sizes`` says."""
    return [
        v[..., : sizes.of(str(e.feature))].contiguous() if e.feature is not None and isinstance(v, Tensor) else v
        for v, e in zip(values, program.outputs, strict=True)
    ]


@functools.lru_cache(maxsize=256)
def _nodes(program: Lowered) -> tuple[Expr, ...]:
    roots = [*program.outputs]
    for p in program.passes:
        roots += [*p.feeds, *p.fold.reductions, *p.fold.scales]
    return tuple(topological(roots))


@functools.lru_cache(maxsize=256)
def _letters(program: Lowered) -> tuple[str, ...]:
    """The letters of vectors that may have zeros behind them."""
    nodes = _nodes(program)
    sizes = {str(e.attrs[0]) for e in nodes if e.op == "size"}
    found = dict.fromkeys(str(e.feature) for e in nodes if e.op == "input" and e.feature is not None)
    seen = {str(v.feature) for e in nodes if not _keeps_zeros(e) for v in (e, *e.args) if v.feature is not None}
    return tuple(f for f in found if f not in seen and f not in sizes and not f.lstrip("#").isdigit())


def _keeps_zeros(e: Expr) -> bool:
    vectors = [a for a in e.args if a.feature is not None]
    if e.op in ("add", "sub"):
        return len(vectors) in (0, 2)
    if e.op == "div":
        return not vectors or vectors == [e.args[0]]
    return (not vectors and e.feature is None) or e.op in (*_KEEPS_ZEROS, "mul")
