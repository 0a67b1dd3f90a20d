"""Reductions in a kernel: the running sums of this code generator, and the lines that kinds write with them
(``reductions/``)."""

from __future__ import annotations

import functools
from typing import Any

from ....program import constructors
from ....program.constructors import ONE, Contraction, apply, contractions
from ....program.expression import Expr, const, letters, topological
from ....program.primitives import PRIMITIVES
from ....program.several import MIX, OUTER, is_product
from ....reductions import kind_of, outputs_of
from ....reductions.base import Lines, Tools
from .expressions import ExpressionWriter, load_one_vector
from .kernel_spec import TINY, WIDEST, Slices, Spec, Unsupported, literal, pad_width, widen

# Running sums in a kernel: of numbers, of few features one by one, of vectors by matrix products.
#
# Sums that are too wide for registers (:class:`StoredSum`) are h vectors of f features for each kept index
# (``program/several.py``), the gradients of several vectors. A program instance owns its part of the result, so it
# adds there: for each of the h vectors a tile loads what was added before, runs one matrix product and stores the sum.
# No other instance reads or writes it, so there are no atomics and one order. A barrier after a tile's stores makes
# them visible to all threads of the instance, which may load other elements than they stored.


class RunningSum:
    """A running sum of a number or a vector: one block, or one number per feature where features are few."""

    def __init__(self, name: str, feature: Any, dtype: str, v: ExpressionWriter, lanes: bool):
        self.name, self.v, self.feature = name, v, feature
        self.kind = v.float if dtype == "float" else "tl.int64"
        self.width = 0 if feature is None else v.spec.width(feature)
        self.tiny = feature is not None and self.width <= TINY
        self.lanes = lanes and dtype == "float" and (feature is None or self.tiny)
        self.delayed_vector: Expr | None = None  # the vectors of products that wait for the next tile
        self.slices: Slices = ((0, 0),)  # of a vector's features, each of which has a block
        self.gap_vector: Expr | None = None  # of Σ weight (x - y) the kept side, times the sum of weights at the end
        if feature is not None and not self.tiny:
            v.lane(feature)
            self.slices = v.spec.slices(feature)
            v.state_width += sum(size for _, size in self.slices)

    def delays_product(self, parts: list[Contraction]) -> bool:
        """True when the product of a tile is left to the next, where it runs beside that tile's arithmetic. Of vectors
        in several slices it is not: with two such products of one register operand Triton 3.6 waits for one of them
        only (H200: wrong sums)."""
        v, one = self.v, parts[0] if len(parts) == 1 else None
        if not v.delays_products or v.spec.pieces or one is None or one.walk or one.minus is not None or self.tiny:
            return False
        if len(self.slices) > 1:
            return False
        alone = one.vector in v.spec.descriptor_dims and one.vector not in v.factors and not v.spec.is_stored_softmax
        self.delayed_vector = one.vector if alone else self.delayed_vector
        return alone

    def add_delayed_product(self) -> list[str]:
        """The lines that add the product that the tile before left over; ``gone`` is that tile's first index."""
        assert self.delayed_vector is not None
        # added to 0, so that the compiler keeps the weights in registers
        lines = []
        for name, (first, _) in zip(self.names, self.slices, strict=True):
            block = self.v.load_by_descriptor(self.delayed_vector, "gone", str(first))
            lines.append(f"{name} = tl.dot({self.name}_late + 0.0, {block}, acc={name}{self.v.options()})")
        return lines

    def delay_product(self, weight: str) -> str:
        return f"{self.name}_late = ({weight}).to(tl.{self.v.operand_type()})"

    @property
    def _scales_weights(self) -> bool:
        """True when weights, and so the sum, are held 2¹⁴ times as large: they are at most 1, and float16 would lose
        small ones."""
        return self.v.spec.multiplies_in_float16 and self.feature is not None

    @property
    def names(self) -> list[str]:
        if self.tiny:
            return [f"{self.name}_{f}" for f in range(self.width)]
        return [f"{self.name}_{first}" if first else self.name for first, _ in self.slices]

    def start(self) -> list[str]:
        shapes = ["[KEPT, FOLDED]" if self.lanes else "[KEPT]"] * len(self.names)
        if self.feature is not None and not self.tiny:
            shapes = [f"[KEPT, {size}]" for _, size in self.slices]
        lines = [f"{n} = tl.zeros({shape}, {self.kind})" for n, shape in zip(self.names, shapes, strict=True)]
        late = f"{self.name}_late = tl.zeros([KEPT, FOLDED], tl.{self.v.operand_type()})"
        lines += [late] if self.delayed_vector is not None else []
        return [*lines, f"{self.name}_mass = tl.zeros([KEPT], {self.kind})"] if self.gap_vector is not None else lines

    def scale(self, factor: str) -> list[str]:
        block = self.feature is not None and not self.tiny
        mass = [f"{self.name}_mass *= {factor}"] if self.gap_vector is not None else []
        return [*(f"{n} *= {factor}[:, None]" if block else f"{n} *= {factor}" for n in self.names), *mass]

    def add(self, c: Contraction, weight: str | None) -> None:
        """Add one tile's Σ weight × vector; ``weight``: a whole block."""
        v = self.v
        if c.walk and weight is None and is_product(c.weight) and c.weight.attrs[0] == MIX:
            add_mixed(self, c.weight)
        elif c.walk:
            self._add_walk(lambda f: v.component(c.weight, f), c.weight, weight)
        elif c.minus is not None:
            assert c.vector is not None and weight is not None
            self._add_gap(c.vector, c.minus, weight)
        elif c.vector is None:
            assert weight is not None
            self.add_block(self.name, weight)
        elif c.vector.op != "leaf" or self.tiny:
            vector = c.vector
            self._add_walk(lambda f: v.component(vector, f), vector, weight)
        else:
            assert weight is not None
            self._product(weight, c.vector)

    def add_block(self, name: str, block: str) -> None:
        """Add a block's sum over the folded axis to a running number."""
        self.v.inside.append(f"{name} += {block}" if self.lanes else f"{name} += tl.sum({block}, 1)")

    def _product(self, weight: str, vector: Expr, block: str = "") -> None:
        v, kind = self.v, self.v.operand_type()
        if v.spec.pieces:
            v.inside.append(f"{self.name} += weighted_thirds({weight}, {v.split_blocks(vector)})")
            return
        weight = f"{weight} * {_WEIGHT_SCALE}" if self._scales_weights else weight
        if kind != v.spec.compute:
            weight = f"{weight}.to(tl.{kind})" if weight.isidentifier() else f"({weight}).to(tl.{kind})"
        if len(self.slices) > 1:
            weight = v.bind((weight, "operand"), weight, True)
        for name, at in zip(self.names, self.slices, strict=True):
            one = block or v.block(vector, at=at)
            v.inside.append(v.add_product(name, weight, one))

    def _add_walk(self, component: Any, vector: Expr, weight: str | None) -> None:
        v = self.v
        zeros, nothing = f"tl.zeros([KEPT, FOLDED], {self.kind})", "0.0" if vector.dtype == "float" else "0"
        v.prepare_walk(vector)
        if self.tiny:
            for k, name in enumerate(self.names):
                part = component(str(k))
                self.add_block(name, v.mask_columns(f"{weight or zeros} {'*' if weight else '+'} {part}", nothing))
            return
        lane, _ = v.lane(self.feature)
        with v.walk(self.width) as f:
            part = component(f)
            block = v.mask_columns(f"{weight or zeros} {'*' if weight else '+'} {part}", nothing)
            v.inside.append(f"{self.name} += tl.where({lane}[None, :] == {f}, tl.sum({block}, 1)[:, None], {nothing})")

    def _add_gap(self, x: Expr, y: Expr, weight: str) -> None:
        """Σ weight (x_i - y_j): few features one by one; else by a product, of float32 vectors centred on the tile, so
        less cancels. Of 16-bit vectors, and of those centred before the launch, the weights' total is multiplied by
        the kept vectors once, after the loops."""
        v = self.v
        gap = apply("sub", x, y)
        if self.tiny:
            return self._add_walk(lambda f: v.component(gap, f), gap, weight)
        kept, folded, sign = (x, y, 1) if v.spec.folds(y) else (y, x, -1)
        weight = v.bind((weight, "gap"), weight, True)
        signed = f"{'-' if sign > 0 else ''}{weight}"
        if v.spec.pieces or v.spec.narrow:
            self.gap_vector, self.sign = kept, "+" if sign > 0 else "-"
            v.inside.append(f"{self.name}_mass += tl.sum({weight}, 1)")
            self._product(signed, folded)
            return
        one, other = v.block(kept), v.block(folded)
        centre = v.bind((folded, "centre"), f"tl.sum({other}, 0)[None, :] / FOLDED", True)
        one, other = f"({one} - {centre})", v.bind((folded, "centred"), f"{other} - {centre}", True)
        whole = f"tl.sum({weight}, 1)[:, None] * {one}"
        v.inside.append(f"{self.name} += {whole}" if sign > 0 else f"{self.name} -= {whole}")
        self._product(signed, folded, other)

    def result(self) -> list[str]:
        if self.gap_vector is not None:
            kept = [_reload_kept(self.v, self.gap_vector, at) for at in self.slices]
            return [f"({n} {self.sign} {self.name}_mass[:, None] * {k})" for n, k in zip(self.names, kept, strict=True)]
        if self._scales_weights:
            return [f"({n} * {1 / _WEIGHT_SCALE!r})" for n in self.names]
        return [f"tl.sum({n}, 1)" if self.lanes else n for n in self.names]


