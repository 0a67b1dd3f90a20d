"""How two consumer warp groups divide a fold that sums vectors, its weights made of one product or several.

- **Own kept indices.** Where all sums fit beside the scores in a group's registers, each group has half of the kept
  tile and does the same work.
- **Shared kept indices.** Where they do not fit (a gated MLP's three column gradients), both groups have the same kept
  indices and divide the sums. One score, the cotangents', is a factor of some of the weights. The receiver makes that
  score and has those sums; the sender makes all other scores, has the other sums, and sends the other factor, in 16
  bits, through shared memory.
- **Shared kept indices, one more factor.** Two column gradients of more than 128 features (attention's) do not fit in
  one group either. The sender makes the weights of one sum and sends them, in 32 bits, to the receiver, whose weights
  are made of them and of the other score.
- **Single warp group.** Two column gradients (attention's) fit in one group's registers with nothing to spare. One
  group is then an instance by itself, and two instances share a multiprocessor (``single_warpgroup.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ....plan.candidates import SPECIAL
from ....program.constructors import ONE, ZERO, apply, contractions, substitute
from ....program.expression import Expr, node, topological
from ....program.primitives import PRIMITIVES
from ....program.several import OF_VECTORS
from ..codegen.kernel_spec import WIDEST, Spec
from ..codegen.reductions import move_factors_to_weight
from .gluon_parts import GROUP_ROWS
from .spec_from_tensors import walks_are_short

FOLDED = 64  # folded indices of a tile
_NARROW = 64  # features of vectors, up to which the compiler's schedule is faster
_NARROW_TABLES = 32  # the same of pairs that look up tables
_MEASURED = 128  # features up to which sums other than the gradients of attention were measured
_ALONE = 256  # features of two sums that one group holds
_MOST_SENT = 2  # factors of a pair that are sent
_MOST_SCORES = 3  # of a tile
# How many numbers per folded index there may be, by the counts of scores and sums. With one score and two of them these
# kernels take 1.07 of the time of the compiler's schedule, with one 0.82 (H200; docs/internals/mlp-kernels.md).
_NUMBERS = {(1, 1): 1, (2, 1): 2, (3, 1): 2, (2, 2): 5}
_JOINT_NUMBERS = 3  # of the joint kernel: plain attention's. With more, as statistics have, it was not measured
_REGISTERS = 224  # of a thread, for what a group holds


@dataclass(frozen=True)
class Product:
    """A weight times a vector, added to the sum of a reduction."""

    place: int
    weight: Expr
    vector: Expr


@dataclass(frozen=True)
class GroupWork:
    """What a consumer group does in every tile: scores, factors that it sends or is sent, and sums."""

    dots: tuple[Expr, ...]
    products: tuple[Product, ...]
    sends: tuple[Expr, ...] = ()
    takes: tuple[Expr, ...] = ()
    early: int = 0  # how many of its sums are started before a tile's scores, instead of after
    held: int = 0  # kept operands that are multiplied from registers
    single_warpgroup: bool = False  # whether it is an instance by itself
    sent: str = ""  # the type in which factors are sent; by default that of matrix products

    def fits(self, spec: Spec) -> bool:
        """True when registers hold its scores and sums, and its weights while they are made and multiplied."""
        sums = {p.place: count_features(p.vector, spec) for p in self.products}
        operands = [count_features(kept_and_folded(e, spec)[0], spec) for e in self.dots][: self.held]
        held = sum(sums.values()) // 2 + (len(self.dots) + len(self.products)) * FOLDED // 2
        held += sum(operands) // 4 - self.early * FOLDED // 4
        one_width = len({spec.slices(p.vector.feature) for p in self.products}) == 1
        return held <= _REGISTERS and len(self.sends) <= _MOST_SENT and one_width


def name_sums(p: Product, spec: Spec) -> list[str]:
    """The names of a product's accumulators, one for each slice of features."""
    return [f"sum{p.place}_{k}" if k else f"sum{p.place}" for k in range(len(spec.slices(p.vector.feature)))]


def count_features(e: Expr, spec: Spec) -> int:
    """The features of a vector, as its slices hold them."""
    return sum(size for _, size in spec.slices(e.feature))


