"""How much of the pairs a step on a GPU holds at once, and where: panels by rows or by columns, totals, weights.

Apart from ``kernel_step.py``, which does to a panel what is planned here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ....plan import budget, in_place_layout, panel_layout, row_blocks
from ....program.expression import Expr
from ...common import matmul, skip_small_tiles
from ...common.evaluate import Sizes
from ...panel.panel_program import Walk, fed
from ..codegen.kernel_spec import WIDEST
from ..schedules import spec_from_tensors
from . import epilogue, stored_weights
from .fuse_stages import groups, parts
from .lent_memory import aligned

_ROW = 32  # bytes: the numbers of a row of a panel
_SHARE = 32  # of the room, one part in so many, at most, is left to the numbers of all rows


@functools.lru_cache(maxsize=1024)
def _homes(
    walk: Walk, at: int, pairs: torch.dtype, weights: torch.dtype, compute: torch.dtype
) -> list[tuple[torch.dtype, Expr | int | None]]:
    """Where each weight of a stage goes: its type and the product it overwrites, else the number of a buffer.

    None for a weight that is a product itself, and is multiplied where it lies. ``pairs``: the type of a panel's
    products; ``weights``: that in which weights are multiplied; a number per pair that is sorted keeps its digits."""
    stage, cut = walk.stages[at], parts(walk.stages[at])
    product = dict(stage.products)
    multiplied = {c.weight for _, _, cs in cut.sums for c in cs}
    kinds = [weights if w in multiplied else pairs if w in product else compute for w in cut.weights]
    plain = [w in product and kind == pairs for w, kind in zip(cut.weights, kinds, strict=True)]
    kept = {product[w] for w, is_plain in zip(cut.weights, plain, strict=True) if is_plain}
    free = [f for f in walk.dying(at) if f not in kept]
    found: list[tuple[torch.dtype, Expr | int | None]] = []
    extra = 0
    for kind, is_plain in zip(kinds, plain, strict=True):
        if is_plain:
            found.append((kind, None))
        elif free and kind == pairs:
            found.append((kind, free.pop(0)))
        else:
            found.append((kind, extra))
            extra += 1
    return found


class Room:
    """A walk on sizes and types: what its stages need in memory."""

    def __init__(self, walk: Walk, sizes: Sizes, kinds: set[torch.dtype]):
        self.walk, self.sizes, self.given = walk, sizes, kinds
        self.parts = [parts(s) for s in walk.stages]
        self.groups = groups(walk)
        sixteen = kinds & set(matmul.SIXTEEN)
        self.narrow = sixteen.pop() if len(sixteen) == 1 else None
        # float16 logits may overflow, and what is computed on one side may leave its range: bfloat16 alone is stored
        self.stored = torch.bfloat16 if self.narrow is torch.bfloat16 else None
        self.kind = self.stored or sizes.compute
        self.fused: dict[bool, epilogue.Epilogue | None] = {}
        self._hold(self.kind)
        if walk.exact and not self.fuses():  # the vendor's products are rounded to the type of their panel
            self.fused = {False: None, True: None}
            self._hold(sizes.compute)

    def _hold(self, pairs: torch.dtype) -> None:
        """Panels of products of a type."""
        self.pairs, places = pairs, range(len(self.walk.stages))
        self.homes = [_homes(self.walk, at, pairs, self.kind, self.sizes.compute) for at in places]

    def fuses(self) -> bool:
        """Whether weights are written by products of our own, whatever the panels."""
        return all(self._fused(moved) is not None for moved in (False, True))

    def _fused(self, moved: bool) -> epilogue.Epilogue | None:
        """The whole walk as one product that writes weights over what would be its own place.

        Not where small tiles are left out: its weights lack a factor of their row.
        """
        if moved not in self.fused:
            alone = len(self.groups) == 1 and self.stored and epilogue.on(self.sizes.device)
            alone = alone and skip_small_tiles.now() is None
            found = epilogue.epilogue(self.walk, self.groups[0], moved) if alone else None
            self.fused[moved] = found if found and self._serves(found) else None
        return self.fused[moved]

    def _without(self) -> epilogue.Epilogue | None:
        """The same with each row's own column left out of the weights, where totals lie in row gradients: it is added
        to those, and to column gradients after all panels, so that 16 bits round it once."""
        if not self._lends():
            return None
        if self._is_sum():
            found = self._fused(True) and epilogue.epilogue(self.walk, self.groups[0], True, True)
        else:
            found = self._later(True)
        vectors = [dict(fed(self.walk.stages[-1]))[v] for v in self._vectors("rows")]
        return found if all(v.op in ("input", "leaf") for v in vectors) else None  # they are there anyway

    def _later(self, without: bool = False) -> epilogue.Epilogue | None:
        """The last stage by itself, as a product that writes weights of rows that are known: of logits that are not
        rounded, as those which the stages before it guess by."""
        last = self.groups[0][-1]
        return epilogue.epilogue(self.walk, range(last, last + 1), True, without, stows=True)

    def _stows(self) -> epilogue.Epilogue | None:
        """The whole walk as products of some columns at a time, whose weights are stowed until rows are known
        (``stored_weights.py``)."""
        fused = self._fused(False)
        if fused is None or fused.task.late is None or any(e.is_pair for e, _ in fused.feeds) or not self._lends():
            return None
        if len(self._widths("rows")) != 1 or len(self._widths("cols")) > 1 or self._later() is None:
            return None
        labels = fused.task.late.hit is not None
        found = epilogue.epilogue(self.walk, self.groups[0], True, stows=True)
        return found if labels == (self._without() is not None) else None

    def _serves(self, found: epilogue.Epilogue) -> bool:
        """Whether it has features enough, its weights go where the product would be, and are summed one way each."""
        last = self.groups[0][-1]
        wide = self.sizes.of(str(found.product.args[0].feature)) > WIDEST
        over = self.homes[last] == [(self.stored, found.product)]
        return wide and over and all(len(products) == 1 for _, _, products in self.parts[last].sums)

    def choose(self, room: int) -> panel_layout.Panels | None:
        """Whole rows where column totals stay accurate, else whole columns of a plain sum.

        Column totals of 16 bits are rounded once a panel: beyond a few panels they are kept in float32.
        """
        rows, cols, pair, totals = self.sizes.rows, self.sizes.cols, self._pair(), self._totals("rows")
        each = self._beside()
        whole = panel_layout.by_rows(rows, cols, pair, room, each=each)
        if totals and (whole is None or not self.stored or whole.count(rows) > panel_layout.ADDS):
            # a gradient of 16 bits, half as large, is not there before the panel is gone
            left = room - totals // 2 if totals <= room else 0
            whole = panel_layout.by_rows(rows, cols, pair, left, wide=True, each=each)
        if whole is not None and whole.pays(rows):
            return whole
        if not self._is_sum():
            fused = self._stows()
            stowing = self._tail(room, fused) if fused else None
            return panel_layout.Panels(rows, stowing.own, tail=stowing) if stowing else whole
        found_tail, few = self._tail(room), self._blocks(room)
        if found_tail and (not few or cols // len(found_tail.turns) * rows >= few.rows * few.cols):
            return panel_layout.Panels(rows, found_tail.own, tail=found_tail)  # panels are larger there, on average
        if not self._each("rows"):
            found = panel_layout.cut(rows, cols, pair, room, self._each("cols"))
            return panel_layout.Panels(*found, outer="rows") if found else whole
        found = panel_layout.cut(cols, rows, pair, room - self._totals("cols"), self._each("rows"))
        if few and (found is None or found[0] * found[1] < few.rows * few.cols):
            return few
        return panel_layout.Panels(*found[::-1]) if found else whole

    def chosen(self) -> panel_layout.Panels | None:
        """What would be chosen now, where nobody asks for a budget."""
        return self.choose(budget.allowed_bytes(lambda: matmul.free_memory(self.sizes.device), self.least()))

    def _blocks(self, room: int) -> panel_layout.Panels | None:
        """Blocks of rows, where column gradients of 16 bits are added to."""
        if not self.stored or not self._each("rows"):
            return None
        rows, cols = self.sizes.rows, self.sizes.cols
        most = panel_layout.ADDS if self._without() else panel_layout.BLOCKS
        strips = len(self._widths("rows")) == 1 == len(self._widths("cols"))
        room -= min(rows * _ROW, room // _SHARE)
        machine = row_blocks.Machine(
            spec_from_tensors.processors(self.sizes.device), (panel_layout.TILE[0], self._tile())
        )
        return row_blocks.blocks(rows, cols, self._held(), machine, room, most, strips)

    def _held(self) -> row_blocks.Held:
        """What blocks of rows hold, where column gradients are of 16 bits."""
        row, widths = self._each("cols"), (sum(self._widths("cols")), sum(self._widths("rows")))
        lent = row * self.kind.itemsize // self.sizes.compute.itemsize if self._lends() else 0
        return row_blocks.Held(self._pair(), row, self._each("rows"), lent, widths)

    def _lends(self) -> bool:
        """Whether row gradients lend their memory to float32 totals of blocks: not where small tiles are looked for,
        in whole panels, nor where totals would not be aligned."""
        return skip_small_tiles.now() is None and all(aligned(w, self.sizes.compute) for w in self._widths("cols"))

    def _tail(self, room: int, fused: epilogue.Epilogue | None = None) -> in_place_layout.Tail | None:
        """Turns that keep most of what they hold in the column gradients' memory, where these are of 16 bits.

        ``fused``: products whose weights are stowed there."""
        if not self.stored or not self._each("rows"):
            return None
        rows, cols = self.sizes.rows, self.sizes.cols
        line, column = max(self._widths("rows")) * self.stored.itemsize, rows * self._pair()
        half = rows * self.stored.itemsize // self.sizes.compute.itemsize // panel_layout.ROUND * panel_layout.ROUND
        lent = half if skip_small_tiles.now() is None else 0  # small tiles are looked for in whole panels
        given, stow = in_place_layout.Rows(rows, lent, self._each("cols")), None
        if fused is not None:
            tile = fused.plan("write_guessed", self.sizes).block_folded
            stow = in_place_layout.Stow(stored_weights.bytes_of_sums(fused, self.sizes), rows * line, tile)
        return in_place_layout.tail(cols, line, column, given, room, panel_layout.MOST, self._filling(rows), stow)

    def _filling(self, rows: int) -> Callable[[int], int]:
        return panel_layout.filling(rows, spec_from_tensors.processors(self.sizes.device), self._tile())

    def _tile(self) -> int:
        """Columns of a tile of the product that fills a panel of some columns."""
        fused = self._fused(True) or self._fused(False)
        return fused.plan("write_known", self.sizes).block_folded if fused else panel_layout.TILE[1]

    def least(self) -> int:
        rows, cols, pair = self.sizes.rows, self.sizes.cols, self._pair()
        row = (
            cols * pair + self._beside() + (self._totals("rows") if rows > panel_layout.ADDS or not self.stored else 0)
        )
        if not self._is_sum():
            return row
        each = max(self._each("rows"), self._each("cols"))  # directions can be done apart
        return min(row, panel_layout.SMALLEST * (each + pair * panel_layout.SMALLEST))

    def _pair(self) -> int:
        """Bytes held of one pair."""
        extra = [sum(kind.itemsize for kind, home in homes if isinstance(home, int)) for homes in self.homes]
        return max(1, len(self.walk.products) * self.pairs.itemsize + max([0, *extra]))

    def _beside(self) -> int:
        """Bytes held of a row besides its pairs: the sums of its tiles, and then its vectors times a factor."""
        fused = self._fused(False)
        if fused is None or not fused.guesses:
            return 0
        return _ROW + max(fused.each(self.sizes), max([0, *self._widths("rows")]) * self.kind.itemsize)

    def _totals(self, over: str) -> int:
        """Bytes of the float32 totals of 16-bit gradients of one direction; none where gradients are float32."""
        return self._each(over) * (self.sizes.cols if over == "rows" else self.sizes.rows) if self.narrow else 0

    def _each(self, over: str) -> int:
        """Bytes of the totals of one row or column."""
        return sum(self._widths(over)) * self.sizes.compute.itemsize

    def _widths(self, over: str) -> list[int]:
        return [self.sizes.of(str(v.feature)) for v in self._vectors(over)]

    def _vectors(self, over: str) -> list[Expr]:
        vectors = [cs[0].vector for p in self.parts for _, o, cs in p.sums if o == over]
        return [v for v in vectors if v is not None]

    def _is_sum(self) -> bool:
        """Whether parts of a row can be added up: one stage, of sums and of picks."""
        kinds = {r.attrs[0] for s in self.walk.stages for r in s.fold.reductions}
        return len(self.walk.stages) == 1 and kinds <= {"sum", "pick"}
