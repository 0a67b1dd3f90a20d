"""Gradients of numbers that are given per pair, over blocks: a kernel that walks lists stores each listed pair's number
where the argument has it.

A pair is written once, by the first of the entries that name it, with what the others add: all copies of a pair have
one number, but for what goes to the first of them alone. So nothing is added in memory, and there is one order. Where
the argument is broadcast along an axis, its gradient is a sum over that axis, as any other. Along batch dimensions it
is added up, one element after the other, so that nothing larger than the argument is held.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ....program import constructors
from ....program.constructors import apply
from ....program.expression import Expr, const, reduce_node, topological
from ....program.lower import Fold
from ....reductions import kind_of
from ...common import bounded_cache
from ...common.evaluate import Sizes, restore_domain
from ...common.subproblem import choose_leaves, keep_reductions
from .lists import COPIED

Launch = Callable[..., list[Tensor]]  # of a fold, leaves and sizes, and the element of each batch dimension (None: all)


def find_gradients(fold: Fold) -> tuple[int, ...]:
    """The places of such reductions; over edges, numbers of pairs are numbers of entries, and pages have none."""
    if fold.domain is None or fold.domain.attrs[0][0] != "blocks":
        return ()
    return tuple(k for k, r in enumerate(fold.reductions) if kind_of(r).per_pair)


def run(
    fold: Fold, leaves: Sequence[Any], sizes: Sizes, places: Sequence[int], launch: Launch, write: Launch
) -> list[Tensor]:
    """Run a fold with such reductions at ``places``. ``launch`` runs any other fold over lists, ``write`` one such
    reduction in one kernel."""
    found: dict[tuple[Expr, int], Tensor] = {}
    others = tuple(k for k in range(len(fold.reductions)) if k not in places)
    if others:
        rest = keep_reductions(fold, others)
        found |= dict(zip(rest.outputs, launch(rest, choose_leaves(fold, leaves, rest), sizes), strict=True))
    for k in places:
        one = keep_reductions(fold, (k,))
        found[one.outputs[0]] = _run_gradient(one, choose_leaves(fold, leaves, one), sizes, launch, write)
    return [found[o] for o in fold.outputs]


def _run_gradient(fold: Fold, leaves: Sequence[Any], sizes: Sizes, launch: Launch, write: Launch) -> Tensor:
    """The gradient of an argument ``[*batch, rows, cols]``, of which any may be 1."""
    given = leaves[fold.leaves.index(fold.reductions[0].args[1])]
    shape = (1,) * (len(sizes.batch) + 2 - given.dim()) + tuple(given.shape)
    for over, dim, length in (("cols", -1, sizes.cols), ("rows", -2, sizes.rows)):
        if shape[dim] == 1 < length:
            (summed,) = launch(_sum_over(fold, over), leaves, sizes)
            return summed.unsqueeze(dim).sum_to_size(shape).view(given.shape)
    assert fold.domain is not None
    (form,) = fold.domain.attrs
    tensors = [leaves[fold.leaves.index(a)] for a in fold.domain.args]

    def count_copies() -> Tensor:
        lists = restore_domain(form, tensors).listing(sizes.rows, sizes.cols)
        return lists.copies(-(-sizes.cols // lists.col_block)).int()

    asked = ("copies", form, sizes.rows, sizes.cols, *tensors)
    copies = bounded_cache.compute_once(asked, count_copies, sizes.device)
    one, own = _add_copies(fold), [*leaves, copies.view(*(1,) * len(sizes.batch), -1)]
    repeated = [n if m == 1 < n else 0 for m, n in zip(shape, sizes.batch, strict=False)]
    if not any(repeated):
        return write(one, own, sizes)[0]
    one = replace(one, raised=True)
    parts: Tensor | None = None
    for at in itertools.product(*([*range(n)] if n else [None] for n in repeated)):
        (part,) = write(one, own, sizes, at)
        parts = part if parts is None else parts.add_(part)
    assert parts is not None
    return parts.view(given.shape)


@functools.lru_cache(maxsize=1024)
def _sum_over(fold: Fold, over: str) -> Fold:
    (r,) = fold.reductions
    return replace(fold, reductions=(reduce_node("sum", over, (), r.args[:1]),))


@functools.lru_cache(maxsize=1024)
def _add_copies(fold: Fold) -> Fold:
    """The fold whose number of a pair is that of all its copies."""
    (r,) = fold.reductions
    number, *like = r.args
    once = [e for e in topological([number]) if e.op == "listed_once"]
    at = [dict.fromkeys(once, const(is_first)) for is_first in (True, False)]
    first, other = (constructors.substitute((number,), changed)[0] for changed in at)
    more = apply("cast", apply("sub", COPIED, 1), to="float")
    total = apply("add", first, apply("where", apply("gt", COPIED, 1), apply("mul", more, other), 0.0))
    made = reduce_node("pair", r.attrs[1], r.attrs[2], (total, *like))
    return replace(fold, leaves=(*fold.leaves, COPIED), reductions=(made,), gradients=())
