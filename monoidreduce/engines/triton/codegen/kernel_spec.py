"""What a kernel's text depends on, besides the fold itself; and why some folds have no kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ....program.expression import Expr
from ....program.lower import Fold

TINY = 8  # features up to which vectors are unrolled; beyond, products are matrix products
WIDEST = 256  # features beyond which accumulators do not fit in registers


Near = tuple[tuple[Expr, tuple[Expr, Expr]], ...]  # squared distances from split vectors, and the whole vectors


class Unsupported(Exception):
    """This fold has no kernel here; the reason is the message."""


@dataclass(frozen=True)
class Spec:
    """One direction of a fold, with the types and feature sizes of its leaves: equal specs have equal texts."""

    fold: Fold  # reductions of one direction
    over: str  # "cols": results per row; "rows": results per column
    types: tuple[str, ...]  # per leaf: its tensor's type; "number" or "positive" for a Python number
    rooms: tuple[int, ...]  # per leaf: padded features that may be read (zeros after its own); 0: only its own
    letters: tuple[tuple[str, int], ...]
    compute: str  # float32 or float64
    narrow: str | None  # the 16-bit type of matrix products, if leaves have one
    rank: int  # batch dimensions after merging
    bounds: bool  # the kernel is told which tiles to visit
    lanes: bool  # plain sums are kept per lane and added up at the end
    guess: bool  # whole tiles use a guessed maximum in a softmax
    exact: bool = True  # float32 products are as exact as float32 allows
    split: bool = False  # the folded axis is split (split-K): one program instance per split
    deep: bool = False  # products may have more features than a block: a K loop (``k_loop.py``)
    join: bool = False  # shifts of exponents along the folded axis are computed before the launch
    raw: bool = False  # products of a K loop are not rounded to 16 bits
    native: bool = False  # the device has an instruction for tanh
    boxes: tuple[tuple[int, ...] | None, ...] = ()  # per leaf: the batch dimensions of its tensor descriptor
    line: bool = False  # shifts of exponents are copied by tensor descriptors
    pieces: int = 0  # 16-bit pieces into which float32 vectors are split (``float32_split.py``); 0: none
    near: Near = ()
    strided: tuple[int, ...] = ()  # outputs that are not contiguous: the kernel is given their strides
    group: int | None = None  # the batch dimension that is folded too: results are summed over it
    group_size: int = 0  # of that dimension, where it is part of the text; 0: it is given at the call

    @cached_property
    def type_of(self) -> Mapping[Expr, str]:
        return dict(zip(self.fold.leaves, self.types, strict=True))

    @cached_property
    def room_of(self) -> Mapping[Expr, int]:
        return dict(zip(self.fold.leaves, self.rooms, strict=True))

    @cached_property
    def box_of(self) -> Mapping[Expr, tuple[int, ...]]:
        """The leaves whose blocks are copied by tensor descriptors."""
        return {e: b for e, b in zip(self.fold.leaves, self.boxes, strict=False) if b is not None}

    @cached_property
    def near_of(self) -> Mapping[Expr, tuple[Expr, Expr]]:
        """The squared distances that are recomputed for close pairs, and the vectors that they are recomputed from."""
        return dict(self.near)

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        return dict(self.letters)

    def width(self, feature: str | int | None) -> int:
        text = str(feature).lstrip("#")
        return int(text) if text.isdigit() else self._sizes[str(feature)]

    def is_number(self, e: Expr) -> bool:
        """Whether a leaf is a Python number."""
        return self.type_of[e] in ("number", "positive")

    def folds(self, e: Expr) -> bool:
        """Whether an expression varies along the folded axis."""
        return e.cols if self.over == "cols" else e.rows

    @property
    def kept_batch(self) -> list[int]:
        """The batch dimensions of the results."""
        return [k for k in range(self.rank) if k != self.group]

    @property
    def group_text(self) -> str:
        """How many elements the folded batch dimension has."""
        return str(self.group_size) if self.group_size else "group"

    def batch_number(self) -> str:
        """The number of a batch element among all, in a loop over folded ones too."""
        if self.group is None:
            return "batch"
        text = "b0"
        for k in range(1, self.rank):
            text = f"({text} * n{k} + b{k})"
        return text

    def keeps(self, e: Expr) -> bool:
        """Whether an expression varies along the kept axis."""
        return e.rows if self.over == "cols" else e.cols


def padded(width: int) -> int:
    """The size of a block for so many features: a power of two, at least 16, as matrix products need."""
    return max(16, 1 << (width - 1).bit_length())
