"""Sums of vectors whose weights are made of several products, by two groups of warps: Gluon, on Hopper.

A gated perceptron and its gradients multiply three to six times for every tile. One warp copies blocks of the folded side
into rings in shared memory; two groups of four warps start a tile's scores and the sums of the tile before, and make weights
of the scores while the sums run. Where all sums fit beside the scores in a group's registers, the groups are *abreast*: each
owns half a kept tile. Where they do not (the three column gradients), they are a *relay*: both own the same kept indices, and
the sums are divided. One score (the cotangents') is a factor of some of the weights. A group makes it, and has these sums;
the other makes all other scores, has the other sums, and sends what that one is multiplied by, in 16 bits.

The arithmetic of pairs is that of every kernel, in the same text: ``tl`` is here Gluon's language, which has its words.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ...program.build import ONE, ZERO, apply
from ...program.contract import contractions
from ...program.expr import Expr, topological
from . import describe, staged
from .plan import KernelPlan
from .spec import WIDEST, Spec
from .text import emit, grouped_text
from .text.totals import factored
from .text.values import Values

_OWNED = 64  # kept indices of a group, and folded ones of a tile
_WIDTH = 128  # of all vectors
_ROOM = 224 * 1024  # bytes of shared memory
_REGISTERS = 224  # of a thread, for scores, sums and weights
_STRANGE = re.compile(r"tl\.(philox|PropagateNan|dot|trans|zeros|full|arange)\b")  # what Gluon has not, or says otherwise


@dataclass(frozen=True)
class Product:
    """A weight times a vector, added to the sum of a reduction."""

    place: int
    weight: Expr
    vector: Expr


@dataclass(frozen=True)
class Part:
    """What a group does in every tile: scores, what it sends and is sent of them, and sums."""

    dots: tuple[Expr, ...]
    products: tuple[Product, ...]
    sends: tuple[Expr, ...] = ()
    takes: tuple[Expr, ...] = ()

    @property
    def places(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(p.place for p in self.products))

    @property
    def early(self) -> int:
        """How many products are made before the scores: their weights then need not wait in registers."""
        held = len(self.places) * _WIDTH // 2 + (len(self.dots) + len(self.products)) * _OWNED // 2
        return sum(held - k * _OWNED // 4 > _REGISTERS for k in range(len(self.products)))


def tile(spec: Spec, device: torch.device, length: int) -> tuple[int, int, int, int] | None:
    """The tile of a fold with this many kept indices in all that has such a kernel and keeps the device busy."""
    if not staged.on(device) or kernel(spec) is None:
        return None
    own = _OWNED * (3 - len(parts(spec)))
    return (own, _OWNED, 4, 2) if 10 * length >= 9 * own * describe.processors(device) else None


def takes(plan: KernelPlan, device: torch.device) -> bool:
    """Whether a plan asks for such a kernel, and its tiles are those of one."""
    shape = plan.block_kept in (_OWNED, 2 * _OWNED) and (plan.block_folded, plan.num_warps) == (_OWNED, 4)
    return plan.boxes == 2 and shape and staged.on(device)


def taken(spec: Spec, plan: KernelPlan) -> emit.Kernel | None:
    """The kernel of a spec with a plan's tiles; None where it has none, or with others."""
    return kernel(spec) if plan.block_kept == _OWNED * (3 - len(parts(spec))) else None


@functools.lru_cache(maxsize=1024)
def parts(spec: Spec) -> tuple[Part, ...]:
    """What the groups do: the same on two kept tiles, or two parts of the work on one; nothing where it is for others."""
    if spec.narrow != "bfloat16" or spec.bounds or spec.split or spec.deep or spec.pieces or spec.fold.raised:
        return ()
    products = list(_products(spec))
    dots = tuple(e for e in topological(spec.fold.reductions) if e.op in ("dot", "sqdist", "fsum"))
    if len(products) < len(spec.fold.reductions) or len(dots) < 2 or any(not _multiplies(e, spec) for e in dots):
        return ()
    if any(e.op == "leaf" and e.feature is None and spec.folds(e) for e in topological(spec.fold.reductions)):
        return ()
    if len(spec.fold.reductions) == 1:
        whole = Part(dots, tuple(products))
        return (whole,) if _holds(whole) else ()
    if len(spec.fold.reductions) * _WIDTH <= WIDEST:
        return ()
    relays = (_relay(e, dots, products) for e in dots)
    return next((found for found in relays if found and all(map(_holds, found))), ())