_WEIGHT_SCALE = 2.0**14


def _reload_kept(v: ExpressionWriter, e: Expr, at: tuple[int, int]) -> str:
    """A slice of a kept leaf's vectors in float32, loaded again: until here nothing holds registers for them."""
    first, size = at
    width = v.spec.width(e.feature)
    width = pad_width(width) if v.spec.pieces else v.spec.padded_width_of[e] or width
    lane, exists = v.slice_lane(size, width - first)
    mask = f"mask=kept_in[:, None]{f' & {exists}[None, :]' if exists else ''}, other={v.spec.zero(e)}"
    place = f"{v.pointer(e)} + {v.axis_offset(e, 'kept')}"
    if v.spec.pieces:
        parts = (f"tl.load({place} + {lane}[None, :] + {k * width}, {mask})" for k in range(3))
        return f"of_thirds({', '.join(parts)})"
    text = f'tl.load({place} + ({lane}[None, :] + {first}) * {e.attrs[0]}_f, {mask}, eviction_policy="evict_first")'
    return widen(text, v.spec.type_of[e], v.spec.compute)


def move_factors_to_weight(c: Contraction) -> Contraction:
    """A contraction whose vector is a leaf times a number, the number in the weight: one block less to read."""
    while c.vector is not None and c.vector.op == "mul":
        vector, number = c.vector.args if c.vector.args[0].feature is not None else c.vector.args[::-1]
        if number.feature is not None or vector.op not in ("leaf", "mul"):
            break
        c = Contraction(_multiply_into(c.weight, number), vector)
    return c


