"""Products of several vectors in a kernel (``program/several.py``), one matrix product for each; and extremes.

The loop over the vectors is inside the loop over tiles: a block of one of them is loaded for each product, which the
compiler does ahead of it, and the block that they are multiplied with stays for all of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ....program.expression import Expr, are_several, letters
from ....program.primitives import PRIMITIVES
from ....program.several import DOTS
from .arithmetic import literal
from .kernel_spec import TINY, WIDEST, Unsupported, pad_width

if TYPE_CHECKING:
    from .expressions import ExpressionWriter


def write_product(v: ExpressionWriter, e: Expr, f: str) -> str:
    """Number ``f`` of the products of several vectors with one, or with as many, for all pairs of a tile."""
    if e.attrs[0] not in DOTS or any(a.op != "leaf" for a in e.args):
        raise Unsupported("products of several vectors that are computed in the tile")
    if v.spec.listed:
        raise Unsupported("products of several vectors over lists of columns")
    kept, folded = e.args[::-1] if v.spec.folds(e.args[0]) else e.args
    return f"tl.dot({load_one_vector(v, kept, f)}, tl.trans({load_one_vector(v, folded, f)}){v.options()})"


def load_one_vector(v: ExpressionWriter, e: Expr, f: str) -> str:
    """Vector ``f`` of several, as a block ``[axis, features]``; of one vector, its block."""
    if not are_several(e):
        return v.block(e)
    width, name = v.spec.width(letters(e.feature)[1]), str(e.attrs[0])
    if width > WIDEST:
        raise Unsupported(f"vectors of {width} features, more than {WIDEST}")
    v.blocks[e] = None
    lane, exists = v.slice_lane(pad_width(width), width)
    text = v.load_rows(e, f" + {f} * {width} * {name}_f", lane, exists, "0")
    text = text if v.spec.type_of[e] == v.operand_type() else f"{text}.to(tl.{v.operand_type()})"
    return v.bind((e, "one of", f), text, True)


def write_extreme(v: ExpressionWriter, e: Expr, kind: str, width: int) -> str:
    """The largest or the smallest feature of a vector per pair; NaN where one is."""
    (vector,) = e.args
    if e.dtype == "bool":
        raise Unsupported("extremes of truth values")
    join = PRIMITIVES["maximum" if e.op == "famax" else "minimum"].triton
    if width <= TINY:
        text = v.component(vector, "0")
        for k in range(1, width):
            text = join.format(text, v.component(vector, str(k)))
        return text
    sign = -1 if e.op == "famax" else 1
    first = literal(sign * math.inf) if e.dtype == "float" else str(sign * (2**63 - 1))
    best = v.bind((e, "best"), f"tl.full([KEPT, FOLDED], {first}, {kind})", True)
    with v.walk(width) as f:
        v.inside.append(f"{best} = {join.format(best, v.component(vector, f))}")
    return best


# Squared distances of close pairs, computed again feature by feature: as norms and a product their digits cancel.

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
    """A squared distance from norms and a split product (``vector_conversions.py``); close pairs are recomputed from
    whole vectors."""
    pair, norms = v.spec.vectors_of_distance[e], v.number(e.args[0].args[0])
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
