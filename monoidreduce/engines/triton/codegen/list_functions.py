"""Functions that kernels over lists call; their text is copied into kernels, as that of ``device_functions.py``."""

from __future__ import annotations

from typing import Any

tl: Any = None  # triton.language, where the text is copied to


def find_list(offsets, count, place):
    # the last of so many lists that begins at a place or before: 32 are looked at in each step
    lane = tl.arange(0, 32)
    first, span = 0, count
    while span > 1:
        step = tl.cdiv(span, 32)
        inside = lane * step < span
        begins = tl.load(offsets + first + lane * step, mask=inside, other=0)
        here = tl.maximum(tl.sum((inside & (begins <= place)).to(tl.int32), 0) - 1, 0)
        first += here * step
        span = tl.minimum(step, span - here * step)
    return first


def first_lane(here):
    # of what is true in each row of a block, the first alone
    lane = tl.arange(0, here.shape[1])[None, :]
    return lane == tl.min(tl.where(here, lane, here.shape[1]), 1)[:, None]
