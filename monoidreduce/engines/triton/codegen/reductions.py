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
from .stored_sums import StoredSum, is_stored

TOOLS = Tools(
    writer=ExpressionWriter,
    running_sum=Accumulator,
    stored_sum=lambda name, r, v: StoredSum(name, r, v) if is_stored(r) else None,
    factored=move_factors_to_weight,
    reads_one_pair=can_read_one_column,
    one_pair=LabelColumnWriter,
    literal=literal,
    padded=padded,
    tiny=TINY,
)


def make(place: int, reduction: Expr, scale: Expr, v: ExpressionWriter) -> Lines:
    """The lines of a reduction; raises Unsupported where its kind has none."""
    kind = kind_of(reduction)
    _check(reduction)
    return kind.lines(kind, place, reduction, scale, v, TOOLS)


def make_for_row(place: int, reduction: Expr, v: ExpressionWriter) -> Lines:
    """The same in a kernel whose program instances own one row each.

    A row of a panel is long and its tiles are wide. Reducing every tile would make all warps wait for each other
    several times a tile; kinds that can do so keep running values per lane, and join them at the end."""
    kind = kind_of(reduction)
    _check(reduction)
    return (kind.lane_lines or kind.lines)(kind, place, reduction, ONE, v, TOOLS)


def _check(reduction: Expr) -> None:
    reason = kind_of(reduction).no_kernel(reduction)
    if reason:
        raise Unsupported(reason)


def known(e: Expr, truths: dict[Expr, bool]) -> Expr:
    """An expression with some conditions known."""
    return constructors.substitute((e,), {c: const(t) for c, t in truths.items()})[0] if truths else e
