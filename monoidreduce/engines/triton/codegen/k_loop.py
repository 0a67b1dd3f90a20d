"""Products of more features than a block holds: a K loop over features, some of both operands at a time.

This is a GEMM with the fold as its epilogue: pairs exist in registers only. It serves folds to numbers (a logsumexp, an
argmax, a sample) of 16-bit vectors; sums of vectors would need as many registers as features, and use panels instead.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from ....program.expression import Expr, topological
from ....program.lower import Fold
from ....reductions import kind_of
from . import packed_vectors
from .kernel_spec import WIDEST, Spec

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

    So a gradient reads them, unless its own products are as exact (``runtime/forward_form.py``). Kinds that select
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
        return lambda at, mask: packed_vectors.write_block(v, e, at, DEPTH, wanted)
    vectors, stride, kind = _place_vectors(v, e, side, lane)

    def write(at: str, mask: str) -> str:
        text = f"tl.load({vectors} + {at} * {stride}{mask})"
        return text if stored or kind == wanted else packed_vectors.widen_block(v.spec, e, text, kind, wanted)

    return write
