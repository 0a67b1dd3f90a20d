"""Vectors stored with scales for blocks of features, or in 4 bits, in a kernel: widened where a block is loaded.

Bytes of 4-bit numbers are loaded as they lie, and their halves interleaved. Scales of blocks are loaded once for each
block where blocks are powers of two, and repeated in registers; else once for each feature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....program.expression import Expr
from .kernel_spec import EIGHT_BITS, Spec, widen

if TYPE_CHECKING:
    from .expressions import ExpressionWriter


def widen_block(spec: Spec, e: Expr, text: str, kind: str, wanted: str) -> str:
    """A loaded block in the operand type. From 8 bits to 16 four numbers are converted at once, by a function that the
    compiler does not move behind the change of layout: single bytes would be read from shared memory."""
    known = wanted in ("bfloat16", "float16") and (kind == "int8" or kind in EIGHT_BITS)
    fast = spec.native and spec.eight_bit_mma and known and e not in spec.widened_in_registers
    return f"{wanted}_of_{kind}({text})" if fast else widen(text, kind, wanted)


def load_kept(v: ExpressionWriter, e: Expr) -> tuple[str, str]:
    """The names of kept bfloat16 vectors as they are loaded, and of the power of two by which each is divided, so that
    float16 holds it."""
    name, (lane, exists) = e.attrs[0], v.lane(e.feature, v.spec.padded_width_of[e])
    loaded = v.bind((e, "loaded"), v.load_rows(e, "", lane, exists, v.spec.zero(e)), False, f"{name}_loaded")
    return loaded, v.bind((e, "unit"), f"float16_unit({loaded})", False, f"{name}_unit")


def write_block(v: ExpressionWriter, e: Expr, first: str, size: int, wanted: str) -> str:
    """``size`` features, from ``first`` on, of a tile's vectors, times their scales, in the type ``wanted``."""
    bits, block = e.packing or (8, 0)
    kind, width = v.spec.type_of[e], v.spec.width(e.feature)
    if bits == 4 and kind == "int32":  # beside float64 products, which fail to compile with a shorter type: one by one
        lane = v.bind(("lane", size), f"tl.arange(0, {size}).to(INT)", False, f"lane{size}")
        text = _load(v, e, first, size, width, share=1, repeat=2)
        text = f"((({text} >> ({lane} % 2 * 4)[None, :]) & 15) - 8)"
    else:
        text = _load(v, e, first, size * bits // 8, width * bits // 8, share=8 // bits)
        text, kind = (f"both_halves({text})", "int8") if bits == 4 else (text, kind)
    float_type = "float64" if v.spec.compute == "float64" else "float32"
    text = widen(text, kind, float_type)
    text = f"{text} * {_load_scales(v, e, first, size, block, float_type)}" if block else text
    return f"({text})" if wanted == float_type else f"({text}).to(tl.{wanted})"


def _load_scales(v: ExpressionWriter, e: Expr, first: str, size: int, block: int, float_type: str) -> str:
    """The scales of a block of features, one for each."""
    (scale,) = e.args
    blocks, length = v.spec.width(scale.feature), "FOLDED" if v.spec.folds(e) else "KEPT"
    whole = block & (block - 1) == 0 and (not first.isdigit() or int(first) % min(block, size) == 0)
    if not whole:  # feature by feature
        text = _load(v, scale, first, size, v.spec.width(e.feature), share=1, repeat=block)
    elif block >= size:
        text = _load(v, scale, first, 1, blocks, share=block)
    else:
        count = size // block
        text = _load(v, scale, first, count, blocks, share=block)
        text = f"tl.broadcast_to({text}[:, :, None], [{length}, {count}, {block}])"
        text = f"tl.reshape({text}, [{length}, {size}])"
    return text if v.spec.type_of[scale] == float_type else f"{text}.to(tl.{float_type})"


def _load(v: ExpressionWriter, e: Expr, first: str, count: int, known: int, share: int, repeat: int = 1) -> str:
    """``count`` numbers of each of a tile's vectors, from number ``first // share`` on. ``known``: how many there are;
    ``repeat``: how often each is loaded, where ``count`` and ``known`` count all of them."""
    name, side = str(e.attrs[0]), "folded" if v.spec.folds(e) else "kept"
    rows = v.axis_offset(e, side)
    start = str(int(first) // share) if first.isdigit() else f"({first}) // {share}" if share > 1 else first
    lane = v.bind(("lane", count), f"tl.arange(0, {count}).to(INT)", False, f"lane{count}")
    at = lane if start == "0" else f"({start} + {lane})"
    place = f"{at} // {repeat}" if repeat > 1 else at
    masks = [f"{side}_in[:, None]"] if side == "kept" or v.masked else []
    whole = first.isdigit() and int(start) + count <= known
    masks += [] if whole else [f"({at} < {known})[None, :]"]
    mask = f", mask={' & '.join(masks)}, other={v.spec.zero(e)}" if masks else ""
    return f"tl.load({v.pointer(e)} + {rows} + ({place})[None, :] * {name}_f{mask})"


def write_component(v: ExpressionWriter, e: Expr, f: str) -> str:
    """Feature ``f`` of stored vectors, times its scale."""
    bits, block = e.packing or (8, 0)
    if bits == 4:
        place, half = (str(int(f) // 2), str(int(f) % 2 * 4)) if f.isdigit() else (f"({f} // 2)", f"({f} % 2 * 4)")
        short = "" if v.spec.type_of[e] == "int32" else ".to(tl.int8)"
        number = f"(({v.load_component(e, place)} >> {half}) & 15){short} - 8"
        text = f"({number}).to({v.float})"
    else:
        text = widen(v.load_component(e, f), v.spec.type_of[e], v.spec.compute)
    if not block:
        return text
    place = str(int(f) // block) if f.isdigit() else f"({f} // {block})"
    return f"{text} * {v.load_component(e.args[0], place)}.to({v.float})"
