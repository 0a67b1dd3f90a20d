"""What a fold costs, counted from its program: matrix products, arithmetic per pair, numbers read and written.

A :class:`Case` is one fold at one size on one device, all that a schedule is chosen by; it holds no tensors. A
:class:`Work` is what :func:`count` finds in it: per pair, per row and per column, so that times the sizes of any slice
it is the cost of that slice (the papers' section 3 assumes the same bilinearity).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..program.constructors import ONE
from ..program.contract import Contraction
from ..program.expression import Expr, topological
from ..program.lower import Fold
from ..program.primitives import PRIMITIVES
from ..reductions import kind_of, outputs_of
from .device_rates import Ceilings

# How many exponentials one of these takes, about; every other operation is plain arithmetic.
SPECIAL = {
    "atan": 2.0,
    "cos": 1.5,
    "decay": 1.0,
    "erf": 1.0,
    "erfc": 2.0,
    "exp": 1.0,
    "exp2": 1.0,
    "expm1": 1.5,
    "gate": 1.0,
    "gelu": 2.0,
    "gumbel": 6.0,  # a hash and two logarithms
    "log": 1.0,
    "log1p": 1.5,
    "log2": 1.0,
    "logaddexp": 2.5,
    "logsigmoid": 2.5,
    "normal_gate": 1.0,
    "pow": 3.0,
    "sigmoid": 1.0,
    "silu": 1.0,
    "sin": 1.5,
    "sinh": 2.0,
    "softplus": 2.5,
    "tanh": 1.5,
    "uniform": 12.0,  # ten rounds of Philox
}
FEW_FEATURES = 16  # up to here squared distances are taken feature by feature


@dataclass(frozen=True)
class Case:
    """One fold at one size on one device."""

    fold: Fold
    name: str  # a digest of the fold: equal programs have equal names, also in another process
    rows: int
    cols: int
    batch: int
    letters: tuple[tuple[str, int], ...]
    dtype: str  # of its vectors: "bfloat16", "float32", ...
    item: int  # bytes of a number of its vectors
    wide: int  # bytes of a number that arithmetic is done in
    ceilings: Ceilings
    kernels: bool = False  # whether it has generated kernels, in which sums stay in registers
    panels: bool = False  # whether it can be done a panel at a time
    gpu: bool = False
    defaults: tuple[tuple[str, tuple[int, ...]], ...] = ()  # tiles that the engine would take by itself, by direction
    tile: int = 0  # bytes that a tile of torch holds per pair
    fixed: int = 0  # and besides, whatever its size
    width: int = 1  # numbers of a pair that are folded whole
    steps: int = 0  # torch operations that a tile takes
    seen: float = 1.0  # the share of the pairs that conditions leave

    def pairs(self, rows: int = 0, cols: int = 0) -> float:
        """Pairs that are computed in tiles of a size: what conditions leave, and what they cut through."""
        cut = (rows / max(1, self.rows) + cols / max(1, self.cols)) / 4
        share = 1.0 if self.seen == 1 else min(1.0, self.seen + cut)
        return self.batch * self.rows * self.cols * share

    def of(self, letter: str | int) -> int:
        name = str(letter).lstrip("#")
        return int(name) if name.isdigit() else dict(self.letters)[name]

    def features(self, e: Expr) -> int:
        """Numbers that one index (or pair) holds of an expression."""
        return 1 if e.feature is None else self.of(str(e.feature))


@dataclass(frozen=True)
class Work:
    """What is done per pair, and what is read and written per row and per column (in bytes)."""

    products: int = 0  # floating operations of matrix products that make pairs
    contracted: int = 0  # floating operations of matrix products that fold pairs
    plain: float = 0.0  # plain operations
    special: float = 0.0  # exponentials and the like
    reads: Mapping[str, int] = field(default_factory=dict)  # "rows", "cols": bytes of an index's inputs
    writes: Mapping[str, int] = field(default_factory=dict)  # bytes of an index's results

    @property
    def flops(self) -> int:
        return self.products + self.contracted


def count(case: Case, over: str | None = None) -> Work:
    """The work of a fold; with ``over`` of its reductions in that direction alone, as a kernel does it."""
    return _count(case.fold, case.letters, case.item, case.wide, over)


@functools.lru_cache(maxsize=4096)
def _count(fold: Fold, letters: tuple[tuple[str, int], ...], item: int, wide: int, over: str | None) -> Work:
    counter = _Counter(fold, dict(letters), item, wide)
    return counter.run([r for r in fold.reductions if over is None or r.attrs[1] in (over, "neither")])


def joined(works: list[Work]) -> Work:
    """Several pieces of work done to the same pairs."""
    both = [{k: sum(getattr(w, n).get(k, 0) for w in works) for k in ("rows", "cols")} for n in ("reads", "writes")]
    sums = [sum(getattr(w, n) for w in works) for n in ("products", "contracted", "plain", "special")]
    return Work(*sums, *both)


def directions(fold: Fold) -> tuple[str, ...]:
    """The directions in which a fold reduces pairs that must be walked."""
    walked = [r for r in fold.reductions if kind_of(r).walks(r, fold.reductions)]
    return tuple(o for o in ("cols", "rows") if any(r.attrs[1] == o for r in walked))


def gathers(fold: Fold) -> bool:
    """Whether single pairs, gathered or scattered, are all that a fold takes: nothing is walked."""
    return not any(kind_of(r).walks(r, fold.reductions) for r in fold.reductions)


class _Counter:
    """Counts one fold: every node once, however often it is used; kinds of reduction call ``count_...`` on it."""

    def __init__(self, fold: Fold, letters: Mapping[str, int], item: int, wide: int):
        self.fold, self.letters, self.item, self.wide = fold, letters, item, wide
        self.products = self.contracted = 0
        self.plain = self.special = 0.0
        self.seen: set[Expr] = set()

    def width(self, e: Expr) -> int:
        name = str(e.feature).lstrip("#")
        return 1 if e.feature is None else int(name) if name.isdigit() else self.letters[name]

    def run(self, reductions: list[Expr]) -> Work:
        for r in reductions:
            if kind_of(r).walks(r, self.fold.reductions):
                kind_of(r).count_pair(self, r)
        writes = {"rows": 0, "cols": 0}
        for r in reductions:
            for feature, dtype in outputs_of(r):
                size = (self.wide if dtype == "float" else 8) * (1 if feature is None else self._of(feature))
                if r.attrs[1] != "neither":
                    writes["rows" if r.attrs[1] == "cols" else "cols"] += size
        used = set(topological(reductions))
        reads = {"rows": 0, "cols": 0}
        for e in self.fold.leaves:
            if e in used and e.rows != e.cols:
                size = 8 if e.dtype == "int" else 1 if e.dtype == "bool" else self.item
                reads["rows" if e.rows else "cols"] += size * self.width(e)
        return Work(self.products, self.contracted, self.plain, self.special, reads, writes)

    def _of(self, feature: str | int) -> int:
        name = str(feature).lstrip("#")
        return int(name) if name.isdigit() else self.letters[name]

    def count_contraction(self, c: Contraction, weighted: bool = False) -> None:
        """Add one contraction; ``weighted``: its weight is multiplied by another."""
        if c.walk:
            self.count_value(c.weight)
            self.plain += self.width(c.weight)
            return
        self.count_number(c.weight)
        self.plain += weighted and c.weight is not ONE and c.weight.is_pair
        if c.vector is None:
            self.plain += 1
        elif c.minus is not None and self.width(c.vector) <= FEW_FEATURES:
            self.plain += 6 * self.width(c.vector)
        else:
            self.contracted += 2 * self.width(c.vector)

    def count_value(self, e: Expr) -> None:
        """A number per pair, or a vector walked feature by feature."""
        inside = topological([e], stop=lambda n: n.feature is None)
        for n in inside:
            if n.feature is None:
                self.count_number(n)
            elif n.is_pair and n.op in PRIMITIVES and n not in self.seen:
                self.seen.add(n)
                self._primitive(n, self.width(n))

    def count_number(self, e: Expr) -> None:
        """Add what a number per pair is computed from."""
        for n in topological([e], stop=lambda x: x in self.seen or not x.is_pair or x.op in ("dot", "sqdist", "fsum")):
            if n in self.seen or not n.is_pair:
                continue
            self.seen.add(n)
            if n.op == "dot":
                self.products += 2 * self.width(n.args[0])
            elif n.op == "sqdist":
                width = self.width(n.args[0])
                self.plain += 6 * width if width <= FEW_FEATURES else 2
                self.products += 0 if width <= FEW_FEATURES else 2 * (width + 4)
            elif n.op in ("fsum", "famax", "famin"):
                self.count_value(n.args[0])
                self.plain += self.width(n.args[0])
            elif n.op in PRIMITIVES:
                self._primitive(n, 1)

    def _primitive(self, n: Expr, times: int) -> None:
        if n.op in SPECIAL:
            self.special += SPECIAL[n.op] * times
        elif n.op not in ("cast", "detach"):
            self.plain += times