def list_factors(e: Expr) -> list[Expr]:
    """The factors of a product."""
    return [factor for a in e.args for factor in list_factors(a)] if e.op == "mul" else [e]


def find_plain_sum(r: Expr) -> Contraction | None:
    """A sum of weight × vector as its one contraction; None where it is none, or several."""
    found = [move_factors_to_weight(c) for c in contractions(r.args[0], r.attrs[1])]
    return found[0] if len(found) == 1 and not found[0].walk and found[0].minus is None else None


def _multiply_into(weight: Expr, number: Expr) -> Expr:
    """weight × number, the number multiplied to the innermost factor, which other weights may share."""
    others: list[Expr] = []
    while weight.op == "mul" and weight.args[0].is_pair:
        weight, other = weight.args
        others.append(other)
    product = apply("mul", weight, number)
    for other in reversed(others):
        product = apply("mul", product, other)
    return product


@functools.lru_cache(maxsize=1024)
def is_stored(r: Expr) -> bool:
    """True when a reduction is a sum of vectors that is kept in memory."""
    kind, over, _ = r.attrs
    return kind == "sum" and any(_is_outer(c) for c in contractions(r.args[0], over))


def _is_outer(c: Contraction) -> bool:
    return c.walk and is_product(c.weight) and c.weight.attrs[0] in OUTER


