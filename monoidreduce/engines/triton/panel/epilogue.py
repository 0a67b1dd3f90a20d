"""Products that write weights instead of themselves: what needs no sweep over the panel afterwards.

Where all numbers of rows are known a generated product's epilogue writes the weights of the sums at once. Where they
wait for a softmax it writes exp(s - guess), the guess being the greatest of a few logits of the row, and sums tiles as
it goes; the totals then multiply the sums' other operands (``row_factor.py``, ``label_corrections.py``). A guess is
checked on the device:
rows that it served ill are written once more, exactly, and nobody waits to hear whether there were any.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ....program.constructors import dot, substitute
from ....program.expression import Expr, node, reduce_node, topological
from ....program.lower import Fold
from ....program.philox import DRAWS
from ...common.evaluate import Sizes
from ...panel.panel_program import Walk
from ..codegen.kernel_spec import WIDEST, Spec
from ..launch import descriptors, jit_module
from ..schedules import attention, spec_from_tensors
from ..schedules.kernel_plan import KernelPlan
from ..schedules.pingpong_template import DEEPEST, OTHERS, TILE
from . import pingpong_epilogue, row_kernel
from .epilogue_kernels import BY_ROWS, HALVES, kernel, reads
from .epilogue_task import Task
from .fuse_stages import PLACES, counted, joint, parts
from .label_corrections import Rest
from .row_factor import Late, Own, apart, distinct, late

# A guess looks at 64 columns. Products of few features end often: with two smaller ones on a processor, one multiplies
# while the other writes. (On an H200 of 512 and 768 features these took 5 to 12 % less, of 2304 and 4096 13 % more.)
PLANS = {
    "write_known": KernelPlan(128, 256, 8, 4),
    "write_spare": KernelPlan(128, 128, 8, 3),
    "guess_peaks": KernelPlan(64, 64, 4, 8),
    "pick_own": KernelPlan(1, 1024, 4, 1),
    "match_own": KernelPlan(64, 64, 4, 3),
    "weigh_own": KernelPlan(64, 64, 4, 3),
    "write_guessed": KernelPlan(128, 256, 8, 4),
    "sum_guessed": KernelPlan(128, 256, 8, 4),
    "close_rows": KernelPlan(16, 256, 8, 1),
}
TURNS = "write_known", "write_guessed", "sum_guessed"  # as groups take turns, in tiles that are wide or not
PAIRED = {False: KernelPlan(TILE, TILE, 4, 1), True: KernelPlan(TILE, TILE + OTHERS, 4, 1)}
SHALLOW = dict.fromkeys(TURNS, KernelPlan(128, 128, 4, 3))
_FEW = 1024  # features
# Features, above which tiles by turns are wide. On an H200, time ÷ products, heads of 2304 in 1100 MB took 1.03 where
# they took 1.06 in narrow ones (in turns with the products 1.00, 1.01), of 1536 in 550 MB 1.08 and 1.05 (1.03 both).
_MANY = 2048
_LEAST = 64  # columns of a tile: a descriptor's pieces have 16 bytes and more
_LIGHT = 12  # operations on a pair: more of them need registers that the product has taken


def plan_of(name: str, width: int, by_turns: bool = False, wide: bool = False) -> KernelPlan:
    """The tiles of a kernel for products of so many features; ``by_turns``: where groups of warps take turns at it, in
    tiles that are ``wide`` or not."""
    if by_turns and name in TURNS:
        return PAIRED[wide]
    return SHALLOW[name] if width <= _FEW and name in SHALLOW else PLANS[name]


def is_wide(width: int) -> bool:
    """Whether groups take turns at wide tiles, which read less and end less often: where features are many, by a Triton
    that has registers for them (3.9 spills)."""
    return width > _MANY and jit_module.triton_version() < (3, 7)


def on(device: torch.device) -> bool:
    """Whether generated products are as fast as the vendor's there: where tensor descriptors feed the matrix units."""
    return device.type == "cuda" and descriptors.are_supported(device)


