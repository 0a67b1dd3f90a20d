"""Squared distances of close pairs, computed again feature by feature: as norms and a product their digits cancel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....program.expression import Expr

if TYPE_CHECKING:
    from .expressions import ExpressionWriter

CLOSE = 0.05  # a squared distance below this share of the squared norms has lost more than a digit to cancellation


def recompute(v: ExpressionWriter, e: Expr, square: str, norms: list[str]) -> None:
    """Recompute a tile's squared distances feature by feature where a pair is so close that digits cancelled."""
    close = f"tl.max(tl.where({square} < {CLOSE} * ({norms[0]} + {norms[1]}), 1, 0))"
    lines, v.inside = v.inside, []
    names = dict(v.inner)
    v.inside.append(f"{square} = tl.zeros([KEPT, FOLDED], {v.float})")
    with v.walk(v.spec.width(e.args[0].feature)) as f:
        gap = v.bind((e, f, "gap"), " - ".join(v.component(a, f) for a in e.args), True)
        v.inside.append(f"{square} += {gap} * {gap}")
    lines += [f"if {close} > 0:", *(f"    {line}" for line in v.inside)]
    v.inside, v.inner = lines, names


def write_distance(v: ExpressionWriter, e: Expr) -> str:
    """A squared distance from norms and a split product (``float32_split.py``); close pairs are recomputed from
    whole vectors."""
    pair, norms = v.spec.near_of[e], v.number(e.args[0].args[0])
    text = v.primitive(e, [v.argument(a, "float") for a in e.args])
    name = v.bind((e, "square"), text, True)
    lines, names, v.inside = v.inside, dict(v.inner), []
    total = v.bind((e, "near"), f"tl.zeros([KEPT, FOLDED], {v.float})", True)
    with v.walk(v.spec.width(pair[0].feature)) as f:
        gap = v.bind((e, f, "gap"), " - ".join(v.component(a, f) for a in pair), True)
        v.inside.append(f"{total} += {gap} * {gap}")
    v.inside.append(f"{name} = tl.where({name} < {CLOSE} * {norms}, {total}, {name})")
    lines += [f"if tl.min({name} - {CLOSE} * {norms}) < 0:", *(f"    {line}" for line in v.inside)]
    v.inside, v.inner = lines, names
    return name
