"""What a kernel's text depends on, besides the fold itself, and what is known of its numbers before it is written.

:class:`Spec` is the first, with why some folds have no kernel. Of numbers, constant factors of exponents and widths of
integers are found: ``exp(scale * s)`` becomes ``exp2(s * factor)`` with ``factor = scale * log2(e)``, a number that is
known before the loop: pairs do not pay for it. Integers have 64 bits in a body. In a kernel, indices, small data and
what stays small are computed in 32, which is faster: an operation whose result may not fit is given its arguments in
64. Bounds follow from types and constants. All of this is symbolic; ``expressions.py`` writes what is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

from ....program.constructors import apply, contractions
from ....program.expression import Expr, const, topological
from ....program.lower import Fold, conditions, split_index_match
from ....program.primitives import PRIMITIVES
from ....reductions import kind_of

TINY = 8  # features up to which vectors are unrolled; beyond, products are matrix products
NARROW = 64  # features up to which vectors are one block: MMAs are not what takes the time
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")  # vectors stored with scales
WIDEST = 256  # features beyond which accumulators do not fit in registers
_MOST_CONDITIONS = 4  # that bounds are computed from


Slices = tuple[tuple[int, int], ...]  # of a vector's features: the first one, and how many
ClosePairs = tuple[tuple[Expr, tuple[Expr, Expr]], ...]  # squared distances of split vectors; the whole vectors


class Unsupported(Exception):
    """This fold has no kernel here; the reason is the message."""


ONCE = "listed_once"  # the leaf that says which entries are the first of equal ones in their list
COPIES = "listed_copies"  # the leaf that says how many equal ones there are, at the first of them; 0 at the others


@dataclass(frozen=True)
class Listing:
    """How a kernel walks lists of blocks of the folded axis (``codegen/listed.py``): part of its text."""

    kept_block: int  # kept indices that share a list; 0: all of them
    folded_block: int  # folded indices of a listed block
    gathered: bool  # a tile holds folded indices of several blocks, or a part of one; else tiles divide a block
    single: bool = False  # one kept index per program instance: products are sums of products, number by number
    each: bool = False  # single, but several in a program instance, each with a list of its own
    tiles: int = 0  # that a group's kept indices are divided into; 0: tiles do not divide them
    logical: bool = False  # the folded index counts along the list, not along the axis
    ends: bool = False  # the kernel is given how many folded indices each list has: its last block is cut
    entries: bool = False  # and which entry of the first list each entry is (for numbers per entry)
    numbered: bool = False  # and how many entries a batch element's lists have: to write a number for each
    window: int = 0  # lists of more entries than two windows are folded window by window; 0: none is
    role: str = "lists"  # "windows": a program instance folds a window; "combine": it combines those of one list
    numbers: int = 1  # that a window has to combine: of a top-k, its k best
    whole_pairs: bool = False  # numbers per pair are of the whole axes, not of the entries of lists

    @property
    def tensors(self) -> int:
        """How many tensors the kernel is given: where lists begin, their items and, of some, their ends or entries."""
        return 2 + self.ends + self.entries


@dataclass(frozen=True)
class Joint:
    """A sum over the kept axis, a vector per folded index, that a kernel adds up in memory beside its own sums
    (``schedules/joint_gradients.py``)."""

    weight: Expr  # also that of one of the kernel's own sums
    vector: Expr
    scale: Expr
    ragged: bool  # some tile reaches beyond the kept axis


@dataclass(frozen=True)
class Spec:
    """One direction of a fold, with the types and feature sizes of its leaves: equal specs have equal texts."""

    fold: Fold  # reductions of one direction
    over: str  # "cols": results per row; "rows": results per column
    types: tuple[str, ...]  # per leaf: its tensor's type; "number" or "positive" for a Python number
    padded_widths: tuple[int, ...]  # per leaf: features that may be read, its own and zeros; 0: only its own
    letters: tuple[tuple[str, int], ...]  # the features of vectors, by the letter of their axis
    compute: str  # float32 or float64
    narrow: str | None  # the 16-bit type of matrix products, if leaves have one
    rank: int  # batch dimensions after merging
    bounds: bool = False  # the kernel is told which tiles to visit
    lanes: bool = False  # plain sums are kept per lane and added up at the end
    guess: bool = False  # whole tiles use a guessed maximum in a softmax

    # Arithmetic
    exact: bool = True  # float32 products are as exact as float32 allows
    unrounded: bool = False  # products of a K loop are not rounded to 16 bits
    native: bool = False  # the device has NVIDIA's approximate tanh, rcp and lg2: kernels call native forms
    eight_bit_mma: bool = False  # the device multiplies 8-bit vectors by each other
    pieces: int = 0  # 16-bit pieces into which float32 vectors are split (``spec_from_tensors.py``); 0: none
    close_pairs: ClosePairs = ()  # squared distances that are computed again for close pairs

    # The folded axis
    split: bool = False  # it is split (split-K): one program instance per split
    k_loop: bool = False  # products may have more features than a block: a K loop
    few_rows: bool = False  # few kept indices: one loop over what they see (``few_rows.py``)
    grouped: bool = False  # few rows, and a batch dimension (query heads) is part of the kept axis
    launches_dependents: bool = False  # the kernel that combines the splits is launched before this one ends
    folded_batch_dim: int | None = None  # the batch dimension that is folded too: results are summed over it
    folded_batch_size: int = 0  # of that dimension, where it is part of the text; 0: it is given at the call
    listed: Listing | None = None  # kept indices fold the blocks that a list names, not the whole axis

    # Memory
    descriptors: tuple[tuple[int, ...] | None, ...] = ()  # per leaf: the batch dimensions of its tensor descriptor
    strides_of_eight: tuple[bool, ...] = ()  # per leaf: its strides are multiples of 8, which Triton does not look for
    strided: tuple[int, ...] = ()  # outputs that are not contiguous: the kernel is given their strides
    small_products: bool = True  # matrix products may have fewer than 16 rows
    precomputed_shifts: bool = False  # shifts of exponents along the folded axis are computed before the launch
    shift_descriptors: bool = False  # and copied by tensor descriptors

    # More results (hand-scheduled kernels)
    diagonals: Expr | None = None  # a number per pair whose sums along diagonals the kernel leaves, tile by tile
    joint: Joint | None = None  # a sum over the kept axis too

    def is_per_entry(self, e: Expr) -> bool:
        """True for a leaf that has a number for each entry of lists."""
        return e.is_pair and self.listed is not None and (not self.listed.whole_pairs or e.attrs[0] in (ONCE, COPIES))

    @property
    def listing(self) -> Listing:
        """How the kernel walks lists: asked of those that do."""
        assert self.listed is not None
        return self.listed

    @cached_property
    def type_of(self) -> Mapping[Expr, str]:
        return dict(zip(self.fold.leaves, self.types, strict=True))

    @cached_property
    def padded_width_of(self) -> Mapping[Expr, int]:
        return dict(zip(self.fold.leaves, self.padded_widths, strict=True))

    @cached_property
    def descriptor_dims(self) -> Mapping[Expr, tuple[int, ...]]:
        """The leaves whose blocks are copied by tensor descriptors."""
        return {e: b for e, b in zip(self.fold.leaves, self.descriptors, strict=False) if b is not None}

    @cached_property
    def leaves_with_strides_of_eight(self) -> frozenset[Expr]:
        """The leaves whose strides are multiples of 8, which the kernel's text says: Triton looks for multiples of 16
        alone, and would load vectors of 40 features number by number."""
        return frozenset(e for e, own in zip(self.fold.leaves, self.strides_of_eight, strict=False) if own)

    @cached_property
    def compares_pairs(self) -> bool:
        """True when a number of a pair is compared with a result that was one of them, as a user's minimum is in its
        gradient: every kernel must then round it alike, however it is used."""
        under = topological(self.fold.reductions)
        equal = any(e.op in ("eq", "ne") and e.is_pair and e.args[0].dtype == "float" for e in under)
        return equal or any(r.attrs[0] == "user" for r in self.fold.reductions)

    @cached_property
    def vectors_of_distance(self) -> Mapping[Expr, tuple[Expr, Expr]]:
        """The squared distances that are recomputed for close pairs, and the vectors that they are recomputed from."""
        return dict(self.close_pairs)

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        return dict(self.letters)

    def width(self, feature: str | int | None) -> int:
        text = str(feature).lstrip("#")
        return int(text) if text.isdigit() else self._sizes[str(feature)]

    def width_text(self, feature: str) -> str:
        """How many features there are, in the text: that of a table is given at the call, as lengths are."""
        table = next((e for e in self.fold.tables if str(e.feature) == feature), None)
        return repr(self.width(feature)) if table is None else f"{table.attrs[0]}_n"

    def slices(self, feature: str | int | None) -> Slices:
        """The blocks that hold vectors over a feature. 16-bit vectors that enter matrix products alone are held in
        several blocks where one of a power of two would be mostly padding (``slice_width``)."""
        width = self.width(feature)
        plain = NARROW < width <= WIDEST and str(feature) not in self._unsliced_features
        sliced = self.narrow and not self.pieces and plain
        return slice_width(width) if sliced else ((0, pad_width(width)),)

    def descriptor_slices(self, e: Expr) -> Slices:
        """The features that each tensor descriptor of a leaf copies; K loops walk over them."""
        return self.slices(e.feature) if e.feature is not None else ((0, 0),)

    @cached_property
    def _unsliced_features(self) -> frozenset[str]:
        """The features of vectors that something besides matrix products reads, or of every vector where some reduction
        is neither a sum nor a softmax."""
        found = {str(e.feature) for r in self.fold.reductions for e in _read_otherwise(r)}
        if all(r.attrs[0] in ("sum", "soft") for r in self.fold.reductions):
            return frozenset(found)
        return frozenset(str(e.feature) for e in topological(self.fold.reductions) if e.feature is not None)

    def is_number(self, e: Expr) -> bool:
        """True when a leaf is a Python number."""
        return self.type_of[e] in ("number", "positive")

    def zero(self, e: Expr) -> str:
        """What is read of a leaf's vectors outside of their mask."""
        if e.packing is not None and e.packing[0] == 4:
            return "136"  # two zeros, each with its offset of 8
        return "0.0" if self.type_of[e] in EIGHT_BITS else "0"

    def multiplies_eight_bits(self, x: Expr, y: Expr) -> str:
        """How a product of two leaves is taken by the matrix units for 8 bits, as they are stored: ``"int32"`` or
        ``"float32"``, the type of its sums; empty where it is not."""
        kinds = {self.type_of[e] if e.packing is None else "" for e in (x, y)}
        deep = self.k_loop and self.width(x.feature) > WIDEST
        if not self.eight_bit_mma or not (deep or all(size >= 32 for _, size in self.slices(x.feature))):
            return ""
        return "int32" if kinds == {"int8"} else "float32" if kinds <= {*EIGHT_BITS} else ""

    @cached_property
    def multiplies_only_eight_bits(self) -> bool:
        """True when all products are taken by the matrix units for 8 bits."""
        products = [e for e in topological(self.fold.reductions) if e.op in ("dot", "sqdist")]
        plain = all(e.op == "dot" and all(a.op == "leaf" for a in e.args) for e in products)
        return bool(products) and plain and all(self.multiplies_eight_bits(*e.args) for e in products)

    @cached_property
    def is_stored_softmax(self) -> bool:
        """True when this is one softmax of vectors that are all 8-bit floats, on a device that multiplies them."""
        (r, *others), vectors = self.fold.reductions, [e for e in self.fold.leaves if e.feature is not None]
        return (
            self.eight_bit_mma
            and not others
            and r.attrs[0] == "soft"
            and all(self.type_of[e] in EIGHT_BITS for e in vectors)
        )

    @cached_property
    def multiplies_in_float16(self) -> bool:
        """True for softmaxes of few kept bfloat16 vectors whose folded vectors are 8-bit floats with no scales of their
        own. Float16 holds those numbers too, and costs one instruction for two of them; bfloat16 costs four."""
        reductions = self.fold.reductions
        products = [e for e in topological(reductions) if e.op == "dot"]
        stored = [a for e in products for a in e.args if a.op == "leaf" and self.folds(a)]
        stored += [v for r in reductions for v in r.args[1:]]
        kept = [a for e in products for a in e.args if a.op == "leaf" and not self.folds(a)]
        return (
            (self.few_rows or self.grouped)
            and self.narrow == "bfloat16"
            and self.eight_bit_mma
            and not (self.listed is not None and self.listed.single)
            and not self._unsliced_features
            and all(r.attrs[0] == "soft" for r in reductions)
            and len(stored) == len(products) + sum(len(r.args) - 1 for r in reductions)
            and all(e.op == "leaf" and e.packing is None and self.type_of[e] in EIGHT_BITS for e in stored)
            and all(self.type_of[e] == "bfloat16" and len(self.slices(e.feature)) == 1 for e in kept)
        )

    @cached_property
    def widened_in_registers(self) -> frozenset[Expr]:
        """The stored vectors that few kept ones are multiplied by, and that nothing else reads: they go to the matrix
        units' registers in 8 bits and are widened there. Widened before, they would pass through shared memory twice,
        and its bandwidth is what such kernels wait for. (Vectors that are summed have to: single bytes cannot be
        transposed on the way.)"""
        if not (self.few_rows or self.grouped):
            return frozenset()
        nodes = topological(self.fold.reductions)
        others = topological(self.fold.reductions, stop=lambda e: e.op == "dot")
        return frozenset(a for e in nodes if e.op == "dot" for a in e.args if self.folds(a)) - frozenset(others)

    @cached_property
    def draws_numbers(self) -> bool:
        """True when pairs draw random numbers, which take registers of their own."""
        return any(e.op in ("gumbel", "uniform") for e in topological(self.fold.reductions))

    def folds(self, e: Expr) -> bool:
        """True when an expression varies along the folded axis."""
        return e.cols if self.over == "cols" else e.rows

    @property
    def kept_batch(self) -> list[int]:
        """The batch dimensions of the results."""
        return [k for k in range(self.rank) if k != self.folded_batch_dim]

    @property
    def kept_start(self) -> str:
        """The first kept index of a tile."""
        return "tile * KEPT" if self.listed is None or self.listed.tiles else "kept_start"

    @property
    def result_place(self) -> tuple[str, str]:
        """How many results a batch element has, and which is the first of a program instance."""
        windows = self.listed is not None and self.listed.role == "windows"
        return ("tiles", "tile") if windows else ("kept_size", self.kept_start)

    @property
    def folded_batch_text(self) -> str:
        """How many elements the folded batch dimension has."""
        return str(self.folded_batch_size) if self.folded_batch_size else "group"

    def batch_number(self) -> str:
        """The number of a batch element among all, in a loop over folded ones too."""
        if self.folded_batch_dim is None:
            return "batch"
        text = "b0"
        for k in range(1, self.rank):
            text = f"({text} * n{k} + b{k})"
        return text

    def keeps(self, e: Expr) -> bool:
        """True when an expression varies along the kept axis."""
        return e.rows if self.over == "cols" else e.cols