def _products(spec: Spec) -> Iterator[Product]:
    for place, (r, scale) in enumerate(spec.fold.scaled):
        if r.attrs[0] != "sum" or scale is not ONE or r.args[0].dtype != "float":
            return
        for c in map(factored, contractions(r.args[0], spec.over)):
            leaf = c.vector is not None and c.vector.op == "leaf" and not c.walk and c.minus is None
            if not leaf or not c.weight.is_pair or not _copied(c.vector, spec):
                return
            yield Product(place, c.weight, c.vector)


def _copied(e: Expr, spec: Spec) -> bool:
    return e in spec.box_of and spec.folds(e) and spec.width(e.feature) == _WIDTH


def _multiplies(e: Expr, spec: Spec) -> bool:
    """Whether it is a product of kept vectors with those that are copied."""
    if e.op != "dot" or any(a.op != "leaf" or spec.type_of[a] != spec.narrow for a in e.args):
        return False
    kept, folded = _sides(e, spec)
    return spec.keeps(kept) and spec.width(kept.feature) == _WIDTH and _copied(folded, spec)


def _sides(e: Expr, spec: Spec) -> tuple[Expr, Expr]:
    return (e.args[1], e.args[0]) if spec.folds(e.args[0]) else (e.args[0], e.args[1])


def _holds(part: Part) -> bool:
    """Whether a group's registers hold a part."""
    held = len(part.places) * _WIDTH // 2 + (len(part.dots) + len(part.products)) * _OWNED // 2
    return held - part.early * _OWNED // 4 <= _REGISTERS and len(part.sends) <= 2


def _relay(lead: Expr, dots: Sequence[Expr], products: Sequence[Product]) -> tuple[Part, ...]:
    """The two parts where one score is a factor of some weights and in no others; nothing where it is not."""
    under = [lead in topological([p.weight]) for p in products]
    factors = [_without(p.weight, lead) if yes else None for p, yes in zip(products, under, strict=True)]
    if all(under) or not any(under) or any(yes and f is None for yes, f in zip(under, factors, strict=True)):
        return ()
    sends = tuple(dict.fromkeys(f for f in factors if f is not None))
    if any(not f.is_pair for f in sends):
        return ()
    own = tuple(p for p, yes in zip(products, under, strict=True) if not yes)
    others = tuple(
        Product(p.place, _times(lead, f), p.vector) for p, f in zip(products, factors, strict=True) if f is not None
    )
    return Part(tuple(e for e in dots if e is not lead), own, sends=sends), Part((lead,), others, takes=sends)


def _times(lead: Expr, factor: Expr) -> Expr:
    """A score times what it was parted from; where a condition had put 0 in its place, it may be infinite."""
    product = apply("mul", lead, factor)
    if not any(e.op == "where" and ZERO in e.args[1:] for e in topological([factor])):
        return product
    return apply("where", apply("ne", factor, ZERO), product, ZERO)


def _without(weight: Expr, lead: Expr) -> Expr | None:
    """What a score is multiplied by in a weight; None where it is not just a factor."""
    if weight is lead or weight is ZERO:
        return ONE if weight is lead else ZERO
    args, inside = weight.args, [lead in topological([a]) for a in weight.args]
    if weight.op in ("neg", "add", "sub"):
        under, rest = args, ()
    elif weight.op == "where" and not inside[0]:
        under, rest = args[1:], args[:1]
    elif weight.op == "mul" and inside == [False, True]:
        under, rest = args[1:], args[:1]
    elif weight.op in ("mul", "div") and inside == [True, False]:
        under, rest = args[:1], args[1:]
    else:
        return None
    found = [_without(a, lead) for a in under]
    if None in found:
        return None
    return apply(weight.op, *(found if args[0] in under else ()), *rest, *(found if args[0] not in under else ()))


class _Values(Values):
    """Numbers of pairs whose products were made before them."""

    dots: tuple[Expr, ...] = ()

    def product(self, x: Expr, y: Expr) -> str:
        return f"score{next(k for k, e in enumerate(self.dots) if set(e.args) == {x, y})}"


