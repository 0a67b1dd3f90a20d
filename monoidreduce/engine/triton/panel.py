"""What is done to a panel of pairs on a GPU: generated kernels for the arithmetic, the vendor's products for the rest.

A stage becomes at most three kernels and its products: one folds numbers over columns (a program instance owns a row of
the panel and walks its columns), one folds numbers over rows, and one writes the weights of every sum of vectors over
the products they were made from, which are then contracted. Numbers come from the generator of the other kernels, a
product being a leaf given per pair.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...plan import panels
from ...program.build import apply, substitute
from ...program.contract import Contraction, contractions
from ...program.expr import Expr, index, node, reduce_node, size, topological
from ...program.lower import Fold
from .. import combine, hardware
from ..evaluate import Sizes, form
from ..panel import ALIGN
from ..walks import Walk
from . import emit, weigh
from .spec import Unsupported


def _whole_number(name: str) -> Expr:
    return node("leaf", (), (name,), rows=False, cols=False, feature=None, dtype="int")


# where a panel begins, and how many rows and columns there are in all
_FIRST = {axis: _whole_number(f"first_{axis}") for axis in ("row", "col")}
_COUNT = {axis: _whole_number(f"count_{axis}") for axis in ("rows", "cols")}
_PLACES = (*_FIRST.values(), *_COUNT.values())


@dataclass(frozen=True)
class Parts:
    """A stage cut by who does it. Places are those of the stage's reductions."""

    numbers: Mapping[str, Fold]  # per direction, what one kernel folds
    places: Mapping[str, tuple[int, ...]]
    sums: tuple[tuple[int, str, tuple[Contraction, ...]], ...]  # place, direction, products to add
    tops: tuple[tuple[int, Expr], ...]  # place, the number per pair whose best are found by sorting
    weights: tuple[Expr, ...]  # numbers per pair that must lie in memory


@functools.lru_cache(maxsize=1024)
def parts(fold: Fold) -> Parts:
    """Cut a stage; raises Unsupported where one of its reductions has neither a kernel nor a product."""
    reductions = tuple(map(_placed, fold.reductions))
    leaves = (*fold.leaves, *_PLACES)
    numbers: dict[str, list[Expr]] = {"cols": [], "rows": []}
    places: dict[str, list[int]] = {"cols": [], "rows": []}
    sums, tops = [], []
    for place, r in enumerate(reductions):
        kind, over, _ = r.attrs
        if kind == "topk" and over == "cols":
            tops.append((place, r.args[0]))
        elif kind == "sum" and r.args[0].feature is not None:
            sums.append((place, over, _products(r)))
        elif any(a.feature is not None for a in r.args):
            raise Unsupported(f"{kind} of vectors")
        else:
            numbers[over].append(r)
            places[over].append(place)
    weights = [c.weight for _, _, cs in sums for c in cs] + [e for _, e in tops]
    used = [n for over in numbers.values() for r in over for n in r.args] + weights
    if any(e.op in ("dot", "sqdist", "fsum", "component") and e.is_pair for e in topological(used)):
        raise Unsupported("vectors per pair")
    folds = {over: Fold(leaves, tuple(rs)) for over, rs in numbers.items() if rs}
    return Parts(
        folds,
        {o: tuple(p) for o, p in places.items()},
        tuple(sums),
        tuple(tops),
        tuple(dict.fromkeys(weights)),
    )


def _placed(r: Expr) -> Expr:
    """A reduction for a panel that does not begin at the first row and column: indices are counted from its own."""
    here: dict[Expr, Expr] = {index(axis): apply("add", index(axis), first) for axis, first in _FIRST.items()}
    here |= {size(axis): count for axis, count in _COUNT.items()}
    (placed,) = substitute((r,), here)
    kind, over, params = placed.attrs
    if kind != "pick":
        return placed
    target = apply("sub", placed.args[0], _FIRST[params[0]])  # compared with the panel's own index
    return reduce_node(kind, over, params, (target, *placed.args[1:]))


def _products(r: Expr) -> tuple[Contraction, ...]:
    found = contractions(r.args[0], r.attrs[1])
    if any(c.walk or c.minus is not None or c.vector is None or c.vector.op != "leaf" for c in found):
        raise Unsupported("a sum of vectors that is no product")
    return found


