"""The arithmetic of one tile, compiled once per fold and variant to a list of in-place torch calls.

A variant is the fold with some conditions known: where interval analysis shows that a condition holds (or fails) on
the whole tile, the ``where`` disappears, and reductions that then see only the identity drop out. Values live in
numbered slots, each a tile-sized buffer used again as soon as its value is dead; a reduction is told whether it may
overwrite its input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..program import intervals as iv
from ..program.build import gap_form, substitute, terms
from ..program.expr import Expr, const, topological
from ..program.lower import Fold
from ..program.primitives import PRIMITIVES
from ..program.reductions import KINDS
from . import hardware
from .evaluate import cast

Tile = tuple[int, int, int]


@dataclass(frozen=True)
class Contraction:
    """Σ over one axis of ``weight`` × ``vector``: a plain sum (no vector), a product, or a walk over features.

    With ``minus`` the vector is the gap ``vector - minus`` between a row's and a column's, kept together for accuracy.
    """

    weight: Expr
    vector: Expr | None
    walk: bool = False
    minus: Expr | None = None


@dataclass(frozen=True)
class Reducer:
    """A reduction of a variant: which one it is, the numbers per pair it reads, and its contractions."""

    place: int
    roots: tuple[Expr, ...]
    values: tuple[tuple[Contraction, ...], ...]


@dataclass(frozen=True)
class Step:
    """Either compute ``node`` into ``slot`` or hand the tile to ``reducer`` (``owned``: roots it may overwrite)."""

    node: Expr | None
    slot: int
    reducer: Reducer | None
    owned: tuple[bool, ...]
    alpha: Expr | None = None  # a number folded into a product
    divide: bool = False


@dataclass(frozen=True)
class Code:
    """The steps of one variant and the number class of each of its slots."""

    steps: tuple[Step, ...]
    slots: tuple[str, ...]


def contractions(value: Expr, over: str) -> tuple[Contraction, ...]:
    """How Σ value is computed: as products where the value is number × vector, else by walking its features."""
    if value.feature is None:
        return (Contraction(value, None),)
    gap = gap_form(value)
    if gap is not None and gap[1].op == gap[2].op == "leaf":
        return (Contraction(gap[0], gap[1], minus=gap[2]),)
    parts = terms(value)
    side = 2 if over == "cols" else 1
    if parts is not None and all(p[3 - side] is None and p[side] is not None for p in parts):
        return tuple(Contraction(p[0], p[side]) for p in parts)
    return (Contraction(value, None, walk=True),)


def _numbers_of(c: Contraction) -> list[Expr]:
    """The pair numbers that a contraction needs computed before it."""
    if not c.walk:
        return [c.weight]
    inside = topological([c.weight], stop=lambda e: e.feature is None)
    return [e for e in inside if e.feature is None and e.is_pair]


def conditions(fold: Fold) -> tuple[Expr, ...]:
    """The conditions worth deciding per tile: those of ``where`` and those that are summed."""
    fields = [a for r in fold.reductions if r.attrs[0] != "pick" for a in r.args]
    under = topological(fields)
    found = [e.args[0] for e in under if e.op == "where"] + [f for f in fields if f.dtype == "bool"]
    return tuple(dict.fromkeys(c for c in found if c.is_pair and _decidable(c)))


def _decidable(c: Expr) -> bool:
    """Whether a tile's index and number ranges can say anything of it."""
    return not any(e.op in ("dot", "sqdist", "fsum", "uniform") for e in topological([c]))


def ranged(fold: Fold) -> tuple[Expr, ...]:
    """The leaves whose least and greatest value per tile the conditions need."""
    return tuple(e for e in topological(conditions(fold)) if e.op == "leaf")


def interval(e: Expr, memo: dict[Expr, iv.Interval]) -> iv.Interval:
    """The interval of an expression on a tile; ``memo`` holds the intervals of indices and leaves."""
    for n in topological([e], stop=memo.__contains__):
        if n in memo:
            continue
        if n.op == "const":
            memo[n] = (float(n.const), float(n.const))
        elif n.op in PRIMITIVES:
            p = PRIMITIVES[n.op]
            attributes = dict(zip(p.attributes, n.attrs, strict=True)) if n.op == "cast" else {}
            memo[n] = p.interval(*(memo[a] for a in n.args), **attributes)
        else:
            memo[n] = (0.0, iv.INF) if n.op == "sqdist" else iv.UNKNOWN
    return memo[e]


def compile_variant(fold: Fold, decided: dict[Expr, bool], scalars: frozenset[Expr]) -> Code | None:
    """The code of a variant, or None if no reduction has anything to do. ``scalars``: leaves that are Python
    numbers."""
    replace = {c: const(truth) for c, truth in decided.items()}
    reducers = []
    for place, r in enumerate(fold.reductions):
        kind, over, params = r.attrs
        fields = substitute(r.args, replace)
        if KINDS[kind].idle(params, [interval(f, {}) for f in fields]):
            continue
        if kind == "soft":
            reducers.append(Reducer(place, fields[:1], tuple(contractions(v, over) for v in fields[1:])))
        elif kind == "sum":
            reducers.append(Reducer(place, (), (contractions(fields[0], over),)))
        else:
            reducers.append(Reducer(place, fields, ()))
    return _schedule(reducers, scalars) if reducers else None