class LoopBodies(NamedTuple):
    """The lines of a kernel's two loops over tiles, and those between them."""

    whole_tile: list[str]  # of the first loop: what one tile adds, without masks
    delayed: list[str]  # after it: the product that its last tile left to the next
    check_guess: list[str]  # whether guessed maxima were near enough; if not, all tiles are left to the second loop
    cut_tile: list[str]  # of the second loop, with masks


@lru_cache(maxsize=1024)
def whole_tile_conditions(fold: Fold) -> dict[Expr, bool]:
    """The conditions that bounds are computed from, and the truth that whole tiles are written for.

    One index compared with data is left out: its range over a tile says nothing. Compared with the other index it is
    false almost everywhere. So is what is given per pair: its ranges would be read from all pairs.
    """
    chosen: dict[Expr, bool] = {}
    for c in conditions(fold):
        if len(chosen) == _MOST_CONDITIONS:
            break
        if any(e.op == "leaf" and e.is_pair for e in topological([c])):
            continue
        hot, _ = split_index_match(c)
        if hot is None:
            chosen[c] = True
        elif not any(e.op == "leaf" for e in topological([hot[1]])):
            chosen[c] = False
    return chosen


@lru_cache(maxsize=4096)
def _replace_fields(spec: Spec, fields: tuple[tuple[str, Any], ...]) -> Spec:
    return replace(spec, **dict(fields))