@functools.lru_cache(maxsize=1024)
def divide_work(spec: Spec) -> tuple[GroupWork, ...]:
    """The work of the consumer groups: one that both do on kept indices of their own, or two on the same kept indices.
    Empty where there is no such kernel, or where the compiler's schedule is faster."""
    if spec.narrow != "bfloat16" or spec.split or spec.k_loop or spec.fold.raised:
        return ()
    if spec.listed is not None and spec.listed.ends:  # what blocks hold beyond the end of a list is not cleared
        return ()
    if walks_are_short(spec) or (spec.bounds and len(spec.fold.reductions) > 2):
        return ()
    products, under = list(_list_products(spec)), topological(spec.fold.reductions)
    dots = tuple(e for e in under if e.op in OF_VECTORS)
    numbers, sums = folded_numbers(spec), len(spec.fold.reductions)
    least = 1 if sums == 1 and not spec.bounds else 2  # one score under a condition took 1.4 of its time
    ringed = len(numbers) <= _NUMBERS.get((len(dots), sums), 0)
    ringed &= all(spec.type_of[e] in ("float32", "int32") and not e.is_pair for e in numbers)
    wide = any(count_features(p.vector, spec) > _MEASURED for p in products)
    wide &= len(dots) != 2 or not any(e.op == "exp" for e in under)
    slow = any(e.is_pair and e.op in SPECIAL and not PRIMITIVES[e.op].fast for e in under)
    if (
        not products
        or (numbers and not ringed)
        or slow
        or wide
        or not least <= len(dots) <= _MOST_SCORES
        or not all(_multiplies(e, spec) for e in dots)
    ):
        return ()
    if sums == 2 and sum(count_features(p.vector, spec) for p in products) <= _ALONE:
        return _make_single_group(spec, dots, products)
    return _make_two_groups(spec, sums, dots, products)


@functools.lru_cache(maxsize=256)
def divide_joint_work(spec: Spec) -> GroupWork | None:
    """The work of each of two consumer groups on kept indices of their own, beside a sum over these (``Spec.joint``);
    None where there is no such kernel."""
    if spec.split or spec.k_loop or spec.fold.raised or spec.listed or spec.fold.tables:
        return None
    if spec.narrow not in ("bfloat16", "float16"):
        return None
    products, under, numbers = list(_list_products(spec, 1)), topological(spec.fold.reductions), folded_numbers(spec)
    dots = tuple(e for e in under if e.op in OF_VECTORS)
    slow = any(e.is_pair and e.op in SPECIAL and not PRIMITIVES[e.op].fast for e in under)
    slow |= not any(e.op == "exp" for e in under)  # other layers than attention were not measured
    ringed = len(numbers) <= _JOINT_NUMBERS and all(spec.type_of[e] == "float32" and not e.is_pair for e in numbers)
    if slow or not ringed or not all(_multiplies(e, spec, 1) for e in dots):
        return None
    found = _make_single_group(spec, dots, products)
    if not found or spec.joint is None or found[0].products[1].weight is not spec.joint.weight:
        return None
    if kept_and_folded(found[0].dots[0], spec)[0] is not spec.joint.vector:
        return None
    return found[0]


def _make_single_group(spec: Spec, dots: tuple[Expr, ...], products: Sequence[Product]) -> tuple[GroupWork, ...]:
    """One group's work: two scores and two sums of the same blocks, where one sum's weights need one score alone."""
    blocks = {kept_and_folded(e, spec)[1] for e in dots}
    if len(dots) != 2 or len(products) != 2 or len(blocks) != 2 or blocks != {p.vector for p in products}:
        return ()
    needs = [[e for e in dots if e in topological([p.weight])] for p in products]
    first = next((k for k in range(2) if len(needs[k]) == 1 and len(needs[1 - k]) == 2), None)
    if first is None or products[0].place == products[1].place or len({kept_and_folded(e, spec)[0] for e in dots}) != 2:
        return ()
    (lead,) = needs[first]
    ordered = lead, *(e for e in dots if e is not lead)
    return (GroupWork(ordered, (products[first], products[1 - first]), single_warpgroup=True),)


def count_kept(found: Sequence[GroupWork]) -> int:
    """How many kept indices an instance has."""
    return GROUP_ROWS if len(found) == 2 or found[0].single_warpgroup else 2 * GROUP_ROWS


def _make_two_groups(
    spec: Spec, sums: int, dots: tuple[Expr, ...], products: Sequence[Product]
) -> tuple[GroupWork, ...]:
    """One sum: the same work on own kept indices. More than registers hold: a sender and a receiver."""
    if sums == 1:
        whole = GroupWork(dots, tuple(products))
        return (whole,) if whole.fits(spec) else ()
    if sum({p.place: count_features(p.vector, spec) for p in products}.values()) <= WIDEST:
        return ()
    divisions = (_make_sender_and_receiver, _make_weights_and_receiver)
    pairs = (divide(e, dots, products) for divide in divisions for e in dots)
    return next((found for found in pairs if found and all(group.fits(spec) for group in found)), ())


def folded_numbers(spec: Spec) -> tuple[Expr, ...]:
    """The numbers per folded index. The producer loads them: each thread of a group needs a quarter of them."""
    under = topological(spec.fold.reductions)
    return tuple(e for e in under if e.op == "leaf" and e.feature is None and spec.folds(e))


def kept_and_folded(e: Expr, spec: Spec) -> tuple[Expr, Expr]:
    """The kept and the folded vectors of a product."""
    return (e.args[1], e.args[0]) if spec.folds(e.args[0]) else (e.args[0], e.args[1])


