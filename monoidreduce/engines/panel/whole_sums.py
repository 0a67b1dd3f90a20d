"""Sums of vectors as whole products: the weights of a panel are written over its inner products, then multiplied.

On a CPU. A gradient of a vocabulary head is Σ weight × vector over both axes. Tiles of torch calls write the weights
of a tile, and multiply it, hundreds of times for each panel; here one generated C++ function writes those of all tiles
where their inner products were, and each sum is one matrix product.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ...program.constructors import contractions
from ...program.expression import Expr, const, reduce_node, topological
from ...program.lower import Fold, conditions, is_idle
from ...reductions.pair import EVERY


@dataclass(frozen=True)
class WholeSums:
    """Sums of vectors, in two steps."""

    weights: Fold  # writes a number per pair for each of ``homes``
    homes: tuple[Expr, ...]  # the inner products (leaves per pair) where weights are written
    terms: tuple[tuple[tuple[int, Expr], ...], ...]  # of each sum: which weight is multiplied with which vectors


@functools.lru_cache(maxsize=256)
def find_whole_sums(fold: Fold, free: tuple[Expr, ...]) -> WholeSums | None:
    """A fold as whole products; None if it has another form. ``free``: its inner products that nothing else reads."""
    weights: dict[Expr, int] = {}
    terms = []
    for r in fold.reductions:
        if r.attrs[0] != "sum" or r.args[0].dtype != "float" or r.args[0].feature is None:
            return None
        parts = contractions(r.args[0], r.attrs[1])
        if any(c.walk or c.vector is None or c.minus is not None or not c.weight.is_pair for c in parts):
            return None
        terms.append(tuple((weights.setdefault(c.weight, len(weights)), c.vector) for c in parts if c.vector))
    if len(weights) > len(free) or _hides_pairs(fold):
        return None
    written = tuple(reduce_node("pair", "neither", (EVERY,), (w, e)) for w, e in zip(weights, free, strict=False))
    used = set(topological(written))
    leaves = tuple(e for e in fold.leaves if e in used)
    return WholeSums(Fold(leaves, written, exact=fold.exact), free[: len(weights)], tuple(terms))


def _hides_pairs(fold: Fold) -> bool:
    """Whether some tiles need no products at all (a causal condition): tiles that are left out are worth more."""
    return any(
        all(is_idle(r, {c: const(truth)}) for r in fold.reductions) for c in conditions(fold) for truth in (False, True)
    )
