"""Blocks of vectors in a kernel, and their matrix products: the part of :class:`Values` that knows of them."""

from __future__ import annotations

from ....program.expression import Expr, topological
from . import k_loop
from .exponents import Exponents
from .kernel_spec import TINY, WIDEST, Unsupported, padded


class Blocks(Exponents):
    """A leaf's vectors ``[side, features]``: loaded, or copied by its tensor descriptor; whole, or in pieces."""

    before: list[str]
    inside: list[str]
    blocks: dict[Expr, None]  # the leaves held as blocks, in order

    def pointer(self, e: Expr) -> str:
        raise NotImplementedError

    def lane(self, feature: str | int | None, room: int = 0) -> tuple[str, str | None]:
        """The feature numbers of a block, and which of them exist, or may be read (None: all)."""
        width = self.spec.width(feature)
        if width > WIDEST:
            raise Unsupported(f"vectors of {width} features, more than {WIDEST}")
        size = padded(width)
        lane = self.bind(("lane", size), f"tl.arange(0, {size}).to(INT)", False, f"lane{size}")
        width = room or width
        inside = self.bind(("in", width), f"{lane} < {width}", False, f"in{width}") if width != size else None
        return lane, inside

    def block(self, e: Expr, piece: int | None = None) -> str:
        """A leaf's vectors, or a piece of each, in the type in which they are multiplied."""
        name, kind = str(e.attrs[0]), self.spec.type_of[e]
        name, folded = f"{name}_block" if piece is None else f"{name}_block_{piece}", self.spec.folds(e)
        self.blocks[e] = None
        lane, exists = self.lane(e.feature, self.spec.room_of[e])
        first = (piece or 0) * padded(self.spec.width(e.feature))
        if folded and e in self.spec.box_of:
            return self.bind((e, "block", piece), self.boxed(e, "start", str(first)), True, name)
        side = "folded" if folded else "kept"
        masks = [f"{side}_in[:, None]"] if not folded or self.masked else []
        masks += [f"{exists}[None, :]"] if exists else []
        mask = f", mask={' & '.join(masks)}, other=0" if masks else ""
        at = f"{self.pointer(e)} + {first}" if first else self.pointer(e)
        text = f"tl.load({at} + {side}_lane[:, None] * {e.attrs[0]}_s + {lane}[None, :] * {e.attrs[0]}_f{mask})"
        wanted = self.operand_type() if piece is None else kind
        text = text if kind == wanted else f"{text}.to(tl.{wanted})"
        return self.bind((e, "block", piece), text, folded, name)

    def pieces(self, e: Expr) -> str:
        """The pieces of a leaf's vectors, as arguments."""
        return ", ".join(self.block(e, k) for k in range(self.spec.pieces))

    def whole(self, e: Expr) -> str:
        """A kept leaf's vectors, from their pieces, read again: registers that held them were for other things."""
        width = padded(self.spec.width(e.feature))
        place = f"{self.pointer(e)} + kept_lane[:, None] * {e.attrs[0]}_s + {self.lane(e.feature, width)[0]}[None, :]"
        parts = (f"tl.load({place} + {k * width}, mask=kept_in[:, None], other=0)" for k in range(3))
        return f"of_thirds({', '.join(parts)})"

    def boxed(self, e: Expr, start: str, feature: str = "0") -> str:
        """The vectors (from a feature on) or numbers of a leaf from an index of its axis, by its tensor descriptor."""
        dims = self.spec.box_of[e]
        at = "".join(f"tl.cast(b{k}, tl.int32), " for k in dims)
        if e.feature is None:
            text = f"{e.attrs[0]}_box.load([{at}{start}])"
            return f"tl.reshape({text}, [FOLDED])" if dims else text
        text = f"{e.attrs[0]}_box.load([{at}{start}, {feature}])"
        width = self.spec.width(e.feature)
        shape = f"[{'FOLDED' if self.spec.folds(e) else 'KEPT'}, {k_loop.DEPTH if width > WIDEST else padded(width)}]"
        return f"tl.reshape({text}, {shape})" if dims else text

    def products(self, *roots: Expr) -> None:
        """Bind the matrix products of expressions, before what is made of them."""
        for n in topological(roots):
            if n.op == "dot" and self.spec.width(n.args[0].feature) > TINY:
                self.number(n)

    def operand_type(self) -> str:
        return self.spec.narrow or self.spec.compute

    def options(self) -> str:
        """How matrix products are done, as further arguments of tl.dot."""
        kind = self.operand_type()
        return {"float64": ", out_dtype=tl.float64", "float32": ", input_precision=PRECISION"}.get(kind, "")
