"""How two groups of warps share a fold that sums vectors, its weights made of one product or several.

Where all sums fit beside the scores in a group's registers, the groups are *abreast*: each owns half a kept tile. Where
they do not (a gated perceptron's three column gradients), they are a *relay*: both own the same kept indices, and
divide the sums. One score, the cotangents', is a factor of some of the weights. One group makes it, and has their sums;
the other makes all other scores, has the other sums, and sends what that one is to be multiplied by, in 16 bits.

Two column gradients (attention's) fit in registers, with nothing to spare. There a group is *alone*: an instance by
itself, two of which share a processor; each begins its products as soon as their weights are made.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ....plan.op_counts import SPECIAL
from ....program.constructors import ONE, ZERO, apply
from ....program.contract import contractions
from ....program.expression import Expr, node, topological
from ..codegen.accumulators import move_factors_to_weight
from ..codegen.kernel_spec import WIDEST, Spec
from .spec_from_tensors import asked

OWNED = 64  # kept indices of a group, and folded ones of a tile
WIDTH = 128  # of all vectors
SENT = 2  # numbers of a pair, at most
_DOTS = 3  # scores of a tile, at most
# By how many scores and sums: numbers of folded indices, at most. Of one score, with two of them, groups take 1.07 of
# the time of the compiler's schedule, with one 0.82 (H200; docs/gpu.md).
_NUMBERS = {(1, 1): 1, (2, 1): 2, (3, 1): 2, (2, 2): 4}
_REGISTERS = 224  # of a thread, for what a part holds
# What takes few instructions in 16 bits. Weights that take longer than the products want more warps than two groups
# have: a gated perceptron of softplus and tanh (mish) takes 1.10 of its time by the compiler's schedule; with these it
# takes 0.80 to 0.87 (H200; docs/gpu.md).
_QUICK = ("exp", "exp2", "expm1", "gate", "gelu", "normal_gate", "sigmoid", "silu", "tanh")


@dataclass(frozen=True)
class Product:
    """A weight times a vector, added to the sum of a reduction."""

    place: int
    weight: Expr
    vector: Expr


@dataclass(frozen=True)
class Part:
    """What a group does in every tile: scores, what it sends or is sent of them, and sums."""

    dots: tuple[Expr, ...]
    products: tuple[Product, ...]
    sends: tuple[Expr, ...] = ()
    takes: tuple[Expr, ...] = ()
    early: int = 0  # of its products, how many are begun before a tile's scores, not after
    held: int = 0  # kept vectors that are multiplied from registers
    alone: bool = False  # whether it is an instance by itself

    @property
    def places(self) -> tuple[int, ...]:
        """The reductions whose sums it has."""
        return tuple(dict.fromkeys(p.place for p in self.products))

    def fits(self) -> bool:
        """Whether registers hold it: its scores and sums, and its weights while they are multiplied, and made."""
        held = len(self.places) * WIDTH // 2 + (len(self.dots) + len(self.products)) * OWNED // 2
        held += self.held * WIDTH // 4 - self.early * OWNED // 4
        return held <= _REGISTERS and len(self.sends) <= SENT


@functools.lru_cache(maxsize=1024)
def parts(spec: Spec) -> tuple[Part, ...]:
    """What the groups do: one part, each on kept indices of its own, or two on the same; nothing where others do it."""
    if spec.narrow != "bfloat16" or spec.split or spec.deep or spec.fold.raised:
        return ()
    if spec.bounds and (asked(spec.fold) or len(spec.fold.reductions) > 2):
        return ()
    products, under = list(_products(spec)), topological(spec.fold.reductions)
    dots = tuple(e for e in under if e.op in ("dot", "sqdist", "fsum"))
    numbers, sums = folded_numbers(spec), len(spec.fold.reductions)
    least = 1 if sums == 1 and not spec.bounds else 2  # one score under a condition took 1.4 of the compiler's time
    ringed = len(numbers) <= _NUMBERS.get((len(dots), sums), 0)
    ringed &= all(spec.type_of[e] in ("float32", "int32") and not e.is_pair for e in numbers)
    slow = any(e.is_pair and e.op in SPECIAL and e.op not in _QUICK for e in under)
    if (
        not products
        or (numbers and not ringed)
        or slow
        or not least <= len(dots) <= _DOTS
        or not all(_multiplies(e, spec) for e in dots)
    ):
        return ()
    return _alone(spec, dots, products) if sums == 2 else _divided(sums, dots, products)


def _alone(spec: Spec, dots: tuple[Expr, ...], products: Sequence[Product]) -> tuple[Part, ...]:
    """Two scores and two sums of the same blocks, where one sum's weights need one of the scores alone."""
    blocks = {sides(e, spec)[1] for e in dots}
    if len(dots) != 2 or len(products) != 2 or len(blocks) != 2 or blocks != {p.vector for p in products}:
        return ()
    needs = [[e for e in dots if e in topological([p.weight])] for p in products]
    first = next((k for k in range(2) if len(needs[k]) == 1 and len(needs[1 - k]) == 2), None)
    if first is None or products[0].place == products[1].place or len({sides(e, spec)[0] for e in dots}) != 2:
        return ()
    (lead,) = needs[first]
    ordered = lead, *(e for e in dots if e is not lead)
    return (Part(ordered, (products[first], products[1 - first]), alone=True),)


