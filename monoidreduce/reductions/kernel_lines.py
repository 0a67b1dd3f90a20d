"""What a kind of reduction answers with lines of text when a Triton kernel is written, and how splits are combined.

Nothing of the Triton engine is imported here: the code generator hands in what a kind may use of it (:class:`Tools`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from ..program.expression import Expr

Form = tuple[tuple[int, ...], torch.dtype]  # shape and type of a tensor


@dataclass(frozen=True)
class Tools:
    """The parts of the code generator that lines are written with."""

    writer: Callable[..., Any]  # expressions as lines: ``writer(spec)``
    running_sum: Callable[..., Any]  # of numbers or vectors: ``running_sum(name, feature, dtype, writer, lanes)``
    stored_sum: Callable[..., Any]  # in memory, where it is too wide: ``stored_sum(name, reduction, writer)``, or None
    move_factors: Callable[..., Any]  # a contraction whose vector is a leaf, numbers in the weight
    reads_one_pair: Callable[..., bool]  # whether a number per pair can be computed at one index: ``(value, spec)``
    one_pair: Callable[..., Any]  # a writer of numbers at one index per kept index: ``(writer, name, index)``
    block_function: Callable[..., Any]  # a writer of functions of blocks, of numbers and vectors: ``(spec)``
    pair_vector: Callable[..., str]  # the vectors of a tile's pairs: ``(writer, expression)``
    literal: Callable[[float], str]
    pad_width: Callable[[int], int]  # features that a block holds
    tiny: int  # features up to which vectors are unrolled


class Lines:
    """A reduction in a kernel. ``fields`` are given anew to each step: loops differ in what is known of conditions."""

    guesses: bool = False  # whether whole tiles do with a guess of a maximum (``guess``, ``guessed`` and others)
    guessing: bool = False  # whether this loop does
    sloped: bool = False  # whether the tile to guess from is the one nearest to the rows' own indices
    skipped: str = ""  # how many folded indices are not visited, where its state begins with them
    peeks: ClassVar[bool] = False  # whether it must look at the first tile before the walk (``peek``)

    def __init__(self, kind: Any, place: int, reduction: Expr, scale: Expr, v: Any, tools: Tools):
        """``place``: of the reduction in the fold. ``v``: the writer of the kernel's expressions."""
        self.kind, self.place, self.reduction, self.scale, self.v, self.tools = kind, place, reduction, scale, v, tools
        _, self.over, self.params = reduction.attrs
        self.name = f"{reduction.attrs[0]}{place}"
        self.helpers: list[str] = []  # functions of its own that the kernel calls
        self.prepare()

    def prepare(self) -> None:
        """Decide what the lines need; called once."""

    @property
    def first_result(self) -> int:
        """The place of its first result among those of the fold."""
        before = self.v.spec.fold.outputs
        return next(k for k, (r, _) in enumerate(before) if r is self.reduction)

    def place_of(self, fields: tuple[Expr, ...]) -> str:
        """The folded index of each pair, ``[1, FOLDED]``: its own, or the second field where results of parts, which
        know theirs, are folded again."""
        return "folded_at[None, :]" if len(fields) == 1 else f"{self.v.number(fields[1])}.to(tl.int32)"

    @property
    def totals(self) -> list[Any]:
        """Its running sums of vectors, where it has any."""
        return []

    def start(self) -> list[str]:
        """The lines that make the state, before the loop."""
        raise NotImplementedError

    def step(self, fields: tuple[Expr, ...]) -> None:
        """Append to ``v.inside`` what one tile does to the state."""
        raise NotImplementedError

    def finish(self) -> list[tuple[list[str], Any]]:
        """Per result: its text (one per feature where features are few) and its feature."""
        raise NotImplementedError


class CombineLaunch(NamedTuple):
    """A launch that combines the results of splits: which of the whole's tensors it writes, which of the stacked ones
    it reads, and what else it is given."""

    name: str
    written: tuple[int, ...]
    read: tuple[int, ...]
    parts: int
    rows: int
    constants: tuple[tuple[str, Any], ...]

    @property
    def grid(self) -> tuple[int]:
        return (-(-self.rows // dict(self.constants)["ROWS"]),)

    def given(self, whole: Sequence[Any], stacked: Sequence[Any]) -> tuple:
        """Its arguments."""
        return *[whole[k] for k in self.written], *[stacked[k] for k in self.read], self.parts, self.rows


NUMBERS_PER_INSTANCE = 2048  # of a program instance that combines splits
FLOATS = (torch.float32, torch.float64)


def split_blocks(parts: int) -> tuple[tuple[str, int], ...]:
    """The constants of a kernel that reads all splits of some rows at once."""
    lanes = max(2, 1 << (parts - 1).bit_length())
    return ("PARTS", lanes), ("ROWS", max(1, min(32, NUMBERS_PER_INSTANCE // lanes)))