@dataclass(frozen=True)
class Epilogue:
    """The stages of a group as one product. ``sides``: the vectors that are multiplied, as the program has them."""

    task: Task
    product: Expr
    sides: tuple[Expr, Expr]
    vectors: tuple[Expr, Expr]  # and as kernels call them
    feeds: tuple[tuple[Expr, Expr], ...]  # of the other leaves
    raw: bool  # whether logits are not rounded as a panel would hold them
    ready: dict[tuple, _Ready] = field(default_factory=dict, compare=False)
    met: set[tuple] = field(default_factory=set, compare=False)  # what kernels were asked for, besides the rows

    @property
    def guesses(self) -> bool:
        return self.task.late is not None

    def each(self, sizes: Sizes) -> int:
        """Bytes besides the panel that are held of one row: what its tiles sum to."""
        return 6 * -(-sizes.cols // self.plan("write_guessed", sizes).block_folded) if self.guesses else 0

    def plan(self, name: str, sizes: Sizes) -> KernelPlan:
        """The tiles of a kernel, where a panel is large enough for them."""
        width = sizes.of(str(self.sides[0].feature))
        wide = is_wide(width)
        return plan_of(name, width, (wide or width <= DEEPEST) and attention.on(sizes.device), wide)

    def __call__(self, out: Tensor, values: Mapping[Expr, Any], numbers: list[Tensor], here: Sizes) -> Rest | None:
        """Write the weights into ``out`` and results into ``numbers``; what is left to do to their sums.

        ``values``: of all leaves, numbers or tensors ``[1, length(, features)]``."""
        return self._ready((out, *numbers), values, here)(out, dict(values), numbers)

    def own(self, values: Mapping[Expr, Any], here: Sizes) -> Rest:
        """What is left out of the weights, of some rows and all columns: each row's own."""
        assert self.task.own is not None
        hits = torch.empty(here.rows, dtype=torch.float32, device=here.device)
        targets = torch.empty(here.rows, dtype=torch.int64, device=here.device)
        self._ready((hits,), values, here)._launch("weigh_own", [hits, targets], values)
        return Rest(None, hits, targets, distinct(self.task.own.target))

    def _ready(self, outputs: tuple[Tensor, ...], values: Mapping[Expr, Any], here: Sizes) -> _Ready:
        told = tuple(map(row_kernel.specialized, (*values.values(), *outputs)))
        key = (here.rows, here.cols, here.device, *told, *PLANS.values(), *SHALLOW.values())
        ready = self.ready.get(key)
        if ready is None:
            ready = self.ready.setdefault(key, _Ready(self, outputs[0], values, here))
        return ready


class _Ready:
    """The kernels on panels of given lengths, types, strides and alignment; they are written when first called."""

    def __init__(self, whole: Epilogue, out: Tensor, values: Mapping[Expr, Any], here: Sizes):
        self.whole, self.here, self.lengths = whole, here, (here.rows, here.cols)
        self.prepared: dict[str, row_kernel.Prepared] = {}
        wide = [values[e].shape[-1] > WIDEST and descriptors.can_copy_vectors(values[e]) for e in whole.vectors]
        self.copied = whole.vectors if all(wide) and descriptors.are_supported(here.device) else ()
        name = "write_guessed" if whole.guesses else "write_known"
        many = here.rows >= TILE and here.cols >= TILE and bool(self.copied) and attention.on(here.device)
        width = values[whole.vectors[0]].shape[-1]
        self.wide = is_wide(width)
        cut = here.cols % PAIRED[self.wide].block_folded != 0
        self.by_turns = (
            many and pingpong_epilogue.kernel(name, whole.task, self._spec(name, values), cut, self.wide) is not None
        )
        self.plans = {name: self._plan(name, width) for name in PLANS}
        plan = self.plans[name]
        self.turns = -(-here.cols // plan.block_folded)
        box = (plan.block_kept, OTHERS if self.by_turns else plan.block_folded // HALVES)
        self.box = descriptors.make_descriptor(out, (), box, self.by_turns) if out.dim() == 2 else None

    def _plan(self, name: str, width: int) -> KernelPlan:
        found = plan_of(name, width, self.by_turns, self.wide)
        if name in ("pick_own", "match_own", "weigh_own") or (self.by_turns and name in TURNS):
            return found
        kept, folded = (
            row_kernel.power(self.here.rows, found.block_kept),
            row_kernel.power(self.here.cols, found.block_folded),
        )
        folded = found.block_folded if name == "close_rows" else min(found.block_folded, max(_LEAST, folded))
        return replace(found, block_kept=kept, block_folded=folded)

    def __call__(self, out: Tensor, values: dict[Expr, Any], numbers: list[Tensor]) -> Rest | None:
        box, rows, device = self.filled(out), self.here.rows, out.device
        if not self.whole.guesses:
            self._launch("write_known", [box], values)
            return None
        empty, padded = functools.partial(torch.empty, device=device), -(-rows // 8) * 8  # aligned
        guesses, picked, factors, hits = empty(4, padded, dtype=torch.float32)[:, :rows]
        marks, targets = empty(rows, dtype=torch.int32), empty(rows, dtype=torch.int64)
        tops, sums = (empty(self.turns, padded, dtype=t) for t in (torch.bfloat16, torch.float32))
        late = self.whole.task.late
        self._launch("guess_peaks", [guesses], values)
        self._launch("write_guessed", [box, guesses, tops, sums, padded], values)
        if late is not None and late.target is not None:
            self._launch("pick_own", [picked], values)
        close = [*numbers, guesses, tops, sums, padded, picked, out, out.stride(0), factors, hits, targets, marks]
        self._launch("close_rows", close, values, self.turns)
        values |= {name: t.unsqueeze(0) for name, t in zip(self.whole.task.names, numbers, strict=True)}
        self._launch("write_spare", [out, out.stride(0), marks], values)
        if late is None or late.hit is None:
            return Rest(factors)
        return Rest(factors, hits, targets, distinct(late.target))

    def filled(self, out: Tensor) -> Any:
        """What kernels write ``out`` by."""
        return descriptors.replace_base(self.box, out)

    def _launch(self, name: str, outputs: list[Any], values: Mapping[Expr, Any], tiles: int = 0) -> None:
        found = self.prepared.get(name)
        if found is None:
            found = self.prepared[name] = self._prepare(name, values, tiles)
        found(outputs, values, self.here.device, alike=True)

    def _grid(self, name: str) -> int:
        """How many program instances: one for each tile of rows, or as many as run at a time, for tiles in turns."""
        plan = self.plans[name]
        rows, turns = (-(-n // b) for n, b in zip(self.lengths, (plan.block_kept, plan.block_folded), strict=True))
        shared = self.by_turns and name in TURNS  # two groups are one instance
        at_once = spec_from_tensors.processors(self.here.device) * (1 if shared else max(1, 8 // plan.num_warps))
        return min(rows * turns, at_once) if name.startswith(("write_", "sum_")) else rows

    def _prepare(self, name: str, values: Mapping[Expr, Any], tiles: int) -> row_kernel.Prepared:
        plan = self.plans[name]
        asked = (name, self.whole.task, self._spec(name, values), self.here.cols % plan.block_folded != 0)
        by_turns = self.by_turns and name in TURNS
        written = (pingpong_epilogue.kernel(*asked, self.wide) if by_turns else None) or kernel(*asked)
        wide = any(row_kernel.is_wide(e, values[e], (plan.block_kept, plan.block_folded)) for e in written.leaves)
        order = () if name in BY_ROWS else tuple(e for e in written.leaves if e in self.copied)
        copied = [(e, plan.block_folded if e.cols else plan.block_kept) for e in order]
        if by_turns and self.wide:
            copied = [(e, TILE) for e in order] + [(e, OTHERS) for e in order if e.cols]
        return row_kernel.Prepared(written, plan, self.lengths, wide, tiles, self._grid(name), tuple(copied))

    def _spec(self, name: str, values: Mapping[Expr, Any]) -> Spec:
        here = self.here
        wanted = reads(name, self.whole.task)
        numbers = tuple(r if r.op == "reduce" else reduce_node("sum", "cols", (), (r,)) for r in wanted)
        under = set(topological(numbers))
        fold = Fold(tuple(e for e in values if e in under), numbers)
        types = tuple(str(values[e].dtype)[6:] if isinstance(values[e], Tensor) else "number" for e in fold.leaves)
        copied = () if name in BY_ROWS else self.copied
        return Spec(
            fold,
            "cols",
            types,
            (0,) * len(types),
            tuple(sorted(here.letters.items())),
            str(here.compute)[6:],
            "bfloat16",
            rank=1,
            bounds=False,
            lanes=False,
            guess=False,
            deep=True,
            raw=self.whole.raw,
            boxes=tuple(() if e in copied else None for e in fold.leaves),
        )


@functools.lru_cache(maxsize=1024)
def epilogue(walk: Walk, group: range, moved: bool, without: bool = False, stows: bool = False) -> Epilogue | None:
    """The stages of a group as one product, where they have one product and one weight, and folds bear a guess.

    ``without``: each row's own column is left out of the weights; None where rows have none. ``stows``: rows are folded
    some columns at a time before any weight is summed; what stands in their own columns is nobody's business here."""
    whole, own = joint(walk, group, moved), None
    if without:
        found = apart(joint(walk, group, False).weights[0]) if len(whole.weights) == 1 else None
        if found is None:
            return None
        others, there = found
        weights = substitute((others, there.weight, there.target), counted("col") if moved else {})
        whole, own = replace(whole, weights=weights[:1]), Own(*weights[1:])
    cuts = [parts(walk.stages[at]) for at in group]
    products = [(e, f) for e, f in zip(whole.leaves, whole.feeds, strict=True) if f.op == "dot"]
    if len(products) != 1 or len(whole.weights) != 1 or any(c.tops or c.numbers["rows"] for c in cuts):
        return None
    made = [e for e in topological(whole.weights) if e.is_pair and e.op != "leaf"]
    if len(made) > _LIGHT or any(e.op in DRAWS for e in made):
        return None
    folds = tuple(r for fold in whole.folds for r in fold)
    waits = late(joint(walk, group, False)) if folds else None
    if folds and (moved is not stows or without or waits is None):
        return None
    ((leaf, product),) = products
    row, col = product.args if product.args[0].rows else product.args[::-1]
    vectors = _vector("u0", row), _vector("u1", col)
    replaced = {leaf: dot(*vectors)}
    (weight,), folds = substitute(whole.weights, replaced), substitute(folds, replaced)
    if waits is not None and stows:
        waits = _replaced(replace(waits, hit=None), counted("col"))
    waits = None if waits is None else _replaced(waits, replaced)
    own = None if own is None else Own(*substitute((own.weight, own.target), replaced))
    names = tuple(n for own in whole.names for n in own)
    feeds = tuple((e, f) for e, f in zip(whole.leaves, whole.feeds, strict=True) if e is not leaf)
    task = Task((*vectors, *(e for e, _ in feeds), *PLACES), folds, names, weight, waits, own)
    return Epilogue(task, product, (row, col), vectors, feeds, bool(folds) or stows or walk.exact)


def _vector(name: str, side: Expr) -> Expr:
    return node("leaf", (), (name,), rows=side.rows, cols=side.cols, feature=side.feature, dtype="float")


def _replaced(waits: Late, replaced: dict[Expr, Expr]) -> Late:
    early, power, factor = substitute((waits.early, waits.power, waits.late), replaced)
    return replace(waits, early=early, power=power, late=factor)
