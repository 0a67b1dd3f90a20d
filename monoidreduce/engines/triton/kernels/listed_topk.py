"""A top-k over lists of columns whose list does not fit in registers: its best, then the best behind these, and so on.

A launch keeps as many as fit in registers, of the pairs behind the last one that the launches before it found: of
lower numbers, of equal ones at later places, and copies of itself that a list still has. All launches are of one
kernel, which computes a pair to the same bits in each of them. Besides the results nothing is held, however long lists
are, and nothing waits for the host. Pairs are computed in every launch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....program.expression import node, reduce_node
from ....program.lower import Fold
from ....reductions import kind_of, outputs_of
from ....reductions.best import worst
from ....reductions.topk import EMPTY, MOST_IN_REGISTERS
from ...common.evaluate import Sizes
from ...common.subproblem import add_unlisted
from .large_topk import Run

_NOWHERE = 2**31 - 1  # behind every place of an int32


def select(fold: Fold, leaves: Sequence[Any], sizes: Sizes, launch: Run) -> list[Tensor]:
    """The results of a fold of one top-k over lists. ``launch``: runs a fold over lists by its own kernels."""
    (r,) = fold.reductions
    _, over, (k, largest) = r.attrs
    kind, own = kind_of(r), functools.partial(torch.full, device=sizes.device)
    shape = (*sizes.batch, sizes.rows if over == "cols" else sizes.cols)
    dtype = sizes.compute if outputs_of(r)[0][1] == "float" else torch.int64
    first = worst(dtype, not largest) if dtype is torch.int64 else math.nan if largest else -math.inf
    value, place = own(shape, first, dtype=dtype), own(shape, -1, dtype=torch.int64)  # before all pairs
    copies = taken = torch.zeros_like(place)
    parts = []
    for _ in range(0, k, MOST_IN_REGISTERS):
        found = launch(_find_next(fold), [*leaves, value, place, copies, taken], sizes)
        values, places = (t.squeeze(0) for t in kind.merge(r.attrs[2], [t.unsqueeze(0) for t in found]))
        parts.append([values, places])
        end, last = values[..., -1], places[..., -1]
        again = (last == place) & _are_equal(end, value)
        same = (places == last.unsqueeze(-1)) & _are_equal(values, end.unsqueeze(-1))
        copies = same.sum(-1) + torch.where(again, copies, 0)
        taken = taken + (places == -1).sum(-1)
        value, place = end, torch.where(last == EMPTY, _NOWHERE, last)
    results = [torch.cat(ts, -1)[..., :k] for ts in zip(*parts, strict=True)]
    values, places = kind.close(r.attrs[2], results)
    assert fold.domain is not None
    given = [leaves[fold.leaves.index(a)] for a in fold.domain.args]
    return add_unlisted(fold, [values, places.masked_fill(values == worst(dtype, largest), -1)], given, sizes)


@functools.lru_cache(maxsize=1024)
def _find_next(fold: Fold) -> Fold:
    """The fold that finds the best behind some of the only reduction of ``fold``."""
    (r,) = fold.reductions
    _, over, (_, largest) = r.attrs
    names = {"last_value": r.args[0].dtype, "last_place": "int", "last_copies": "int", "last_taken": "int"}
    last = tuple(
        node("leaf", (), (n,), rows=over == "cols", cols=over == "rows", feature=None, dtype=dtype)
        for n, dtype in names.items()
    )
    one = reduce_node("next_best", over, (MOST_IN_REGISTERS, largest), (*r.args, *last))
    return replace(fold, leaves=(*fold.leaves, *last), reductions=(one,))


def _are_equal(one: Tensor, other: Tensor) -> Tensor:
    return (one == other) | ((one != one) & (other != other))
