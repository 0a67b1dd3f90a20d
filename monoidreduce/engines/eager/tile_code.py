"""The arithmetic of one tile, compiled once per fold and variant to a list of in-place torch calls.

A variant is the fold with some conditions known: where interval analysis shows that a condition holds (or fails) on
the whole tile, the ``where`` disappears, and reductions that then see only the identity drop out. Values live in
numbered slots, each a tile-sized buffer used again as soon as its value is dead; a reduction is told whether it may
overwrite its input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...program.constructors import ONE, Contraction, interval, is_along_diagonals, substitute
from ...program.expression import Expr, const, topological
from ...program.lower import Fold
from ...program.normal_form import split_index_match
from ...program.primitives import PRIMITIVES
from ...reductions import kind_of
from ..common.evaluate import Sizes

FEW_FEATURES = 16  # up to this many, differences are computed directly: three passes per feature, no cancellation

WALKED = ("fsum", "famax", "famin")  # numbers made of a vector, one feature at a time


@dataclass(frozen=True)
class Reducer:
    """A reduction of a variant: which one it is, the numbers per pair it reads, and its contractions."""

    place: int
    roots: tuple[Expr, ...]
    values: tuple[tuple[Contraction, ...], ...]


@dataclass(frozen=True)
class FusedScale:
    """A node computed directly from ``base``, with the scalar factors between them fused into it."""

    base: Expr
    factors: tuple[tuple[Expr, bool], ...]


@dataclass(frozen=True)
class Step:
    """Either compute ``node`` into ``slot`` or hand the tile to ``reducer`` (``owned``: roots it may overwrite)."""

    node: Expr | None
    slot: int
    reducer: Reducer | None
    owned: tuple[bool, ...]
    fused: FusedScale | None = None


@dataclass(frozen=True)
class TileCode:
    """The steps of one variant and the number class of each of its slots."""

    steps: tuple[Step, ...]
    slots: tuple[str, ...]


def _pair_numbers(c: Contraction) -> list[Expr]:
    """The pair numbers that a contraction needs computed before it."""
    if not c.walk:
        return [c.weight]
    inside = topological([c.weight], stop=lambda e: e.feature is None)
    return [e for e in inside if e.feature is None and e.is_pair]


def compile_variant(fold: Fold, decided: dict[Expr, bool], scalars: frozenset[Expr]) -> TileCode | None:
    """The code of a variant, or None if no reduction has anything to do. ``scalars``: leaves that are Python
    numbers."""
    replace = {c: const(truth) for c, truth in decided.items()}
    reducers = []
    for place, r in enumerate(fold.reductions):
        kind, (_, over, params) = kind_of(r), r.attrs
        if not kind.walks(r, fold.reductions):
            continue
        fields = substitute(r.args, replace)
        if not decided or not kind.idle(params, [interval(f, {}) for f in fields]):
            reducers.append(Reducer(place, *kind.tile_reads(fields, over)))
    return _schedule(reducers, scalars) if reducers else None


def _schedule(reducers: list[Reducer], scalars: frozenset[Expr]) -> TileCode:
    plan: list[tuple[Expr | None, Reducer | None, tuple[Expr, ...]]] = []  # (node, reducer, the numbers it reads)
    ready: set[Expr] = set()
    fused = _find_fused_scales(reducers, scalars)

    def compute(root: Expr) -> None:
        """Plan the operands of a number, then the number itself (without recursion)."""
        stack: list[tuple[Expr, tuple[Expr, ...], Iterator[Expr]]] = []
        entering: Expr | None = root
        while entering is not None or stack:
            if entering is not None and entering not in ready and entering.args:
                e = entering
                ready.add(e)
                reads = (
                    _numbers_read_by_node(e)
                    if e not in fused
                    else ()
                    if fused[e].base.op == "dot"
                    else (fused[e].base,)
                )
                stack.append((e, reads, iter(reads)))
            entering = next(stack[-1][2], None) if stack else None
            if entering is None and stack:
                e, reads, _ = stack.pop()
                plan.append((e, None, reads))

    for r in reducers:
        reads = _numbers_read(r)
        for e in reads:
            compute(e)
        plan.append((None, r, reads))
    return _assign_slots(plan, fused)


def _numbers_read(r: Reducer) -> tuple[Expr, ...]:
    """The numbers per pair that a reducer reads: its roots and those of its contractions."""
    roots = [n for root in r.roots for n in _pair_numbers(Contraction(root, None, walk=root.feature is not None))]
    return tuple(dict.fromkeys([*roots, *_numbers_contracted(r)]))


def _numbers_contracted(r: Reducer) -> list[Expr]:
    return [n for v in r.values for c in v for n in _pair_numbers(c)]


def _numbers_read_by_node(e: Expr) -> tuple[Expr, ...]:
    """The numbers that a node is computed from (none for products of vectors; those inside the walk for a feature
    sum)."""
    hot = match_label_scatter(e)
    if hot is not None:
        return (hot.dense,)
    if e.op in WALKED:
        return tuple(_pair_numbers(Contraction(e.args[0], None, walk=True)))
    if e.op == "lookup":
        return () if is_along_diagonals(e.args[1]) else e.args[1:]
    return () if e.op in ("dot", "sqdist") else e.args


@dataclass(frozen=True)
class LabelScatter:
    """dense ± [index == target] value, where target and value are one-sided numbers: a scatter into the tile."""

    dense: Expr
    axis: str
    target: Expr
    value: Expr
    sign: int


def match_label_scatter(e: Expr) -> LabelScatter | None:
    """Read a node as a :class:`LabelScatter`, if it is one."""
    if e.op not in ("add", "sub") or not e.is_pair or e.feature is not None or e.dtype != "float":
        return None
    for dense, hot in (e.args, e.args[::-1]) if e.op == "add" else (e.args,):
        if hot.op == "where" and dense.is_pair and hot.args[2].const == 0 and not hot.args[1].is_pair:
            found, rest = split_index_match(hot.args[0])
            plain = not hot.args[1].args and rest.const is True
            if plain and found is not None and found[1].feature is None and not found[1].args:
                return LabelScatter(dense, found[0], found[1], hot.args[1], -1 if e.op == "sub" else 1)
    return None


def _find_fused_scales(reducers: list[Reducer], scalars: frozenset[Expr]) -> dict[Expr, FusedScale]:
    """Scalar factors that are fused: of a product of vectors, and of the argument of an exponential.

    Only where nothing else reads the unscaled value, and in an exponent only where a factor was rounded anyway."""
    roots = [n for r in reducers for n in _numbers_read(r)]
    order = topological(roots)
    uses: dict[Expr, int] = {}
    for used in (*roots, *(a for e in order for a in e.args)):
        uses[used] = uses.get(used, 0) + 1
    found: dict[Expr, FusedScale] = {}
    for e in order:
        if e.op == "exp" and e.is_pair:
            base, factors = _split_scales(e.args[0], scalars, uses)
            if base.op != "dot" and any(k.op != "const" or abs(k.const) != 1 for k, _ in factors):
                found[e] = FusedScale(base, factors)
        elif e.op in ("mul", "div") and e.dtype == "float":
            scale = _split_factor(e, scalars)
            if scale is not None and scale[0].op == "dot" and scale[0].dtype == "float" and uses[scale[0]] == 1:
                found[e] = FusedScale(scale[0], (scale[1],))
    return found


def _split_scales(
    e: Expr, scalars: frozenset[Expr], uses: dict[Expr, int]
) -> tuple[Expr, tuple[tuple[Expr, bool], ...]]:
    """An expression without its scalar factors, and the factors."""
    factors: list[tuple[Expr, bool]] = []
    while uses[e] == 1 and e.is_pair and (scale := _split_factor(e, scalars)) is not None:
        e, factor = scale
        factors.append(factor)
    return e, tuple(factors)


def _split_factor(e: Expr, scalars: frozenset[Expr]) -> tuple[Expr, tuple[Expr, bool]] | None:
    """An expression as (unscaled, (scalar, whether it divides)); None if it has no scalar factor."""
    if e.op == "neg":
        return e.args[0], (const(-1.0), False)
    if e.op not in ("mul", "div"):
        return None
    for x, k in (e.args, e.args[::-1]) if e.op == "mul" else (e.args,):
        if k.op == "const" or k in scalars:
            return x, (k, e.op == "div")
    return None


def _assign_slots(plan: list, fused: dict[Expr, FusedScale]) -> TileCode:
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
            again = _numbers_contracted(reducer)  # a value may be its own logit
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
    return TileCode(tuple(steps), tuple(slots))


# Memory estimate of a tile: its buffers, and the temporaries that torch allocates, in bytes per pair
# (tests/unit/plan/test_cost.py compares it with what a run allocates)

_OUT_OF_PLACE = ("cast", "floor_divide", "isnan", "isinf", "logsigmoid", "detach")  # computed out of place, then copied
RANDOM_BYTES = 9 * 8 * 2**16  # bytes held while random numbers are drawn, for any tile


def bytes_per_pair(fold: Fold, code: TileCode, sizes: Sizes) -> int:
    """Bytes that a tile holds per pair."""
    item = {"float": sizes.compute.itemsize, "int": 8, "bool": 1}
    besides = [_temporary_bytes(s, fold, sizes, item) for s in code.steps]
    return sum(item[k] for k in code.slots) + max([0, *besides])


def fixed_bytes(code: TileCode) -> int:
    """Bytes that do not grow with the tile."""
    return RANDOM_BYTES if any(s.node is not None and s.node.op in ("gumbel", "uniform") for s in code.steps) else 0


def _temporary_bytes(step: Step, fold: Fold, sizes: Sizes, item: dict[str, int]) -> int:
    if step.reducer is not None:
        r, reads = fold.reductions[step.reducer.place], (step.reducer.roots, step.reducer.values)
        return kind_of(r).tile_bytes(_TileSizes(sizes, item), r.attrs[2], reads, step.owned)
    e = step.node
    if e is None:
        return 0
    if e.op == "sqdist":
        return 2 * item["float"]  # two differences
    if e.op in WALKED:
        return _feature_walk_bytes(e.args[0], item)
    if e.op == "lookup":  # along diagonals it is copied; else the place of every entry, and whether there is one
        return 0 if is_along_diagonals(e.args[1]) else item[e.dtype] + 2 * item["int"] + 3 * item["bool"]
    return item[e.dtype] if e.op in _OUT_OF_PLACE and e.is_pair else 0


def _feature_walk_bytes(value: Expr, item: dict[str, int]) -> int:
    """Bytes per pair of evaluating a vector per pair one feature at a time."""
    inside = topological([value], stop=lambda n: n.feature is None or not n.is_pair)
    return sum(item[n.dtype] for n in inside if n.is_pair and n.feature is not None)


class _TileSizes:
    """The sizes that ``Reduction.tile_bytes`` reads."""

    def __init__(self, sizes: Sizes, item: dict[str, int]):
        self.sizes, self.item, self.wide, self.size_of = sizes, item, item["float"], sizes.of

    def contraction(self, c: Contraction, weighted: bool) -> int:
        """Bytes per pair beside a contraction; ``weighted``: its weight is multiplied by another."""
        if c.walk:
            return _feature_walk_bytes(c.weight, self.item) + (self.wide if weighted else 0)
        few = c.vector is not None and self.sizes.of(str(c.vector.feature)) <= FEW_FEATURES
        if c.minus is not None and few:
            return 2 * self.wide
        return self.wide if weighted and c.weight is not ONE else 0
