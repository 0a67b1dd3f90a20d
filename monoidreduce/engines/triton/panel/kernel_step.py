"""What is done to a panel of pairs on a GPU: generated kernels for the arithmetic, the vendor's products for the rest.

A group of stages becomes its products, one kernel that takes every row through all of them (``row_kernel.py``), and one
product for every sum of vectors, whose weights that kernel wrote over the panel; or a generated product writes the
weights itself (``epilogue.py``). Numbers that are folded over rows have a kernel of their own. Numbers come from the
generator of the other kernels, a product being a leaf given per pair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....plan import in_place_layout, panel_layout
from ....program.expression import Expr
from ....program.lower import Fold
from ....program.reductions import KINDS
from ...common import combine, matmul
from ...common.evaluate import Evaluator, Sizes, from_layout, to_layout
from ...common.one_sided import Gathered, gather
from ...panel import ALIGN, Part, cut_evenly
from ...panel.panel_program import Walk
from ..codegen.kernel_spec import Unsupported
from ..kernels import elementwise as sides
from ..kernels import topk
from ..launch import launch_cache
from . import epilogue, panel_replay, row_kernel, sparse_contraction
from .fuse_stages import PLACES, joint, placed
from .lent_memory import Lent
from .precompile import look
from .stored_weights import Stowed
from .sums import Sums

_ALIGNED = 16  # columns of a panel that has fewer than ``ALIGN``: what copies rows wants 16 bytes


class KernelStep(Sums):
    """Stages done by kernels; see :class:`monoidreduce.engines.panel.Step`."""

    splits = True  # softmax means of vectors come as a softmax and a sum

    @staticmethod
    def repeated(walked: Callable[..., list[Any]], *given: Any) -> list[Any]:
        return panel_replay.repeated(walked, *given)

    def before(self, numbers: tuple[Expr, ...], whole: Evaluator) -> None:
        """Numbers of all rows in one kernel: a torch call each would keep the device waiting."""
        for side, fed_with, outputs in _gathered(numbers):
            leaves = [from_layout(whole(e), e) for e in fed_with]
            key: tuple = (side, self.sizes.rows, self.sizes.cols, self.sizes.device, self.sizes.compute)
            key += tuple((row_kernel.specialized(v), getattr(v, "shape", None)) for v in leaves)
            try:
                launch = _SIDES.get(key) or sides.ElementwiseLaunch(side, leaves, self.sizes)
            except Unsupported:
                continue
            _SIDES[key] = launch
            while len(_SIDES) > _MOST:
                del _SIDES[next(iter(_SIDES))]
            found = launch(leaves)
            launch_cache.tell(launch.again, (*found, *launch.filled(leaves)))
            whole.memo |= {e: to_layout(v, e) for e, v in zip(outputs, found, strict=True)}

    def begin(self, panel: panel_layout.Panels) -> None:
        heard = launch_cache.hearing.get()
        if heard is not None:
            heard.begun(KernelStep(self.walk, self.sizes, self.given), panel)
        self.written = _written(self.walk)
        self._begin_sums(panel)
        numbered = {(n, kind) for homes in self.homes for kind, n in homes if isinstance(n, int)}
        self.kinds = {f: self.pairs for f in self.walk.products} | {k: k[1] for k in sorted(numbered, key=str)}
        self.buffers = self.own = {} if panel.blocks else {key: self._buffer(kind) for key, kind in self.kinds.items()}
        self.spare = next((b.view(-1) for b in self.own.values() if b.dtype == self.stored), None)
        self.over = frozenset({"rows", "cols"})  # the directions that this panel is folded over
        self.makes: Callable[[Part, Sizes], dict[Expr, Tensor]] | None = None  # weights, if they are made otherwise
        self.made: tuple[Any, set[Expr]] = (None, set())
        self.states: list[dict[int, Any]] = [{} for _ in self.walk.stages]
        self.numbers: dict[Expr, Tensor] = {}  # of every row, by what a kernel calls them
        self.heres: dict[tuple[int, int], Sizes] = {}

    def _buffer(self, kind: torch.dtype) -> Tensor:
        return torch.empty(self.panel.rows, _pitch(self.panel.cols), dtype=kind, device=self.sizes.device)

    def walk_panels(self) -> Iterable[tuple[slice, slice]]:
        if self.panel.tail is not None:
            return self._take_turns(self.panel.tail)
        return self._take_blocks() if self.panel.blocks else cut_evenly(self.sizes, self.panel)

    def _take_blocks(self) -> Iterator[tuple[slice, slice]]:
        """Blocks of rows one after the other, a strip of columns of each at a time."""
        widths, cols = self._gradients(), self.sizes.cols
        size = max(self._panel_size(b.rows, b.cols) + self._apart(b) for b in self.panel.blocks)
        host = torch.empty(size, dtype=torch.uint8, device=self.sizes.device)
        for block in self.panel.blocks:
            self.buffers = self._inside(host, 0, block.rows, block.cols)
            self.spare = next((b.view(-1) for b in self.buffers.values() if b.dtype == self.stored), None)
            self._begin_block(block, widths, host[self._panel_size(block.rows, block.cols) :])
            for start in range(0, cols, block.cols):
                for row in range(block.first, block.last, block.rows):
                    yield slice(row, min(block.last, row + block.rows)), slice(start, min(cols, start + block.cols))
            self._close_lent()

    def _take_turns(self, plan: in_place_layout.Tail) -> Iterator[tuple[slice, slice]]:
        """Panels of all rows, in the memory of the largest column gradient until that is written."""
        widths, rows = self._gradients(), self.sizes.rows
        host = self.totals[max(widths["rows"], key=lambda key: widths["rows"][key])].view(-1).view(torch.uint8)
        at = plan.totals
        for key, width in widths["cols"].items():
            place = None if at is None else host[at:]
            self.lent[key] = Lent.zeros(self.totals[key], rows, plan.lent, self.sizes.compute, place)
            at = None if at is None else at + (rows - plan.lent) * width * self.sizes.compute.itemsize
        if plan.stowed:
            yield from self._take_stowed(plan, host)
        for turn in plan.turns:
            if "cols" not in turn.over:  # the row gradients are complete, and their place is needed
                self._close_lent()
            self.over = turn.over
            self.buffers = self.own if turn.at is None else self._inside(host, turn.at, rows, turn.last - turn.first)
            yield slice(0, rows), slice(turn.first, turn.last)
        self._close_lent()

    def _take_stowed(self, plan: in_place_layout.Tail, host: Tensor) -> Iterator[tuple[slice, slice]]:
        """Everything once, for what is folded of it, then the columns whose weights were stowed meanwhile."""
        fused, rows = self._stows(), slice(0, self.sizes.rows)
        assert fused is not None
        stowed = Stowed(self, fused, plan, host)
        self.makes, self.over = stowed.fold, frozenset()
        yield rows, slice(0, self.sizes.cols)
        for turn in plan.stowed:
            self.makes, self.over = stowed.weigh, turn.over
            yield rows, slice(turn.first, turn.last)
        self.makes = None
        stowed.close()

    def _inside(self, host: Tensor, at: int, rows: int, cols: int) -> dict[Any, Tensor]:
        """A panel's buffers in the memory of something else."""
        found, width = {}, _pitch(cols)
        for key, kind in self.kinds.items():
            size = rows * width * kind.itemsize
            found[key] = host[at : at + size].view(kind).view(rows, width)
            at += size
        return found

    def _panel_size(self, rows: int, cols: int) -> int:
        return sum(rows * _pitch(cols) * kind.itemsize for kind in self.kinds.values())

    # A group of stages of one panel

    def __call__(self, group: range, part: Part) -> None:
        at = group[-1]
        cut = self.parts[at]
        here = self._here(part)
        self._fold_rows(at, part, here)
        look(self, group, part, here)
        weights = self._sweep(group, part, here)
        self.contract = sparse_contraction.Contract()
        for place, over, products in cut.sums:
            value = self._contract((at, place), over, products, weights, part) if over in self.over else None
            if value is not None:
                part.keep(at, place, [value], [self.complete.get((at, place))])
        if self.panel.tail is None and self.block is None and part.cols.stop == self.sizes.cols:
            self._close_lent()
        for place, e in cut.tops:
            part.keep(
                at,
                place,
                topk.select_best_of_panel(weights[e], self.walk.stages[at].fold.reductions[place], here.compute),
            )

    def _here(self, part: Part) -> Sizes:
        return self._sized(part.rows.stop - part.rows.start, part.cols.stop - part.cols.start)

    def _sized(self, rows: int, cols: int) -> Sizes:
        if (rows, cols) not in self.heres:
            self.heres[rows, cols] = replace(self.sizes, rows=rows, cols=cols)
        return self.heres[rows, cols]

    def _sweep(self, group: range, part: Part, here: Sizes) -> dict[Expr, Tensor]:
        """Every row through the stages: numbers handed over, the last stage's weights returned, each as a matrix."""
        moved = self.panel.cols < self.sizes.cols
        if self.makes is not None:
            return self.makes(part, here)
        stowed = self.panel.tail is not None and self.panel.tail.stowed
        fused, self.rest = self.without or (self._later() if stowed else self._fused(moved)), None
        if fused and not fused.guesses:
            rows = part.rows if self.block is None else slice(self.block.first, self.block.last)
            if self.without and self.mine[0] != rows:
                across = part.across(rows)
                self._keep_own(self.without.own(self._given(self.without, across), self._here(across)), across)
            return self._written(fused, part, here, [])
        whole = joint(self.walk, group, moved)
        wholes = [self._rows(n) for names in whole.names for n in names]
        numbers = [w[part.rows] for w in wholes] if not moved else [torch.empty_like(w) for w in wholes]
        found = self._written(fused, part, here, numbers) if fused else self._swept(group, part, here, numbers)
        places = [(stage, place) for stage in group for place in self.parts[stage].places["cols"]]
        fold = Fold((), tuple(r for fold in whole.folds for r in fold))
        own = zip(places, combine.split(fold, numbers), combine.split(fold, wholes), strict=True)
        for (stage, place), (r, results), (_, complete) in own:
            if "cols" not in self.over:
                continue
            if moved:
                self._combine(self.states[stage], place, r, [t[: here.rows] for t in results], part)
            else:
                part.keep(stage, place, results, complete)
        return found

    def _given(self, fused: epilogue.Epilogue, part: Part) -> dict[Expr, Any]:
        values = {e: self._value(f, part) for e, f in fused.feeds} | self._begins(part)
        sides = zip(fused.vectors, fused.sides, strict=True)
        return values | {e: part.feed(f).to(self.narrow).unsqueeze(0) for e, f in sides}

    def _written(self, fused: epilogue.Epilogue, part: Part, here: Sizes, numbers: list[Tensor]) -> dict[Expr, Tensor]:
        """Weights by a product of its own; ``rest``: what is left to do to their sums."""
        out = self.buffers[fused.product][: here.rows, : here.cols]
        self.rest = fused(out, self._given(fused, part), numbers, here)
        return {self.parts[self.groups[0][-1]].weights[0]: out}

    def _swept(self, group: range, part: Part, here: Sizes, numbers: list[Tensor]) -> dict[Expr, Tensor]:
        """Weights by the vendor's product and a kernel over its rows."""
        moved = self.panel.cols < self.sizes.cols
        whole = joint(self.walk, group, moved)
        values = {e: self._value(f, part) for e, f in zip(whole.leaves, whole.feeds, strict=True)}
        outputs: list[Any] = list(numbers)
        found, written = {}, []
        last = group[-1]
        for w, inside, (kind, home) in zip(self.parts[last].weights, whole.weights, self.homes[last], strict=True):
            if home is None:
                found[w] = values[inside][0]
                continue
            buffer = self.buffers[(home, kind) if isinstance(home, int) else home].view(kind)
            found[w] = buffer[: here.rows, : here.cols]
            written.append(inside)
            outputs += [found[w], found[w].stride(0)]
        if outputs:
            work = row_kernel.Work(whole.leaves, whole.folds, whole.names, tuple(written))
            self._launch((group, moved), work, "cols", values, part, here, outputs)
        return found

    def _rows(self, name: Expr) -> Tensor:
        """Where a kernel writes a number of every row: allocated once, not once a panel."""
        if name not in self.numbers:
            self.numbers[name] = _output(name.dtype, self.sizes.rows, self.sizes)
        return self.numbers[name]

    def _fold_rows(self, at: int, part: Part, here: Sizes) -> None:
        """Numbers folded over the rows of a panel, added to those of the panels before."""
        cut, stage = self.parts[at], self.walk.stages[at]
        if not cut.numbers["rows"] or "rows" not in self.over:
            return
        fold = Fold((*stage.fold.leaves, *PLACES), tuple(map(placed, cut.numbers["rows"])))
        values = {e: self._value(f, part) for e, f in zip(stage.fold.leaves, stage.feeds, strict=True)}
        kinds = [KINDS[r.attrs[0]].outputs(r.args, r.attrs[2])[k][1] for r, k in fold.outputs]
        outputs = [_output(kind, here.cols, here) for kind in kinds]
        self._launch(at, row_kernel.Plain(fold), "rows", values, part, here, outputs)
        found = combine.split(fold, outputs)
        for place, (r, own) in zip(cut.places["rows"], found, strict=True):
            self._combine(self.states[at], place, r, own, part)

    def _value(self, f: Expr, part: Part) -> Any:
        """What is fed to a kernel: numbers, and tensors ``[1, length(, length)]``; a product is computed once."""
        if f.feature is not None:
            return None
        value = self._product(f, part) if f.op == "dot" else part.feed(f)
        if isinstance(value, Tensor):
            return value.unsqueeze(0)
        if self.sizes.compute is torch.float64 and f.dtype == "float":  # a kernel's own numbers are float32
            return torch.full((1,), value, dtype=torch.float64, device=self.sizes.device)
        return value

    def _product(self, f: Expr, part: Part) -> Tensor:
        where = (part.rows, part.cols, self.over)
        panel = self.buffers[f][: part.rows.stop - part.rows.start, : part.cols.stop - part.cols.start]
        if self.made[0] != where:
            self.made = (where, set())
        if f not in self.made[1]:
            sides = [part.feed(a) for a in (f.args if f.args[0].rows else f.args[::-1])]
            x, y = (t if self.narrow is None else t.to(self.narrow) for t in sides)
            matmul.panel_into(panel, x, y)
            self.made[1].add(f)
        return panel

    def _launch(
        self, key: Any, work: row_kernel.Written, over: str, values: dict, part: Part, here: Sizes, outputs: list
    ) -> None:
        values = {**values, **self._begins(part)}
        kinds = tuple(v.dtype if isinstance(v, Tensor) else type(v) for v in values.values())
        sizes = (here.rows, here.cols, here.compute, here.device, tuple(here.letters.values()))
        whole = (key, over, len(outputs), kinds, sizes, row_kernel.PLANS[over])
        if whole not in self.written:
            self.written[whole] = row_kernel.prepare(work, over, values, here)
        self.written[whole](outputs, values, here.device)

    def _begins(self, part: Part) -> dict[Expr, int]:
        begins = (part.rows.start, part.cols.start, self.sizes.rows, self.sizes.cols)
        return dict(zip(PLACES, begins, strict=True))

    # What panels add up to

    def _combine(self, states: dict[int, Any], place: int, r: Expr, own: list[Tensor], part: Part) -> None:
        """Add a panel's numbers to those of the panels before: over rows by ⊙, over columns as sums."""
        rows, cols = part.rows, part.cols
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
        self.add_waiting(at)
        results: dict[int, list[Tensor]] = {p: [t] for (a, p), t in self.totals.items() if a == at}
        for over, reductions in cut.numbers.items():
            for place, r in zip(cut.places[over], reductions, strict=True):
                state = self.states[at].get(place)
                if state is not None:
                    results[place] = state if over == "cols" else combine.closed(r, state)
        return [results.get(place) for place in range(len(self.walk.stages[at].fold.reductions))]


def _pitch(cols: int) -> int:
    """Numbers from one row of a panel to the next. Few columns are not rounded up to what a budget has no room for."""
    step = ALIGN if cols >= ALIGN else _ALIGNED
    return -(-cols // step) * step


_MOST = 256
_SIDES: dict[tuple, sides.ElementwiseLaunch] = {}


@functools.lru_cache(maxsize=1024)
def _gathered(numbers: tuple[Expr, ...]) -> list[Gathered]:
    return gather(numbers, frozenset())


@functools.lru_cache(maxsize=256)
def _written(walk: Walk) -> dict[tuple, row_kernel.Prepared]:
    """The kernels of a walk that were written so far."""
    return {}


def _output(kind: str, length: int, sizes: Sizes) -> Tensor:
    return torch.empty(length, dtype=sizes.compute if kind == "float" else torch.int64, device=sizes.device)
