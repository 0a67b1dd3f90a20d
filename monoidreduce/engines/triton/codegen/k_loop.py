"""Products of vectors that are not one block times another: of many features, of several vectors, of stored ones.

**K loop**: products of more features than a block holds, over some features of both operands at a time. This is a GEMM
with the fold as its epilogue: pairs exist in registers only. It serves folds to numbers (a logsumexp, an argmax, a
sample) of 16-bit vectors; sums of vectors would need as many registers as features, and use panels instead.

**Several vectors** (``program/several.py``): one matrix product for each; and extremes. The loop over the vectors is
inside the loop over tiles: a block of one of them is loaded for each product, which the compiler does ahead of it, and
the block that they are multiplied with stays for all of them.

**Packed vectors**, stored with scales for blocks of features or in 4 bits, are widened where a block is loaded. Bytes
of 4-bit numbers are loaded as they lie, and their halves interleaved. Scales of blocks are loaded once for each block
where blocks are powers of two, and repeated in registers; else once for each feature.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from ....program.expression import Expr, are_several, letters, topological
from ....program.lower import Fold
from ....program.primitives import PRIMITIVES
from ....program.several import DOTS
from ....reductions import kind_of
from .kernel_spec import EIGHT_BITS, TINY, WIDEST, Spec, Unsupported, literal, pad_width, widen

if TYPE_CHECKING:
    from .expressions import ExpressionWriter

DEPTH = 64  # features at a time
STRIPS = 4  # column strips of a tile whose pairs draw random numbers: all at once would not fit in registers
FEW = 8  # top-k lists beyond this are slower in registers than by panels
_FITS = 35 * 2**20  # bytes of kept vectors that stay in the L2 cache of an H200 whatever is loaded besides
_NEAR = 10 * 2**20  # bytes of kept vectors of tiles that run at the same time, where all are more
PROLOGUE = [  # with splits: a few kept tiles (``count_concurrent_tiles``) take all splits before the next few
    "batch = tl.program_id(0) // (tiles * parts)",
    "tile, part = grouped(tl.program_id(0) % (tiles * parts), tiles, parts, beside)",
]


@functools.lru_cache(maxsize=1024)
def takes_fold(fold: Fold, width: int, narrow: bool) -> bool:
    """True for folds of these kernels: 16-bit products of many features, folded to numbers."""
    products = [e for e in topological(fold.reductions) if e.op == "dot"]
    plain = all(a.feature is None for r in fold.reductions for a in r.args)
    short = all(kind_of(r).selected(r.attrs[2]) <= FEW for r in fold.reductions)
    several = any(e.op == "einsum" for e in topological(fold.reductions))
    return narrow and width > WIDEST and plain and short and bool(products) and not several


def rounds_products(spec: Spec) -> bool:
    """True when products are rounded as a panel would hold them.

    So a gradient reads them, unless its own products are as exact (``runtime/dispatch.py``). Kinds that select
    pairs see products as exact as they are.
    """
    sums = not all(kind_of(r).selected(r.attrs[2]) for r in spec.fold.reductions)
    return not spec.unrounded and spec.narrow == "bfloat16" and sums


def list_operands(spec: Spec) -> list[Expr]:
    """The leaves that are operands of a K loop."""
    products = [
        e for e in topological(spec.fold.reductions) if e.op == "dot" and spec.width(e.args[0].feature) > WIDEST
    ]
    return list(dict.fromkeys(a for e in products for a in e.args)) if spec.k_loop else []


def write_tile_loop(spec: Spec) -> str:
    """The loop over whole tiles of a K loop's fold, from one number to another.

    Where tensor descriptors copy, it is flattened with the loop over features: the next tile's first blocks are then on
    their way while this one is folded. (H200, 1024 × 128256 of 4096 features: an argmax 1.49 ms, else 1.54. Two folds
    at once have no registers for it.)"""
    walked = set(list_operands(spec))
    flat = walked and walked <= spec.descriptor_dims.keys() and len(spec.fold.reductions) == 1
    return "tl.range({}, {}, flatten=True)" if flat else "range({}, {})"


def count_concurrent_tiles(spec: Spec, kept: int, length: int) -> int:
    """How many kept tiles run at the same time: all, or as many as leave the cache space for what they are multiplied
    with. (H200, 65536 × 65536 of 768 features: 9.8 ms, all at once 12.3; 8192 × 256000 of 2304: 14.7 and 15.2; but
    32768 × 32768 of 512, which all fit: 1.6 and 1.5, since parts have to be combined.)"""
    each = sum(spec.width(e.feature) * 2 for e in list_operands(spec) if not spec.folds(e))
    return max(1, _NEAR // (kept * each) if length * each > _FITS else -(-length // kept))


def write_tile_in_strips(v: ExpressionWriter, step: Callable[[], None]) -> list[str]:
    """The lines of one tile: its products whole, then a step for each strip of its columns."""
    found = {}
    for e in topological(v.spec.fold.reductions):
        if e.op == "dot" and v.spec.width(e.args[0].feature) > WIDEST:
            kept, folded = e.args[::-1] if v.spec.folds(e.args[0]) else e.args
            found[product_key(kept, folded)] = write_product(v, kept, folded)
    lines = [*v.inside, f"strip_lane = tl.arange(0, FOLDED // {STRIPS}).to(INT)", "tile_start = start"]
    cuts = {}
    for key, name in found.items():
        cuts[key] = [name]
        while len(cuts[key]) < STRIPS:
            halves = [(f"{whole}a", f"{whole}b") for whole in cuts[key]]
            lines += [f"{a}, {b} = halved({whole})" for whole, (a, b) in zip(cuts[key], halves, strict=True)]
            cuts[key] = [part for both in halves for part in both]
    for k in range(STRIPS):
        v.loop(v.masked)
        v.inner |= {key: names[k] for key, names in cuts.items()}
        step()
        lines += [f"start = tile_start + {k} * (FOLDED // {STRIPS})", "folded_at = start + strip_lane"]
        lines += ["folded_in = folded_at < folded_size"] if v.masked else []
        own = (re.sub(r"\bFOLDED\b", f"FOLDED // {STRIPS}", line) for line in v.inside)
        lines += [re.sub(r"\bfolded_lane\b", "strip_lane", line) for line in own]
    return lines


def product_key(kept: Expr, folded: Expr) -> tuple:
    """The key under which a product is bound in a loop's body."""
    return kept, folded, "K loop"