def owned(found: Sequence[Part]) -> int:
    """The kept indices of an instance."""
    return OWNED if len(found) == 2 or found[0].alone else 2 * OWNED


def _divided(sums: int, dots: tuple[Expr, ...], products: Sequence[Product]) -> tuple[Part, ...]:
    if sums == 1:
        whole = Part(dots, tuple(products))
        return (whole,) if whole.fits() else ()
    if sums * WIDTH <= WIDEST:
        return ()
    relays = (_relay(e, dots, products) for e in dots)
    return next((found for found in relays if found and all(part.fits() for part in found)), ())


def folded_numbers(spec: Spec) -> tuple[Expr, ...]:
    """The numbers of folded indices. The copying warp fetches them: every thread of a group needs a quarter of them."""
    under = topological(spec.fold.reductions)
    return tuple(e for e in under if e.op == "leaf" and e.feature is None and spec.folds(e))


def sides(e: Expr, spec: Spec) -> tuple[Expr, Expr]:
    """The kept and the folded vectors of a product."""
    return (e.args[1], e.args[0]) if spec.folds(e.args[0]) else (e.args[0], e.args[1])


def _products(spec: Spec) -> Iterator[Product]:
    """The products of all sums; none where a reduction is not such a sum."""
    found = []
    for place, (r, scale) in enumerate(spec.fold.scaled):
        if r.attrs[0] != "sum" or spec.folds(scale) or r.args[0].dtype != "float":
            return
        for c in map(move_factors_to_weight, contractions(r.args[0], spec.over)):
            if c.walk or c.minus is not None or c.vector is None or not c.weight.is_pair or not _copied(c.vector, spec):
                return
            found.append(Product(place, c.weight, c.vector))
    yield from found


def _copied(e: Expr, spec: Spec) -> bool:
    """Whether it is a leaf of the folded side whose vectors tensor descriptors copy."""
    return e in spec.box_of and spec.folds(e) and spec.width(e.feature) == WIDTH


def _multiplies(e: Expr, spec: Spec) -> bool:
    """Whether it is a product of kept vectors with those that are copied."""
    if e.op != "dot" or any(a.op != "leaf" or spec.type_of[a] != spec.narrow for a in e.args):
        return False
    kept, folded = sides(e, spec)
    return spec.keeps(kept) and _copied(folded, spec)


def _relay(lead: Expr, dots: Sequence[Expr], products: Sequence[Product]) -> tuple[Part, ...]:
    """The two parts where one score is a factor of some weights, and in no others; nothing where it is not."""
    under = [lead in topological([p.weight]) for p in products]
    factors = [_without(p.weight, lead) if yes else None for p, yes in zip(products, under, strict=True)]
    sends = tuple(dict.fromkeys(f for f in factors if f is not None))
    if (
        [f is not None for f in factors] != under
        or not 0 < sum(under) < len(under)
        or any(not f.is_pair for f in sends)
    ):
        return ()
    came = [
        node("leaf", (), (f"came{k}",), rows=True, cols=True, feature=None, dtype="float") for k in range(len(sends))
    ]
    own, others = [], []
    for p, f in zip(products, factors, strict=True):
        if f is None:
            own.append(p)
        else:
            others.append(replace(p, weight=_times(lead, came[sends.index(f)], f)))
    rest = tuple(e for e in dots if e is not lead)
    sender = Part(rest, tuple(own), sends=sends, early=len(own), held=1)
    return sender, Part((lead,), tuple(others), takes=tuple(came))


def _times(lead: Expr, came: Expr, factor: Expr) -> Expr:
    """A score times what it was parted from; where a condition had put 0 in its place, it may be infinite."""
    product = apply("mul", lead, came)
    if not any(e.op == "where" and ZERO in e.args[1:] for e in topological([factor])):
        return product
    return apply("where", apply("ne", came, ZERO), product, ZERO)


def _without(weight: Expr, lead: Expr) -> Expr | None:
    """What a score is multiplied by in a weight; None where it is not just a factor."""
    dependent: set[Expr] = {lead}  # what the score is a part of
    found: dict[Expr, Expr | None] = {}
    for e in topological([weight], stop=lambda e: e is lead):
        if not dependent.isdisjoint(e.args):
            dependent.add(e)
        found[e] = _factor_of(e, lead, dependent, found)
    return found[weight]


def _factor_of(e: Expr, lead: Expr, dependent: set[Expr], found: dict[Expr, Expr | None]) -> Expr | None:
    """:func:`_without` of a node, given that of its arguments."""
    if e is lead or e is ZERO:
        return ONE if e is lead else ZERO
    inside = [a in dependent for a in e.args]
    if e.op in ("neg", "add", "sub"):
        apart = [True] * len(inside)
    elif (e.op == "where" and not inside[0]) or (e.op == "mul" and inside == [False, True]):
        apart = [False] + [True] * (len(inside) - 1)
    elif e.op in ("mul", "div") and inside == [True, False]:
        apart = inside
    else:
        return None
    parts = [found[a] if yes else a for a, yes in zip(e.args, apart, strict=True)]
    return None if None in parts else apply(e.op, *parts)
