"""Of the kernels of a product that writes weights, those that meet each row's own column alone: its label.

Among the other pairs (``epilogue_kernels.py``) what stands there would take registers that they need.

``pick_own``: the product there; ``match_own``: the same by the matrix units, for many rows at once.
``weigh_own``: the weight there, where all numbers of rows are given.
"""

from __future__ import annotations

from ..codegen import k_loop
from ..codegen.expressions import ExpressionWriter
from ..codegen.label_gather import LabelColumnWriter
from .epilogue_task import PLACES, Task, cut, product, sides


def _pick_own(v: ExpressionWriter, task: Task, first: list[str]) -> tuple[list[str], list[str]]:
    """The product at each row's own column, feature by feature."""
    assert task.late is not None and task.late.target is not None
    target = v.number(task.late.target)
    own = f"own = tl.where(({target} >= 0) & ({target} < folded_size), {target}, 0).to(tl.int64)"
    lines = [*v.before, own, "taken = tl.zeros([KEPT, FOLDED], tl.float32)", *_features(v, task, "FOLDED")]
    lines += ["    taken += x.to(tl.float32) * y.to(tl.float32)"]
    lines += ["tl.store(picked + kept_at, tl.sum(taken, 1), mask=kept_in)"]
    return ["picked"], ["tile = tl.program_id(0)", "start = 0", *PLACES, *lines]


def _match_own(v: ExpressionWriter, task: Task, first: list[str]) -> tuple[list[str], list[str]]:
    """The product there."""
    assert task.late is not None and task.late.target is not None
    lines = _units_own(v, task, LabelColumnWriter(v, "own", task.late.target))
    lines += ["tl.store(picked + kept_at, tl.reshape(product, [KEPT]), mask=kept_in)"]
    return ["picked"], ["tile = tl.program_id(0)", "start = 0", *PLACES, *lines]


def _weigh_own(v: ExpressionWriter, task: Task, first: list[str]) -> tuple[list[str], list[str]]:
    """The weight at each row's own column."""
    assert task.own is not None
    there = LabelColumnWriter(v, "own", task.own.target)
    lines = _units_own(v, task, there)
    there.outer[product(task)] = "product"
    weight = there.number(task.own.weight)
    lines += [
        *cut(v),
        *cut(there),
        f"hit = tl.where({there.inside_text}, {weight}, 0.0) + tl.zeros([KEPT, 1], {v.float})",
        "tl.store(hits + kept_at, tl.reshape(hit, [KEPT]), mask=kept_in)",
        f"place = tl.where({there.inside_text}, {there.place}, -1) + tl.zeros([KEPT, 1], tl.int64)",
        "tl.store(targets + kept_at, tl.reshape(place, [KEPT]), mask=kept_in)",
    ]
    return ["hits", "targets"], ["tile = tl.program_id(0)", "start = 0", *PLACES, *lines]


def _units_own(v: ExpressionWriter, task: Task, there: LabelColumnWriter) -> list[str]:
    """The product at each row's own column, by the matrix units.

    They multiply a tile's rows with the columns of all of them, and the diagonal counts: a product must be what it is
    elsewhere to the last bit. Of a row that is sure of its label only the difference from the row's total is left, and
    features added up in another order outweigh it (H200, a contrastive loss of 3e-8: gradients were off by 41 times
    their size, and by 0.07 so, as plain torch's are). A product that is rounded might be to another number."""
    lines = [*cut(v), *cut(there), f"own = {there.place}", "taken = tl.zeros([KEPT, KEPT], tl.float32)"]
    lines += [*_features(v, task, str(k_loop.DEPTH)), f"    {k_loop._dot('taken', ['x', 'y'])}"]
    lines += ["product = tl.sum(tl.where(kept_lane[:, None] == kept_lane[None, :], taken, 0.0), 1)[:, None]"]
    return lines + ([k_loop.write_rounding("product")] if k_loop.rounds_products(v.spec) else [])


def _features(v: ExpressionWriter, task: Task, some: str) -> list[str]:
    """A loop over the features of rows and of the columns ``own``, some at a time."""
    multiplied = sides(product(task))
    x, y = (str(e.attrs[0]) for e in multiplied)
    width = v.spec.width(multiplied[0].feature)
    return [
        f"for d in range(0, {width}, {some}):",
        f"    lane = d + tl.arange(0, {some})[None, :]",
        f"    inside = kept_in[:, None] & (lane < {width})",
        f"    x = tl.load({x}_ptr + kept_at.to(tl.int64)[:, None] * {x}_s + lane * {x}_f, mask=inside, other=0)",
        f"    y = tl.load({y}_ptr + own * {y}_s + lane * {y}_f, mask=inside, other=0)",
    ]


WRITERS = {"pick_own": _pick_own, "match_own": _match_own, "weigh_own": _weigh_own}
