"""The panel schedule: the vendor's products fill a panel of pairs, everything else is done to it where it lies.

A *panel* is all pairs of a few rows. Passes that need only earlier results over columns run one after another on the
same panel, with its products computed once; a pass that needs a result over rows starts a new walk. What is done to a
panel is a :class:`Step`: in tiles of torch here, in generated kernels on a GPU
(``engines/triton/panel/kernel_step.py``).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import BudgetError
from ...plan import budget, panel_layout
from ...plan import tiles as plan
from ...program.expression import Expr, size, topological
from ...program.lower import Fold, Lowered, Pass
from ..common import matmul
from ..common.evaluate import Evaluator, Sizes, from_layout, to_layout
from ..common.label_gather import run_pick
from ..eager.accumulators import ACCUMULATORS, Accumulator
from ..eager.tile_run import Buffers
from ..eager.tile_walk import Chunk, FoldCode, code_of, slices
from .panel_program import Walk, as_program, by_reduction, fed, least_room, paired, row_numbers, split_means, walks

ALIGN = 64  # elements: rows of a panel begin on a multiple


class Step(Protocol):
    """How one walk's stages are done to a panel."""

    splits: bool  # whether a softmax mean of vectors should come as a softmax and a sum
    groups: tuple[range, ...]  # the stages that are done at once

    @staticmethod
    def repeated(walked: Callable[..., list[Any]], *given: Any) -> list[Any]:
        """What ``walked(*given)`` returns, perhaps as it was done before."""

    def __init__(self, walk: Walk, sizes: Sizes, kinds: set[torch.dtype]) -> None:
        """``kinds``: the types of the vectors."""

    def before(self, numbers: tuple[Expr, ...], whole: Evaluator) -> None:
        """Compute numbers of all rows, if there is a faster way than the evaluator's own."""

    def choose(self, room: int) -> panel_layout.Panels | None:
        """What fits in ``room`` bytes, None where nothing does."""

    def least(self) -> int:
        """Bytes in which something fits."""

    def begin(self, panel: panel_layout.Panels) -> None: ...

    def walk_panels(self) -> Iterable[tuple[slice, slice]]:
        """The rows and columns of the panels, in their order."""

    def __call__(self, group: range, part: Part) -> None:
        """Do a group of stages to a panel, and hand over the results that are complete."""

    def finish(self, at: int) -> list[list[Tensor] | None]:
        """The results that only all panels complete, None for the others."""


Maker = type[Step]


class Part(Protocol):
    """Some rows and columns: what is fed for them, and where their results go."""

    rows: slice
    cols: slice

    def feed(self, f: Expr) -> Any:
        """The value of an expression of one side (or given per pair) for these rows and columns."""

    def across(self, rows: slice) -> Part:
        """Some rows, and all columns."""

    def keep(self, at: int, place: int, values: list[Tensor], wholes: Sequence[Tensor | None] = ()) -> None:
        """The results of one reduction of a stage; ``wholes``: those of all rows that they are part of, if they are."""


# Running ------------------------------------------------------------------------------------------------------


def execute(program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, maker: Maker, room: int = 0) -> list[Any]:
    """Run a program of one batch element, walk by walk; its outputs in the evaluator's layout. ``room``: bytes that
    panels may take, the budget's if left out."""
    return maker.repeated(functools.partial(_walked, maker), program, inputs, sizes, room)


def least(program: Lowered, sizes: Sizes, maker: Maker, kinds: set[torch.dtype]) -> int:
    """Bytes in which a program can be run, its vectors being of ``kinds``."""
    return least_room(split_means(program) if maker.splits else program, lambda w: maker(w, sizes, kinds).least())


def _walked(maker: Maker, program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, room: int) -> list[Any]:
    program = split_means(program) if maker.splits else program
    whole = Evaluator(sizes, inputs)
    needed = _under(program.outputs)
    for walk in walks(program):
        first = _Run(walk, whole, needed, maker, room)
        runs = [first] if first.panel else [_Run(w, whole, needed, maker, room) for w in walk.apart()] or [first]
        if not all(each.panel for each in runs):
            bytes = least(program, sizes, maker, first.kinds)
            raise BudgetError(given=budget.format_floor(first.room), least=budget.format_ceil(bytes), bytes=bytes)
        for each in runs:
            each.run()
    return [whole(e) for e in program.outputs]


@functools.lru_cache(maxsize=1024)
def _under(outputs: tuple[Expr, ...]) -> frozenset[Expr]:
    return frozenset(topological(outputs))


