"""Products that write weights instead of themselves: what needs no sweep over the panel afterwards.

Where all numbers of rows are known a generated product's epilogue writes the weights of the sums at once. Where they wait
for a softmax it writes exp(s - guess), the guess being the greatest of a few logits of the row, and sums tiles as it goes;
the totals then multiply the sums' other operands (``late.py``). A guess is checked on the device: rows that it served ill
are written once more, exactly, and nobody waits to hear whether there were any.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...program.build import dot, substitute
from ...program.expr import Expr, node, reduce_node, topological
from ...program.lower import Fold
from ...program.philox import DRAWS
from ..evaluate import Sizes
from ..walks import Walk
from . import boxes, deep, describe, sweep
from .joint import PLACES, joint, parts
from .late import Late, late
from .matched import matches
from .plan import KernelPlan
from .spec import WIDEST, Spec
from .write import Task, kernel, reads

# tiles of 128 × 256 pairs, as the vendor's products have them; a guess looks at 64 columns
PLANS = {
    "write_known": KernelPlan(128, 256, 8, 3),
    "write_spare": KernelPlan(128, 128, 8, 3),
    "guess_peaks": KernelPlan(64, 64, 4, 4),
    "write_guessed": KernelPlan(128, 256, 8, 3),
    "close_rows": KernelPlan(32, 64, 4, 1),
}


def on(device: torch.device) -> bool:
    """Whether generated products are as fast as the vendor's there: where tensor descriptors feed the matrix units."""
    return device.type == "cuda" and boxes.on(device)


