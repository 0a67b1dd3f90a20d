"""The cost of a call over listed pairs: that of the same body over as many columns as lists have on average.

The cost model knows dense problems. Pieces of lists are such, so only the number of pairs differs: every row is taken
to fold the average number of listed columns. Dense schedules and the gradient in the forward do not apply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..engines.common.evaluate import Sizes
from ..engines.listed.lists import find_lists
from ..program import constructors
from ..program.constructors import LISTED
from ..program.declarations import Parameter
from ..program.domain import COL_SEQUENCE, ROW_SEQUENCE
from ..program.expression import Expr, const, index, topological


@dataclass(frozen=True)
class ListedPairs:
    """How many columns a row folds: on average and at most, of ``cols``; ``kind``: of the domain."""

    kind: str
    average: float
    longest: int
    cols: int

    def __str__(self) -> str:
        share = 100 * self.average / max(1, self.cols)
        return (
            f"over {self.kind}: {self.average:.3g} of {self.cols} columns a row ({share:.2g} % of the pairs), "
            f"at most {self.longest}"
        )


def count_pairs(outputs: Sequence[Expr], inputs: Mapping[str, Any], sizes: Sizes) -> ListedPairs | None:
    """How many columns a row folds; None where pairs are not listed, nor folded sequence by sequence."""
    listed = constructors.find_listed(outputs)
    if listed is not None:
        return count_listed(listed, [inputs[a.attrs[0]] for a in listed.args], sizes)
    if ROW_SEQUENCE not in inputs or sizes.device.type != "cpu":
        return None
    lengths = [
        torch.bincount(inputs[n].flatten(), minlength=int(inputs[ROW_SEQUENCE].max()) + 2 if sizes.rows else 2)
        for n in (ROW_SEQUENCE, COL_SEQUENCE)
    ]
    count = min(map(len, lengths)) - 1  # what is behind the sequences belongs to none
    rows, cols = (t[:count] for t in lengths)
    longest = int(cols.max()) if count else 0
    return ListedPairs("jagged", int((rows * cols).sum()) / max(1, sizes.rows), longest, sizes.cols)


def count_listed(listed: Expr, tensors: Sequence[Tensor], sizes: Sizes) -> ListedPairs:
    """What the lists of a call hold; of tensors without numbers, what they have room for."""
    (form,) = listed.attrs
    if any(t.device.type == "meta" for t in tensors):
        room = tensors[-1 if form[0] == "edges" else 0].shape[-1]
        each = {"edges": room / max(1, sizes.rows), "blocks": room * form[2], "pages": room * form[1]}[form[0]]
        return ListedPairs(form[0], each, int(each), sizes.cols)
    lists = find_lists(form, tensors, sizes.rows, sizes.cols, "cols", False)
    lengths = lists.length * lists.unit
    first = lists.kept * lists.kept_block
    rows = (first + lists.kept_block).clamp(max=sizes.rows) - first
    every = torch.Size(lists.batch).numel() * sizes.rows
    longest = int(lengths.max()) if len(lengths) else 0
    return ListedPairs(form[0], int((rows * lengths).sum()) / max(1, every), longest, sizes.cols)


def as_dense(
    outputs: tuple[Expr, ...],
    inputs: Mapping[str, Any],
    sizes: Sizes,
    parameters: Mapping[str, Parameter],
    cols: int,
) -> tuple[tuple[Expr, ...], dict[str, Any], Sizes]:
    """The program over all of ``cols`` columns, inputs without numbers, and their sizes."""
    replaced: dict[Expr, Expr] = {}
    for e in topological(outputs):
        packed = e.op == "eq" and [a.attrs[:1] for a in e.args] == [(ROW_SEQUENCE,), (COL_SEQUENCE,)]
        if e.op in LISTED or packed:
            replaced[e] = index("col") if e.op == "listed_position" else _everywhere()
    given = {n: _resize(v, parameters[n], sizes, cols) for n, v in inputs.items()}
    return constructors.substitute(outputs, replaced), given, replace(sizes, cols=cols)


def _everywhere() -> Expr:
    """A condition that holds for every pair, and that a program is not simplified by: counts stay counts of pairs."""
    pair = constructors.apply("add", index("row"), index("col"))
    return constructors.apply("ge", pair, const(0))


def _resize(value: Any, p: Parameter, sizes: Sizes, cols: int) -> Any:
    if not isinstance(value, Tensor) or p.axis not in ("cols", "pairs", "edges"):
        return value
    lead, tail = value.shape[: value.dim() - len(p.tail)], value.shape[value.dim() - len(p.tail) :]
    if p.axis == "edges":
        shape: tuple[int, ...] = (*lead, sizes.rows, cols)
    else:
        at = p.tail.index("cols")
        shape = (*lead, *(cols if k == at and n != 1 else n for k, n in enumerate(tail)))
    return torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)