def specialize(spec: Spec, **fields: Any) -> Spec:
    """A spec with other fields; equal specs are one object, so that its cached properties are computed once."""
    return _replace_fields(spec, tuple(fields.items()))


def _read_otherwise(r: Expr) -> list[Expr]:
    """The vectors of a reduction that are not just operands of matrix products."""
    found = []
    for a in r.args:
        for c in contractions(a, r.attrs[1]):
            whole = not c.walk
            found += [] if whole else [e for e in topological([a]) if e.feature is not None]
    for e in topological(r.args):
        if e.op in ("sqdist", "fsum", "famax", "famin") or (e.op == "dot" and any(a.op != "leaf" for a in e.args)):
            found += [n for n in topological(e.args) if n.feature is not None]
    return found


def pair_vector_leaves(r: Expr) -> list[Expr]:
    """The vector leaves of which a kernel makes vectors per pair, number by number: not operands of matrix products."""
    if kind_of(r).vector_lines is None:
        return []
    vectors = topological([a for a in r.args if a.feature is not None], stop=lambda e: e.feature is None)
    return [e for e in vectors if e.op == "leaf" and e.feature is not None]


@cache
def slice_width(width: int) -> Slices:
    """Features as blocks of powers of two, at least 16 each, largest first: one block where that is full to 7/8, else
    as many as there are ones in the binary number. Features past the last are zeros.

    >>> slice_width(96), slice_width(72), slice_width(112)
    (((0, 64), (64, 32)), ((0, 64), (64, 16)), ((0, 128),))
    """
    multiple, whole = -(-width // 16) * 16, pad_width(width)
    if 8 * multiple >= 7 * whole:
        return ((0, whole),)
    found, first = [], 0
    while first < multiple:
        size = 1 << (multiple - first).bit_length() - 1
        found.append((first, size))
        first += size
    return tuple(found)


def name_descriptor(x: str, k: int = 0) -> str:
    """The name of a leaf's tensor descriptor for the ``k``-th slice of its features.

    >>> name_descriptor("x1"), name_descriptor("x1", 1)
    ('x1_box', 'x1_box1')
    """
    return f"{x}_box{k or ''}"


def gluon_type(kind: str) -> str:
    """The name that Triton has for a type of torch.

    >>> gluon_type("float8_e4m3fn"), gluon_type("bfloat16")
    ('float8e4nv', 'bfloat16')
    """
    return {"float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5"}.get(kind, kind)


def widen(text: str, kind: str, wanted: str) -> str:
    """Loaded numbers of one type in another. There is no conversion from 8-bit floats to float64."""
    middle = ".to(tl.float32)" if kind in EIGHT_BITS and wanted == "float64" else ""
    return f"{text}{middle}.to(tl.{wanted})"


def power_of_two(n: int) -> int:
    """The least power of two that is not below a number, and not below 1."""
    return 1 << max(n - 1, 0).bit_length()


def pad_width(width: int) -> int:
    """The size of a block for so many features: a power of two, at least 16, as matrix products need."""
    return max(16, power_of_two(width))


LOG2E = math.log2(math.e)
_DEEPEST = 128  # nodes under an exponent, up to which factors are taken out of its sums and conditions

BITS = ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift")
_GROWS = ("add", "sub", "mul", "square", "neg", "abs", "floor_divide")  # results may be larger than the arguments
_MEETS = ("where", "eq", "ne", "lt", "le", "gt", "ge")  # a constant beyond 32 bits beside an argument of 32
SMALL = 2**28  # lengths are below this; so are a call's integers and the offsets inside a tile, or all have 64 bits
_ANY = 2**63
_MOST = {"bool": 1, "int8": 2**7, "uint8": 2**8, "int16": 2**15, "int32": 2**31, "number": SMALL}
_RULES: dict[str, Callable[..., int]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "square": lambda x: x * x,
    "floor_divide": lambda x, y: x,
    "bitwise_right_shift": lambda x, n: x,
    "remainder": lambda x, y: y,
    "fmod": min,
    "popcount": lambda x: 64,
    "where": lambda c, x, y: max(x, y),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), lambda x, y: 1 << max(x, y).bit_length()),
    "bitwise_not": lambda x: x + 1,
    **dict.fromkeys(("neg", "abs", "detach", "floor", "ceil", "round", "trunc", "sign", "spread"), lambda x: x),
    **dict.fromkeys(("minimum", "maximum"), max),
}


