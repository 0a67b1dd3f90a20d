"""Small functions of kernels that multiply float32 numbers in pieces: three bfloat16 numbers that add up to one.

Nobody calls them here: their text is copied into kernels, as that of ``device_functions.py``. Of the nine products of pieces the
three smallest are below float32's rounding; the others are added smallest first.
"""

from __future__ import annotations

from typing import Any

tl: Any = None  # triton.language, where the text is copied to


def piece_times(a, b, acc):
    return tl.dot(a, b, acc=acc)


def high_third(x):
    # its first eight digits, cut off: what is left has its sign
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


def product_of_thirds(a, b, c, x, y, z):
    acc = piece_times(b, y, tl.zeros([a.shape[0], x.shape[1]], tl.float32))
    acc = piece_times(c, x, acc)
    acc = piece_times(a, z, acc)
    acc = piece_times(b, x, acc)
    acc = piece_times(a, y, acc)
    return piece_times(a, x, acc)


def thirds_across(a, b, c, x, y, z):
    return product_of_thirds(a, b, c, tl.trans(x), tl.trans(y), tl.trans(z))


def halves_across(a, b, x, y):
    acc = piece_times(b, tl.trans(x), tl.zeros([a.shape[0], x.shape[0]], tl.float32))
    acc = piece_times(a, tl.trans(y), acc)
    return piece_times(a, tl.trans(x), acc)


def weighted_thirds(weight, x, y, z):
    # a tile's sum, from 0: the units cut digits off, and over a long walk that would add up
    high = high_third(weight)
    rest = weight - high
    middle = high_third(rest)
    a, b, c = high.to(x.dtype), middle.to(x.dtype), (rest - middle).to(x.dtype)
    return product_of_thirds(a, b, c, x, y, z)


def of_thirds(x, y, z):
    return x.to(tl.float32) + (y.to(tl.float32) + z.to(tl.float32))