def _schedule(reducers: list[Reducer], scalars: frozenset[Expr]) -> Code:
    plan: list[tuple[Expr | None, Reducer | None, tuple[Expr, ...]]] = []  # (node, reducer, the numbers it reads)
    ready: set[Expr] = set()
    fused = _fusable(reducers, scalars)

    def compute(e: Expr) -> None:
        if e in ready or not e.args:
            return
        ready.add(e)
        reads = () if e in fused else _numbers_under(e)
        for a in reads:
            compute(a)
        plan.append((e, None, reads))

    for r in reducers:
        reads = _read_by(r)
        for e in reads:
            compute(e)
        plan.append((None, r, reads))
    return _assign(plan, fused)


def _read_by(r: Reducer) -> tuple[Expr, ...]:
    """The numbers per pair that a reducer reads: its roots and those of its contractions."""
    roots = [n for root in r.roots for n in _numbers_of(Contraction(root, None, walk=root.feature is not None))]
    return tuple(dict.fromkeys([*roots, *_contracted(r)]))


def _contracted(r: Reducer) -> list[Expr]:
    return [n for v in r.values for c in v for n in _numbers_of(c)]


def _numbers_under(e: Expr) -> tuple[Expr, ...]:
    """The numbers that a node is computed from (none for products of vectors; those inside the walk for a feature
    sum)."""
    if e.op == "fsum":
        return tuple(_numbers_of(Contraction(e.args[0], None, walk=True)))
    return () if e.op in ("dot", "sqdist") else e.args


def _fusable(reducers: list[Reducer], scalars: frozenset[Expr]) -> dict[Expr, Expr]:
    """``mul(dot, number)`` and ``div(dot, number)`` whose dot has no other use: the number rides in the product."""
    roots = [n for r in reducers for n in _read_by(r)]
    order = topological(roots)
    uses: dict[Expr, int] = {}
    for e in order:
        for a in e.args:
            uses[a] = uses.get(a, 0) + 1
    for e in roots:
        uses[e] = uses.get(e, 0) + 1
    found: dict[Expr, Expr] = {}
    for e in order:
        if e.op in ("mul", "div") and e.dtype == "float":
            pairs = (e.args, e.args[::-1]) if e.op == "mul" else (e.args,)
            for d, k in pairs:
                if d.op == "dot" and d.dtype == "float" and uses[d] == 1 and (k.op == "const" or k in scalars):
                    found[e] = d
    return found


def _assign(plan: list, fused: dict[Expr, Expr]) -> Code:
    last: dict[Expr, int] = {}
    for at, (_, _, reads) in enumerate(plan):
        for e in reads:
            last[e] = at
    slots: list[str] = []
    free: list[int] = []
    home: dict[Expr, int] = {}
    steps: list[Step] = []
    for at, (e, reducer, reads) in enumerate(plan):
        dying = [a for a in dict.fromkeys(reads) if a in home and last[a] == at]
        if e is None:
            assert reducer is not None
            again = _contracted(reducer)  # a value may be its own logit
            owned = tuple(a in dying and a not in again for a in reducer.roots)
            steps.append(Step(None, -1, reducer, owned))
            free += [home.pop(a) for a in dying]
            continue
        slot = -1
        if e.is_pair:
            in_place = e.op in PRIMITIVES and e not in fused
            reuse = next((home[a] for a in dying if in_place and slots[home[a]] == e.dtype), None)
            if reuse is None:
                reuse = next((s for s in free if slots[s] == e.dtype), None)
                if reuse is None:
                    slots.append(e.dtype)
                    reuse = len(slots) - 1
                else:
                    free.remove(reuse)
            slot = reuse
            home[e] = slot
        free += [home.pop(a) for a in dying if home.get(a) != slot]
        for a in dying:
            home.pop(a, None)
        alpha, divide = None, False
        if e in fused:
            alpha, divide = next(a for a in e.args if a is not fused[e]), e.op == "div"
        steps.append(Step(e, slot, None, (), alpha, divide))
    return Code(tuple(steps), tuple(slots))


# Running ---------------------------------------------------------------------------------------------------------------


class Buffers:
    """Memory of a run: one flat tile-sized buffer per slot, allocated when first used, and constants as tensors."""

    def __init__(self, elements: int, compute: torch.dtype, device: torch.device, numbers: dict[Expr, Any]):
        self.kinds = {"float": compute, "int": torch.int64, "bool": torch.bool}
        self.elements, self.device = elements, device
        self.numbers = numbers  # leaves and sizes that are Python numbers
        self.flat: dict[tuple[int, str], Tensor] = {}
        self.constants: dict[Expr, Tensor] = {}

    def constant(self, e: Expr) -> Tensor:
        if e not in self.constants:
            value = float("nan") if e.op == "nan" else e.const if e.op == "const" else self.numbers[e]
            self.constants[e] = torch.tensor(value, dtype=self.kinds[e.dtype], device=self.device)
        return self.constants[e]

    def view(self, slot: int, kind: str, tile: Tile) -> Tensor:
        key = (slot, kind)
        if key not in self.flat:
            self.flat[key] = torch.empty(self.elements, dtype=self.kinds[kind], device=self.device)
        b, m, n = tile
        return self.flat[key][: b * m * n].view(tile)