def literal(value: float | int | bool) -> str:
    """A Python number as it is written in a kernel."""
    if isinstance(value, float) and (math.isinf(value) or math.isnan(value)):
        return f'float("{value}")'
    return repr(value)


class FactoredExpression(NamedTuple):
    """An expression as ``core * constant``, times (or divided by, where True) numbers that no pair changes."""

    core: Expr
    constant: float
    numbers: list[tuple[Expr, bool]]


def factor_out(e: Expr, spec: Spec, positive: bool) -> FactoredExpression:
    """Take every factor that does not depend on the pair out of ``e``; with ``positive``, only those above zero."""
    constant = 1.0
    numbers: list[tuple[Expr, bool]] = []
    while True:
        if e.op == "neg" and not positive:
            e, constant = e.args[0], -constant
            continue
        masks = e.op == "where" and e.args[2].op == "const" and e.depth <= _DEEPEST
        if masks and e.args[2].const == -math.inf:  # a positive factor leaves -inf as it is
            inner = factor_out(e.args[1], spec, positive=True)
            core = apply("where", e.args[0], inner.core, e.args[2])
            return FactoredExpression(core, constant * inner.constant, [*numbers, *inner.numbers])
        if e.op in ("add", "sub") and (both := _factor_out_of_sum(e, spec)) is not None:
            return FactoredExpression(both.core, constant * both.constant, [*numbers, *both.numbers])
        k = None
        if e.op in ("mul", "div"):
            k = next((a for a in (e.args if e.op == "mul" else e.args[1:]) if _is_factor(a, spec, positive)), None)
        if k is None:
            return FactoredExpression(e, constant, numbers)
        rest = e.args[1] if k is e.args[0] else e.args[0]
        if k.op == "const":
            constant = constant / k.const if e.op == "div" else constant * k.const
        else:
            numbers.append((k, e.op == "div"))
        e = rest