def write_product(v: ExpressionWriter, kept: Expr, folded: Expr) -> str:
    """Write the loop over a product's features; returns the name that holds the product."""
    found = v.inner.get(product_key(kept, folded))
    if found:
        return found
    kind = v.spec.multiplies_eight_bits(kept, folded)
    total = v.bind(product_key(kept, folded), f"tl.zeros([KEPT, FOLDED], tl.{kind or 'float32'})", True)
    if kept in v.spec.descriptor_dims and folded in v.spec.descriptor_dims:
        blocks = [v.load_by_descriptor(kept, "tile * KEPT", "d"), v.load_by_descriptor(folded, "start", "d")]
        v.inside += _write_loop(total, v.spec.width(kept.feature), blocks, kind)
    else:
        _by_pointers(v, kept, folded, total, kind)
    if kind == "int32":
        v.inside.append(f"{total} = {total}.to(tl.float32)")
    if rounds_products(v.spec):
        v.inside.append(write_rounding(total))
    return total


def write_rounding(total: str) -> str:
    return f"{total} = {total}.to(tl.bfloat16).to(tl.float32)  # as a panel would hold it"


def _write_loop(total: str, width: int, blocks: list[str], eight: str = "") -> list[str]:
    return [f"for d in range(0, {width}, {DEPTH}):", f"    {write_dot(total, blocks, eight)}"]


def write_dot(total: str, blocks: list[str], eight: str = "") -> str:
    """A line that adds the product of two blocks to a total.

    ``eight``: the type of sums of 8-bit products. Hopper adds FP8 products up in 22 bits; after each block they are
    added in float32."""
    options = {"int32": ", out_dtype=tl.int32", "float32": f", max_num_imprecise_acc={DEPTH}"}.get(eight, "")
    return f"{total} = tl.dot({blocks[0]}, tl.trans({blocks[1]}), acc={total}{options})"


def _by_pointers(v: ExpressionWriter, kept: Expr, folded: Expr, total: str, eight: str) -> None:
    width = v.spec.width(kept.feature)
    lane = v.bind(("lane", DEPTH), f"tl.arange(0, {DEPTH}).to(INT)", False, f"lane{DEPTH}")
    sides, whole = ((kept, "kept"), (folded, "folded")), width // DEPTH * DEPTH
    blocks = [_make_block_writer(v, e, side, lane, bool(eight)) for e, side in sides]
    v.inside += _write_loop(total, whole, [block("d", "") for block in blocks], eight)
    if width > whole:
        mask = f", mask=({lane} < {width - whole})[None, :], other="
        ends = [block(str(whole), mask + v.spec.zero(e)) for block, (e, _) in zip(blocks, sides, strict=True)]
        v.inside.append(write_dot(total, ends, eight))


def _place_vectors(v: ExpressionWriter, e: Expr, side: str, lane: str) -> tuple[str, str, str]:
    """Where the vectors of a tile begin (what lies beyond the end reads the last), their stride, their type."""
    name, outside = str(e.attrs[0]), side == "kept" or v.masked
    at = f"tl.minimum({side}_at, {side}_size - 1)" if outside else f"{side}_at"
    text = f"{v.base(e)} + {at}.to(tl.int64)[:, None] * {name}_s + {lane}[None, :] * {name}_f"
    return v.bind((e, "vectors"), text, side == "folded", f"{name}_vectors"), f"{name}_f", v.spec.type_of[e]


def _make_block_writer(v: ExpressionWriter, e: Expr, side: str, lane: str, stored: bool) -> Callable[[str, str], str]:
    """What writes a block of a tile's vectors, from a feature on and with a mask; ``stored``: as they are stored."""
    wanted = v.operand_type()
    if e.packing is not None:
        return lambda at, mask: write_block(v, e, at, DEPTH, wanted)
    vectors, stride, kind = _place_vectors(v, e, side, lane)

    def write(at: str, mask: str) -> str:
        text = f"tl.load({vectors} + {at} * {stride}{mask})"
        return text if stored or kind == wanted else widen_block(v.spec, e, text, kind, wanted)

    return write


if TYPE_CHECKING:
    from .expressions import ExpressionWriter


def write_products(v: ExpressionWriter, e: Expr, f: str) -> str:
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
    """A squared distance from norms and a split product (``spec_from_tensors.py``); close pairs are recomputed from
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