def _list_products(spec: Spec, least: int = 0) -> Iterator[Product]:
    """The products of all sums; none where some reduction is no such sum."""
    found = []
    for place, (r, scale) in enumerate(spec.fold.scaled):
        if r.attrs[0] != "sum" or spec.folds(scale) or r.args[0].dtype != "float":
            return
        for c in map(move_factors_to_weight, contractions(r.args[0], spec.over)):
            if (
                c.walk
                or c.minus is not None
                or c.vector is None
                or not c.weight.is_pair
                or not _is_copied(c.vector, spec, least)
            ):
                return
            found.append(Product(place, c.weight, c.vector))
    yield from found


def _is_copied(e: Expr, spec: Spec, least: int) -> bool:
    """True for a leaf of the folded axis, of so many features (0: as many as gain), whose blocks descriptors copy."""
    least = least or (_NARROW_TABLES if spec.fold.tables else _NARROW) + 1
    return e in spec.descriptor_dims and spec.folds(e) and count_features(e, spec) >= least


def _multiplies(e: Expr, spec: Spec, least: int = 0) -> bool:
    """True for a product of kept vectors with vectors whose blocks are copied."""
    if e.op != "dot" or any(a.op != "leaf" or spec.type_of[a] != spec.narrow for a in e.args):
        return False
    kept, folded = kept_and_folded(e, spec)
    return spec.keeps(kept) and _is_copied(folded, spec, least)


def _make_sender_and_receiver(lead: Expr, dots: Sequence[Expr], products: Sequence[Product]) -> tuple[GroupWork, ...]:
    """The two groups' work where one score (``lead``) is a factor of some weights and is in no others; else nothing."""
    under = [lead in topological([p.weight]) for p in products]
    factors = [_factor_beside(p.weight, lead) if yes else None for p, yes in zip(products, under, strict=True)]
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
            others.append(replace(p, weight=_multiply_score(lead, came[sends.index(f)], f)))
    rest = tuple(e for e in dots if e is not lead)
    sender = GroupWork(rest, tuple(own), sends=sends, early=len(own), held=1)
    return sender, GroupWork((lead,), tuple(others), takes=tuple(came))


def _make_weights_and_receiver(lead: Expr, dots: Sequence[Expr], products: Sequence[Product]) -> tuple[GroupWork, ...]:
    """The two groups' work where weights are made of one score (``lead``) and of what the other scores make, which is
    sent; else nothing. One sum each: those of attention's columns."""
    under = [lead in topological([p.weight]) for p in products]
    if sorted(under) != [False, True] or len(dots) != 2:
        return ()
    own, other = products if under[1] else products[::-1]
    sends = tuple(dict.fromkeys(_find_made_of_others(other.weight, lead)))
    if len(sends) != 1 or sends[0].dtype != "float":
        return ()
    came = node("leaf", (), ("came0",), rows=True, cols=True, feature=None, dtype="float")
    (weight,) = substitute((other.weight,), {sends[0]: came})
    rest = tuple(e for e in dots if e is not lead)
    sender = GroupWork(rest, (own,), sends=sends, early=1, sent="float32")
    return sender, GroupWork((lead,), (replace(other, weight=weight),), takes=(came,), sent="float32")


def _find_made_of_others(e: Expr, lead: Expr) -> Iterator[Expr]:
    """The largest numbers of pairs under an expression that are made of scores other than ``lead``."""
    below = topological([e])
    if lead in below:
        yield from (found for a in e.args for found in _find_made_of_others(a, lead) if e is not lead)
    elif e.is_pair and any(n.op == "dot" for n in below):
        yield e


def _multiply_score(lead: Expr, came: Expr, factor: Expr) -> Expr:
    """A score times the factor that was sent; 0 where a condition made that 0, since the score may be infinite."""
    product = apply("mul", lead, came)
    if not any(e.op == "where" and ZERO in e.args[1:] for e in topological([factor])):
        return product
    return apply("where", apply("ne", came, ZERO), product, ZERO)


def _factor_beside(weight: Expr, lead: Expr) -> Expr | None:
    """What a score is multiplied by in a weight; None where it is not just a factor."""
    dependent: set[Expr] = {lead}  # expressions that contain the score
    found: dict[Expr, Expr | None] = {}
    for e in topological([weight], stop=lambda e: e is lead):
        if not dependent.isdisjoint(e.args):
            dependent.add(e)
        found[e] = _factor_of(e, lead, dependent, found)
    return found[weight]


def _factor_of(e: Expr, lead: Expr, dependent: set[Expr], found: dict[Expr, Expr | None]) -> Expr | None:
    """:func:`_factor_beside` of a node, given that of its arguments."""
    if e is lead or e is ZERO:
        return ONE if e is lead else ZERO
    inside = [a in dependent for a in e.args]
    if e.op in ("neg", "add", "sub"):
        factored_out = [True] * len(inside)
    elif (e.op == "where" and not inside[0]) or (e.op == "mul" and inside == [False, True]):
        factored_out = [False] + [True] * (len(inside) - 1)
    elif e.op in ("mul", "div") and inside == [True, False]:
        factored_out = inside
    else:
        return None
    args = [found[a] if yes else a for a, yes in zip(e.args, factored_out, strict=True)]
    return None if None in args else apply(e.op, *args)