class StoredSum:
    """A running sum in the result's memory, with the methods of ``RunningSum`` that a sum calls."""

    tiny, delayed_vector = False, None

    def __init__(self, name: str, reduction: Expr, v: ExpressionWriter):
        self.name, self.v, self.feature = name, v, reduction.args[0].feature
        spec = v.spec
        if any(r.attrs[0] == "soft" for r in spec.fold.reductions) and spec.guess:
            raise Unsupported("gradients of several vectors beside a softmax of 16-bit vectors")
        before = spec.fold.reductions[: spec.fold.reductions.index(reduction)]
        self.out = sum(len(outputs_of(r)) for r in before)
        self.count, self.width = (spec.width(letter) for letter in letters(self.feature))

    def delays_product(self, parts: list[Contraction]) -> bool:
        return False

    def _block(self) -> tuple[str, str]:
        """The place of a block of the first of the vectors, and its mask."""
        v, name = self.v, f"{self.name}_at"
        lane, exists = v.slice_lane(pad_width(self.width), self.width)
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
        zeros = f"tl.zeros([KEPT, {pad_width(self.width)}], {self.v.float})"
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
            one = v.mask_columns(f"tl.zeros([KEPT, FOLDED], {v.float}) + {v.component(numbers, each)}", "0.0")
            operand = v.bind((self.name, "operand"), f"({one}).to(tl.{v.operand_type()})", True)
            place = v.bind((self.name, "place"), f"{at} + {each} * {self.width}", True)
            old = v.bind((self.name, "old"), f"tl.load({place}, mask={mask}, other=0)", True)
            new = f"tl.dot({operand}, {load_one_vector(v, vectors, each)}, acc={old}{v.options()})"
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
        one = v.mask_columns(f"tl.zeros([KEPT, FOLDED], {v.float}) + {v.component(numbers, each)}", "0.0")
        if total.tiny:
            one = v.bind((total.name, "operand"), one, True)
            for k, name in enumerate(total.names):
                number = v.leaf_component(vectors, f"({each} * {width} + {k})")
                total.add_block(name, f"{one} * {number}")
            return
        operand = v.bind((total.name, "operand"), f"({one}).to(tl.{v.operand_type()})", True)
        v.inside.append(
            f"{total.name} = tl.dot({operand}, {load_one_vector(v, vectors, each)}, acc={total.name}{v.options()})"
        )


# Vectors per pair in registers: blocks ``[KEPT, FOLDED, features]``, and functions of numbers and vectors.
#
# Sums and softmaxes never hold a vector per pair: they are matrix products. A monoid of one's own may combine vectors
# in any way, so a tile's are made whole, and the monoid's ``combine`` is a device function of blocks: numbers ``[...,
# n]`` and vectors ``[..., n, features]``, which folds a tile as a tree of halves.

# Features of all vectors of a pair, with their padding: tiles of more are one row, or do not fit in registers.
MOST_PAIR_FEATURES = 256
MOST_PAIR_FEATURES_OF_OLD = 64  # with a Triton whose products need 16 rows, which 128 features leave no registers for


class BlockFunctionWriter(ExpressionWriter):
    """Writes a function of blocks, whose arguments are names in ``outer``. A number beside a vector gets one more axis;
    a sum over features leaves out the padding."""

    def __init__(self, spec: Spec):
        super().__init__(spec)
        self.scalars = True

    def _text(self, e: Expr) -> str:
        if e.op == "fsum":
            width = self.spec.width(e.args[0].feature)
            x = self.number(e.args[0])
            if pad_width(width) > width:
                x = f"tl.where(tl.arange(0, {pad_width(width)}) < {width}, {x}, 0.0)"
            return f"sum_features({x})"
        if e.op == "spread":
            return self._beside_vector(e.args[0])
        if e.feature is None:
            return super()._text(e)
        args = [
            self._beside_vector(a, want) if a.feature is None else self.convert(self.number(a), a, want)
            for a, want in zip(e.args, self._wants(e), strict=True)
        ]
        return self.primitive(e, args)

    def _beside_vector(self, e: Expr, want: str = "") -> str:
        text = self.argument(e, want or e.dtype)
        is_block = any(n.op == "leaf" for n in topological([e]))  # it is made of arguments
        return f"tl.expand_dims({text}, -1)" if is_block else text


