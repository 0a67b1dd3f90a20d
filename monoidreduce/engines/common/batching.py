"""Leading batch dimensions: broadcast without copies.

Adjacent batch dimensions that can be viewed as one in every tensor are merged; the last merged one becomes the batch
axis of tiles and the others are looped over, so that expanded, transposed and sliced batches are never copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

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
    return merge_batch_and_strides(batch, tensors, ())[:2]


def merge_batch_and_strides(
    batch: tuple[int, ...], tensors: list[Tensor], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], list[Tensor], list[tuple[int, ...]]]:
    """The same beside tensors that are yet to be allocated, of which the ``strides`` of the batch dimensions are known;
    these too with merged dimensions."""
    count = len(batch)
    views = [t.expand((*batch, *t.shape[count:])) for t in tensors]
    shape, others = list(batch), [list(s) for s in strides]
    at = 0
    while at + 1 < len(shape):
        if all(_can_merge(shape, v.stride(), at) for v in views) and all(_can_merge(shape, s, at) for s in others):
            views = [v.flatten(at, at + 1) for v in views]
            for s in others:
                s[at : at + 2] = [s[at] if shape[at + 1] == 1 else s[at + 1]]
            shape[at : at + 2] = [shape[at] * shape[at + 1]]
        else:
            at += 1
    if not shape:
        return (1,), [v.unsqueeze(0) for v in views], [(0,) for _ in others]
    return tuple(shape), views, [tuple(s) for s in others]


def _can_merge(shape: Sequence[int], strides: Sequence[int], at: int) -> bool:
    return 1 in shape[at : at + 2] or strides[at] == strides[at + 1] * shape[at + 1]


def iterate_outer(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every index into the looped (all but the last) batch dimensions."""
    return itertools.product(*(range(s) for s in shape[:-1]))
