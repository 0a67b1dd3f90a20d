"""A fold as a registered torch operator, ``torch.ops.monoidreduce.fold``: what compilers and tracers see of us.

The operator has no gradient of its own (``autograd.py`` puts it under one), no state, and outputs that alias nothing.
A fold travels as its name: a digest of its text, so that a graph kept on disk means the same fold in the next
process, or is not found in its cache at all.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..engines.common import unchanged_tensors
from ..engines.common.evaluate import Form, Sizes, pair_result_form, result_form
from ..errors import EngineError
from ..program.lower import Fold, digest_fold
from ..reductions import kind_of
from .registry import FOLDERS

_SCHEMA = (
    "fold(str fold, str engine, Tensor[] leaves, Scalar[] numbers, int[] places, SymInt rows, SymInt cols, "
    "SymInt[] batch, str letters, SymInt[] lengths, ScalarType compute, Device device) -> Tensor[]"
)
_lock = threading.Lock()
_FOLDS: dict[str, Fold] = {}  # kept: a compiled graph may hold the name for as long as the process lives

library = torch.library.Library("monoidreduce", "DEF")
library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))


def call(fold: Fold, engine: str, leaves: Sequence[Any], sizes: Sizes) -> list[Tensor]:
    """Run a fold through the operator: as an engine would be called."""
    numbers = {k: v for k, v in enumerate(leaves) if not isinstance(v, Tensor)}
    return torch.ops.monoidreduce.fold(
        name(fold),
        engine,
        [v for v in leaves if isinstance(v, Tensor)],
        list(numbers.values()),
        list(numbers),
        sizes.rows,
        sizes.cols,
        list(sizes.batch),
        ",".join(sizes.letters),
        list(sizes.letters.values()),
        sizes.compute,
        sizes.device,
    )


def _run(fold: str, engine: str, *given: Any) -> list[Tensor]:
    known, leaves, sizes = _opened(fold, *given)
    with torch.no_grad(), unchanged_tensors.allocate_in_own_thread():  # gradients are autograd.py's business
        found = FOLDERS[engine](known, leaves, sizes)
    # kernels may hand vectors back in 16 bits and in the memory order of their inputs, others do not: a graph is told
    # one type and one layout for all engines
    return [t.to(dtype).contiguous() for t, (_, dtype) in zip(found, shapes(known, leaves, sizes), strict=True)]


def _fake(fold: str, engine: str, *given: Any) -> list[Tensor]:
    known, leaves, sizes = _opened(fold, *given)
    return [torch.empty(shape, dtype=dtype, device=sizes.device) for shape, dtype in shapes(known, leaves, sizes)]


def _opened(
    fold: str,
    leaves: list[Tensor],
    numbers: list[Any],
    places: list[int],
    rows: int,
    cols: int,
    batch: list[int],
    letters: str,
    lengths: list[int],
    compute: torch.dtype,
    device: torch.device,
) -> tuple[Fold, list[Any], Sizes]:
    """What an engine is called with, from what the operator is."""
    named = dict(zip(letters.split(","), lengths, strict=True)) if lengths else {}
    sizes = Sizes(rows, cols, tuple(batch), named, device, compute)
    return _known(fold), _joined(leaves, numbers, places), sizes


def _joined(leaves: list[Tensor], numbers: list[Any], places: list[int]) -> list[Any]:
    """Tensors and numbers in the order of the fold's leaves."""
    given: list[Any] = list(leaves)
    for place, number in zip(places, numbers, strict=True):
        given.insert(place, number)
    return given


def _known(name: str) -> Fold:
    if name not in _FOLDS:
        raise EngineError(
            detail="a graph from another process names a fold that this process has not met",
            fix="Call the op once on any tensors of these types, with gradients if the graph has them, then the graph",
        )
    return _FOLDS[name]


def shapes(fold: Fold, leaves: list[Any], sizes: Sizes) -> list[Form]:
    """Shape and type of each of a fold's results."""
    return [
        pair_result_form(leaves[fold.leaves.index(r.args[1])], sizes)
        if kind_of(r).per_pair
        else result_form(r, k, sizes)
        for r, k in fold.outputs
    ]


library.impl("fold", _run, "CompositeExplicitAutograd")
torch.library.register_fake("monoidreduce::fold", _fake, lib=library)


def in_front(fold: Fold, leaves: Sequence[Any], dims: Sequence[int | None], size: int) -> list[Any]:
    """Leaves with a mapped dimension as the first batch dimension.

    Those that do not have it broadcast; what is given per pair is expanded, for its gradient is written in its shape.
    """
    found: list[Any] = []
    for e, v, d in zip(fold.leaves, leaves, dims, strict=True):
        if isinstance(v, Tensor):
            v = v.unsqueeze(0) if d is None else v.movedim(d, 0)
            v = v.expand(size, *v.shape[1:]) if d is None and e.is_pair else v
        found.append(v)
    return found


def _vmap(info: Any, dims: tuple, fold: str, engine: str, leaves: list[Tensor], *rest: Any) -> tuple:
    numbers, places, rows, cols, batch, *others = rest
    at = _joined(dims[2], [None] * len(places), places)
    moved = in_front(_known(fold), _joined(leaves, numbers, places), at, info.batch_size)
    found = torch.ops.monoidreduce.fold(
        fold,
        engine,
        [v for v in moved if isinstance(v, Tensor)],
        numbers,
        places,
        rows,
        cols,
        [info.batch_size, *batch],
        *others,
    )
    return found, [0] * len(found)


torch.library.register_vmap("monoidreduce::fold", _vmap, lib=library)


@functools.lru_cache(maxsize=4096)
def name(fold: Fold) -> str:
    """The name of a fold: a digest of its text, node by node."""
    found = digest_fold(fold) + "-exact" * fold.exact
    with _lock:
        _FOLDS[found] = replace(fold, gradients=())  # a graph is told one shape for all engines
    return found
