"""Folds over listed blocks on a CPU, where an engine walks over tiles and leaves out those that no list names.

Nothing is gathered, and both directions of a gradient are one walk. Lists with a block that stands twice, blocks that
are too small for a tile, and what is not folded pair by pair are left to gathered pieces (``run.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...program import constructors
from ...program.constructors import LISTED
from ...program.expression import Expr, const, topological
from ...program.lower import Fold
from ...reductions import kind_of
from ..common import bounded_cache, subproblem
from ..common.evaluate import Sizes, restore_domain
from ..common.subproblem import ChosenBlocks

Walk = Callable[[Fold, list[Any], Sizes, ChosenBlocks], list[Tensor] | None]
_LEAST = 16  # indices of a block
_MOST = 2**24  # blocks of a table


def run(
    fold: Fold, given: Mapping[Expr, Any], sizes: Sizes, tensors: Sequence[Tensor], walk: Walk
) -> list[Tensor] | None:
    """Run a fold over listed blocks; None where ``walk`` cannot."""
    assert fold.domain is not None
    (form,) = fold.domain.attrs
    if form[0] != "blocks" or sizes.device.type != "cpu" or min(form[1:3]) < _LEAST:
        return None
    whole = _drop_lists(fold)
    if whole is None or any(type(t) is not Tensor for t in tensors) or torch._C._len_torch_dispatch_stack():
        return None
    make = functools.partial(_make_table, form, tensors, sizes.rows, sizes.cols)
    chosen = bounded_cache.compute_once(("chosen", form, sizes.rows, sizes.cols, *tensors), make, sizes.device)
    found = None if chosen is None else walk(whole, [given[e] for e in whole.leaves], sizes, chosen)
    return None if found is None else subproblem.add_unlisted(fold, found, tensors, sizes)


@functools.lru_cache(maxsize=1024)
def _drop_lists(fold: Fold) -> Fold | None:
    """The fold of all pairs; None where some reduction is not one of pairs, or depends on how many there are."""
    replaced = {e: const(True) for e in topological(fold.reductions) if e.op in LISTED and e.op != "listed_position"}
    reductions = constructors.substitute(fold.reductions, replaced)
    scales = constructors.substitute(fold.scales, replaced)
    for r in reductions:
        pairs = kind_of(r).per_pair or (any(a.rows for a in r.args) and any(a.cols for a in r.args))
        if not pairs or kind_of(r).gathers or r.attrs[0] == "moments":
            return None
    used = set(topological([*reductions, *scales]))
    if constructors.find_listed([*reductions, *scales]) is not None or len(set(reductions)) < len(reductions):
        return None
    new = dict(zip(fold.reductions, reductions, strict=True))
    gradients = tuple((new[r], e) for r, e in fold.gradients)
    leaves = tuple(e for e in fold.leaves if e in used or any(e is g for _, g in gradients))
    return Fold(leaves, tuple(reductions), tuple(scales), raised=True, exact=fold.exact, gradients=gradients)


def _make_table(form: tuple, tensors: Sequence[Tensor], rows: int, cols: int) -> ChosenBlocks | None:
    lists = restore_domain(form, tensors).listing(rows, cols)
    blocks = -(-cols // lists.col_block)
    if not 0 < lists.groups * blocks <= _MOST:
        return None
    times = lists.items.new_zeros(lists.groups * blocks, dtype=torch.int32)
    owner = lists.owners().long()
    at = (owner * blocks + lists.items)[owner < lists.groups]
    times.index_add_(0, at, torch.ones_like(at, dtype=torch.int32))
    if not len(at) or int(times.max()) > 1:
        return None
    table = times.to(torch.int8).view(*lists.batch, -1, blocks)
    return ChosenBlocks(table, lists.row_block, lists.col_block, len(at) / len(times))
