"""Long lists, split: a row with far more edges than others is folded by many program instances and combined with ⊙.

All entries of the lists are cut into windows of equal size, by their place alone, so that nothing is read back from the
device. A list of more than two windows is left out by the kernel of all lists. A second launch has one program instance
a window: it searches the offsets for the list in which its window lies, and is idle where that is short. A third
combines the windows of each long list: that is a fold of the same kind, over the windows' results. Both are written by
the compiler of all kernels over lists (``codegen/listed.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ....program.expression import Expr, node, reduce_node
from ....program.lower import Fold
from ....reductions import FastForm, all_have, kind_of, outputs_of
from ...common.combine import split
from ...common.evaluate import Form, Sizes
from ..launch.launch_recipes import FoundAtLaunch
from .fold_kernel import Merged
from .listed_launch import ListedLaunch
from .prepared_fold import ExtraLaunch

LEAST_WINDOW = 2048  # entries
_TIMES_AVERAGE = 4  # a window has at least so many times the entries of an average list
_LEAST_WINDOWS = 4  # that all entries make, below which nothing is split


def window_size(fold: Fold, average: int, entries: int) -> int:
    """Entries of a window; 0 where no list is split. ``average``: entries of a list, ``entries``: of all."""
    best = {r.attrs[2] for r in fold.reductions if r.attrs[0] == "topk"}
    if not all_have(FastForm.LONG_LISTS, fold.reductions) or (best and len(fold.reductions) > 1):
        return 0  # of a top-k, k numbers of each window are combined
    size = max(LEAST_WINDOW, _TIMES_AVERAGE << max(average - 1, 0).bit_length())
    return size if entries > _LEAST_WINDOWS * size else 0


def combining_fold(fold: Fold, over: str) -> tuple[Fold, tuple[int, ...]]:
    """The fold over windows whose results are those of whole lists, and which of the windows' results it reads."""
    leaves: list[Expr] = []
    reductions: list[Expr] = []
    read: list[int] = []
    for r, places in split(fold, list(range(len(fold.outputs)))):
        if kind_of(r).per_pair:  # written where it is computed
            continue
        chosen = list(zip(places, outputs_of(r), strict=True))
        chosen = chosen[:-2] if r.attrs[0] == "soft" else chosen  # its logarithm and means say all
        flat = r.attrs[0] == "topk"  # its k numbers of a window are as many entries
        fields = tuple(
            node(
                "leaf", (), (f"window{k}",), rows=over == "rows", cols=over == "cols",
                feature=None if flat else feature, dtype=dtype,
            )
            for k, (feature, dtype) in chosen
        )  # fmt: skip
        leaves += fields
        read += [k for k, _ in chosen]
        reductions.append(reduce_node(r.attrs[0], over, r.attrs[2], fields))
    return Fold(tuple(leaves), tuple(reductions), raised=True), tuple(read)


MakeLaunch = Callable[[Fold, list[Any], Sizes, int], ListedLaunch]


class LongLists:
    """The two launches after that of all lists, on tensors like the given ones.

    ``make(fold, values, sizes, numbers)`` prepares a launch of a fold on leaves ``[*batch, length(, features)]``, of
    which each window has so many numbers."""

    def __init__(self, fold: Fold, over: str, sizes: Sizes, windows: ListedLaunch, make: MakeLaunch):
        self.fold, self.windows = fold, windows
        self.whole = [k for k, (r, _) in enumerate(fold.outputs) if not kind_of(r).per_pair]
        self.combine: ListedLaunch | None = None
        if self.whole:
            joined, self.read = combining_fold(fold, over)
            numbers = next((r.attrs[2][0] for r in fold.reductions if r.attrs[0] == "topk"), 1)
            self.flat = any(r.attrs[0] == "topk" for r in fold.reductions)
            count = windows.tiles * numbers
            among = replace(sizes, cols=count) if over == "cols" else replace(sizes, rows=count)
            like = [self._entries(windows.allocators[k]()) for k in self.read]
            self.combine = make(joined, like, among, numbers)

    def _entries(self, part: Tensor) -> Tensor:
        """Results of windows as what is combined."""
        return part.flatten(-2) if self.flat else part

    def __call__(self, outputs: list[Tensor], leaves: Sequence[Any], lists: tuple[Tensor, ...], merged: Merged) -> None:
        """Fold what the launch of all lists left out, into its ``outputs``."""
        if not self.windows.grid:
            return
        parts = [allocate() if k in self.whole else outputs[k] for k, allocate in enumerate(self.windows.allocators)]
        while not self.windows.launch_into(parts, [*leaves, *lists], merged):
            pass
        if self.combine is not None:
            own = [outputs[k] for k in self.whole]
            while not self.combine.launch_into(own, [*(self._entries(parts[k]) for k in self.read), *lists[:2]], dict):
                pass

    def recipes(
        self, outputs: Sequence[Form], places: Sequence[int], feeds: int, find: Callable[[Any], FoundAtLaunch]
    ) -> list[ExtraLaunch] | None:
        """How a replay makes these launches again after that of all lists, into its ``outputs``; None where it cannot.

        ``places``: of the leaves among the step's, of which there are ``feeds``; ``find``: the lists of a launch."""
        if not self.windows.grid:
            return []
        names = {k: f"window{k}" for k in self.whole}
        recipe = self.windows.recipe_over(places, find(self.windows))
        if recipe is None:
            return None
        made = [ExtraLaunch(recipe, tuple(names.get(k, k) for k in range(len(self.windows.allocators))))]
        if self.combine is not None:
            recipe = self.combine.recipe_over(range(feeds, feeds + len(self.read)), find(self.combine))
            if recipe is None:
                return None
            recipe = recipe._replace(outputs=tuple(outputs[k] for k in self.whole))  # in their types
            made.append(ExtraLaunch(recipe, tuple(self.whole), tuple(names[k] for k in self.read)))
        return made