def _factor_out_of_sum(e: Expr, spec: Spec) -> FactoredExpression | None:
    """``scale * s + slope * d`` as ``scale * (s + (slope / scale) * d)``: the quotient is computed before the loop."""
    first, other = e.args
    if e.depth > _DEEPEST or not first.is_pair or other.op != "mul" or not other.is_pair:
        return None
    number, rest = other.args if not other.args[0].is_pair else other.args[::-1]
    core, factor, numbers = factor_out(first, spec, positive=True)
    if number.is_pair or spec.folds(number) or number.feature is not None or core is first:
        return None
    by: Expr = const(factor)
    for k, divides in numbers:
        by = apply("div" if divides else "mul", by, k)
    return FactoredExpression(apply(e.op, core, apply("mul", apply("div", number, by), rest)), factor, numbers)


def _is_factor(k: Expr, spec: Spec, positive: bool) -> bool:
    """True for a number that is the same for all pairs: a constant, or a float given at the call."""
    if k.op == "const" and k.dtype != "bool":
        return k.const > 0 if positive else k.const != 0
    if k.dtype != "float" or k.rows or k.cols or k.feature is not None:
        return False
    return k.op == "leaf" and (not positive or spec.type_of[k] == "positive")


class IntegerBounds:
    """The largest magnitude of every integer of a kernel, as far as it is known before the numbers are."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.known: dict[Expr, int] = {}
        self.wide: set[Expr] = set()  # what was written so far and has 64 bits

    def arguments(self, e: Expr, args: list[str]) -> list[str]:
        """The texts of an operation's arguments, in 64 bits where its result, or a constant, needs them."""
        if e.op in _GROWS:
            widens = e.dtype == "int" and (e.op in ("mul", "square") or self.most(e) >= 2**31)
        else:
            widens = e.op in _MEETS and any(map(_is_beyond_int32, e.args))
        beside = any(self.spec.type_of.get(a) == "int64" or a in self.wide for a in e.args)
        if e.op in _GROWS and e.dtype == "int" and (widens or beside):
            self.wide.add(e)
        if not widens or beside:  # Triton widens what stands beside 64 bits
            return args
        whole = [a.op != "const" and a.dtype != "float" and (e.op != "where" or k > 0) for k, a in enumerate(e.args)]
        return [f"{text}.to(tl.int64)" if w else text for text, w in zip(args, whole, strict=True)]

    def most(self, e: Expr) -> int:
        for n in topological([e], stop=self.known.__contains__):
            if n not in self.known:
                self.known[n] = min(self._find(n), _ANY)
        return self.known[e]

    def _find(self, e: Expr) -> int:
        if e.dtype == "bool":
            return 1
        if e.op == "const":
            return int(abs(e.const)) if e.dtype == "int" else _ANY
        if e.op in ("row_index", "col_index", "size"):
            return SMALL
        if e.op == "leaf":
            return _MOST.get(self.spec.type_of.get(e, ""), _ANY)
        rule = _RULES.get(e.op) if e.dtype == "int" else None
        if e.op == "cast":
            return 1 if e.args[0].dtype == "bool" else _ANY
        return rule(*(self.known[a] for a in e.args)) if rule is not None else _ANY