@dataclass(frozen=True)
class Epilogue:
    """The stages of a group as one product. ``sides``: the vectors that are multiplied, as the program has them."""

    task: Task
    product: Expr
    sides: tuple[Expr, Expr]
    vectors: tuple[Expr, Expr]  # and as kernels call them
    feeds: tuple[tuple[Expr, Expr], ...]  # of the other leaves
    prepared: dict[tuple, sweep.Prepared] = field(default_factory=dict, compare=False)

    @property
    def guesses(self) -> bool:
        return self.task.late is not None

    def each(self, cols: int) -> int:
        """Bytes besides the panel that are held of one row."""
        return 8 * -(-cols // PLANS["write_guessed"].block_folded) + 12 if self.guesses else 0

    def __call__(self, out: Tensor, values: Mapping[Expr, Any], numbers: list[Tensor], here: Sizes) -> Tensor | None:
        """Write the weights into ``out`` and results into ``numbers``; what the weights are still to be multiplied by.

        ``values``: of all leaves, numbers or tensors ``[1, length(, features)]``."""
        run = _Run(self, out, values, here)
        if not self.guesses:
            run("write_known", [run.box("write_known")])
            return None
        floats = functools.partial(torch.empty, dtype=torch.float32, device=out.device)
        guesses, factors = floats(here.rows), floats(here.rows)
        marks = torch.empty(here.rows, dtype=torch.int32, device=out.device)
        turns = -(-here.cols // run.plan("write_guessed").block_folded)
        tops, sums = floats(turns, here.rows), floats(turns, here.rows)
        run("guess_peaks", [guesses])
        run("write_guessed", [run.box("write_guessed"), guesses, tops, sums])
        close = [*numbers, out, out.stride(0), guesses, tops, sums, factors, marks]
        run("close_rows", close, tiles=turns)
        run.values |= {name: t.unsqueeze(0) for name, t in zip(self.task.names, numbers, strict=True)}
        run("write_spare", [out, out.stride(0), marks])
        return factors


class _Run:
    """The launches on one panel."""

    def __init__(self, whole: Epilogue, out: Tensor, values: Mapping[Expr, Any], here: Sizes):
        self.whole, self.out, self.values, self.here = whole, out, dict(values), here

    def plan(self, name: str) -> KernelPlan:
        found = PLANS[name]
        kept, folded = (sweep.power(n, b) for n, b in zip(self._lengths, (found.block_kept, found.block_folded), strict=True))
        return replace(found, block_kept=kept, block_folded=found.block_folded if name == "close_rows" else folded)

    @property
    def _lengths(self) -> tuple[int, int]:
        return self.here.rows, self.here.cols

    def grid(self, name: str) -> int:
        """How many program instances: one for each tile of rows, or as many as run at a time, for tiles in turns."""
        plan = self.plan(name)
        rows, turns = -(-self.here.rows // plan.block_kept), -(-self.here.cols // plan.block_folded)
        at_once = describe.processors(self.here.device) * max(1, 8 // plan.num_warps)
        return min(rows * turns, at_once) if name.startswith("write_") else rows

    def box(self, name: str) -> Any:
        """The panel, written block by block."""
        plan = self.plan(name)
        return boxes.filled(boxes.template(self.out, (), (plan.block_kept, plan.block_folded // 2)), self.out)

    def __call__(self, name: str, outputs: list[Any], tiles: int = 0) -> None:
        kinds = tuple(v.dtype if isinstance(v, Tensor) else type(v) for v in self.values.values())
        shape = (self._lengths, tuple(self.here.letters.values()), self.here.device)
        key = (name, kinds, shape, tiles, self._copied(name), PLANS[name])
        if key not in self.whole.prepared:
            self.whole.prepared[key] = self._prepare(name, tiles)
        self.whole.prepared[key](outputs, self.values, self.here.device)

    def _copied(self, name: str) -> tuple[Expr, ...]:
        """The vectors whose blocks tensor descriptors copy."""
        if name == "close_rows" or not boxes.on(self.here.device):
            return ()
        vectors = self.whole.vectors
        return vectors if all(boxes.fits(self.values[e]) and self.values[e].shape[-1] > WIDEST for e in vectors) else ()

    def _prepare(self, name: str, tiles: int) -> sweep.Prepared:
        task, here, values = self.whole.task, self.here, self.values
        read = reads(name, task)
        numbers = tuple(r if r.op == "reduce" else reduce_node("sum", "cols", (), (r,)) for r in read)
        under = set(topological(numbers))
        fold = Fold((*(e for e in values if e in under),), numbers)
        types = tuple(str(values[e].dtype)[6:] if isinstance(values[e], Tensor) else "number" for e in fold.leaves)
        letters, copied = tuple(sorted(here.letters.items())), self._copied(name)
        found = tuple(() if e in copied else None for e in fold.leaves)
        spec = Spec(
            fold, "cols", types, (0,) * len(types), letters, str(here.compute)[6:], "bfloat16", 1, False, False, False,
            deep=True, boxes=found, raw=self.whole.guesses,
        )  # fmt: skip
        plan = self.plan(name)
        written = kernel(name, task, spec, masked=here.cols % plan.block_folded != 0)
        blocks = (plan.block_kept, plan.block_folded)
        wide = any(sweep.is_wide(e, values[e], blocks) for e in written.leaves)
        order = tuple(e for e in written.leaves if e in copied)
        return sweep.Prepared(written, plan, self._lengths, wide, tiles, self.grid(name), order)


@functools.lru_cache(maxsize=1024)
def epilogue(walk: Walk, group: range, moved: bool) -> Epilogue | None:
    """The stages of a group as one product, where they have one product and one weight, and folds bear a guess."""
    whole = joint(walk, group, moved)
    cuts = [parts(walk.stages[at]) for at in group]
    products = [(e, f) for e, f in zip(whole.leaves, whole.feeds, strict=True) if f.op == "dot"]
    if len(products) != 1 or len(whole.weights) != 1 or any(c.tops or c.numbers["rows"] for c in cuts):
        return None
    if any(e.op in DRAWS for e in topological(whole.weights)):  # these need the registers that a product has taken
        return None
    folds = tuple(r for fold in whole.folds for r in fold)
    apart = late(whole) if folds else None
    if folds and (moved or apart is None):
        return None
    ((leaf, product),) = products
    row, col = product.args if product.args[0].rows else product.args[::-1]
    vectors = _vector("u0", row), _vector("u1", col)
    replaced = {leaf: dot(*vectors)}
    (weight,), folds = substitute(whole.weights, replaced), substitute(folds, replaced)
    apart = None if apart is None else _replaced(apart, replaced)
    names = tuple(n for own in whole.names for n in own)
    feeds = tuple((e, f) for e, f in zip(whole.leaves, whole.feeds, strict=True) if e is not leaf)
    task = Task((*vectors, *(e for e, _ in feeds), *PLACES), folds, names, weight, apart)
    return Epilogue(task, product, (row, col), vectors, feeds)


def _vector(name: str, side: Expr) -> Expr:
    return node("leaf", (), (name,), rows=side.rows, cols=side.cols, feature=side.feature, dtype="float")


def _replaced(apart: Late, replaced: dict[Expr, Expr]) -> Late:
    early, power, factor = substitute((apart.early, apart.power, apart.late), replaced)
    return replace(apart, early=early, power=power, late=factor)