def pair_vector(v: ExpressionWriter, e: Expr) -> str:
    """The name of a tile's vectors ``[KEPT, FOLDED, features]`` (axes of size 1 where they do not vary)."""
    if v.spec.k_loop:
        raise Unsupported("a monoid with vector fields, of many features")
    for n in topological([e], stop=lambda n: n.feature is None):
        if _find_vectors(v, n) is None:
            v.bind((n, "vectors"), _write_vector(v, n), True)
    return str(_find_vectors(v, e))


def _find_vectors(v: ExpressionWriter, e: Expr) -> str | None:
    return v.inner.get((e, "vectors")) or v.outer.get((e, "vectors"))


def _write_vector(v: ExpressionWriter, e: Expr) -> str:
    if e.feature is None:
        text = v.number(e)
        return f"tl.expand_dims({text}, 2)" if e.rows or e.cols else text
    if e.op == "spread":
        return str(_find_vectors(v, e.args[0]))
    if e.op == "leaf":
        if e.is_pair or not (e.rows or e.cols):
            raise Unsupported("a monoid's vectors that are given per pair, or once for all")
        return f"tl.expand_dims({_load_vectors(v, e)}, {0 if v.spec.folds(e) else 1})"
    return v.primitive(e, [str(_find_vectors(v, a)) for a in e.args])


def _load_vectors(v: ExpressionWriter, e: Expr) -> str:
    """A leaf's vectors ``[axis, features]`` in the type that arithmetic is done in: blocks of products are rounded."""
    lane, exists = v.lane(e.feature)
    text = v.load_rows(e, "", lane, exists, "0")
    text = text if v.spec.type_of[e] == v.spec.compute else f"{text}.to({v.float})"
    return v.bind((e, "whole vectors"), text, v.spec.folds(e), f"{e.attrs[0]}_whole")


# A number per pair at one folded index per kept index (a label): computed there alone, not for whole tiles.


def can_read_one_column(value: Expr, spec: Spec) -> bool:
    """True when a value can be computed at one folded index: arithmetic on numbers, and products of leaves."""
    for e in topological([value], stop=lambda e: e.op == "dot"):
        if e.op == "dot":
            if any(a.op != "leaf" or not TINY < spec.width(a.feature) <= WIDEST for a in e.args):
                return False
        elif e.feature is not None or (e.args and (e.op not in PRIMITIVES or not PRIMITIVES[e.op].triton)):
            return False
    return True


