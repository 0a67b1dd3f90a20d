"""Memory estimate of a tile of the eager engine: its buffers, and the temporaries that torch allocates.

Counted from the tile's code, step by step, in bytes per pair; ``tests/unit/plan/test_cost.py`` compares it with what a
run allocates.
"""

from __future__ import annotations

from ...program.constructors import ONE
from ...program.contract import Contraction
from ...program.expression import Expr, topological
from ...program.lower import Fold
from ...reductions import kind_of
from ..common.evaluate import Sizes
from .tile_code import Step, TileCode
from .tile_run import FEW_FEATURES

_OUT_OF_PLACE = ("cast", "floor_divide", "isnan", "isinf", "logsigmoid", "detach")  # computed out of place, then copied
RANDOM_BYTES = 9 * 8 * 2**16  # bytes held while random numbers are drawn, for any tile


def bytes_per_pair(fold: Fold, code: TileCode, sizes: Sizes) -> int:
    """Bytes that a tile holds per pair."""
    item = {"float": sizes.compute.itemsize, "int": 8, "bool": 1}
    besides = [_temporary_bytes(s, fold, sizes, item) for s in code.steps]
    return sum(item[k] for k in code.slots) + max([0, *besides])


def fixed_bytes(code: TileCode) -> int:
    """Bytes that do not grow with the tile."""
    return RANDOM_BYTES if any(s.node is not None and s.node.op in ("gumbel", "uniform") for s in code.steps) else 0


def _temporary_bytes(step: Step, fold: Fold, sizes: Sizes, item: dict[str, int]) -> int:
    if step.reducer is not None:
        r, reads = fold.reductions[step.reducer.place], (step.reducer.roots, step.reducer.values)
        return kind_of(r).tile_bytes(_TileSizes(sizes, item), r.attrs[2], reads, step.owned)
    e = step.node
    if e is None:
        return 0
    if e.op == "sqdist":
        return 2 * item["float"]  # two differences
    if e.op == "fsum":
        return _feature_walk_bytes(e.args[0], item)
    return item[e.dtype] if e.op in _OUT_OF_PLACE and e.is_pair else 0


def _feature_walk_bytes(value: Expr, item: dict[str, int]) -> int:
    """Bytes per pair of evaluating a vector per pair one feature at a time."""
    inside = topological([value], stop=lambda n: n.feature is None or not n.is_pair)
    return sum(item[n.dtype] for n in inside if n.is_pair and n.feature is not None)


class _TileSizes:
    """The sizes that ``Reduction.tile_bytes`` reads."""

    def __init__(self, sizes: Sizes, item: dict[str, int]):
        self.sizes, self.item, self.wide, self.size_of = sizes, item, item["float"], sizes.of

    def contraction(self, c: Contraction, weighted: bool) -> int:
        """Bytes per pair beside a contraction; ``weighted``: its weight is multiplied by another."""
        if c.walk:
            return _feature_walk_bytes(c.weight, self.item) + (self.wide if weighted else 0)
        few = c.vector is not None and self.sizes.of(str(c.vector.feature)) <= FEW_FEATURES
        if c.minus is not None and few:
            return 2 * self.wide
        return self.wide if weighted and c.weight is not ONE else 0
