"""What a kernel's text depends on, besides the fold itself; and why some folds have no kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ....program.expression import Expr
from ....program.lower import Fold

TINY = 8  # up to here features are unrolled; beyond, products are matrix products
WIDEST = 256  # beyond, accumulators do not fit in registers


Near = tuple[tuple[Expr, tuple[Expr, Expr]], ...]  # squared distances made of pieces, and of which whole vectors


class Unsupported(Exception):
    """This fold has no kernel here; the reason is the message."""


@dataclass(frozen=True)
class Spec:
    """One direction of a fold, with the types and feature sizes of its leaves: equal specs have equal texts."""

    fold: Fold  # reductions of one direction
    over: str  # "cols": results per row; "rows": results per column
    types: tuple[str, ...]  # per leaf: its tensor's type; "number" or "positive" for a Python number
    rooms: tuple[int, ...]  # per leaf: features that may be read, zeros after its own; 0 where only its own
    letters: tuple[tuple[str, int], ...]
    compute: str  # float32 or float64
    narrow: str | None  # the 16-bit type of matrix products, if leaves have one
    rank: int  # batch dimensions after merging
    bounds: bool  # whether tiles to visit are given
    lanes: bool  # whether plain sums are kept per lane and added at the end
    guess: bool  # whether whole tiles do with a guess of a softmax's maximum
    exact: bool = True  # whether float32 products are to be as exact as float32 allows
    split: bool = False  # whether the folded axis is cut into parts, one program instance each
    deep: bool = False  # whether products may have more features than a block: they are then walked
    join: bool = False  # whether shifts of exponents along the folded axis are made before the launch
    raw: bool = False  # whether wide products stay as exact as they are
    native: bool = False  # whether the device has an instruction for tanh
    boxes: tuple[tuple[int, ...] | None, ...] = ()  # per leaf: the batch dimensions of its tensor descriptor
    line: bool = False  # whether shifts have tensor descriptors
    pieces: int = 0  # in how many pieces of 16 bits float32 vectors are multiplied (``float32_split.py``)
    near: Near = ()

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
        """The squared distances of which those of close pairs are computed anew, and the vectors for that."""
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

    def keeps(self, e: Expr) -> bool:
        """Whether an expression varies along the kept axis."""
        return e.rows if self.over == "cols" else e.cols


def padded(width: int) -> int:
    """How many a block holds, of features or of others: a power of two, at least 16, as matrix products need."""
    return max(16, 1 << (width - 1).bit_length())
