"""Vectors per pair in registers: blocks ``[KEPT, FOLDED, features]``, and functions of numbers and vectors.

Sums and softmaxes never hold a vector per pair: they are matrix products. A monoid of one's own may combine vectors in
any way, so a tile's are made whole, and the monoid's ``combine`` is a device function of blocks: numbers ``[..., n]``
and vectors ``[..., n, features]``, which folds a tile as a tree of halves.
"""

from __future__ import annotations

from ....program.expression import Expr, topological
from .expressions import ExpressionWriter
from .kernel_spec import Spec, Unsupported, padded

MOST = 64  # features of all vectors of a pair, with their padding: a tile of 16 × 16 pairs with 128 spills registers


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
            if padded(width) > width:
                x = f"tl.where(tl.arange(0, {padded(width)}) < {width}, {x}, 0.0)"
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
        return text if not _varies(e) else f"tl.expand_dims({text}, -1)"


def _varies(e: Expr) -> bool:
    """Whether a number is a block: it is made of arguments."""
    return any(n.op == "leaf" for n in topological([e]))


def pair_vector(v: ExpressionWriter, e: Expr) -> str:
    """The name of a tile's vectors ``[KEPT, FOLDED, features]`` (axes of size 1 where they do not vary)."""
    if v.spec.listed or v.spec.deep:
        raise Unsupported("a monoid with vector fields, over lists or many features")
    for n in topological([e], stop=lambda n: n.feature is None):
        if (n, "vectors") not in v.inner and (n, "vectors") not in v.outer:
            v.bind((n, "vectors"), _vector_text(v, n), True)
    found = v.inner.get((e, "vectors")) or v.outer[e, "vectors"]
    return found


def _vector_text(v: ExpressionWriter, e: Expr) -> str:
    known = lambda a: v.inner.get((a, "vectors")) or v.outer[a, "vectors"]
    if e.feature is None:
        text = v.number(e)
        return f"tl.expand_dims({text}, 2)" if e.rows or e.cols else text
    if e.op == "spread":
        return known(e.args[0])
    if e.op == "leaf":
        if e.is_pair or not (e.rows or e.cols):
            raise Unsupported("a monoid's vectors that are given per pair, or once for all")
        return f"tl.expand_dims({_load_vectors(v, e)}, {0 if v.spec.folds(e) else 1})"
    return v.primitive(e, [known(a) for a in e.args])


def _load_vectors(v: ExpressionWriter, e: Expr) -> str:
    """A leaf's vectors ``[axis, features]`` in the type that arithmetic is done in: blocks of products are rounded."""
    lane, exists = v.lane(e.feature)
    folded = v.spec.folds(e)
    masks = [("folded_in" if folded else "kept_in") + "[:, None]"] if not folded or v.masked else []
    masks += [f"{exists}[None, :]"] if exists else []
    mask = f", mask={' & '.join(masks)}, other=0" if masks else ""
    rows = f"folded_lane[:, None] * {v.stride(e, 's')}" if folded else v.kept_offset(e, "[:, None]")
    text = f"tl.load({v.pointer(e)} + {rows} + {lane}[None, :] * {e.attrs[0]}_f{mask})"
    text = text if v.spec.type_of[e] == v.spec.compute else f"{text}.to({v.float})"
    return v.bind((e, "whole vectors"), text, folded, f"{e.attrs[0]}_whole")