def is_wide(fold: Fold, sizes: Sizes) -> bool:
    """Whether a fold has pairs, and vectors of more features than a kernel's registers hold."""
    if all(sizes.of(letter) <= panel_layout.NARROW for letter in fold.letters):
        return False
    return bool(torch.Size(sizes.batch).numel() * sizes.rows * sizes.cols) and not writes_pairs(fold)


def writes_pairs(fold: Fold) -> bool:
    """Whether a fold has a result per pair, the gradient of what was given so: tiles write it."""
    return any(r.attrs[0] == "pair" for r in fold.reductions)


def run(fold: Fold, leaves: list[Any], sizes: Sizes, maker: Maker | None = None, room: int = 0) -> list[Tensor]:
    """Run a fold as every engine does, one batch element after the other."""
    program, names = as_program(fold), [str(e.attrs[0]) for e in fold.leaves]
    one = Sizes(sizes.rows, sizes.cols, (), sizes.letters, sizes.device, sizes.compute)
    shape = torch.Size(sizes.batch)
    found = []
    for b in range(shape.numel()):
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(b, device="cpu"), shape)) if sizes.batch else ()
        own = [v.expand((*shape, *v.shape[len(shape) :]))[at] if isinstance(v, Tensor) else v for v in leaves]
        values = execute(program, dict(zip(names, own, strict=True)), one, maker or TorchStep, room)
        found.append([_full(from_layout(v, e), e, one) for v, e in zip(values, program.outputs, strict=True)])
    if len(found) == 1:  # no second copy of a gradient that may be most of the memory
        return [t.view(*shape, *t.shape) for t in found[0]]
    return [torch.stack(parts).view(*shape, *parts[0].shape) for parts in zip(*found, strict=True)]


def _full(value: Any, e: Expr, sizes: Sizes) -> Tensor:
    length = (sizes.rows,) if e.rows else (sizes.cols,) if e.cols else ()
    tail = () if e.feature is None else (sizes.of(str(e.feature)),)
    kind = {"int": torch.int64}.get(e.dtype, sizes.compute)
    value = value if isinstance(value, Tensor) else torch.full((), value, device=sizes.device)
    if e.feature is not None and value.dtype in matmul.SIXTEEN:
        kind = value.dtype  # as the caller will hold it
    return value.to(kind).expand(*length, *tail)


