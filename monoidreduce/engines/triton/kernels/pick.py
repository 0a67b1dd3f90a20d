"""Gathers and scatters of single pairs: sums against ``index == t``, such as the gradient of a maximum.

One axis holds the targets ``t`` (say rows), one each or a few. What the pairs weigh is computed first, by one generated
kernel (:func:`weigh`). Then

- a **gather** (one result per row) adds weight × the vector at the target, row by row, in one kernel;
- a **scatter** (one result per column) sorts the pairs by their target, so that each column's are neighbours. A kernel
  adds runs of equal targets in pieces of a fixed length, a second one the few runs that cross from one piece into
  others. The order of every sum is that of the rows, whatever runs first: results are bitwise equal in every run, and
  one column that is the target of all rows takes no longer than others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....program.constructors import ONE
from ....program.expression import Expr, topological
from ....program.lower import Fold
from ....program.philox import DRAWS
from ....program.primitives import PRIMITIVES
from ...common.evaluate import Sizes
from ...common.label_gather import MatchedPairs, gather_leaf, one_number_per_match
from ..codegen.expressions import ExpressionWriter
from ..codegen.kernel_spec import Spec, Unsupported, pad_width, power_of_two
from ..launch.driver import Kernels

_TEXT = """@triton.jit
def vectors_at(near, far, n_s, n_f, f_s, f_f, row, t, lane, inside, WHICH: tl.constexpr):
    # of pairs: the row's own, the target's, or their difference
    if WHICH == 0:
        return tl.load(near + row * n_s + lane * n_f, mask=inside, other=0).to(tl.float32)
    elif WHICH == 1:
        return tl.load(far + t * f_s + lane * f_f, mask=inside, other=0).to(tl.float32)
    else:
        x = tl.load(near + row * n_s + lane * n_f, mask=inside, other=0).to(tl.float32)
        y = tl.load(far + t * f_s + lane * f_f, mask=inside, other=0).to(tl.float32)
        if WHICH == 2:
            return x - y
        else:
            return y - x