@dataclass
class TileRun:
    """One tile being computed: its leaf values, and the values of its nodes so far."""

    values: dict[Expr, Any]
    tile: Tile
    buffers: Buffers

    def run(self, code: Code, hand_over: Callable[[Reducer, tuple[bool, ...], TileRun], None]) -> None:
        for step in code.steps:
            if step.reducer is not None:
                hand_over(step.reducer, step.owned, self)
            else:
                self._compute(step, code)

    def _compute(self, step: Step, code: Code) -> None:
        e = step.node
        assert e is not None
        out = self.buffers.view(step.slot, code.slots[step.slot], self.tile) if step.slot >= 0 else None
        if e.op == "dot" or step.alpha is not None:
            d = e if e.op == "dot" else next(a for a in e.args if a.op == "dot")
            k = (
                1
                if step.alpha is None
                else step.alpha.const
                if step.alpha.op == "const"
                else self.buffers.numbers[step.alpha]
            )
            self.values[e] = hardware.dot_into(
                out, self.get(d.args[0]), self.get(d.args[1]), 1 / k if step.divide else k
            )
        elif e.op == "exp" and out is not None:
            self.values[e] = hardware.exp_into(out, self.get(e.args[0]))
        elif e.op == "sqdist":
            self.values[e] = _sqdist_into(out, *(self.get(a) for a in e.args))
        elif e.op == "fsum":
            total = out.zero_() if out is not None else 0
            for f in range(self.width(e.args[0])):
                total += self.component(e.args[0], f)
            self.values[e] = total
        else:
            self.values[e] = _apply(e, [self.get(a) for a in e.args], out, self.buffers.kinds["float"])

    def get(self, e: Expr) -> Any:
        if e not in self.values:
            if e.op in ("const", "nan") or e in self.buffers.numbers:
                self.values[e] = self.buffers.constant(e)
            else:
                self.values[e] = _apply(e, [self.get(a) for a in e.args], None, self.buffers.kinds["float"])
        return self.values[e]

    def full(self, e: Expr) -> Tensor:
        """A number as a whole tile, expanded where it does not vary."""
        return self.get(e).expand(self.tile)

    def width(self, e: Expr) -> int:
        """The number of features of a vector expression."""
        leaf = next(n for n in topological([e]) if n.feature == e.feature and n in self.values)
        return self.values[leaf].shape[-1]

    def component(self, e: Expr, f: int) -> Tensor:
        """Feature ``f`` of a vector per pair, as a number per pair: never all features at once."""
        memo: dict[Expr, Any] = {}
        for n in topological([e], stop=lambda n: n.feature is None or n in self.values):
            if n.feature is None:
                memo[n] = self.get(n)
            elif n in self.values:  # a row or column vector [b, l, f]
                column = self.values[n][..., f]
                memo[n] = column.unsqueeze(-2) if n.cols else column.unsqueeze(-1)
            elif n.op == "spread":
                memo[n] = memo[n.args[0]]
            else:
                memo[n] = _apply(n, [memo[a] for a in n.args], None, self.buffers.kinds["float"])
        return memo[e]


def _apply(e: Expr, args: list[Any], out: Tensor | None, compute: torch.dtype) -> Any:
    p = PRIMITIVES[e.op]
    if e.op == "cast":
        value = cast(args[0], e.attrs[0], compute)
        return value if out is None else out.copy_(value)
    attributes = dict(zip(p.attributes, e.attrs, strict=True))
    return p.torch(*args, **attributes) if out is None else p.torch(*args, **attributes, out=out)


def _sqdist_into(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """|x_i - y_j|²: directly for few features; else by a product, and directly again for pairs too close for that."""
    x, y = x.to(out.dtype), y.to(out.dtype)
    if x.shape[-1] <= FEW_FEATURES:
        out.zero_()
        for f in range(x.shape[-1]):
            gap = x[..., f].unsqueeze(-1) - y[..., f].unsqueeze(-2)
            out.addcmul_(gap, gap)
        return out
    centre = y.mean(1, keepdim=True)  # distances do not move, and smaller numbers cancel less
    x, y = x - centre, y - centre
    hardware.dot_into(out, x, y, -2.0)
    norms = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2)
    out += norms
    close = out < norms.mul_(1e-2)  # here cancellation has cost more than two digits
    if bool(close.any()):
        b, i, j = close.nonzero(as_tuple=True)
        for at in range(0, len(b), _CLOSE_CHUNK):
            part = slice(at, at + _CLOSE_CHUNK)
            out[b[part], i[part], j[part]] = (x[b[part], i[part]] - y[b[part], j[part]]).square().sum(-1)
    return out


_CLOSE_CHUNK = 4096
FEW_FEATURES = 8  # up to here differences are taken directly
