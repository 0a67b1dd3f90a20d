"""A fold as a registered torch operator, ``torch.ops.monoidreduce.fold``: what compilers and tracers see of us.

The operator has no gradient of its own (``autograd.py`` puts it under one), no state, and outputs that alias nothing.
A fold travels as its name: a digest of its text, so that a graph kept on disk means the same fold in the next
process, or is not found in its cache at all.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engines.common import bounded_cache
from ..engines.common.evaluate import (
    Form,
    Sizes,
    pair_result_form,
    result_form,
    sum_gradients,
    summed_batch,
    traced_length,
)
from ..engines.common.matmul import SIXTEEN
from ..errors import EngineError
from ..plan import settings
from ..program.lower import Fold, digest_fold
from ..reductions import kind_of
from .dispatch import FOLDERS

# The sizes of a call as an operator's arguments
SIZES = "SymInt rows, SymInt cols, SymInt[] batch, str letters, SymInt[] lengths, ScalarType compute, Device device"
# The values of a call whose other properties have a name (:class:`FixedSizes`), and its lengths
VALUES = "Tensor[] tensors, Scalar[]? numbers, SymInt[] lengths"
_SCHEMA = f"fold(str fold, str engine, Tensor[] leaves, Scalar[]? numbers, int[] places, {SIZES}) -> Tensor[]"
# Inductor gives the operators tensors with the strides that they were traced with and copies nothing to contiguous;
# before torch 2.8 or so, with strides of the same order.
TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))
_lock = threading.Lock()
_FOLDS: dict[str, Fold] = {}  # kept: a compiled graph may hold the name for as long as the process lives

library = torch.library.Library("monoidreduce", "DEF")


def register_operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an operator of torch: what it runs, and the results that a compiler sees.

    In one place, since torch looks for the source of each line that registers such results: ten milliseconds a file."""
    operator = schema.partition("(")[0]
    library.define(schema, tags=TAGS)
    library.impl(operator, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"monoidreduce::{operator}", fake, lib=library)


def call(fold: Fold, engine: str, leaves: Sequence[Any], sizes: Sizes) -> list[Tensor]:
    """Run a fold through the operator: as an engine would be called."""
    return torch.ops.monoidreduce.fold(name_fold(fold), engine, *split_values(leaves), *write_sizes(sizes))


def split_values(values: Sequence[Any]) -> tuple[list[Tensor], list[Any] | None, list[int]]:
    """Values as an operator's arguments: the tensors, the numbers (None, not an empty list, which ``torch.export.save``
    does not write) and the places of these."""
    numbers = {k: v for k, v in enumerate(values) if not isinstance(v, Tensor)}
    return [v for v in values if isinstance(v, Tensor)], list(numbers.values()) or None, list(numbers)


def write_sizes(sizes: Sizes) -> tuple:
    """Sizes as an operator's arguments (:data:`SIZES`)."""
    letters = sizes.letters
    lengths = list(letters.values())
    return sizes.rows, sizes.cols, list(sizes.batch), ",".join(letters), lengths, sizes.compute, sizes.device


def read_sizes(
    rows: int,
    cols: int,
    batch: Sequence[int],
    letters: str,
    lengths: Sequence[int],
    compute: torch.dtype,
    device: torch.device,
) -> Sizes:
    """The inverse of :func:`write_sizes`."""
    named = dict(zip(letters.split(","), lengths, strict=True)) if lengths else {}
    return Sizes(rows, cols, tuple(batch), named, device, compute)


class FixedSizes(NamedTuple):
    """What is fixed of the sizes of a call in a compiled graph; the lengths are the rest."""

    letters: tuple[str, ...]
    compute: torch.dtype

    @staticmethod
    def of(sizes: Sizes) -> FixedSizes:
        return FixedSizes(tuple(sizes.letters), sizes.compute)

    def read_lengths(self, lengths: Sequence[int], device: torch.device) -> Sizes:
        """The inverse of :func:`write_lengths`."""
        first = 2 + len(self.letters)
        letters = dict(zip(self.letters, lengths[2:first], strict=True))
        return Sizes(lengths[0], lengths[1], tuple(lengths[first:]), letters, device, self.compute)


def write_lengths(sizes: Sizes) -> list[int]:
    """The lengths of a call: rows, columns, features, batch."""
    return [sizes.rows, sizes.cols, *sizes.letters.values(), *sizes.batch]


def fix_lengths(sizes: Sizes) -> Sizes:
    """Sizes whose lengths are numbers: where a compiler leaves one open, the number that it was traced with, without a
    guard."""
    letters = {name: traced_length(length) for name, length in sizes.letters.items()}
    rows, cols, *batch = map(traced_length, (sizes.rows, sizes.cols, *sizes.batch))
    return replace(sizes, rows=rows, cols=cols, batch=tuple(batch), letters=letters)


def _run(fold_name: str, engine: str, *given: Any) -> list[Tensor]:
    fold, leaves, sizes = _open_arguments(fold_name, *given)
    with torch.no_grad(), bounded_cache.allocate_in_own_thread():  # gradients are autograd.py's business
        found = FOLDERS[engine](fold, leaves, sizes)
    # kernels hand vectors back in 16 bits and in the memory order of their inputs, others do not: a graph is told one
    # type and one layout for all engines
    forms = _list_forms_of_engine(fold, engine, leaves, sizes)
    found = sum_gradients(fold, found, leaves, sizes)
    return [t.to(dtype).contiguous() for t, (_, dtype) in zip(found, forms, strict=True)]


