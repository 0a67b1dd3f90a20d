"""Reductions in a kernel: the lines that their kinds write (``reductions/``), with the parts of this code generator."""

from __future__ import annotations

from ....program import constructors
from ....program.constructors import ONE
from ....program.expression import Expr, const, topological
from ....program.primitives import PRIMITIVES
from ....reductions import kind_of
from ....reductions.base import Lines, Tools
from .accumulators import Accumulator, StoredSum, is_stored, move_factors_to_weight
from .exponents import literal
from .expressions import ExpressionWriter
from .kernel_spec import TINY, WIDEST, Spec, Unsupported, pad_width

# Vectors per pair in registers: blocks ``[KEPT, FOLDED, features]``, and functions of numbers and vectors.
#
# Sums and softmaxes never hold a vector per pair: they are matrix products. A monoid of one's own may combine vectors
# in any way, so a tile's are made whole, and the monoid's ``combine`` is a device function of blocks: numbers ``[...,
# n]`` and vectors ``[..., n, features]``, which folds a tile as a tree of halves.

# Features of all vectors of a pair, with their padding: tiles of more are one row, or do not fit in registers.
MOST = 256
MOST_OF_OLD = 64  # with a Triton whose products need 16 rows, which 128 features leave no registers for


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
    if v.spec.listed or v.spec.k_loop:
        raise Unsupported("a monoid with vector fields, over lists or many features")
    for n in topological([e], stop=lambda n: n.feature is None):
        if _find_vectors(v, n) is None:
            v.bind((n, "vectors"), _vector_text(v, n), True)
    return str(_find_vectors(v, e))


def _find_vectors(v: ExpressionWriter, e: Expr) -> str | None:
    return v.inner.get((e, "vectors")) or v.outer.get((e, "vectors"))


def _vector_text(v: ExpressionWriter, e: Expr) -> str:
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

    def block_of(self, col: Expr) -> str:
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
    running_sum=Accumulator,
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
        _check(reduction)
    if not _has_pair_vectors(reduction):
        return kind.lines(kind, place, reduction, scale, v, TOOLS)
    assert kind.vector_lines is not None
    lines = kind.vector_lines(kind, place, reduction, scale, v, TOOLS)
    most = MOST if v.spec.small_products else MOST_OF_OLD
    if v.pair_features > most:
        raise Unsupported(f"a monoid's vectors of more than {most} features, with their padding")
    return lines


def make_row_lines(place: int, reduction: Expr, v: ExpressionWriter) -> Lines:
    """The same in a kernel whose program instances own one row each.

    A row of a panel is long and its tiles are wide. Reducing every tile would make all warps wait for each other
    several times a tile; kinds that can do so keep running values per lane, and join them at the end."""
    kind = kind_of(reduction)
    _check(reduction)
    if _has_pair_vectors(reduction):
        raise Unsupported("a monoid with vector fields, on a panel")
    return (kind.lane_lines or kind.lines)(kind, place, reduction, ONE, v, TOOLS)


def _has_pair_vectors(reduction: Expr) -> bool:
    """True when a kernel holds a vector per pair."""
    return kind_of(reduction).vector_lines is not None and any(a.feature is not None for a in reduction.args)


def _check(reduction: Expr) -> None:
    reason = kind_of(reduction).no_kernel(reduction)
    if reason:
        raise Unsupported(reason)


def substitute_truths(e: Expr, truths: dict[Expr, bool]) -> Expr:
    """An expression with some conditions known."""
    return constructors.substitute((e,), {c: const(t) for c, t in truths.items()})[0] if truths else e
