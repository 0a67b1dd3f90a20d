"""Reductions in a kernel: the lines that their kinds write (``reductions/``), with the parts of this code generator."""

from __future__ import annotations

from ....program import constructors
from ....program.constructors import ONE
from ....program.expression import Expr, const
from ....reductions import kind_of
from ....reductions.kernel_lines import Lines, Tools
from .accumulators import Accumulator, move_factors_to_weight
from .exponents import literal
from .expressions import ExpressionWriter
from .kernel_spec import TINY, Unsupported, padded
from .label_gather import LabelColumnWriter, can_read_one_column
from .pair_vectors import MOST, BlockFunctionWriter, pair_vector
from .stored_sums import StoredSum, is_stored

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