class KernelStep:
    """Stages done by kernels; see :class:`monoidreduce.engine.panel.Step`."""

    splits = True  # softmax means of vectors come as a softmax and a sum

    def __init__(self, walk: Walk, sizes: Sizes, kinds: set[torch.dtype]):
        self.walk, self.sizes = walk, sizes
        self.parts = [parts(s.fold) for s in walk.stages]
        sixteen = kinds & set(hardware.SIXTEEN)
        self.narrow = sixteen.pop() if len(sixteen) == 1 else None
        # float16 logits may overflow, and what is computed on one side may leave its range: bfloat16 alone is stored
        self.stored = torch.bfloat16 if self.narrow is torch.bfloat16 else None
        self.kind = self.stored or sizes.compute
        self.homes = [self._homes(at) for at in range(len(walk.stages))]

    def _homes(self, at: int) -> list[tuple[torch.dtype, Expr | int | None]]:
        """Where each weight of a stage goes: its type and the product it overwrites, else the number of a buffer.

        None for a weight that is a product itself, and is multiplied where it lies.
        """
        stage, cut = self.walk.stages[at], self.parts[at]
        product = dict(stage.products)
        kinds = [self._weight_type(w, cut) for w in cut.weights]
        plain = [w in product and kind == self.kind for w, kind in zip(cut.weights, kinds, strict=True)]
        kept = {product[w] for w, is_plain in zip(cut.weights, plain, strict=True) if is_plain}
        free = [f for f in self.walk.dying(at) if f not in kept]
        found: list[tuple[torch.dtype, Expr | int | None]] = []
        extra = 0
        for kind, is_plain in zip(kinds, plain, strict=True):
            if is_plain:
                found.append((kind, None))
            elif free and kind.itemsize <= self.kind.itemsize:
                found.append((kind, free.pop(0)))
            else:
                found.append((kind, extra))
                extra += 1
        return found

    def _weight_type(self, w: Expr, cut: Parts) -> torch.dtype:
        """The type in which a weight is multiplied; a number per pair that is sorted keeps its digits."""
        multiplied = any(c.weight is w for _, _, cs in cut.sums for c in cs)
        return self.stored if multiplied and self.stored else self.sizes.compute

    # How much is held

    def choose(self, room: int) -> panels.Panels | None:
        """Whole rows where column totals stay accurate, else whole columns of a plain sum.

        Column totals of 16 bits are rounded once a panel: beyond a few panels they are kept in float32.
        """
        rows, cols, pair, totals = self.sizes.rows, self.sizes.cols, self._pair(), self._totals("rows")
        whole = panels.by_rows(rows, cols, pair, room)
        if totals and (whole is None or not self.stored or whole.count(rows) > panels.ADDS):
            whole = panels.by_rows(rows, cols, pair, room - totals, wide=True)
        if not self._is_sum():
            return whole
        if whole is not None and whole.rows >= min(panels.FEW, rows):
            return whole
        if not self._each("rows"):
            found = panels.cut(rows, cols, pair, room, self._each("cols"))
            return panels.Panels(*found, outer="rows") if found else whole
        found = panels.cut(cols, rows, pair, room - self._totals("cols"), self._each("rows"))
        return panels.Panels(*found[::-1]) if found else whole

    def least(self) -> int:
        rows, cols, pair = self.sizes.rows, self.sizes.cols, self._pair()
        row = cols * pair + (self._totals("rows") if rows > panels.ADDS or not self.stored else 0)
        if not self._is_sum():
            return row
        each = max(self._each("rows"), self._each("cols"))  # directions can be done apart
        return min(row, panels.SMALLEST * (each + pair * panels.SMALLEST))

    def _pair(self) -> int:
        """Bytes held of one pair."""
        extra = [sum(kind.itemsize for kind, home in homes if isinstance(home, int)) for homes in self.homes]
        return max(1, len(self.walk.products) * self.kind.itemsize + max([0, *extra]))

    def _totals(self, over: str) -> int:
        """Bytes of the float32 totals of 16-bit gradients of one direction; none where gradients are float32."""
        return self._each(over) * (self.sizes.cols if over == "rows" else self.sizes.rows) if self.narrow else 0

    def _each(self, over: str) -> int:
        """Bytes of the totals of one row or column."""
        vectors = [cs[0].vector for p in self.parts for _, o, cs in p.sums if o == over]
        return sum(self.sizes.of(str(v.feature)) * self.sizes.compute.itemsize for v in vectors if v is not None)

    def _is_sum(self) -> bool:
        """Whether parts of a row can be added up: one stage, of sums and of picks."""
        kinds = {r.attrs[0] for s in self.walk.stages for r in s.fold.reductions}
        return len(self.walk.stages) == 1 and kinds <= {"sum", "pick"}

    def begin(self, panel: panels.Panels) -> None:
        self.panel = panel
        self.panels = {f: self._buffer(self.kind) for f in self.walk.products}
        numbered = {(n, kind) for homes in self.homes for kind, n in homes if isinstance(n, int)}
        self.extra = {key: self._buffer(key[1]) for key in sorted(numbered, key=str)}
        self.made: tuple[Any, set[Expr]] = (None, set())
        self.totals: dict[tuple[int, int], Tensor] = {}  # of vectors, whole
        self.adding: dict[tuple[int, int], Tensor] = {}  # of some columns' vectors, before they are rounded
        self.states: list[dict[int, Any]] = [{} for _ in self.walk.stages]
        self.prepared: dict[tuple, weigh.Prepared] = {}

    def _buffer(self, kind: torch.dtype) -> Tensor:
        width = -(-self.panel.cols // ALIGN) * ALIGN
        return torch.empty(self.panel.rows, width, dtype=kind, device=self.sizes.device)

    # One stage of one panel

    def __call__(self, at: int, leaves: dict[Expr, Any], rows: slice, cols: slice) -> list[list[Tensor] | None]:
        stage, cut = self.walk.stages[at], self.parts[at]
        here = replace(self.sizes, rows=rows.stop - rows.start, cols=cols.stop - cols.start)
        given = {e: v.unsqueeze(0) if isinstance(v, Tensor) else v for e, v in leaves.items()}
        for leaf, f in stage.products:
            given[leaf] = self._product(f, leaves[leaf], (rows, cols)).unsqueeze(0)
        counts = (rows.start, cols.start, self.sizes.rows, self.sizes.cols)
        given |= dict(zip(_PLACES, counts, strict=True))
        results: dict[int, list[Tensor]] = {}
        whole = {"cols": here.cols == self.sizes.cols, "rows": False}  # whether a direction is complete here
        for over, fold in cut.numbers.items():
            found = combine.split(fold, self._fold((at, over), fold, over, given, here))
            for place, (r, own) in zip(cut.places[over], found, strict=True):
                if whole[over]:
                    results[place] = own
                else:
                    self._combine(self.states[at], place, r, own, (rows, cols))
        weights = self._weights(at, given, here)
        for place, over, products in cut.sums:
            value = self._contract((at, place), over, products, weights, leaves, (rows, cols))
            if value is not None:
                results[place] = [value]
        for place, e in cut.tops:
            results[place] = _top(weights[e], stage.fold.reductions[place], here)
        return [results.get(place) for place in range(len(stage.fold.reductions))]

    def _product(self, f: Expr, sides: tuple[Tensor, Tensor], where: tuple[slice, slice]) -> Tensor:
        x, y = sides if f.args[0].rows else sides[::-1]
        panel = self.panels[f][: x.shape[0], : y.shape[0]]
        if self.made[0] != where:
            self.made = (where, set())
        if f not in self.made[1]:
            x, y = (t if t.dtype == self.narrow or self.narrow is None else t.to(self.narrow) for t in (x, y))
            hardware.panel_into(panel, x, y)
            self.made[1].add(f)
        return panel

    def _fold(self, key: tuple, fold: Fold, over: str, values: dict[Expr, Any], here: Sizes) -> list[Tensor]:
        forms = [form(r, k, here, (1,)) for r, k in fold.outputs]
        outputs = [torch.empty(shape, dtype=dtype, device=here.device) for shape, dtype in forms]
        self._launch(key, emit.kernel, fold, over, values, here, outputs, over)
        return [o[0] for o in outputs]

    def _weights(self, at: int, values: dict[Expr, Any], here: Sizes) -> dict[Expr, Tensor]:
        """Every weight of a stage as a matrix, in the type in which it is multiplied."""
        found: dict[Expr, Tensor] = {}
        written, outputs = [], []
        for w, (kind, home) in zip(self.parts[at].weights, self.homes[at], strict=True):
            if home is None:
                found[w] = values[w][0]
                continue
            buffer = self.extra[home, kind] if isinstance(home, int) else self.panels[home].view(kind)
            found[w] = buffer[: here.rows, : here.cols]
            written.append(reduce_node("sum", "cols", (), (w,)))
            outputs += [found[w], found[w].stride(0)]
        if written:
            fold = Fold((*self.walk.stages[at].fold.leaves, *_PLACES), tuple(written))
            self._launch((at, "weights"), weigh.weights_kernel, fold, "cols", values, here, outputs, "weights")
        return found

    def _launch(
        self, key: tuple, write: Any, fold: Fold, over: str, values: Any, here: Sizes, outputs: list, plan: str
    ) -> None:
        used = {e: self._number(e, values[e]) for e in fold.leaves}
        key = (*key, here.rows, here.cols)
        if key not in self.prepared:
            self.prepared[key] = weigh.prepare(write, fold, over, used, here, plan)
        weigh.start(self.prepared[key], outputs, used, here.device)

    def _number(self, e: Expr, v: Any) -> Any:
        """A kernel's own numbers are float32: a float64 program gets its numbers as tensors."""
        if isinstance(v, Tensor) or self.sizes.compute is not torch.float64 or e.dtype != "float":
            return v
        return torch.full((1,), v, dtype=torch.float64, device=self.sizes.device)

    # What panels add up to

    def _contract(
        self, key: tuple[int, int], over: str, products: tuple[Contraction, ...], weights: Any, leaves: Any, where: Any
    ) -> Tensor | None:
        """Σ weight × vector: returned where it is complete, else added to what the panels before gave."""
        rows, cols = where
        kept, folded = (rows, cols) if over == "cols" else (cols, rows)
        alone = over == "cols" and self.panel.cols == self.sizes.cols
        width = leaves[products[0].vector].shape[-1]
        shape = (kept.stop - kept.start, width)
        if alone:
            out = torch.empty(shape, dtype=self.kind, device=self.sizes.device)
        else:
            out = self._total(key, over, kept, width)
        for k, c in enumerate(products):
            weight = weights[c.weight] if over == "cols" else weights[c.weight].mT
            vector = leaves[c.vector].to(weight.dtype)
            hardware.contract_into(out, weight, vector, add=k > 0 or (not alone and folded.start > 0))
        if alone:
            return out
        if key in self.adding and folded.stop == (self.sizes.cols if over == "cols" else self.sizes.rows):
            self.totals[key][kept] = self.adding[key][: shape[0]]
        return None

    def _total(self, key: tuple[int, int], over: str, kept: slice, width: int) -> Tensor:
        """Where to add: the whole total, or a float32 part of it where 16 bits would be rounded too often.

        An axis whose parts are walked one after the other completes each before the next; its whole total may then be
        of 16 bits. So may column totals over few enough panels of whole rows.
        """
        length, own = (self.sizes.cols, self.panel.cols) if over == "rows" else (self.sizes.rows, self.panel.rows)
        other, step = (self.sizes.rows, self.panel.rows) if over == "rows" else (self.sizes.cols, self.panel.cols)
        in_turn = self.panel.outer != over and own < length
        if key not in self.totals:
            narrow = None if self.panel.wide or not (in_turn or over == "rows") else self.stored
            device = self.sizes.device
            self.totals[key] = torch.empty(length, width, dtype=narrow or self.sizes.compute, device=device)
            if narrow and in_turn and step < other:
                self.adding[key] = torch.empty(own, width, dtype=self.sizes.compute, device=device)
        if key in self.adding:
            return self.adding[key][: kept.stop - kept.start]
        return self.totals[key][kept]

    def _combine(self, states: dict[int, Any], place: int, r: Expr, own: list[Tensor], where: Any) -> None:
        """Add a panel's numbers to those of the panels before: over rows by ⊙, over columns as sums."""
        rows, cols = where
        if r.attrs[1] == "cols":
            if place not in states:
                length = (self.sizes.rows, *own[0].shape[1:])
                states[place] = [torch.zeros(length, dtype=own[0].dtype, device=own[0].device)]
            states[place][0][rows] += own[0]
            return
        new = combine.opened(r, [t.unsqueeze(0) for t in own], [rows.stop - rows.start], [rows.start])
        if self.panel.cols < self.sizes.cols:  # sums: one total for all columns
            if place not in states:
                states[place] = [t.new_zeros(1, self.sizes.cols, *t.shape[2:]) for t in new]
            states[place][0][:, cols] += new[0]
            return
        states[place] = combine.merged(r, [states[place], new] if place in states else [new])

    def finish(self, at: int) -> list[list[Tensor] | None]:
        cut = self.parts[at]
        results: dict[int, list[Tensor]] = {p: [t] for (a, p), t in self.totals.items() if a == at}
        for over, fold in cut.numbers.items():
            for place, r in zip(cut.places[over], fold.reductions, strict=True):
                state = self.states[at].get(place)
                if state is not None:
                    results[place] = state if over == "cols" else combine.closed(r, state)
        return [results.get(place) for place in range(len(self.walk.stages[at].fold.reductions))]


def _top(panel: Tensor, r: Expr, sizes: Sizes) -> list[Tensor]:
    """The best of each row, as the eager engine keeps them."""
    k, largest = r.attrs[2]
    values, places = panel.topk(min(k, panel.shape[1]), dim=1, largest=largest)
    worst = -torch.inf if largest else torch.inf
    return [values.to(sizes.compute), torch.where(values == worst, -1, places)]