class LabelColumnWriter(ExpressionWriter):
    """Writes values in blocks ``[KEPT, 1]``: each kept index with the one folded index that it names."""

    def __init__(self, host: ExpressionWriter, name: str, target: Expr):
        super().__init__(host.spec)
        self.host, self.prefix = host, name
        self.target = self.bind("target", host.number(target), False, f"{name}_target")
        mine = "(kept_at < tl.where(part == 0, kept_size, 0))" if self.spec.split else "kept_in"  # once, in one part
        text = f"({self.target} >= 0) & ({self.target} < folded_size) & {mine}[:, None]"
        self.inside_text = self.bind("inside", text, False, f"{name}_inside")
        self.place = self.bind("place", f"tl.where({self.inside_text}, {self.target}, 0).to(tl.int64)", False)

    def bind(self, key: object, text: str, folded: bool, name: str = "") -> str:
        """Bind everything once, after the loop, under names of its own."""
        name = name if name.startswith(self.prefix) else f"{self.prefix}_{name}" if name else ""
        if not name:
            name, self.count = f"{self.prefix}_v{self.count}", self.count + 1
        return super().bind(key, text, False, name)

    def _text(self, e: Expr) -> str:
        if e.op in ("row_index", "col_index") and self.spec.folds(e):
            return self.target
        if e.op == "dot":
            kept, there = e.args if self.spec.folds(e.args[1]) else e.args[::-1]
            vectors = f"{self.host.block(kept)}.to({self.float}) * {self._gather_vectors(there)}.to({self.float})"
            return f"tl.sum({vectors}, 1)[:, None]"
        return super()._text(e)

    def dropout_block(self, col: Expr) -> str:
        return f"({self.number(col)} >> 7)"

    def _gather_vectors(self, e: Expr) -> str:
        """The folded leaf's vectors at these indices."""
        name = str(e.attrs[0])
        lane, exists = self.host.lane(e.feature, self.spec.padded_width_of[e])
        base = self.host.base(e)
        mask = self.inside_text + (f" & {exists}[None, :]" if exists else "")
        place = f"{base} + {self.place} * {name}_s + {lane}[None, :] * {name}_f"
        text = f"tl.load({place}, mask={mask}, other={self.spec.zero(e)})"
        return self.bind((e, "there"), text, False)

    def _leaf(self, e: Expr) -> str:
        if not self.spec.folds(e) or self.spec.is_number(e):
            return self.host.number(e)
        at = f"{self.host.base(e)} + {self.place} * {e.attrs[0]}_s"
        if e.is_pair:
            kept, folded = self.host.pair_strides(e)
            at = f"{self.host.base(e)} + kept_at.to(tl.int64)[:, None] * {kept} + {self.place} * {folded}"
        text = f"tl.load({at}, mask={self.inside_text}, other=0)"
        return self.to_arithmetic_type(text, e, self.spec.type_of[e])


TOOLS = Tools(
    writer=ExpressionWriter,
    running_sum=RunningSum,
    stored_sum=lambda name, r, v: StoredSum(name, r, v) if is_stored(r) else None,
    move_factors=move_factors_to_weight,
    reads_one_pair=can_read_one_column,
    one_pair=LabelColumnWriter,
    block_function=BlockFunctionWriter,
    pair_vector=pair_vector,
    literal=literal,
    pad_width=pad_width,
    tiny=TINY,
)


def make_lines(place: int, reduction: Expr, scale: Expr, v: ExpressionWriter) -> Lines:
    """The lines of a reduction; raises Unsupported where its kind has none."""
    kind = kind_of(reduction)
    if not (kind.per_pair and v.spec.listed):  # a number for each entry of lists is stored where it is computed
        _refuse_without_kernel(reduction)
    if not _has_pair_vectors(reduction):
        return kind.lines(kind, place, reduction, scale, v, TOOLS)
    assert kind.vector_lines is not None
    lines = kind.vector_lines(kind, place, reduction, scale, v, TOOLS)
    most = MOST_PAIR_FEATURES if v.spec.small_products else MOST_PAIR_FEATURES_OF_OLD
    if v.pair_features > most:
        raise Unsupported(f"a monoid's vectors of more than {most} features, with their padding")
    return lines


def make_row_lines(place: int, reduction: Expr, v: ExpressionWriter) -> Lines:
    """The same in a kernel whose program instances own one row each.

    A row of a panel is long and its tiles are wide. Reducing every tile would make all warps wait for each other
    several times a tile; kinds that can do so keep running values per lane, and join them at the end."""
    kind = kind_of(reduction)
    _refuse_without_kernel(reduction)
    if _has_pair_vectors(reduction):
        raise Unsupported("a monoid with vector fields, on a panel")
    return (kind.lane_lines or kind.lines)(kind, place, reduction, ONE, v, TOOLS)


def _has_pair_vectors(reduction: Expr) -> bool:
    """True when a kernel holds a vector per pair."""
    return kind_of(reduction).vector_lines is not None and any(a.feature is not None for a in reduction.args)


def _refuse_without_kernel(reduction: Expr) -> None:
    reason = kind_of(reduction).no_kernel(reduction)
    if reason:
        raise Unsupported(reason)


def substitute_truths(e: Expr, truths: dict[Expr, bool]) -> Expr:
    """An expression with some conditions known."""
    return constructors.substitute((e,), {c: const(t) for c, t in truths.items()})[0] if truths else e
