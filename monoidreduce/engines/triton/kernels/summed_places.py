"""Tables that pairs look up by a number of the row plus a number of the column.

Places of a picture and blocks of pairs are read so. Both numbers are computed before the launch, once for every row and
column, and no pair reads outside of the table: a pair then adds two integers and loads an entry, without a mask, and
hand-scheduled kernels have it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....program.constructors import apply, look_up, substitute
from ....program.diagonals import split_index
from ....program.expression import Expr, index, node, topological
from ....program.lower import Fold
from ...common.evaluate import Evaluator, Sizes
from ..codegen.lookups import is_band, name_sum

_MOST_KNOWN = 64
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Sum:
    """A lookup as it was and as it is: its table, the numbers of rows and columns, and the leaves that they became."""

    table: Expr
    parts: tuple[Expr, Expr]
    leaves: tuple[Expr, Expr, Expr]  # of the table, of rows and of columns


class SummedPlaces:
    """The leaves that a rewritten fold has more: made in every call, from what is known of earlier ones."""

    def __init__(self, fold: Fold, sums: Sequence[_Sum], sizes: Sizes):
        self.fold, self.sums = fold, sums
        self.known: dict[tuple, tuple[Tensor, Tensor] | None] = {}
        letters = {str(s.leaves[0].feature): sizes.of(str(s.table.feature)) for s in sums}
        self.sizes = replace(sizes, letters={**sizes.letters, **letters})

    def __call__(self, leaves: Sequence[Any]) -> list[Any] | None:
        """The leaves, and the tables and places after them; None where a pair reads what is not there."""
        values = dict(zip(self.fold.leaves, leaves, strict=True))
        found: list[Any] = [*leaves]
        for one in self.sums:
            numbers = tuple(values[e] for e in _read(one.parts))
            key = one.parts, numbers
            if key not in self.known:
                self.known = {**(self.known if len(self.known) < _MOST_KNOWN else {})}
                self.known[key] = find_places(one, values, self.sizes)
            places, table = self.known[key], values[one.table]
            if places is None:
                return None
            found += [table.to(self.sizes.compute).contiguous(), *places]
        return found


def find_places(one: _Sum, values: Mapping[Expr, Any], sizes: Sizes) -> tuple[Tensor, Tensor] | None:
    """The numbers of all rows and of all columns, neither negative; None where some sum is outside of the table."""
    if not sizes.rows or not sizes.cols:
        return None
    given = {str(e.attrs[0]): values[e] for e in _read(one.parts)}
    rows, cols = (
        evaluate_places(e, axis, length, given, sizes)
        for e, axis, length in zip(one.parts, ("row", "col"), (sizes.rows, sizes.cols), strict=True)
    )
    least = cols.min()
    rows, cols = rows + least, cols - least
    if rows.min() < 0 or rows.max() + cols.max() >= sizes.of(str(one.table.feature)):
        return None
    shape = (1,) * len(sizes.batch)
    return tuple(t.to(sizes.device, torch.int32).view(*shape, -1) for t in (rows, cols))  # type: ignore[return-value]


def evaluate_places(e: Expr, axis: str, length: int, leaves: Mapping[str, Any], sizes: Sizes) -> Tensor:
    """A number of the row, or of the column, for indices from 0 up to ``length``; on a CPU."""
    at = torch.arange(length).view(*(1,) * (len(sizes.batch) + 1), -1)
    found = Evaluator(replace(sizes, device=_CPU), dict(leaves), {index(axis): at})(e)
    return torch.as_tensor(found).expand(at.shape).reshape(-1)


def _read(parts: Sequence[Expr]) -> list[Expr]:
    return [e for e in topological(parts) if e.op == "leaf"]


def rewrite_fold(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> tuple[Fold, SummedPlaces | None]:
    """The fold with sums of two numbers in place of such indices, and what makes its leaves; None where it has none."""
    values = dict(zip(fold.leaves, leaves, strict=True))
    sums, new = list[_Sum](), dict[Expr, Expr]()
    for e in topological(fold.reductions):
        if e.op != "lookup" or e.dtype != "float" or not e.is_pair or e.args[0].op != "leaf" or is_band(e.args[0]):
            continue
        parts = split_index(e.args[1])
        if parts is None or any(isinstance(values[n], Tensor) for n in _read(parts)):
            continue
        first = len(fold.leaves) + 3 * len(sums)
        named = lambda k, rows, cols, feature, kind, first=first: node(
            "leaf", (), (f"x{first + k}",), rows=rows, cols=cols, feature=feature, dtype=kind
        )
        made = (
            named(0, False, False, name_sum(first), "float"),
            named(1, True, False, None, "int"),
            named(2, False, True, None, "int"),
        )
        one = _Sum(e.args[0], parts, made)
        if find_places(one, values, sizes) is None:
            continue
        sums.append(one)
        new[e] = look_up(made[0], apply("add", made[1], made[2]))
    if not sums:
        return fold, None
    reductions = substitute(fold.reductions, new)
    renamed = dict(zip(fold.reductions, reductions, strict=True))
    inner = replace(
        fold,
        leaves=(*fold.leaves, *(e for s in sums for e in s.leaves)),
        reductions=reductions,
        gradients=tuple((renamed[r], leaf) for r, leaf in fold.gradients),
    )
    return inner, SummedPlaces(fold, sums, sizes)
