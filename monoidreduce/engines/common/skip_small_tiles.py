"""Tiles of a gradient that are left out because they are small: ``mr.skip_below``.

A gradient contracts cotangents of pairs with vectors: dx_i = Σ_j c_ij y_j. Of a peaked softmax almost all c_ij are
tiny; where every c_ij of a tile is, its two products can be left out, at the price of an error that is known
beforehand. Off unless it is asked for. How many tiles were contracted is counted where they are: on a GPU in a tensor
that is read only when somebody asks.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...plan import settings
from . import matmul

TILE = 128  # rows and columns of a tile that is contracted or left out


class skip_below(contextlib.ContextDecorator):
    """Leave tiles out of gradients where every pair's cotangent is below a bound. A block, or a decorator.

    A gradient multiplies numbers of pairs with vectors: dx_i = Σ_j c_ij y_j and dy_j = Σ_i c_ij x_i. A tile of 128
    rows × 128 columns (less at the edges) is left out of such a sum where all its |c_ij| < ``bound`` × C, with C the
    largest |c_ij| seen so far: on a GPU that of the same panel, in tiles of torch of all tiles so far. So it
    means the same for a sum, a mean or a scaled loss, and every entry of a gradient is off by less than

        |Δ dx_i| < bound · C · Σ_j |y_j|  and  |Δ dy_j| < bound · C · Σ_i |x_i|,

    with C the largest of all and the sums over the pairs in tiles left out. Values, and gradients of numbers per row or
    column, are never touched; nor is a gradient that is itself to be differentiated, one that is compiled or
    transformed, or anything where kernels hold whole vectors (up to 256 features on a GPU) or the problem is run dense:
    there all tiles are contracted. A backward keeps the bound of its forward.

    ``tiles`` says how many tiles gradients have met inside the block so far, ``kept`` which share of them was
    contracted; on a GPU asking waits for it.

    >>> import torch, monoidreduce as mr
    >>> x, weight = torch.randn(300, 300, requires_grad=True), torch.randn(5000, 300) * 3
    >>> with mr.use(engine="panel"), mr.skip_below(2**-12) as skipped:
    ...     mr.ops.cross_entropy(x, weight, torch.zeros(300, dtype=torch.int64)).backward()
    >>> skipped.tiles >= 3 * 40, 0 < skipped.kept < 1  # of 128 by 128 pairs
    (True, True)
    """

    def __init__(self, bound: float):
        usual = isinstance(bound, (int, float)) and not isinstance(bound, bool)
        if not usual or not 0 < bound < 1 or not math.isfinite(bound):
            raise ArgumentError(
                detail=f"skip_below was given {bound!r}",
                fix="Give a number between 0 and 1, such as 2**-12; to leave nothing out, leave skip_below out",
            )
        self.bound = float(bound)
        self.tiles = 0
        self._counts: dict[torch.device, Tensor] = {}
        self._kept = 0
        self._before: list[dict] = []

    def __enter__(self) -> skip_below:
        self._before.append(settings.put(skip_below=self))
        return self

    def __exit__(self, *error: object) -> None:
        settings.put(**self._before.pop())

    def __repr__(self) -> str:
        return f"skip_below({self.bound!r})"

    @property
    def kept(self) -> float:
        """The share of tiles that was contracted; 1.0 where there was none."""
        kept = self._kept + sum(int(count) for count in self._counts.values())
        return kept / self.tiles if self.tiles else 1.0

    def count(self, kept: int | Tensor, tiles: int) -> None:
        """Add tiles: how many were kept, as a number or as counts on a device, which are not waited for."""
        self.tiles += tiles
        if isinstance(kept, Tensor):
            total = self._counts.setdefault(kept.device, torch.zeros((), dtype=torch.int64, device=kept.device))
            total += kept.sum()
        else:
            self._kept += kept


_active: contextvars.ContextVar[skip_below | None] = contextvars.ContextVar("skipping", default=None)


def requested() -> skip_below | None:
    """The enclosing ``mr.skip_below``, or None."""
    return settings.current.get().skip_below


active = _active.get  # the ``mr.skip_below`` that applies to the gradient being computed, or None


def apply_to_gradient() -> contextlib.AbstractContextManager[skip_below | None]:
    """Inside the block, every sum of vectors is a gradient, and the requested bound applies to it."""
    return settings.hold(_active, requested())


class SkippingContraction:
    """Contractions of one sum, tile by tile; what is small is relative to the largest weight so far.

    The large tiles along the folded axis are gathered for 128 kept indices at a time. On a GPU all tiles are contracted
    here, since comparing would need a host sync; panel kernels compare on the device
    (``triton/panel/accumulators.py``).
    """

    def __init__(self) -> None:
        self.largest = 0.0

    def __call__(self, total: Tensor, weights: Tensor, vectors: Tensor) -> None:
        """total[b, l, d] += weights[b, l, n] @ vectors[b, n, d], without the tiles that are left out."""
        skipped = _active.get()
        if skipped is None or weights.device.type != "cpu":
            matmul.accumulate(total, weights, vectors)
            return
        self.largest = max(float(weights.abs().amax()), self.largest)
        least = self.largest * skipped.bound if math.isfinite(self.largest) else 0.0
        for b in range(weights.shape[0]):
            for at in range(0, weights.shape[1], TILE):
                block, one = weights[b, at : at + TILE], slice(b, b + 1)
                large = _find_large_tiles(block, least)
                kept = int(large.sum())
                skipped.count(kept, len(large))
                if kept == len(large):
                    matmul.accumulate(total[one, at : at + TILE], block.unsqueeze(0), vectors[one])
                elif kept:
                    chosen = large.repeat_interleave(TILE)[: block.shape[1]].nonzero().squeeze(1)
                    few = block[:, chosen].unsqueeze(0), vectors[b, chosen].unsqueeze(0)
                    matmul.accumulate(total[one, at : at + TILE], *few)


def _find_large_tiles(block: Tensor, least: float) -> Tensor:
    """Which blocks of 128 columns have a number that is not below ``least``; NaN counts as large."""
    weak = (block.abs().amax(0) < least).to(torch.uint8)
    return torch.stack([run.amin() for run in weak.split(TILE)]) == 0


# A counter of tiles computed and skipped, for tests and for ``explain``.


@dataclass
class Tally:
    """Tiles and pairs computed, and those that interval analysis showed to be idle.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def later(x: mr.Row, y: mr.Col):
    ...     return mr.sum(torch.where(mr.col_index > mr.row_index, x * y, 0.0))
    >>> with mr.use(engine="eager"), mr.tally() as seen:
    ...     sums = later(torch.ones(4096), torch.ones(4096))
    >>> seen.skipped > 0 and seen.tiles == seen.computed + seen.skipped
    True
    """

    computed: int = 0
    skipped: int = 0
    pairs_computed: int = 0
    pairs_skipped: int = 0

    @property
    def tiles(self) -> int:
        return self.computed + self.skipped


counters: contextvars.ContextVar[tuple[Tally, ...]] = contextvars.ContextVar("tally", default=())


@contextlib.contextmanager
def tally() -> Iterator[Tally]:
    """Count the tiles that run inside the block.

    >>> with tally() as t:
    ...     pass
    >>> t.computed, t.skipped
    (0, 0)
    """
    mine = Tally()
    with settings.hold(counters, (*counters.get(), mine)):
        yield mine


def pause_counting() -> contextlib.AbstractContextManager[tuple]:
    """Nothing that runs inside the block is counted: for dry runs."""
    return settings.hold(counters, ())


def count_tile(computed: bool, batch: int, rows: int, cols: int, tiles: int = 1) -> None:
    """Add a tile, or several of one size, to all active counters; ``computed``: False if they were skipped."""
    for t in counters.get():
        if computed:
            t.computed += tiles
            t.pairs_computed += tiles * batch * rows * cols
        else:
            t.skipped += tiles
            t.pairs_skipped += tiles * batch * rows * cols