@triton.jit
def gather_sum(
    out, place, weight, near, far, side, other, matches, n_b, n_s, n_f, f_b, f_s, f_f,
    WHICH: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    batch = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(2) * LANES + tl.arange(0, LANES)[None, :]
    exists = row < side
    near += batch * n_b
    far += batch * f_b
    total = tl.zeros([ROWS, LANES], tl.float32)
    for match in range(0, matches):
        at = (batch * side + row) * matches + match
        t = tl.load(place + at, mask=exists, other=-1).to(tl.int64)
        hit = (t >= 0) & (t < other) & exists
        w = tl.load(weight + at, mask=hit, other=0)
        inside = hit[:, None] & (lane < WIDTH)
        total += w[:, None] * vectors_at(near, far, n_s, n_f, f_s, f_f, row[:, None], t[:, None], lane, inside, WHICH)
    tl.store(out + (batch * side + row)[:, None] * WIDTH + lane, total, mask=exists[:, None] & (lane < WIDTH))


@triton.jit
def keys_of(key, place, span, other, beyond, size, LANES: tl.constexpr):
    # where each pair's sum stands among those of all batch elements; beyond all of them where there is none
    at = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    t = tl.load(place + at, mask=at < size, other=-1).to(tl.int64)
    found = tl.where((t >= 0) & (t < other), t + at // span * other, beyond)
    tl.store(key + at, found.to(key.dtype.element_ty), mask=at < size)


@triton.jit
def run_sums(
    out, rest, key, order, weight, near, far, side, other, matches, entries, beyond, n_b, n_s, n_f, f_b, f_s, f_f,
    WHICH: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, ENTRIES: tl.constexpr,
):
    piece = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    leading = tl.load(key + piece * ENTRIES)
    before = tl.load(key + piece * ENTRIES - 1, mask=piece > 0, other=-1)
    total = tl.zeros([LANES], tl.float32)
    for step in tl.static_range(ENTRIES):
        at = piece * ENTRIES + step
        k = tl.load(key + at, mask=at < entries, other=beyond)
        after = tl.load(key + at + 1, mask=at + 1 < entries, other=beyond)
        keys = lane * 0 + k
        inside = (lane < WIDTH) & (keys < beyond)
        e = tl.load(order + at, mask=k < beyond, other=0).to(tl.int64)
        w = tl.load(weight + e, mask=k < beyond, other=0)
        batch = e // matches // side
        row = e // matches % side
        t = k.to(tl.int64) % other
        total += w * vectors_at(near + batch * n_b, far + batch * f_b, n_s, n_f, f_s, f_f, row, t, lane, inside, WHICH)
        ends = keys != after
        old = (keys == leading) & (keys == before)  # of a run that began in an earlier piece
        part = (old | (keys == after)) if step == ENTRIES - 1 else (old & ends)
        tl.store(out + k.to(tl.int64) * WIDTH + lane, total, mask=inside & ends & (part == 0))
        tl.store(rest + (piece * 2 + tl.where(old, 0, 1)) * WIDTH + lane, total, mask=inside & part)
        total = tl.where(ends, 0.0, total)


@triton.jit
def join_runs(
    out, rest, key, pieces, entries, beyond,
    WIDTH: tl.constexpr, LANES: tl.constexpr, ENTRIES: tl.constexpr, MANY: tl.constexpr,
):
    piece = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    end = piece * ENTRIES + ENTRIES - 1
    k = tl.load(key + end, mask=end < entries, other=beyond)
    after = tl.load(key + end + 1, mask=end + 1 < entries, other=beyond)
    leading = tl.load(key + piece * ENTRIES)
    before = tl.load(key + piece * ENTRIES - 1, mask=piece > 0, other=-1)
    begins = (k < beyond) & (k == after) & ((leading != k) | (before != k))  # here, and goes on
    if begins:
        total = tl.load(rest + (piece * 2 + 1) * WIDTH + lane, mask=lane < WIDTH, other=0)
        next = piece + 1
        more = 1
        while more != 0:
            at = next + tl.arange(0, MANY)
            same = tl.load(key + at * ENTRIES, mask=at < pieces, other=beyond) == k
            block = rest + (at * 2)[:, None] * WIDTH + lane[None, :]
            total += tl.sum(tl.load(block, mask=same[:, None] & (lane < WIDTH)[None, :], other=0), 0)
            more = tl.min(same.to(tl.int32), 0)
            next += MANY
        tl.store(out + k.to(tl.int64) * WIDTH + lane, total, mask=lane < WIDTH)
"""
_kernels = Kernels("Sums over single pairs, each given by its place on one axis.", _TEXT)
_PIECE = 16  # pairs that one program instance of the scatter adds, one after the other
_WIDE = 128  # features of a program instance
_SORTED_BYTES = 36  # of a pair, while torch sorts them: keys and places, and both again


def has_kernel(r: Expr, sizes: Sizes) -> bool:
    """True where kernels compute a pick: in float32, of targets and vectors as they are given."""
    return sizes.compute is torch.float32 and sizes.rows > 0 < sizes.cols and _is_made_of_leaves(r)


@functools.lru_cache(maxsize=1024)
def _is_made_of_leaves(r: Expr) -> bool:
    target, value, _ = r.args
    if target.op != "leaf":
        return False
    if any(e.packing is not None for e in topological(r.args)):
        return False
    if r.attrs[0] != "picks" and (_find_operands(r) is None or (r.args[2] is ONE and _gathers(r))):
        return False  # numbers in their order are torch's own
    for e in topological([value], stop=lambda e: e.op in PRODUCTS):
        if e.op in PRODUCTS:
            x, y = e.args
            if e.dtype != "float" or x.op != "leaf" or y.op != "leaf" or x.rows == y.rows or x.cols == y.cols:
                return False
        elif (e.op == "leaf" and e.is_pair) or (e.feature is not None and e.feature != target.feature):
            return False
    return True


class Pairs:
    """The pairs of one batch chunk whose leaves are ``[batch, length(, features)]``, and what is known of them: the
    gradients of rows and of columns gather and scatter the same ones."""

    def __init__(self, values: Mapping[Expr, Any], sizes: Sizes, batch: int):
        self.values, self.sizes, self.batch = values, sizes, batch
        self.places: dict[tuple[Expr, bool], Tensor] = {}
        self.weights: dict[tuple[Expr, Expr, bool], Tensor] = {}
        self.sorted: dict[tuple[Expr, bool], tuple[Tensor, Tensor]] = {}

    def place(self, target: Expr, by_rows: bool) -> Tensor:
        """The targets ``[batch, side, matches]``."""
        found = self.places.get((target, by_rows))
        if found is None:
            place = self.values[target]
            place = place.unsqueeze(-1) if target.feature is None else place
            side = self.sizes.rows if by_rows else self.sizes.cols
            found = place.expand(self.batch, side, place.shape[-1]).contiguous()
            self.places[target, by_rows] = found
        return found

    def weight(self, value: Expr, target: Expr, by_rows: bool) -> Tensor:
        """What each pair weighs, in float32."""
        found = self.weights.get((value, target, by_rows))
        if found is None:
            found = _weigh_pairs(value, target, self.values, self.sizes, self.place(target, by_rows), by_rows)
            self.weights[value, target, by_rows] = found
        return found

    def sort(self, target: Expr, by_rows: bool) -> tuple[Tensor, Tensor]:
        """The pairs in the order of their targets, those without one last: the places of their sums among those of all
        batch elements, and which pair each is."""
        found = self.sorted.get((target, by_rows))
        if found is None:
            place, other = self.place(target, by_rows), self.sizes.cols if by_rows else self.sizes.rows
            entries, beyond = place.numel(), len(place) * other
            key = torch.empty(entries, dtype=torch.int32 if beyond < 2**31 else torch.int64, device=place.device)
            if entries:
                given = (key, place, place[0].numel(), other, beyond, entries)
                _kernels("keys_of", (-(-entries // 1024),), given, dict(LANES=1024))
            found = self.sorted[target, by_rows] = key.sort(stable=True)
        return found


def run(r: Expr, pairs: Pairs, raised: bool) -> Tensor:
    """A pick ``[batch, length(, features)]``; ``raised``: in float32, else vectors are as they were given."""
    target, value, vector = r.args
    by_rows = _by_rows(r)
    place, weight = pairs.place(target, by_rows), pairs.weight(value, target, by_rows)
    if r.attrs[0] == "picks":
        inside = (place >= 0) & (place < (pairs.sizes.cols if by_rows else pairs.sizes.rows))
        return torch.where(inside, weight, 0.0)
    operands = _find_operands(r)
    assert operands is not None  # see has_kernel
    which, *leaves = operands
    if vector is ONE:
        near = far = torch.ones(1, dtype=torch.float32, device=place.device).expand(*place.shape[:2], 1)
    else:
        near, far = (pairs.values[e].expand(pairs.batch, *pairs.values[e].shape[1:]) for e in leaves)
    other = pairs.sizes.cols if by_rows else pairs.sizes.rows
    held = torch.float32 if raised or near.dtype != far.dtype else near.dtype
    if _gathers(r):
        found = _gather(place, weight, which, near, far, other, held)
    else:
        found = _scatter(place, pairs.sort(target, by_rows), weight, which, near, far, other, held)
    return found.squeeze(-1) if vector is ONE else found


def estimate_bytes(r: Expr, values: Mapping[Expr, Any], sizes: Sizes, batch: tuple[int, ...], raised: bool) -> int:
    """Bytes alive at once while a pick is computed, its result included; see :func:`run`."""
    by_rows, feature = _by_rows(r), r.args[2].feature
    side, other = (sizes.rows, sizes.cols) if by_rows else (sizes.cols, sizes.rows)
    matches = 1 if r.args[0].feature is None else sizes.of(str(r.args[0].feature))
    width, pairs = 1 if feature is None else sizes.of(str(feature)), batch[-1] * side * matches
    leaves: Sequence[Expr] = () if feature is None else (_find_operands(r) or ())[1:]
    item = 4 if raised or not leaves else max(values[e].element_size() for e in leaves)
    if r.attrs[0] == "picks":
        width = matches
    whole = item * width * math.prod(batch) * (side if _gathers(r) else other)
    if len(batch) > 1:  # and, in turn, one of the looped batch dimensions
        whole *= 2
    held = 0 if values[r.args[0]].is_contiguous() else 8 * pairs
    held += 0 if r.args[1].op == "leaf" else 4 * pairs
    if not _gathers(r):
        pieces = -(-pairs // _PIECE)
        held += _SORTED_BYTES * pairs + 8 * width * pieces
    return whole + held


def _by_rows(r: Expr) -> bool:
    """True when rows hold the targets, which are columns."""
    return r.attrs[2][0] == "col"


def _gathers(r: Expr) -> bool:
    """True when the axis that holds the targets keeps its results."""
    return (r.attrs[1] == "cols") == _by_rows(r)


def _is_vector(e: Expr) -> bool:
    """True for a vector leaf of one axis."""
    return e.op == "leaf" and e.feature is not None and e.rows != e.cols


def _find_operands(r: Expr) -> tuple[int, Expr, Expr] | None:
    """What is summed, as the kernels know it (``vectors_at``), with the vectors of the axis that holds the targets and
    of the other one; None where it is something else."""
    vector, by_rows = r.args[2], _by_rows(r)
    if vector is ONE:
        return 0, ONE, ONE
    if _is_vector(vector):
        return (0 if vector.rows == by_rows else 1), vector, vector
    if vector.op == "sub" and all(map(_is_vector, vector.args)) and vector.args[0].rows != vector.args[1].rows:
        x, y = vector.args
        return (2, x, y) if x.rows == by_rows else (3, y, x)
    return None


def _weigh_pairs(
    value: Expr, target: Expr, values: Mapping[Expr, Any], sizes: Sizes, place: Tensor, by_rows: bool
) -> Tensor:
    """What each pair weighs ``[batch, side, matches]``, in float32."""
    (value,) = one_number_per_match((value,), target)
    leaves: Iterable[Expr] = list_leaves(value)
    if target.feature is None:
        found = {e: values[e] for e in leaves}
    else:
        names = {str(e.attrs[0]): v for e, v in values.items()}
        found = {e: names[str(e.attrs[0]).removesuffix("/match")] for e in leaves}
    weight = weigh(value, found, sizes, place, by_rows)
    if weight is not None:
        return weight
    evaluator = MatchedPairs(sizes, {})
    safe = place.clamp(0, (sizes.cols if by_rows else sizes.rows) - 1)
    for e in topological([value], stop=lambda e: e.op in PRODUCTS):
        if e.op in PRODUCTS:
            evaluator.memo[e] = weigh(e, found, sizes, place, by_rows)
        elif e.op in ("leaf", "row_index", "col_index"):
            evaluator.memo[e] = gather_leaf(e, dict(values), by_rows, slice(0, place.shape[1]), safe, sizes)
    weight = evaluator.to_compute(evaluator(value), value)
    if not isinstance(weight, Tensor):
        return torch.full(place.shape, float(weight), dtype=torch.float32, device=place.device)
    return weight.expand(place.shape).contiguous()


def _gather(
    place: Tensor, weight: Tensor, which: int, near: Tensor, far: Tensor, other: int, held: torch.dtype
) -> Tensor:
    batch, side, matches = place.shape
    width = near.shape[-1]
    out = torch.empty(batch, side, width, dtype=held, device=place.device)
    lanes = min(power_of_two(width), _WIDE)
    constants = dict(WHICH=which, WIDTH=width, LANES=lanes, ROWS=max(1, 2048 // lanes))
    grid = (-(-side // constants["ROWS"]), batch, -(-width // lanes))
    arguments = (out, place, weight, near, far, side, other, matches, *near.stride(), *far.stride())
    _kernels("gather_sum", grid, arguments, constants)
    return out


def _scatter(
    place: Tensor,
    in_order: tuple[Tensor, Tensor],
    weight: Tensor,
    which: int,
    near: Tensor,
    far: Tensor,
    other: int,
    held: torch.dtype,
) -> Tensor:
    batch, side, matches = place.shape
    width, entries, beyond = near.shape[-1], place.numel(), batch * other
    out, (key, order) = torch.zeros(batch, other, width, dtype=held, device=place.device), in_order
    pieces = -(-entries // _PIECE)
    rest = torch.empty(pieces, 2, width, dtype=torch.float32, device=place.device)
    lanes = min(power_of_two(width), _WIDE)
    constants = dict(WIDTH=width, LANES=lanes, ENTRIES=_PIECE)
    grid, sizes = (pieces, -(-width // lanes)), (side, other, matches, entries, beyond)
    arguments = (out, rest, key, order, weight, near, far, *sizes, *near.stride(), *far.stride())
    _kernels("run_sums", grid, arguments, dict(WHICH=which) | constants, dict(num_warps=1))
    _kernels("join_runs", grid, (out, rest, key, pieces, entries, beyond), constants | dict(MANY=64))
    return out


# What matched pairs weigh: products of their vectors, and all arithmetic, in one generated kernel.
#
# The text is made of the same lines as a fold's (``expressions.py``). A program instance takes some pairs: a number is
# a block ``[KEPT, 1]``, read at the pair's own index or at its target; an inner product or squared distance is a loop
# over features.


PRODUCTS = ("dot", "sqdist")
_OTHERS = ("leaf", "const", "nan", "size", "row_index", "col_index", *PRODUCTS)
_WIDE_PRODUCT = 128  # features that are read at once
_KINDS = {bool: torch.bool, int: torch.int64}
_WEIGHTS_TEXT = """@triton.jit
def pair_weights({signature}):
    INT: tl.constexpr = tl.int64
    FOLDED: tl.constexpr = 1
    entry = tl.program_id(0).to(tl.int64) * KEPT + tl.arange(0, KEPT)[:, None]
    batch = tl.program_id(1).to(tl.int64)
    exists = entry < side * matches
    row = entry // matches
    match = entry % matches
    place += batch * side * matches
    out += batch * side * matches
    there = tl.load(place + entry, mask=exists, other=-1).to(tl.int64)
    hit = (there >= 0) & (there < other) & exists
    there = tl.where(hit, there, 0)
{body}
"""


class _Weights(ExpressionWriter):
    """Numbers of matched pairs; ``by_rows``: rows hold the targets, which are columns."""

    def __init__(self, spec: Spec, by_rows: bool):
        super().__init__(spec)
        self.by_rows = by_rows

    def _text(self, e: Expr) -> str:
        if e.op in ("row_index", "col_index"):
            return "row" if (e.op == "row_index") == self.by_rows else "there"
        if e.op == "size":
            axis = e.attrs[0]
            if axis not in ("rows", "cols"):
                return str(self.spec.width(axis))
            return "side" if (axis == "rows") == self.by_rows else "other"
        return super()._text(e)

    def _leaf(self, e: Expr) -> str:
        name = str(e.attrs[0]).replace("/", "_")
        mask = ", mask=hit, other=0" if e.rows or e.cols else ""
        text = f"tl.load({self._at(e, name)}{mask})"
        return self.to_arithmetic_type(text, e, self.spec.type_of[e])

    def _name(self, e: Expr) -> str:
        return ""

    def _at(self, e: Expr, name: str) -> str:
        if e.is_pair:  # one number per match
            return f"{name}_ptr + batch * {name}_b + row * {name}_s + match * {name}_f"
        index = "row" if (e.rows if self.by_rows else e.cols) else "there"
        step = f" + {index} * {name}_s" if e.rows or e.cols else ""
        return f"{name}_ptr + batch * {name}_b{step}"

    def _over_features(self, e: Expr) -> str:
        width = self.spec.width(e.args[0].feature)
        lanes = min(pad_width(width), _WIDE_PRODUCT)
        total = self.bind((e, "total"), "tl.zeros([KEPT, 1], tl.float32)", True)
        blocks = []
        for a in e.args:
            x = str(a.attrs[0])
            load = f"tl.load({self._at(a, x)} + lane * {x}_f, mask=inside, other=0)"
            blocks.append(f"{load}.to(tl.float32)")
        x, y = ("here", "far") if e.op == "dot" else ("gap", "gap")
        self.inside += [
            f"for first in range(0, {width}, {lanes}):",
            f"    lane = first + tl.arange(0, {lanes})[None, :]",
            f"    inside = hit & (lane < {width})",
            f"    here = {blocks[0]}",
            f"    far = {blocks[1]}",
            *([] if e.op == "dot" else ["    gap = here - far"]),
            f"    {total} += tl.sum({x} * {y}, 1)[:, None]",
        ]
        return total


@functools.lru_cache(maxsize=1024)
def list_leaves(value: Expr) -> tuple[Expr, ...]:
    """The leaves that a value is computed from."""
    return tuple(e for e in topological([value]) if e.op == "leaf")


@functools.lru_cache(maxsize=256)
def _write(value: Expr, by_rows: bool, types: tuple[str, ...], letters: tuple) -> Kernels | None:
    """The kernel of a value; None where it holds something that is no arithmetic on numbers and products."""
    leaves = list_leaves(value)
    spec = Spec(Fold(leaves, ()), "cols", types, (0,) * len(leaves), letters, "float32", None, 1)
    known = [e.op in _OTHERS or (e.op in PRIMITIVES and e.op not in DRAWS) for e in topological([value])]
    if not all(known) or any(e.packing is not None for e in leaves):
        return None
    lines = _Weights(spec, by_rows)
    try:
        found = lines.argument(value, "float")
    except Unsupported:
        return None
    names = ["out", "place", "side", "other", "matches"]
    for e in spec.fold.leaves:
        x = str(e.attrs[0]).replace("/", "_")
        names += [f"{x}_ptr", f"{x}_b", *([f"{x}_s"] if e.rows or e.cols else [])]
        names += [f"{x}_f"] if e.feature is not None or e.is_pair else []
    store = f"tl.store(out + entry, tl.where(hit, {found}, 0.0) + tl.zeros([KEPT, 1], tl.float32), mask=exists)"
    body = "\n".join(f"    {line}" for line in [*lines.before, *lines.inside, store])
    signature = ", ".join([*names, "KEPT: tl.constexpr"])
    return Kernels("What matched pairs weigh.", _WEIGHTS_TEXT.format(signature=signature, body=body))


def weigh(value: Expr, values: Mapping[Expr, Any], sizes: Sizes, place: Tensor, by_rows: bool) -> Tensor | None:
    """What each pair weighs ``[batch, side, matches]``, 0 where its target is outside; None where there is no kernel.

    ``values``: of leaves, ``[batch, length(, features)]``; of numbers per match ``[batch, side, matches]``."""
    given = [values[e] for e in list_leaves(value)]
    kinds = [_KINDS.get(type(v), torch.float32) for v in given]  # of Python numbers
    pairs = zip(given, kinds, strict=True)
    given = [v if isinstance(v, Tensor) else torch.full((1,), v, dtype=t, device=place.device) for v, t in pairs]
    kernels = _write(value, by_rows, tuple([str(v.dtype)[6:] for v in given]), tuple(sizes.letters.items()))
    if kernels is None:
        return None
    batch, side, matches = place.shape
    out = torch.empty(place.shape, dtype=torch.float32, device=place.device)
    other = sizes.cols if by_rows else sizes.rows
    arguments: list[Any] = [out, place, side, other, matches]
    for v in given:
        arguments += [v, *(0 if n == 1 else s for n, s in zip(v.shape, v.stride(), strict=True))]
    if out.numel():
        kernels("pair_weights", (-(-side * matches // 32), batch), arguments, dict(KEPT=32))
    return out
