"""Leading batch dimensions: broadcast without copies.

Adjacent batch dimensions that can be viewed as one in every tensor are merged; the last merged one becomes the batch
axis of tiles and the others are looped over, so that expanded, transposed and sliced batches are never copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor


def broadcast_shapes(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """The broadcast of two batch shapes. ``torch.broadcast_shapes`` is called only if they differ: its first call takes
    a second, for its imports."""
    if not one or one == other:
        return other
    return tuple(torch.broadcast_shapes(one, other)) if other else one


def merge_batch_dims(batch: tuple[int, ...], tensors: list[Tensor]) -> tuple[tuple[int, ...], list[Tensor]]:
    """Expand each tensor to the batch shape and merge adjacent dimensions; returns the merged batch shape and views."""
    count = len(batch)
    views = [t.expand((*batch, *t.shape[count:])) for t in tensors]
    shape = list(batch)
    at = 0
    while at + 1 < len(shape):
        if all(_can_merge(v, at) for v in views):
            views = [v.flatten(at, at + 1) for v in views]
            shape[at : at + 2] = [shape[at] * shape[at + 1]]
        else:
            at += 1
    if not shape:
        return (1,), [v.unsqueeze(0) for v in views]
    return tuple(shape), views


def _can_merge(v: Tensor, at: int) -> bool:
    if v.shape[at] == 1 or v.shape[at + 1] == 1:
        return True
    return v.stride(at) == v.stride(at + 1) * v.shape[at + 1]


def iterate_outer(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every index into the looped (all but the last) batch dimensions."""
    return itertools.product(*(range(s) for s in shape[:-1]))