def _is_beyond_int32(e: Expr) -> bool:
    """True for an integer constant that int32 does not hold: Triton refuses it beside an int32 tensor."""
    return e.op == "const" and e.dtype == "int" and not -(2**31) <= e.const < 2**31


LAYER = 64  # levels of an expression that are written by nested calls; deeper ones are bound layer by layer


def read_across_layers(e: Expr, is_bound: Callable[[Expr], bool]) -> list[Expr]:
    """The unbound elementwise nodes under ``e`` that are read from a higher layer, arguments first.

    Writing an expression is recursive. In a deep one, nodes are divided into layers of ``LAYER`` levels; values that
    cross layers are bound from the bottom up, so that calls nest no deeper than a layer.
    """
    order = topological([e], stop=is_bound)
    read = {a for n in order if not is_bound(n) for a in n.args if a.depth // LAYER < n.depth // LAYER}
    return [n for n in order if n in read and n.op in PRIMITIVES and not is_bound(n)]


# K loops: GEMMs of more features than a block holds, with the fold as their epilogue

K_LOOP_DEPTH = 64  # features at a time
_FEW = 8  # top-k lists beyond this are slower in registers than by panels
_FITS = 35 * 2**20  # bytes of kept vectors that stay in the L2 cache of an H200 whatever is loaded besides
_NEAR = 10 * 2**20  # bytes of kept vectors of tiles that run at the same time, where all are more


@lru_cache(maxsize=1024)
def takes_k_loop(fold: Fold, width: int, narrow: bool) -> bool:
    """True for folds of these kernels: 16-bit products of many features, folded to numbers."""
    products = [e for e in topological(fold.reductions) if e.op == "dot"]
    plain = all(a.feature is None for r in fold.reductions for a in r.args)
    short = all(kind_of(r).selected(r.attrs[2]) <= _FEW for r in fold.reductions)
    several = any(e.op == "einsum" for e in topological(fold.reductions))
    return narrow and width > WIDEST and plain and short and bool(products) and not several


def rounds_products(spec: Spec) -> bool:
    """True when products are rounded as a panel would hold them.

    So a gradient reads them, unless its own products are as exact (``runtime/dispatch.py``). Kinds that select
    pairs see products as exact as they are.
    """
    sums = not all(kind_of(r).selected(r.attrs[2]) for r in spec.fold.reductions)
    return not spec.unrounded and spec.narrow == "bfloat16" and sums


def list_k_loop_operands(spec: Spec) -> list[Expr]:
    """The leaves that are operands of a K loop."""
    products = [
        e for e in topological(spec.fold.reductions) if e.op == "dot" and spec.width(e.args[0].feature) > WIDEST
    ]
    return list(dict.fromkeys(a for e in products for a in e.args)) if spec.k_loop else []


def count_concurrent_tiles(spec: Spec, kept: int, length: int) -> int:
    """How many kept tiles run at the same time: all, or as many as leave the cache space for what they are multiplied
    with. (H200, 65536 × 65536 of 768 features: 9.8 ms, all at once 12.3; 8192 × 256000 of 2304: 14.7 and 15.2; but
    32768 × 32768 of 512, which all fit: 1.6 and 1.5, since parts have to be combined.)"""
    each = sum(spec.width(e.feature) * 2 for e in list_k_loop_operands(spec) if not spec.folds(e))
    return max(1, _NEAR // (kept * each) if length * each > _FITS else -(-length // kept))