class _Run:
    """One walk over panels: what it is fed, what it holds, what it found."""

    def __init__(self, walk: Walk, whole: Evaluator, needed: frozenset[Expr], maker: Maker, room: int):
        self.walk, self.whole, self.needed = walk, whole, needed
        self.nodes = [list(by_reduction(s.fold.reductions, s.results).values()) for s in walk.stages]
        self.sizes = whole.sizes
        feeds = [f for s in walk.stages for f in s.feeds]
        feeds += [a for f in feeds if f.op == "dot" for a in f.args]
        self.fixed = {f: whole(f) for f in dict.fromkeys(feeds) if not f.rows}
        vectors = [v for f, v in self.fixed.items() if f.cols and f.feature is not None]
        self.kinds = {v.dtype for v in vectors}
        self.step = maker(walk, self.sizes, self.kinds)
        known = row_numbers(tuple(feeds))
        self.step.before(known, whole)
        self.numbers = {f: whole(f) for f in known}
        self.panel: panel_layout.Panels | None = panel_layout.Panels(1, 1)
        self.room = room
        if self.sizes.rows and self.sizes.cols:
            self.room = room or budget.allowed_bytes(lambda: matmul.free_memory(self.sizes.device), self.step.least())
            self.panel = self.step.choose(self.room)
        self.found: dict[Expr, Tensor] = {}
        self.last: tuple[slice, Evaluator, dict[Expr, Any]] | None = None

    def run(self) -> None:
        assert self.panel is not None
        self.step.begin(self.panel)
        for rows, cols in self.step.walk_panels():
            part = _Part(self, rows, cols)
            for group in self.step.groups:
                self.step(group, part)
        for at, stage in enumerate(self.walk.stages):
            for nodes, value in paired(stage, self.step.finish(at)):
                self.whole.memo |= {n: to_layout(value, n) for n in nodes}
        self.whole.memo |= {n: to_layout(v, n) for n, v in self.found.items()}
        self.last = None
        del self.step  # and with it the panel, before another walk has its own
        for stage in self.walk.stages:
            self._gather(stage.gathers)

    def local(self, rows: slice) -> tuple[Evaluator, dict[Expr, Any]]:
        """An evaluator of these rows alone, and what was fed of them; what does not depend on rows was computed once.

        Panels of the same rows share both: they are parts of sums, which nothing on these panels reads."""
        if self.last is None or self.last[0] != rows:
            self.last = rows, self._of_rows(rows), {}
        return self.last[1:]

    def _of_rows(self, rows: slice) -> Evaluator:
        inputs = self.whole.inputs
        memo = dict(self.fixed)
        for f, value in self.numbers.items():
            memo[f] = value[rows] if isinstance(value, Tensor) and value.shape[0] > 1 else value
        for e in topological([*(f for s in self.walk.stages for f in s.feeds)], stop=memo.__contains__):
            if e in memo:
                continue
            if e.op in ("input", "leaf") and e.rows:
                value = inputs[e.attrs[0]]
                if e.is_pair:  # given per pair, perhaps broadcast
                    value = value.expand(self.sizes.rows, self.sizes.cols)
                memo[e] = to_layout(value[rows] if isinstance(value, Tensor) else value, e)
            elif e.op == "row_index":
                memo[e] = torch.arange(rows.start, rows.stop, device=self.sizes.device).view(-1, 1)
            elif e.rows and e in self.whole.memo:  # a result of an earlier walk
                memo[e] = self.whole.memo[e][rows]
        return Evaluator(self.sizes, inputs, memo)

    def keep(self, nodes: tuple[Expr, ...], value: Tensor, rows: slice, local: Evaluator, whole: Tensor | None) -> None:
        """What later stages read of these rows, and what outputs read of all."""
        for n in nodes:
            local.memo[n] = to_layout(value, n)
            if n not in self.needed:
                continue
            if whole is not None or value.shape[0] == self.sizes.rows:
                self.found[n] = value if whole is None else whole
                continue
            if n not in self.found:
                self.found[n] = value.new_empty((self.sizes.rows, *value.shape[1:]))
            self.found[n][rows] = value

    def _gather(self, gathers: Pass | None) -> None:
        if gathers is None:
            return
        leaves = {e: from_layout(self.whole(f), f) for e, f in zip(gathers.fold.leaves, gathers.feeds, strict=True)}
        leaves = {e: v.unsqueeze(0) if isinstance(v, Tensor) else v for e, v in leaves.items()}
        for r, (nodes,) in by_reduction(gathers.fold.reductions, gathers.results).items():
            length = self.sizes.rows if r.attrs[1] == "cols" else self.sizes.cols
            tail = () if r.args[2].feature is None else (self.sizes.of(str(r.args[2].feature)),)
            out = torch.zeros(1, length, *tail, dtype=self.sizes.compute, device=self.sizes.device)
            run_pick(r, leaves, self.sizes, 1, out, plan.ELEMENTS)
            self.whole.memo |= {n: to_layout(out[0], n) for n in nodes}


def cut_evenly(sizes: Sizes, panel: panel_layout.Panels) -> Iterator[tuple[slice, slice]]:
    """The panels in their order; where there are no pairs, an empty one, which gives the identities."""
    rows = slices(sizes.rows, panel.rows) or [slice(0, 0)]
    cols = slices(sizes.cols, panel.cols) or [slice(0, 0)]
    if panel.outer == "rows":
        yield from itertools.product(rows, cols)
    else:
        yield from ((r, c) for c, r in itertools.product(cols, rows))


class _Part:
    """One panel of a run; see :class:`Part`."""

    def __init__(self, run: _Run, rows: slice, cols: slice):
        self.run, self.rows, self.cols = run, rows, cols
        self.local, self.fed = run.local(rows)

    def feed(self, f: Expr) -> Any:
        if f not in self.fed:
            self.fed[f] = from_layout(self.local(f), f)
        value = self.fed[f]
        if not f.cols or not isinstance(value, Tensor):
            return value
        return value[:, self.cols] if f.rows else value[self.cols]

    def across(self, rows: slice) -> _Part:
        return _Part(self.run, rows, slice(0, self.run.sizes.cols))

    def keep(self, at: int, place: int, values: list[Tensor], wholes: Sequence[Tensor | None] = ()) -> None:
        for own, value, whole in zip(self.run.nodes[at][place], values, wholes or [None] * len(values), strict=True):
            self.run.keep(own, value, self.rows, self.local, whole)


# Steps in torch -----------------------------------------------------------------------------------------------