def _make_fake(fold_name: str, engine: str, *given: Any) -> list[Tensor]:
    fold, leaves, sizes = _open_arguments(fold_name, *given)
    forms = _list_forms_of_engine(fold, engine, leaves, sizes)
    return [torch.empty(shape, dtype=dtype, device=sizes.device) for shape, dtype in forms]


def _list_forms_of_engine(fold: Fold, engine: str, leaves: list[Any], sizes: Sizes) -> list[Form]:
    kernels = engine in ("auto", "triton") and settings.kernels_run_on(sizes.device)
    return list_narrow_result_forms(fold, leaves, sizes) if kernels else list_result_forms(fold, leaves, sizes)


def _open_arguments(
    fold_name: str, leaves: list[Tensor], numbers: list[Any] | None, places: list[int], *sizes: Any
) -> tuple:
    """What an engine is called with, from what the operator is: the fold, its leaves and the sizes."""
    return _find_fold(fold_name), join_values(leaves, numbers, places), read_sizes(*sizes)


def join_values(tensors: Sequence[Any], numbers: Sequence[Any] | None, places: Sequence[int]) -> list[Any]:
    """The inverse of :func:`split_values`."""
    given: list[Any] = list(tensors)
    for place, number in zip(places, numbers or (), strict=True):
        given.insert(place, number)
    return given


def unknown_name_error(what: str, how: str = "with gradients if the graph has them") -> EngineError:
    """The error of a graph that names ``what``, a fold or a program, before this process has met it."""
    return EngineError(
        detail=f"a graph from another process names a {what} that this process has not met",
        fix=f"Call the op once on any tensors of these types, {how}, then the graph",
    )


def _find_fold(name: str) -> Fold:
    if name not in _FOLDS:
        raise unknown_name_error("fold")
    return _FOLDS[name]


def list_result_forms(fold: Fold, leaves: list[Any], sizes: Sizes) -> list[Form]:
    """Shape and type of each of a fold's results."""
    return [
        pair_result_form(leaves[fold.leaves.index(r.args[1])], sizes)
        if kind_of(r).per_pair
        else result_form(r, k, sizes, summed_batch(fold, r, leaves, sizes) if _sums_gradients(fold) else None)
        for r, k in fold.outputs
    ]


def list_narrow_result_forms(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> list[Form]:
    """The same where kernels run: sums of 16-bit vectors are stored in 16 bits."""
    made = list_result_forms(fold, list(leaves), sizes)
    pairs = zip(fold.leaves, leaves, strict=True)
    vectors = [v.dtype for e, v in pairs if e.feature is not None and isinstance(v, Tensor)]
    narrow = next((d for d in vectors if d in SIXTEEN), None)
    if narrow is None or fold.raised:
        return made
    tail = len(sizes.batch) + 1
    sums = [kind_of(r).sums_vectors and len(made[at][0]) > tail for at, (r, _) in enumerate(fold.outputs)]
    return [(shape, narrow if summed else dtype) for (shape, dtype), summed in zip(made, sums, strict=True)]


register_operator(_SCHEMA, _run, _make_fake)


def move_batch_to_front(fold: Fold, leaves: Sequence[Any], dims: Sequence[int | None], size: int) -> list[Any]:
    """Leaves with a mapped dimension as the first batch dimension.

    Those that do not have it broadcast; what is given per pair is expanded, for its gradient is written in its shape,
    and so are all tensors of a domain where one is mapped, for each element then has lists of its own.
    """
    found: list[Any] = []
    lists = () if fold.domain is None else fold.domain.args
    mapped = any(d is not None for e, d in zip(fold.leaves, dims, strict=True) if e in lists)
    for e, v, d in zip(fold.leaves, leaves, dims, strict=True):
        if isinstance(v, Tensor):
            v = v.unsqueeze(0) if d is None else v.movedim(d, 0)
            v = v.expand(size, *v.shape[1:]) if d is None and (e.is_pair or (mapped and e in lists)) else v
        found.append(v)
    return found


def _vmap(info: Any, dims: tuple, fold_name: str, engine: str, leaves: list[Tensor], *rest: Any) -> tuple:
    numbers, places, rows, cols, batch, *others = rest
    at = join_values(dims[2], [None] * len(places), places)
    moved = move_batch_to_front(_find_fold(fold_name), join_values(leaves, numbers, places), at, info.batch_size)
    found = torch.ops.monoidreduce.fold(
        name_fold(keep_batch(_find_fold(fold_name))),
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
def name_fold(fold: Fold) -> str:
    """The name of a fold: a digest of its text, node by node.

    A graph is told one shape for all engines: gradients are summed over the batch afterwards, by torch. Those of pages
    are summed by the fold, since a page has no memory for each sequence."""
    summed = _sums_gradients(fold)
    found = digest_fold(fold) + "-exact" * fold.exact
    if summed:
        found += "".join(f"-{fold.reductions.index(r)}.{fold.leaves.index(e)}" for r, e in fold.gradients)
    with _lock:
        _FOLDS[found] = fold if summed else keep_batch(fold)
    return found


def _sums_gradients(fold: Fold) -> bool:
    return bool(fold.gradients) and fold.domain is not None and fold.domain.attrs[0][0] == "pages"


@functools.lru_cache(maxsize=4096)
def keep_batch(fold: Fold) -> Fold:
    """The same fold, whose results are not summed over any batch dimension."""
    return replace(fold, gradients=())
