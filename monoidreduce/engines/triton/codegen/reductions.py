"""Reductions in a kernel: the lines that their kinds write (``reductions/``), with the parts of this code generator."""

from __future__ import annotations

from ....program import constructors
from ....program.constructors import ONE
from ....program.expression import Expr, const, topological
from ....program.primitives import PRIMITIVES
from ....reductions import kind_of
from ....reductions.kernel_lines import Lines, Tools
from .accumulators import Accumulator, move_factors_to_weight
from .exponents import literal
from .expressions import ExpressionWriter
from .kernel_spec import TINY, WIDEST, Spec, Unsupported, padded
from .pair_vectors import MOST, BlockFunctionWriter, pair_vector
from .stored_sums import StoredSum, is_stored

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
            return (
                f"tl.sum({self.host.block(kept)}.to({self.float}) * {self._there(there)}.to({self.float}), 1)[:, None]"
            )
        return super()._text(e)

    def block_of(self, col: Expr) -> str:
        return f"({self.number(col)} >> 7)"

    def _there(self, e: Expr) -> str:
        """The folded leaf's vectors at these indices."""
        name = str(e.attrs[0])
        lane, exists = self.host.lane(e.feature, self.spec.room_of[e])
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
        return self._loaded(text, e, self.spec.type_of[e])


TOOLS = Tools(
    writer=ExpressionWriter,
    running_sum=Accumulator,
    stored_sum=lambda name, r, v: StoredSum(name, r, v) if is_stored(r) else None,
    factored=move_factors_to_weight,
    reads_one_pair=can_read_one_column,
    one_pair=LabelColumnWriter,
    block_function=BlockFunctionWriter,
    pair_vector=pair_vector,
    literal=literal,
    padded=padded,
    tiny=TINY,
)


def make(place: int, reduction: Expr, scale: Expr, v: ExpressionWriter) -> Lines:
    """The lines of a reduction; raises Unsupported where its kind has none."""
    kind = kind_of(reduction)
    if not (kind.per_pair and v.spec.listed):  # a number for each entry of lists is stored where it is computed
        _check(reduction)
    if not _has_pair_vectors(reduction):
        return kind.lines(kind, place, reduction, scale, v, TOOLS)
    assert kind.vector_lines is not None
    lines = kind.vector_lines(kind, place, reduction, scale, v, TOOLS)
    if v.pair_features > MOST:
        raise Unsupported(f"a monoid's vectors of more than {MOST} features, with their padding")
    return lines


def make_for_row(place: int, reduction: Expr, v: ExpressionWriter) -> Lines:
    """The same in a kernel whose program instances own one row each.

    A row of a panel is long and its tiles are wide. Reducing every tile would make all warps wait for each other
    several times a tile; kinds that can do so keep running values per lane, and join them at the end."""
    kind = kind_of(reduction)
    _check(reduction)
    if _has_pair_vectors(reduction):
        raise Unsupported("a monoid with vector fields, on a panel")
    return (kind.lane_lines or kind.lines)(kind, place, reduction, ONE, v, TOOLS)


def _has_pair_vectors(reduction: Expr) -> bool:
    """Whether a kernel holds a vector per pair."""
    return kind_of(reduction).vector_lines is not None and any(a.feature is not None for a in reduction.args)


def _check(reduction: Expr) -> None:
    reason = kind_of(reduction).no_kernel(reduction)
    if reason:
        raise Unsupported(reason)


def known(e: Expr, truths: dict[Expr, bool]) -> Expr:
    """An expression with some conditions known."""
    return constructors.substitute((e,), {c: const(t) for c, t in truths.items()})[0] if truths else e
