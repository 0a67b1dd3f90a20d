"""Products of more features than a block holds: the product is walked, a few features of both sides at a time.

This is a matrix product with the fold as its epilogue: pairs exist in registers only. It serves folds to numbers (a
logsumexp, an argmax, a sample) of 16-bit vectors; sums of vectors would need as many registers as features, and go by
panels instead (``panel.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...program.expr import Expr, topological
from ...program.lower import Fold
from .spec import WIDEST, Spec

if TYPE_CHECKING:
    from .values import Values

DEPTH = 64  # features at a time
_BLIND = ("best", "topk")  # kinds that have no gradient: they see the product as exact as it is


def fits(fold: Fold, width: int, narrow: bool) -> bool:
    """Whether a fold is for these kernels: 16-bit products of many features, folded to numbers."""
    products = [e for e in topological(fold.reductions) if e.op == "dot"]
    plain = all(a.feature is None for r in fold.reductions for a in r.args)
    return narrow and width > WIDEST and plain and bool(products)


def rounds(spec: Spec) -> bool:
    """Whether products are rounded as a panel would hold them.

    A gradient reads them from a panel. The sum of exponentials that it divides by must be that of the same numbers: of
    exact ones, it would miss the largest weights of a peaked softmax by several per cent.
    """
    return spec.narrow == "bfloat16" and any(r.attrs[0] not in _BLIND for r in spec.fold.reductions)


def product(v: Values, kept: Expr, folded: Expr) -> str:
    """The lines that walk a product's features; the name that holds it."""
    found = v.inner.get((kept, folded, "deep"))
    if found:
        return found
    width = v.spec.width(kept.feature)
    total = v.bind((kept, folded, "deep"), "tl.zeros([KEPT, FOLDED], tl.float32)", True)
    lane = v.bind(("lane", DEPTH), f"tl.arange(0, {DEPTH}).to(INT)", False, f"lane{DEPTH}")
    sides = [_vectors(v, e, side, lane) for e, side in ((kept, "kept"), (folded, "folded"))]
    whole = width // DEPTH * DEPTH
    v.inside += [f"for d in range(0, {whole}, {DEPTH}):", f"    {_step(v, total, sides, 'd', '')}"]
    if width > whole:
        v.inside.append(_step(v, total, sides, str(whole), f", mask=({lane} < {width - whole})[None, :], other=0"))
    if rounds(v.spec):
        v.inside.append(f"{total} = {total}.to(tl.bfloat16).to(tl.float32)  # as a panel would hold it")
    return total


def _vectors(v: Values, e: Expr, side: str, lane: str) -> tuple[str, str, str]:
    """Where the vectors of a tile begin (what lies beyond the end reads the last), their stride, their type."""
    name, outside = str(e.attrs[0]), side == "kept" or v.masked
    at = f"tl.minimum({side}_at, {side}_size - 1)" if outside else f"{side}_at"
    text = f"{v.base(e)} + {at}.to(tl.int64)[:, None] * {name}_s + {lane}[None, :] * {name}_f"
    return v.bind((e, "vectors"), text, side == "folded", f"{name}_vectors"), f"{name}_f", v.spec.type_of[e]


def _step(v: Values, total: str, sides: list[tuple[str, str, str]], at: str, mask: str) -> str:
    blocks = []
    for vectors, stride, kind in sides:
        text = f"tl.load({vectors} + {at} * {stride}{mask})"
        blocks.append(text if kind == v.operand_type() else f"{text}.to(tl.{v.operand_type()})")
    return f"{total} = tl.dot({blocks[0]}, tl.trans({blocks[1]}), acc={total})"
