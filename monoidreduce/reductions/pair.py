"""``pair``: folds nothing. It writes a number per pair, in the shape of an argument that was given per pair.

Fields: the number, and that argument. Where the argument is broadcast, the numbers are summed over what was. Gradients
make this kind, and panels that are written in place (``engines/panel.py``); its ``over`` is neither axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..program import intervals as iv
from ..program.expression import Expr
from .base import Accumulator, FastForm, Lines, Offset, Outputs, Reads, Reduction, State

EVERY = "every"  # the parameter of a result that begins with anything: zeros are written too


class PairAccumulator(Accumulator):
    """A number per pair, added to ``into`` [b, M, N]; where that is broadcast (stride 0), to its one element."""

    def start(self) -> None:
        pass

    def step(self, reducer: Any, owned: tuple[bool, ...], tile: Any, at: slice, offset: Offset) -> None:
        assert self.into is not None
        row, col = tile.offset
        value = tile.full(reducer.roots[0])
        here = self.into[:, row : row + value.shape[1], col : col + value.shape[2]]
        for dim in range(3):
            if here.stride(dim) == 0 and here.shape[dim] > 1:
                here, value = here.narrow(dim, 0, 1), value.sum(dim, keepdim=True)
        here += value

    def finish(self) -> list[Tensor]:
        return []


class PairLines(Lines):
    """A number for each entry of lists (``cols=``), stored as soon as it is computed; other pairs have no kernel."""

    def start(self) -> list[str]:
        return []

    def step(self, fields: tuple[Expr, ...]) -> None:
        self.v.store_entries(f"out{self.first_result}", self.v.full(fields[0]))

    def finish(self) -> list[tuple[list[str], Any]]:
        return [([], None)]


class Pair(Reduction):
    """Every pair is in one part: it is written there, and never merged."""

    name = "pair"
    fast_forms = FastForm.CPP | FastForm.EDGES | FastForm.ALL_LISTS & ~FastForm.SPLIT_LISTS
    per_pair = True
    accumulator, lines = PairAccumulator, PairLines
    plain_ops, combine_ops = 1, 0

    def outputs(self, fields: tuple[Expr, ...], params: tuple) -> Outputs:
        return [(None, "float")]

    def pullback(self, over: str, params: tuple, fields: list, results: list, g: list) -> list:
        return [g[0], None]

    def idle(self, params: tuple, fields: list[iv.Interval]) -> bool:
        return fields[0] == iv.FALSE and not self.writes_all(params)

    def writes_all(self, params: tuple) -> bool:
        return EVERY in params

    def identity(self, params: tuple) -> tuple[float, ...]:
        return (0.0,)

    def merge(self, params: tuple, state: State) -> State:
        return state

    def tile_reads(self, fields: tuple[Expr, ...], over: str) -> Reads:
        return fields[:1], ()

    def tile_width(self, r: Expr, size_of: Callable[[str], int]) -> int:
        return 1

    def tile_bytes(self, memory: Any, params: tuple, reads: Reads, owned: tuple[bool, ...]) -> int:
        return 0

    def no_kernel(self, r: Expr) -> str:
        return "pair has no kernel"

    def count_pair(self, counter: Any, r: Expr) -> None:
        counter.count_value(r.args[0])
        counter.plain += self.plain_ops

    def exchanged_bytes(self, r: Expr, width: Callable[[Expr], int], item: int) -> tuple[int, int]:
        return 0, 0  # it is where it belongs