@functools.lru_cache(maxsize=1024)
def kernel(spec: Spec) -> emit.Kernel | None:
    """Write the kernel of a spec, with the arguments that any other rendering has; None where there is none."""
    found = parts(spec)
    if not found:
        return None
    plain = emit.kernel(spec)
    names, unspecialized = emit._arguments(spec, list(plain.leaves), 0)
    text = _Text(spec, found, names)
    groups = [text.group(k) for k in range(len(found))]
    fields = text.fields() | {"name": plain.name, "unspecialized": repr(unspecialized), "groups": "".join(groups)}
    body = grouped_text.KERNEL.format(**fields)
    helpers = emit._copied("\n".join([*text.arithmetic, fields["opening"]]))
    if _STRANGE.search("\n".join([*text.arithmetic, *helpers])):
        return None
    helpers = [helper.replace("@triton.jit", "@gluon.jit") for helper in helpers]
    whole = "\n".join([emit._header(spec, list(plain.leaves), grouped_text.IMPORTS), *helpers, body])
    return replace(plain, text=whole, guesses=False, staged=True)


class _Text:
    """The lines of a kernel, from what its groups do."""

    def __init__(self, spec: Spec, found: tuple[Part, ...], names: Sequence[str]):
        self.spec, self.parts, self.relay = spec, found, len(found) == 2
        self.dots = tuple(e for part in found for e in part.dots)
        self.arithmetic: list[str] = []
        # per group, the kept vectors that it holds; and what is copied, in the order in which it is needed
        self.kept = [list(dict.fromkeys(_sides(e, spec)[0] for e in part.dots)) for part in found]
        needed = [e for part in found for e in (*(_sides(d, spec)[1] for d in part.dots), *(p.vector for p in part.products))]
        self.copied = list(dict.fromkeys(needed))
        self.sent = len(found[0].sends)
        self.rooms = sum(map(len, self.kept)) * (1 if self.relay else 2)
        block = _OWNED * _WIDTH * 2
        rest = self.rooms * block + self.sent * 2 * _OWNED * _OWNED * 2
        self.depth = min(4, (_ROOM - rest) // (len(self.copied) * block))
        rings = ["room", *(f"{_name(e)}_{what}" for e in self.copied for what in ("ring", "full", "empty"))]
        rings += [f"sent{k}" for k in range(self.sent)] + (["sent_full", "sent_empty"] if self.sent else [])
        wrap = lambda lines: textwrap.fill(", ".join(lines), 110, initial_indent="    ", subsequent_indent="    ")
        self.names, self.rings = wrap(names), wrap(rings).strip()

    def fields(self) -> dict[str, str]:
        """What is said once in a kernel."""
        spec, narrow, fetches, begun = self.spec, f"tl.{self.spec.narrow}", [], []
        block = f"tl.NVMMASharedLayout.get_default_for([{_OWNED}, {_WIDTH}], {narrow})"
        made = [f"room = tl.allocate_shared_memory({narrow}, [{self.rooms}, {_OWNED}, {_WIDTH}], {block})"]
        barriers = "tl.allocate_shared_memory(tl.int64, [{}, 1], mbarrier.MBarrierLayout())".format
        for e in self.copied:
            x, spot = _name(e), "".join(f"tl.cast(b{d}, tl.int32), " for d in spec.box_of[e])
            fetches += [
                f"mbarrier.wait({x}_empty.index(slot), phase)",
                f"mbarrier.expect({x}_full.index(slot), {x}_box.block_type.nbytes)",
                f"copy({x}_box, [{spot}start, 0], {x}_full.index(slot), {x}_ring.index(slot))",
            ]
            made += [
                f"{x}_ring = tl.allocate_shared_memory({narrow}, [{self.depth}] + {x}_box.block_type.shape, {x}_box.layout)",
                f"{x}_full = {barriers(self.depth)}",
                f"{x}_empty = {barriers(self.depth)}",
            ]
            users = sum(e in self._read(part) for part in self.parts) if self.relay else 2
            begun += [f"mbarrier.init({x}_full.index(k), count=1)", f"mbarrier.init({x}_empty.index(k), count={users})"]
        for k in range(self.sent):
            made.append(f"sent{k} = tl.allocate_shared_memory({narrow}, [2, {_OWNED}, {_OWNED}], {grouped_text.SENT})")
        if self.sent:
            made += [f"sent_{what} = {barriers(2)}" for what in ("full", "empty")]
            made += [f"mbarrier.init(sent_{w}.index({k}), count=1)" for w in ("full", "empty") for k in range(2)]
        runs = [(f"group{k if self.relay else 0}", k, "KEPT" if self.relay else "KEPT // 2") for k in range(2)]
        partition = functools.partial(grouped_text.PARTITION.format, names=self.names, rings=self.rings)
        partitions = [partition(function=f, side=k, own=own) for f, k, own in [*runs, ("copies", 0, "KEPT")]]
        return {
            "names": self.names,
            "rings": self.rings,
            "depth": str(self.depth),
            "opening": _inside(self._opening(), 4),
            "fetches": _inside(fetches, 8),
            "made": _inside(made, 4),
            "begun": _inside(begun, 8),
            "partitions": "\n".join(partitions),
        }

    def _opening(self) -> list[str]:
        scalars = [line for line in emit._opening(self.spec) if not re.search("KEPT|FOLDED|kept_in", line)]
        return [*scalars, "wholes = folded_size // FOLDED", "visits = tl.cdiv(folded_size, FOLDED)"]

    def _read(self, part: Part) -> list[Expr]:
        """What a group reads of what is copied."""
        return [*(_sides(e, self.spec)[1] for e in part.dots), *(p.vector for p in part.products)]

    def group(self, at: int) -> str:
        """The function of a group."""
        part, v = self.parts[at], _Values(self.spec)
        v.dots = self.dots
        rooms = {e: f"room.index({self._room(at, k)})" for k, e in enumerate(self.kept[at])}
        kept = []
        for e, room in rooms.items():
            place = f"{v.pointer(e)} + wide_row[:, None] * {_name(e)}_s + wide_lane[None, :] * {_name(e)}_f"
            kept.append(f"{room}.store(tl.load({place}, mask=wide_in[:, None], other=0))")
        whole, other = (self._weigh(part, v, masked) for masked in (False, True))
        self.arithmetic += [*v.before, *whole, *other]
        results = []
        for place in part.places:
            room = next(iter(rooms.values()))
            results += [
                f"{room}.store(sum{place}.to(tl.{self.spec.narrow}))",
                f"tl.store(out{place} + (out_at + wide_row[:, None]) * {_WIDTH} + wide_lane[None, :], "
                f"{room}.load(WIDE), mask=wide_in[:, None])",
            ]
        opening = self._opening() + ([] if self.relay else ["tile = tile * 2 + SIDE"])
        begin = [f"sum{place} = tl.zeros([KEPT, {_WIDTH}], tl.float32, SUMS)" for place in part.places]
        named = [f"weight{k} = next{k}" for k in range(len(part.products))]
        title = "four warps own one side of the kept tile"
        if self.relay:
            title = f"four warps {'take' if part.takes else 'send'} numbers of pairs, and have sums of their own"
        return grouped_text.GROUP.format(
            function=f"group{at}",
            title=title,
            names=self.names,
            rings=self.rings,
            width=_WIDTH,
            across=_WIDTH // 8,
            down=256 // _WIDTH,
            opening=_inside(opening, 4),
            before=_inside(v.before, 4),
            kept=_inside(kept, 4),
            begin=_inside(begin, 4),
            first=_inside(self._scores(part, rooms, alone=True), 4),
            first_whole=_inside([*whole, *named], 8),
            first_other=_inside([*other, *named], 8),
            held="",
            whole=_inside(self._turn(part, rooms, whole), 8),
            other=_inside(["folded_in = start + folded_lane < folded_size", *other][:0] + self._turn(part, rooms, other), 12),
            last=_inside([*self._sums(part, part.products), self._waited(part)], 4),
            results=_inside(results, 4),
        )

    def _room(self, at: int, k: int) -> str:
        before = sum(map(len, self.kept[:at]))
        return str(before + k) if self.relay else f"SIDE * {len(self.kept[at])} + {k}"

    def _scores(self, part: Part, rooms: dict[Expr, str], alone: bool = False) -> list[str]:
        """The scores of a tile are begun; ``alone``: and waited for."""
        lines, seen = [], set()
        for e in part.dots:
            kept, folded = _sides(e, self.spec)
            x, slot = _name(folded), f"turn % {self.depth}"
            if folded not in seen:
                lines.append(f"mbarrier.wait({x}_full.index({slot}), (turn // {self.depth}) & 1)")
                seen.add(folded)
            block = f"{x}_ring.index({slot}).reshape([FOLDED, {_WIDTH}]).permute((1, 0))"
            score = f"score{self.dots.index(e)}"
            lines.append(f"{score} = warpgroup_mma({rooms[kept]}, {block}, blank, use_acc=False, is_async=True)")
        if alone:
            lines += self._scored(part, 0, [])
        return lines

    def _scored(self, part: Part, running: int, more: list[str]) -> list[str]:
        """Wait for scores; what is read for them alone is given back."""
        names = [*(f"score{self.dots.index(e)}" for e in part.dots), *more]
        summed = {p.vector for p in part.products}
        lines = [f"{', '.join(names)} = warpgroup_mma_wait({running}, deps=[{', '.join(names)}])"]
        free = dict.fromkeys(_sides(e, self.spec)[1] for e in part.dots)
        return lines + [f"mbarrier.arrive({_name(e)}_empty.index(turn % {self.depth}))" for e in free if e not in summed]

    def _sums(self, part: Part, products: Sequence[Product]) -> list[str]:
        """Sums of the tile before are begun."""
        lines, seen = [], {_sides(e, self.spec)[1] for e in part.dots}
        for p in products:
            x, slot = _name(p.vector), f"(turn - 1) % {self.depth}"
            if p.vector not in seen:
                lines.append(f"mbarrier.wait({x}_full.index({slot}), ((turn - 1) // {self.depth}) & 1)")
                seen.add(p.vector)
            block = f"{x}_ring.index({slot}).reshape([FOLDED, {_WIDTH}])"
            weight = f"weight{part.products.index(p)}"
            lines.append(f"sum{p.place} = warpgroup_mma({weight}, {block}, sum{p.place}, is_async=True)")
        return lines

    def _waited(self, part: Part, more: Sequence[str] = ()) -> str:
        names = [*(f"sum{place}" for place in part.places), *more]
        return f"{', '.join(names)} = warpgroup_mma_wait(0, deps=[{', '.join(names)}])"

    def _turn(self, part: Part, rooms: dict[Expr, str], arithmetic: list[str]) -> list[str]:
        """A tile's scores, the sums of the tile before, and this one's weights while they run."""
        early, late = part.products[: part.early], part.products[part.early :]
        weights = [f"weight{k}" for k in range(len(part.products))]
        given_back = dict.fromkeys(_name(p.vector) for p in part.products)
        return [
            "start = turn * FOLDED",
            "folded_at = start + tl.arange(0, FOLDED, tl.SliceLayout(0, SCORES))",
            "folded_in = folded_at < folded_size",
            *self._sums(part, early),
            *self._scores(part, rooms),
            *self._sums(part, late),
            *self._scored(part, len(late), weights[: len(early)]),
            *arithmetic,
            self._waited(part, weights[len(early) :]),
            *(f"mbarrier.arrive({x}_empty.index((turn - 1) % {self.depth}))" for x in given_back),
            *(f"{w} = next{k}" for k, w in enumerate(weights)),
        ]

    def _weigh(self, part: Part, v: _Values, masked: bool) -> list[str]:
        """The arithmetic of a tile, from its scores to its weights; what is sent comes first."""
        v.loop(masked)
        narrow, wait = self.spec.narrow, "mbarrier.wait(sent_{}.index(turn % 2), (turn // 2) & 1{})".format
        if part.takes:
            v.inside.append(wait("full", ""))
            v.inside += [f"came{k} = sent{k}.index(turn % 2).load(SCORES)" for k in range(self.sent)]
            v.inside.append("mbarrier.arrive(sent_empty.index(turn % 2))")
            v.inside += [f"other{k} = came{k}.to(tl.float32)" for k in range(self.sent)]
            v.inner |= {f: f"other{k}" for k, f in enumerate(part.takes)}
        seen = lambda e: v.seen_name(v.full(e), "0.0")
        if part.sends:
            texts = [seen(f) for f in part.sends]
            v.inside.append(wait("empty", " ^ 1"))
            v.inside += [f"sent{k}.index(turn % 2).store(({t}).to(tl.{narrow}))" for k, t in enumerate(texts)]
            v.inside.append("mbarrier.arrive(sent_full.index(turn % 2))")
        for k, p in enumerate(part.products):
            v.inside.append(f"next{k} = packed(tl.convert_layout(({seen(p.weight)}).to(tl.{narrow}), WEIGHTS))")
        return v.inside


def _name(e: Expr) -> str:
    return str(e.attrs[0])


def _inside(lines: Sequence[str], by: int) -> str:
    return "\n".join(f"{' ' * by}{line}" for line in lines)
