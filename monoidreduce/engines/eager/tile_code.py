"""The arithmetic of one tile, compiled once per fold and variant to a list of in-place torch calls, and what runs it.

A variant is the fold with some conditions known: where interval analysis shows that a condition holds (or fails) on
the whole tile, the ``where`` disappears, and reductions that then see only the identity drop out. Values live in
numbered slots, each a tile-sized buffer used again as soon as its value is dead; a reduction is told whether it may
overwrite its input.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...program.constructors import ONE, Contraction, interval, is_along_diagonals, substitute
from ...program.expression import Expr, are_several, const, letters, size, topological
from ...program.lower import Fold, split_index_match
from ...program.primitives import PRIMITIVES
from ...program.several import DOTS, MIX
from ...reductions import kind_of
from ..common import matmul
from ..common.evaluate import Sizes, cast, look_up

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
        reads = numbers_read(r)
        for e in reads:
            compute(e)
        plan.append((None, r, reads))
    return _assign_slots(plan, fused)


def numbers_read(r: Reducer) -> tuple[Expr, ...]:
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
    roots = [n for r in reducers for n in numbers_read(r)]
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


# Running it: buffers reused from tile to tile, and the steps executed in place

TileShape = tuple[int, int, int]


class Buffers:
    """Memory of a run: one flat tile-sized buffer per slot, allocated when first used, and constants as tensors."""

    def __init__(self, elements: int, compute: torch.dtype, device: torch.device, numbers: dict[Expr, Any]):
        self.kinds = {"float": compute, "int": torch.int64, "bool": torch.bool}
        self.elements, self.device = elements, device
        self.numbers = numbers  # leaves and sizes that are Python numbers
        self.flat: dict[tuple[int | Expr, str], Tensor] = {}
        self.constants: dict[Expr, Tensor] = {}

    def constant(self, e: Expr) -> Tensor:
        if e not in self.constants:
            value = float("nan") if e.op == "nan" else e.const if e.op == "const" else self.numbers[e]
            self.constants[e] = torch.full((), value, dtype=self.kinds[e.dtype], device=self.device)
        return self.constants[e]

    def view(self, slot: int | Expr, kind: str, tile: TileShape) -> Tensor:
        key = (slot, kind)
        if key not in self.flat:
            self.flat[key] = torch.empty(self.elements, dtype=self.kinds[kind], device=self.device)
        b, m, n = tile
        return self.flat[key][: b * m * n].view(tile)


@dataclass
class TileRun:
    """One tile being computed: its leaf values, and the values of its nodes so far."""

    values: dict[Expr, Any]
    tile: TileShape
    buffers: Buffers
    offset: tuple[int, int]  # the tile's first row and column
    narrow: dict[Expr, Tensor] = field(default_factory=dict)  # 16-bit products that nothing has read yet
    homes: dict[Expr, Tensor] = field(default_factory=dict)  # the buffers they are cast into when read
    rounded: tuple[tuple[int, int], Tensor, Tensor] | None = None  # the last weights rounded for a product

    def run(self, code: TileCode, hand_over: Callable[[Reducer, tuple[bool, ...], TileRun], None]) -> None:
        for step in code.steps:
            if step.reducer is not None:
                hand_over(step.reducer, step.owned, self)
            else:
                self._compute(step, code)

    def _compute(self, step: Step, code: TileCode) -> None:
        e = step.node
        assert e is not None
        out: Any = self.buffers.view(step.slot, code.slots[step.slot], self.tile) if step.slot >= 0 else None
        base = e if step.fused is None else step.fused.base
        if base.op == "dot":
            self._dot(e, out, self.get(base.args[0]), self.get(base.args[1]), self._factor(step))
        elif step.fused is not None:
            self.values[e] = matmul.exp_into(out, self.get(base), self._factor(step))
        elif e.op == "sub" and e.args[0] in self.narrow and not e.args[1].is_pair and e.args[1].op == "leaf":
            self.values[e] = torch.sub(self.narrow[e.args[0]], self.get(e.args[1]), out=out)  # cast while it is read
        elif e.op == "exp" and out is not None and _is_softmax_exponent(e.args[0]):
            self.values[e] = matmul.exp_into(out, self.get(e.args[0]))
        elif (hot := match_label_scatter(e)) is not None:
            assert out is not None
            self.values[e] = self._scatter(out, hot)
        elif e.op == "sqdist":
            self.values[e] = _sqdist_into(out, *(self.get(a) for a in e.args))
        elif e.op in WALKED:
            self.values[e] = self._one_sided(e) if out is None else self._over_features(e, out)
        elif e.op == "lookup":
            self.values[e] = self._look_up(e, out)
        else:
            self.values[e] = _apply_primitive(e, [self.get(a) for a in e.args], out, self.buffers.kinds["float"])

    def _look_up(self, e: Expr, out: Tensor | None) -> Tensor:
        """The entries of a table [b, 1, n] that a tile reads; along diagonals, a window of it, one entry each."""
        table, index = self.get(e.args[0])[:, 0], e.args[1]
        if out is None or not is_along_diagonals(index):
            value = look_up(table, self.get(index), 2)
            return value if out is None else out.copy_(value)
        window = look_up(table, self.along_diagonals(index), 1)
        return out.copy_(window.unfold(-1, self.tile[2], 1).flip(-1))

    def along_diagonals(self, index: Expr) -> Tensor:
        """An index that is equal along diagonals: its values [b or 1, m + n - 1], from the corner of the tile's last
        column to that of its last row."""
        _, m, n = self.tile
        step = torch.arange(1 - n, m, device=self.buffers.device)
        first = {"row_index": self.offset[0], "col_index": self.offset[1]}
        own = {"row_index": step.clamp(min=0), "col_index": (-step).clamp(min=0)}
        memo: dict[Expr, Any] = {}
        for e in topological([index], stop=lambda e: not (e.rows or e.cols)):
            if e.op in first:
                memo[e] = (own[e.op] + first[e.op]).unsqueeze(0)
            elif not (e.rows or e.cols):
                value = self.get(e)
                memo[e] = value.reshape(-1, 1) if value.dim() else value
            else:
                memo[e] = _apply_primitive(e, [memo[a] for a in e.args], None, self.buffers.kinds["float"])
        return memo[index]

    def _factor(self, step: Step) -> float:
        """The product of the scalar factors fused into a step."""
        factor = 1.0
        for e, divides in step.fused.factors if step.fused is not None else ():
            k = e.const if e.op == "const" else self.buffers.numbers[e]
            factor *= _reciprocal(k) if divides else k
        return factor

    def _dot(self, e: Expr, out: Tensor, x: Tensor, y: Tensor, alpha: float) -> None:
        if matmul.is_16bit(x, y):
            self.narrow[e], self.homes[e] = matmul.multiply_16bit(x, y, alpha), out
        else:
            self.values[e] = matmul.dot_into(out, x, y, alpha)

    def _scatter(self, out: Tensor, hot: LabelScatter) -> Tensor:
        """out = dense, plus the value at the one label per row (or column), if it is in this tile."""
        dense = self.full(hot.dense)
        if dense.data_ptr() != out.data_ptr():
            out.copy_(dense)
        by_rows = hot.axis == "col"
        b, m, n = self.tile
        side, other = (m, n) if by_rows else (n, m)
        places = self.get(hot.target).reshape(-1, side).expand(b, side) - self.offset[1 if by_rows else 0]
        batch, at = ((places >= 0) & (places < other)).nonzero(as_tuple=True)
        if len(batch):
            to = places[batch, at]
            where = (batch, at, to) if by_rows else (batch, to, at)
            out[where] += self.full(hot.value)[where] * hot.sign
        return out

    def get(self, e: Expr) -> Any:
        if e not in self.values:
            if e in self.narrow:
                self.values[e] = self.homes[e].copy_(self.narrow[e])
            elif e.op in ("const", "nan") or e in self.buffers.numbers:
                self.values[e] = self.buffers.constant(e)
            else:
                for n in topological(e.args, stop=self._is_there):  # operands first: bounds the recursion
                    self.get(n)
                self.values[e] = self._one_sided(e)
        return self.values[e]

    def _is_there(self, e: Expr) -> bool:
        return e in self.values or e in self.narrow or not e.args

    def _one_sided(self, e: Expr) -> Any:
        """A row or column value that is not a leaf: what remains of a pair expression where a condition is decided.

        Row numbers are [b, m, 1], column numbers [b, 1, n]; vectors are [b, l, features].
        """
        args = [self.get(a) for a in e.args]
        if e.op in WALKED:
            x = args[0].sum(-1) if e.op == "fsum" else args[0].amax(-1) if e.op == "famax" else args[0].amin(-1)
            return x.unsqueeze(-2) if e.cols else x.unsqueeze(-1)
        if e.op == "lookup":
            return look_up(args[0][:, 0], args[1], 2)
        if e.op == "component":
            x = args[0][..., e.attrs[0]]
            return x.unsqueeze(-2) if e.cols else x.unsqueeze(-1)
        if e.feature is not None and e.cols:
            args = [a.mT if x.feature is None and x.cols else a for a, x in zip(args, e.args, strict=True)]
        value = args[0] if e.op == "spread" else _apply_primitive(e, args, None, self.buffers.kinds["float"])
        narrow = e.feature is not None and any(a.dtype is torch.bfloat16 for a in args)
        return value.to(torch.bfloat16) if narrow else value

    def round_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """A tile of weights in the type it is multiplied in; rounded once, even if several products read it."""
        if weight.dtype == dtype or dtype not in matmul.SIXTEEN:
            return weight.to(dtype)
        key = (weight.data_ptr(), weight._version)
        if self.rounded is None or self.rounded[0] != key:
            self.rounded = key, weight, weight.to(dtype)  # the weight is kept, so that its address stays its own
        return self.rounded[2]

    def full(self, e: Expr) -> Tensor:
        """A number as a whole tile, expanded where it does not vary."""
        return self.get(e).expand(self.tile)

    def width(self, e: Expr) -> int:
        """The number of features of a vector expression."""
        return self.count(str(e.feature))

    def count(self, letter: str) -> int:
        """The number of features of a letter."""
        own = letter.lstrip("#")
        return int(own) if own.isdigit() else self.buffers.numbers[size(letter)]

    def pieces(self, e: Expr) -> list[Tensor]:
        """The vectors of several, [b, l, f] each; of one vector, itself."""
        if not are_several(e):
            return [self.get(e)]
        return list(self.get(e).unflatten(-1, [self.count(name) for name in letters(e.feature)]).unbind(-2))

    def _over_features(self, e: Expr, out: Tensor) -> Tensor:
        """The sum, or the extreme, of a vector per pair."""
        (x,) = e.args
        if e.op == "fsum":
            out.zero_()
        for f in range(self.width(x)):
            one = self.component(x, f, reuse=True).expand(self.tile)
            if e.op == "fsum":
                out += one
            elif f == 0:
                out.copy_(one)
            else:
                (torch.maximum if e.op == "famax" else torch.minimum)(out, one, out=out)
        return out

    def _product(self, e: Expr, f: int, reuse: bool) -> Tensor:
        """Number ``f`` of a product of several vectors."""
        x, y = e.args
        if e.attrs[0] in DOTS:
            one, other = (self.pieces(a)[f] if are_several(a) else self.get(a) for a in (e.args if x.rows else (y, x)))
            if matmul.is_16bit(one, other):
                return matmul.multiply_16bit(one, other, 1).to(self.buffers.kinds["float"])
            fresh = None if reuse else torch.empty(self.tile, dtype=one.dtype, device=one.device)
            return matmul.dot_into(self.buffers.view(e, "float", self.tile) if fresh is None else fresh, one, other, 1)
        own, width = y.feature != e.feature, self.count(letters(y.feature)[-1])
        if e.attrs[0] == MIX:
            count = range(self.count(letters(y.feature)[0]))
            total = torch.zeros((), dtype=self.buffers.kinds["float"], device=self.buffers.device)
            return sum((self.component(x, a) * self.component(y, a * width + f) for a in count), total)
        return self.component(x, f // width) * self.component(y, f % width if own else f)

    def component(self, e: Expr, f: int, reuse: bool = False) -> Tensor:
        """Feature ``f`` of a vector per pair, as a number per pair: never all features at once.

        ``reuse``: it is read before the next one is asked for, which may then be written to the same memory."""
        memo: dict[Expr, Any] = {}
        order = topological([e], stop=lambda n: n.feature is None or n in self.values or n.op == "einsum")
        uses = collections.Counter(a for n in order for a in n.args)
        owned: set[Expr] = set()  # products, and what was computed in place of them
        for n in order:
            if n.feature is None:
                memo[n] = self.get(n)
            elif n in self.values:  # a row or column vector [b, l, f]
                column = self.values[n][..., f]
                memo[n] = column.unsqueeze(-2) if n.cols else column.unsqueeze(-1)
            elif n.op == "einsum":
                memo[n] = self._product(n, f, reuse)
                owned |= {n} if n.attrs[0] in DOTS else set()
            elif n.op == "spread":
                memo[n] = memo[n.args[0]]
            else:
                free = (memo[a] for a in n.args if a in owned and uses[a] == 1 and n.dtype == "float")
                into = next(free, None)
                memo[n] = _apply_primitive(n, [memo[a] for a in n.args], into, self.buffers.kinds["float"])
                owned |= {n} if into is not None else set()
        return memo[e]


def _reciprocal(k: float) -> float:
    return 1 / k if k else math.copysign(math.inf, k)


def _is_softmax_exponent(x: Expr) -> bool:
    """A pair number minus a row's: a softmax weight's exponent, where the rounding of exp2 falls on tiny weights."""
    return x.op == "sub" and not x.args[1].is_pair


def _apply_primitive(e: Expr, args: list[Any], out: Tensor | None, compute: torch.dtype) -> Any:
    p = PRIMITIVES[e.op]
    if e.op == "cast":
        value = cast(args[0], e.attrs[0], compute)
        return value if out is None else out.copy_(value)
    attributes = dict(zip(p.attributes, e.attrs, strict=True))
    return p.torch(*args, **attributes) if out is None else p.torch(*args, **attributes, out=out)


def _sqdist_into(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """|x_i - y_j|²: directly for few features or rows; else by a matrix product, close pairs again directly."""
    x, y = x.to(out.dtype), y.to(out.dtype)
    if x.shape[-1] <= FEW_FEATURES:
        return _sqdist_direct(out, x, y)
    if x.shape[1] <= _FEW_ROWS:
        return _sqdist_of_few_rows(out, x, y)
    centre = y.mean(1, keepdim=True)  # centred: distances are the same, and cancellation is smaller
    cx, cy = x - centre, y - centre
    (xh, xl), (yh, yl) = _split_norms(cx), _split_norms(cy)
    one = torch.ones((), dtype=x.dtype, device=x.device)
    left = torch.cat([cx * -2, xh, xl, one.expand_as(xh), one.expand_as(xh)], -1)
    right = torch.cat([cy, one.expand_as(yh), one.expand_as(yh), yh, yl], -1)
    matmul.dot_into(out, left, right, 1)
    # cancellation may have cost two digits here; a point at infinity gives NaN
    close = ~(out >= 1e-2 * (xh + yh.amax(1, keepdim=True)))
    count = int(close.sum())
    if count > out.numel() // 8:
        return _sqdist_direct(out, x, y)
    if count:
        b, i, j = close.nonzero(as_tuple=True)
        for at in range(0, count, _CLOSE_CHUNK):
            part = slice(at, at + _CLOSE_CHUNK)
            out[b[part], i[part], j[part]] = (x[b[part], i[part]] - y[b[part], j[part]]).square().sum(-1)
    return out.clamp_(min=0)


def _sqdist_direct(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    if not x.shape[-1]:
        return out.zero_()
    gaps = feature_differences(x, y)
    gaps(0, out).square_()
    gap = torch.empty_like(out) if x.shape[-1] > 1 else out
    for f in range(1, x.shape[-1]):
        out.addcmul_(gaps(f, gap), gap)
    return out


def _sqdist_of_few_rows(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """One row after the other: a product would copy and convert all columns several times to read them once."""
    gap = torch.empty_like(y, memory_format=torch.contiguous_format)
    for i in range(x.shape[1]):
        torch.sub(y, x[:, i : i + 1], out=gap)
        torch.sum(gap.square_(), -1, out=out[:, i])
    return out


def feature_differences(x: Tensor, y: Tensor) -> Callable[[int, Tensor | None], Tensor]:
    """A function of (f, out) that computes x_i - y_j of feature f as a tile. y is transposed to be contiguous along n:
    six times as fast."""
    left, right = x.mT.unsqueeze(-1), y.mT.contiguous().unsqueeze(-2)
    return lambda f, out: torch.sub(left[:, f], right[:, f], out=out)


def _split_norms(x: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms as high + low: their rounding would be the largest error of the product form."""
    exact = x.double().square().sum(-1, keepdim=True)
    high = exact.to(x.dtype)
    return high, (exact - high.double()).to(x.dtype)


_CLOSE_CHUNK = 4096
_FEW_ROWS = 8


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