class TorchStep:
    """Stages done in tiles of torch, by the eager engine's arithmetic; the panel holds the products alone."""

    splits = False

    @staticmethod
    def repeated(walked: Callable[..., list[Any]], *given: Any) -> list[Any]:
        return walked(*given)

    def __init__(self, walk: Walk, sizes: Sizes, kinds: set[torch.dtype]):
        self.walk, self.sizes = walk, sizes
        narrow = torch.bfloat16 in kinds and not matmul.raise_16bit(sizes.device, torch.bfloat16)
        self.kind = torch.bfloat16 if narrow and not walk.exact else sizes.compute
        self.room = plan.LEAST
        self.groups = tuple(range(at, at + 1) for at in range(len(walk.stages)))

    def before(self, numbers: tuple[Expr, ...], whole: Evaluator) -> None:
        pass

    def choose(self, room: int) -> panel_layout.Panels | None:
        # A quarter for the tiles, less where one row of a panel needs it: what least() names must suffice.
        self.room = min(max(plan.LEAST, min(room // 4, room - self.least() + plan.LEAST)), plan.ELEMENTS * plan.HELD)
        return panel_layout.by_rows(self.sizes.rows, self.sizes.cols, self._pair(), room - self.room)

    def least(self) -> int:
        return self.sizes.cols * self._pair() + plan.LEAST

    def _pair(self) -> int:
        return max(1, len(self.walk.products)) * self.kind.itemsize

    def begin(self, panel: panel_layout.Panels) -> None:
        self.panel = panel
        shape = (panel.rows, self.width(panel))
        self.panels = {f: torch.empty(shape, dtype=self.kind, device=self.sizes.device) for f in self.walk.products}
        self.made: tuple[slice | None, set[Expr]] = (None, set())
        self.tiles = self.cut(panel)
        self.kept = [self._accumulators(s.fold) for s in self.walk.stages]
        self.buffers: dict[int, Buffers] = {}

    def code(self, fold: Fold, numbers: frozenset[Expr]) -> FoldCode:
        return code_of(fold, numbers)

    def width(self, panel: panel_layout.Panels) -> int:
        """Numbers from one row of a panel to the next."""
        return -(-panel.cols // ALIGN) * ALIGN

    def cut(self, panel: panel_layout.Panels) -> plan.Tiles:
        """The tiles in which everything but products is done to a panel."""
        return plan.choose(1, panel.rows, panel.cols, room=self.room)

    def walk_panels(self) -> Iterable[tuple[slice, slice]]:
        return cut_evenly(self.sizes, self.panel)

    def _accumulators(self, fold: Fold) -> dict[int, Accumulator]:
        found = {}
        for place, r in enumerate(fold.reductions):
            kind, over, _ = r.attrs
            if over == "rows":
                widths = [-1 if f.feature is None else self.sizes.of(str(f.feature)) for f in r.args]
                found[place] = ACCUMULATORS[kind](r, 1, self.sizes.cols, widths, self.sizes.compute, self.sizes.device)
        return found

    def __call__(self, group: range, part: Part) -> None:
        (at,) = group
        stage = self.walk.stages[at]
        given: dict[Expr, Any] = {e: part.feed(f) for e, f in fed(stage)}
        for leaf, f in stage.products:
            given[leaf] = self._product(f, part)
        given = {e: v.unsqueeze(0) if isinstance(v, Tensor) else v for e, v in given.items()}
        numbers = {e: v for e, v in given.items() if not isinstance(v, Tensor)}
        code = self.code(stage.fold, frozenset(numbers))
        buffers, kept = self._buffers(at, numbers), self.kept[at]
        chunk = Chunk(code, given, self.sizes, self.tiles, 1, buffers, part.rows, kept)
        chunk.walk()
        for place, accumulator in enumerate(chunk.accumulators):
            if place not in kept:
                part.keep(at, place, _first(accumulator))

    def _buffers(self, at: int, numbers: dict[Expr, Any]) -> Buffers:
        """One set of tile buffers per stage, kept from panel to panel."""
        if at not in self.buffers:
            constants = numbers | {size(axis): self.sizes.of(axis) for axis in ("rows", "cols", *self.sizes.letters)}
            elements = self.tiles.rows * self.tiles.cols
            self.buffers[at] = Buffers(elements, self.sizes.compute, self.sizes.device, constants)
        return self.buffers[at]

    def _product(self, f: Expr, part: Part) -> Tensor:
        rows = part.rows
        panel = self.panels[f][: rows.stop - rows.start, : self.sizes.cols]
        if self.made[0] != rows:
            self.made = (rows, set())
        if f not in self.made[1]:
            x, y = (part.feed(a) for a in (f.args if f.args[0].rows else f.args[::-1]))
            matmul.panel_into(panel, x, y)
            self.made[1].add(f)
        return panel

    def finish(self, at: int) -> list[list[Tensor] | None]:
        kept = self.kept[at]
        return [_first(kept[p]) if p in kept else None for p in range(len(self.walk.stages[at].fold.reductions))]


def _first(accumulator: Accumulator | None) -> list[Tensor]:
    assert accumulator is not None
    return [v[0] for v in accumulator.finish()]
