"""Sums that are too wide for registers: h vectors of f features for each kept index (``program/several.py``).

They are the gradients of several vectors. A program instance owns its part of the result, so it adds there: for each
of the h vectors a tile loads what was added before, runs one matrix product and stores the sum. No other instance reads
or writes it, so there are no atomics and one order. A barrier after a tile's stores makes them visible to all threads
of the instance, which may load other elements than they stored.
"""

from __future__ import annotations

import functools
from typing import Any

from ....program.contract import Contraction, contractions
from ....program.expression import Expr
from ....program.several import OUTER, is_product, letters
from ....reductions import outputs_of
from .expressions import ExpressionWriter
from .kernel_spec import Unsupported, padded
from .several import block_of


@functools.lru_cache(maxsize=1024)
def is_stored(r: Expr) -> bool:
    """Whether a reduction is a sum of vectors that is kept in memory."""
    kind, over, _ = r.attrs
    return kind == "sum" and any(_is_outer(c) for c in contractions(r.args[0], over))


def _is_outer(c: Contraction) -> bool:
    return c.walk and is_product(c.weight) and c.weight.attrs[0] in OUTER


class StoredSum:
    """A running sum in the result's memory, with the methods of ``accumulators.Accumulator`` that a sum calls."""

    tiny, waiting = False, None

    def __init__(self, name: str, reduction: Expr, v: ExpressionWriter):
        self.name, self.v, self.feature = name, v, reduction.args[0].feature
        spec = v.spec
        if any(r.attrs[0] == "soft" for r in spec.fold.reductions) and spec.guess:
            raise Unsupported("gradients of several vectors beside a softmax of 16-bit vectors")
        before = spec.fold.reductions[: spec.fold.reductions.index(reduction)]
        self.out = sum(len(outputs_of(r)) for r in before)
        self.count, self.width = (spec.width(letter) for letter in letters(self.feature))

    def waits(self, parts: list[Contraction]) -> bool:
        return False

    def _block(self) -> tuple[str, str]:
        """The place of a block of the first of the vectors, and its mask."""
        v, name = self.v, f"{self.name}_at"
        lane, exists = v.slice_lane(padded(self.width), self.width)
        mask = "kept_in[:, None]" + (f" & {exists}[None, :]" if exists else "")
        if self.out in v.spec.strided:
            batch = "".join(f" + b{k} * out{self.out}_b{k}" for k in v.spec.kept_batch)
            row = f"out{self.out}{batch} + (tl.cast(tile * KEPT, tl.int64) + kept_lane[:, None]) * out{self.out}_s"
        else:
            place = "tl.cast(part, tl.int64) * batches + batch" if v.spec.split else "tl.cast(batch, tl.int64)"
            row = f"(({place}) * kept_size + tile * KEPT + kept_lane[:, None]) * {self.count * self.width}"
            row = f"out{self.out} + {row}"
        return v.bind((self.name, "at"), f"{row} + {lane}[None, :]", False, name), mask

    def _each(self, lines: list[str]) -> list[str]:
        """Lines for each of the vectors, whose number is ``each``."""
        return [f"for each in range(0, {self.count}):", *(f"    {line}" for line in lines), "tl.debug_barrier()"]

    def start(self) -> list[str]:
        at, mask = self._block()
        zeros = f"tl.zeros([KEPT, {padded(self.width)}], {self.v.float})"
        return self._each([f"tl.store({at} + each * {self.width}, {zeros}, mask={mask})"])

    def add(self, c: Contraction, weight: str | None) -> None:
        """Add one tile's Σ numbers × vectors."""
        v, e = self.v, c.weight
        if not _is_outer(c) or weight is not None or e.args[1].op != "leaf":
            raise Unsupported("sums of several vectors that are no gradients of products")
        if not self.count or not self.width:
            return
        numbers, vectors = e.args
        at, mask = self._block()
        v.prepare_walk(numbers)
        v.prepare_walk(e)
        with v.walk(self.count) as each:
            one = v.seen(f"tl.zeros([KEPT, FOLDED], {v.float}) + {v.component(numbers, each)}", "0.0")
            operand = v.bind((self.name, "operand"), f"({one}).to(tl.{v.operand_type()})", True)
            place = v.bind((self.name, "place"), f"{at} + {each} * {self.width}", True)
            old = v.bind((self.name, "old"), f"tl.load({place}, mask={mask}, other=0)", True)
            new = f"tl.dot({operand}, {block_of(v, vectors, each)}, acc={old}{v.options()})"
            v.inside.append(f"tl.store({place}, {new}, mask={mask})")
        v.inside.append("tl.debug_barrier()")

    def result(self) -> list[str]:
        return []

    def scale(self, factor: str) -> list[str]:
        """Lines that multiply it by a number per kept index."""
        at, mask = self._block()
        place = f"{at} + each * {self.width}"
        return self._each([f"tl.store({place}, tl.load({place}, mask={mask}, other=0) * {factor}, mask={mask})"])


def add_mixed(total: Any, e: Expr) -> None:
    """Add one tile's Σ over pairs and over a of number a × vector a to a running sum of vectors."""
    v, (numbers, vectors) = total.v, e.args
    if vectors.op != "leaf":
        raise Unsupported("products of several vectors that are computed in the tile")
    count, width = (v.spec.width(letter) for letter in letters(vectors.feature))
    if not count:
        return
    v.prepare_walk(numbers)
    with v.walk(count) as each:
        one = v.seen(f"tl.zeros([KEPT, FOLDED], {v.float}) + {v.component(numbers, each)}", "0.0")
        if total.tiny:
            one = v.bind((total.name, "operand"), one, True)
            for k, name in enumerate(total.names):
                number = v.leaf_component(vectors, f"({each} * {width} + {k})")
                total.add_block(name, f"{one} * {number}")
            return
        operand = v.bind((total.name, "operand"), f"({one}).to(tl.{v.operand_type()})", True)
        v.inside.append(
            f"{total.name} = tl.dot({operand}, {block_of(v, vectors, each)}, acc={total.name}{v.options()})"
        )
