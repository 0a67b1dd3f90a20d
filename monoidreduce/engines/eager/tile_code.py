"""The arithmetic of one tile, compiled once per fold and variant to a list of in-place torch calls.

A variant is the fold with some conditions known: where interval analysis shows that a condition holds (or fails) on
the whole tile, the ``where`` disappears, and reductions that then see only the identity drop out. Values live in
numbered slots, each a tile-sized buffer used again as soon as its value is dead; a reduction is told whether it may
overwrite its input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...program.constructors import substitute
from ...program.contract import Contraction, interval
from ...program.expression import Expr, const, topological
from ...program.lower import Fold
from ...program.normal_form import split_index_match
from ...program.primitives import PRIMITIVES
from ...reductions import kind_of


@dataclass(frozen=True)
class Reducer:
    """A reduction of a variant: which one it is, the numbers per pair it reads, and its contractions."""

    place: int
    roots: tuple[Expr, ...]
    values: tuple[tuple[Contraction, ...], ...]


@dataclass(frozen=True)
class Riding:
    """A node computed from ``base``, with the numbers that stand between: they cost no pass of their own."""

    base: Expr
    factors: tuple[tuple[Expr, bool], ...]


@dataclass(frozen=True)
class Step:
    """Either compute ``node`` into ``slot`` or hand the tile to ``reducer`` (``owned``: roots it may overwrite)."""

    node: Expr | None
    slot: int
    reducer: Reducer | None
    owned: tuple[bool, ...]
    riding: Riding | None = None


@dataclass(frozen=True)
class Code:
    """The steps of one variant and the number class of each of its slots."""

    steps: tuple[Step, ...]
    slots: tuple[str, ...]


def _numbers_of(c: Contraction) -> list[Expr]:
    """The pair numbers that a contraction needs computed before it."""
    if not c.walk:
        return [c.weight]
    inside = topological([c.weight], stop=lambda e: e.feature is None)
    return [e for e in inside if e.feature is None and e.is_pair]


def compile_variant(fold: Fold, decided: dict[Expr, bool], scalars: frozenset[Expr]) -> Code | None:
    """The code of a variant, or None if no reduction has anything to do. ``scalars``: leaves that are Python
    numbers."""
    replace = {c: const(truth) for c, truth in decided.items()}
    reducers = []
    for place, r in enumerate(fold.reductions):
        kind, (_, over, params) = kind_of(r), r.attrs
        if not kind.walks(r, fold.reductions):
            continue
        fields = substitute(r.args, replace)
        if not kind.idle(params, [interval(f, {}) for f in fields]):
            reducers.append(Reducer(place, *kind.tile_reads(fields, over)))
    return _schedule(reducers, scalars) if reducers else None


def _schedule(reducers: list[Reducer], scalars: frozenset[Expr]) -> Code:
    plan: list[tuple[Expr | None, Reducer | None, tuple[Expr, ...]]] = []  # (node, reducer, the numbers it reads)
    ready: set[Expr] = set()
    fused = _fusable(reducers, scalars)

    def compute(root: Expr) -> None:
        """Plan what a number is computed from, then the number itself."""
        stack: list[tuple[Expr, tuple[Expr, ...], Iterator[Expr]]] = []
        entering: Expr | None = root
        while entering is not None or stack:
            if entering is not None and entering not in ready and entering.args:
                e = entering
                ready.add(e)
                reads = _numbers_under(e) if e not in fused else () if fused[e].base.op == "dot" else (fused[e].base,)
                stack.append((e, reads, iter(reads)))
            entering = next(stack[-1][2], None) if stack else None
            if entering is None and stack:
                e, reads, _ = stack.pop()
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
    hot = hot_sum(e)
    if hot is not None:
        return (hot.dense,)
    if e.op == "fsum":
        return tuple(_numbers_of(Contraction(e.args[0], None, walk=True)))
    return () if e.op in ("dot", "sqdist") else e.args


@dataclass(frozen=True)
class HotSum:
    """dense ± [index == target] value, where target and value are one-sided numbers: a scatter into the tile."""

    dense: Expr
    axis: str
    target: Expr
    value: Expr
    sign: int


def hot_sum(e: Expr) -> HotSum | None:
    """Read a node as a :class:`HotSum`, if it is one."""
    if e.op not in ("add", "sub") or not e.is_pair or e.feature is not None or e.dtype != "float":
        return None
    for dense, hot in (e.args, e.args[::-1]) if e.op == "add" else (e.args,):
        if hot.op == "where" and dense.is_pair and hot.args[2].const == 0 and not hot.args[1].is_pair:
            found, rest = split_index_match(hot.args[0])
            plain = not hot.args[1].args and rest.const is True
            if plain and found is not None and found[1].feature is None and not found[1].args:
                return HotSum(dense, found[0], found[1], hot.args[1], -1 if e.op == "sub" else 1)
    return None


def _fusable(reducers: list[Reducer], scalars: frozenset[Expr]) -> dict[Expr, Riding]:
    """A product times a number, and the exponential of one: the number rides in what is computed anyway.

    Only where nothing else reads what lies between, and, in an exponent, where a factor was rounded anyway."""
    roots = [n for r in reducers for n in _read_by(r)]
    order = topological(roots)
    uses: dict[Expr, int] = {}
    for used in (*roots, *(a for e in order for a in e.args)):
        uses[used] = uses.get(used, 0) + 1
    found: dict[Expr, Riding] = {}
    for e in order:
        if e.op == "exp" and e.is_pair:
            base, factors = _scaled(e.args[0], scalars, uses)
            if base.op != "dot" and any(k.op != "const" or abs(k.const) != 1 for k, _ in factors):
                found[e] = Riding(base, factors)
        elif e.op in ("mul", "div") and e.dtype == "float":
            scale = _factor(e, scalars)
            if scale is not None and scale[0].op == "dot" and scale[0].dtype == "float" and uses[scale[0]] == 1:
                found[e] = Riding(scale[0], (scale[1],))
    return found


def _scaled(e: Expr, scalars: frozenset[Expr], uses: dict[Expr, int]) -> tuple[Expr, tuple[tuple[Expr, bool], ...]]:
    """What an expression is a multiple of, and the numbers that make it so."""
    factors: list[tuple[Expr, bool]] = []
    while uses[e] == 1 and e.is_pair and (scale := _factor(e, scalars)) is not None:
        e, factor = scale
        factors.append(factor)
    return e, tuple(factors)


def _factor(e: Expr, scalars: frozenset[Expr]) -> tuple[Expr, tuple[Expr, bool]] | None:
    """An expression as (what is scaled, (a number, whether it divides)), if it is that."""
    if e.op == "neg":
        return e.args[0], (const(-1.0), False)
    if e.op not in ("mul", "div"):
        return None
    for x, k in (e.args, e.args[::-1]) if e.op == "mul" else (e.args,):
        if k.op == "const" or k in scalars:
            return x, (k, e.op == "div")
    return None


def _assign(plan: list, fused: dict[Expr, Riding]) -> Code:
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
            in_place = e.op in PRIMITIVES and not (e in fused and fused[e].base.op == "dot")
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
        steps.append(Step(e, slot, None, (), fused.get(e)))
    return Code(tuple(steps), tuple(slots))
