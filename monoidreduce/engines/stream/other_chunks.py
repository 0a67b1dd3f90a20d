"""Gradients of monoids that have no local one (``common/others.py``), over columns that arrive in chunks.

A chunk is one more block: a first reading keeps a state of each chunk, whose fold gives every chunk its cotangent; a
second one goes back through the pairs of each chunk. So such a gradient reads the source twice, and holds as many
numbers per row as a state has, for each chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...program.lower import Fold
from ..common.evaluate import Sizes
from ..common.others import Blocks, add_gradients, each_reduction


class OtherChunks:
    """The reductions of one pass whose gradients come from all others, with their cotangents."""

    def __init__(self, fold: Fold, cotangents: Sequence[Tensor | None]):
        self.parts = [*each_reduction(fold, cotangents)]
        self.states: list[list[list[Tensor]]] = [[] for _ in self.parts]  # of each reduction and chunk
        self.given: list[list[tuple[Tensor, ...]]] = []  # likewise, the cotangents

    def read(self, leaves: Sequence[Any], sizes: Sizes) -> None:
        """The first reading of a chunk."""
        for (fold, _), states in zip(self.parts, self.states, strict=True):
            states.append(_job(fold, leaves, sizes, (False,) * len(leaves)).states())

    def fold(self, leaves: Sequence[Any], sizes: Sizes) -> None:
        """After the first reading: the cotangent of each chunk."""
        for (fold, given), states in zip(self.parts, self.states, strict=True):
            job = _job(fold, leaves, sizes, (False,) * len(leaves))
            stacked = [torch.stack(ts) for ts in zip(*states, strict=True)]
            pulled = torch.func.vjp(job.merge(0), *stacked)[1](tuple(job.filled(given)))
            self.given.append([*zip(*(t.unbind() for t in pulled), strict=True)])
        self.states.clear()

    def gradients(
        self, number: int, leaves: Sequence[Any], sizes: Sizes, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """The second reading of chunk ``number``: the gradients of its leaves."""
        grads: list[Tensor | None] = [None] * len(leaves)
        for (fold, _), given in zip(self.parts, self.given, strict=True):
            job = _job(fold, leaves, sizes, wanted)
            add_gradients(grads, job, job.gradients(given[number]))
        return grads


def _job(fold: Fold, leaves: Sequence[Any], sizes: Sizes, wanted: Sequence[bool]) -> Blocks:
    return Blocks(fold, sizes, tuple(leaves), tuple(wanted))
