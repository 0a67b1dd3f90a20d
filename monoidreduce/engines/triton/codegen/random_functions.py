"""Random numbers in kernels, as ``program/philox.py`` defines them: more functions like those of
``device_functions.py``, whose text is copied into kernels. They may call those."""

from __future__ import annotations

from typing import Any

from .device_functions import log1p

tl: Any = None  # triton.language, where the text is copied to


def turned(word, shift, factor):
    return (word ^ (word >> shift)) * factor


def mixed(word):
    word = turned(turned(word, 16, tl.full((), 0x21F0AAAD, tl.uint32)), 15, tl.full((), 0xD35A2D97, tl.uint32))
    return word ^ (word >> 15)


def hashed(a, b, c):
    return mixed(mixed(mixed(a) ^ b) ^ c)


def word(seed, batch, place):
    # an odd number of 32 bits: two rounds of 64 bits from seed, batch and place; shifts keep the sign
    found = (place.to(tl.int64) * -0x61C8864680B583EB + batch * -0x2E4AB5CD2E6D12FD) ^ seed
    found = (found ^ (found >> 32)) * -0x40A7B892E31B1A47
    found = (found ^ (found >> 32)) * -0x6B2FB644ECCEEE15
    return ((found >> 32) | 1).to(tl.int32)


def mark(seed, col):
    # the word of two columns, shifted so that this one's coin is in the upper bits of a product
    pair = col.to(tl.int64) >> 1
    low = ((word(seed, 0, (1 << 40) + (pair >> 6)).to(tl.int64) & 0xFFFFFFFF) >> 17) | 1
    low = tl.where((pair & 1) != 0, low * 13795 % 32768, low)
    low = tl.where((pair & 2) != 0, low * 18249 % 32768, low)
    low = tl.where((pair & 4) != 0, low * 4817 % 32768, low)
    low = tl.where((pair & 8) != 0, low * 3745 % 32768, low)
    low = tl.where((pair & 16) != 0, low * 321 % 32768, low)
    low = tl.where((pair & 32) != 0, low * 4737 % 32768, low)
    found = (word(seed, 0, -1 - pair).to(tl.int64) & -32768) | low
    return (found << (17 - (col.to(tl.int64) & 1) * 16)).to(tl.int32)


def block_of(first, at, SIZE: tl.constexpr):
    # of 128 columns each: one number where a tile lies in one
    return first >> 7 if SIZE <= 128 else at >> 7


def blended(row, block):
    # as a block of columns meets it: two steps on for each, a step being the word with its halves exchanged
    word = row.to(tl.uint32)
    return word + ((word << 16) | (word >> 16)) * (block.to(tl.uint32) * 2)


def coin(row, mark, block):
    return ((blended(row, block) * mark.to(tl.uint32)) >> 17).to(tl.int32)


def lot(seed, batch, i, j):
    # as a coin, with a step of its own for each row; (word + 1/2) / 2**32, which may be rounded to 1
    wide = tl.full((), 0, tl.int64) + seed
    low, high, number = wide.to(tl.uint32), (wide >> 32).to(tl.uint32), batch.to(tl.uint32)
    begin = mixed(hashed(low, high, number) + i.to(tl.uint32) * tl.full((), 0x9E3779B9, tl.uint32))
    step = mixed(hashed(number, low, high) + i.to(tl.uint32) * tl.full((), 0x85EBCA6B, tl.uint32)) | 1
    word = begin + j.to(tl.uint32) * step
    word = turned(turned(word, 16, tl.full((), 0x21F0AAAD, tl.uint32)), 15, tl.full((), 0xD35A2D97, tl.uint32))
    return word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10


def ticket(seed, batch, i, j):
    # in float32 whatever the arithmetic
    return tl.minimum(lot(seed, batch, i, j), 0.9999999403953552)


def gumbel(seed, batch, i, j, FLOAT: tl.constexpr):
    return -tl.log(-log1p(-ticket(seed, batch, i, j).to(FLOAT)))


def normal_log2(x):
    # of positive normal numbers: exponent and significand as they stand in the bits, and a polynomial; exact to 3e-5
    bits = x.to(tl.int32, bitcast=True)
    m = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    s = -0.4094755947589874 + m * 0.04392862692475319
    s = 4.069756507873535 + m * (-3.520218849182129 + m * (1.6101775169372559 + m * s))
    return m * s + (bits.to(tl.float32) * 1.1920928955078125e-07 - 128.7941589355469)


def quick_gumbel(seed, batch, i, j, FLOAT: tl.constexpr):
    # exact to 2e-4, which is little beside logits of 16 bits; a GPU's own logarithms take twice the instructions
    u = ticket(seed, batch, i, j)
    near = u * (1.0 + u * (1.0 / 2.0 + u * (1.0 / 3.0 + u * (1.0 / 4.0))))
    far = normal_log2(1.0 - u) * -0.6931471805599453
    return normal_log2(tl.where(u < 0.0625, near, far)) * -0.6931471805599453


def native_normal_log2(x):
    # exact to 2e-7 of 1, for normal numbers
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


def native_gumbel(seed, batch, i, j, FLOAT: tl.constexpr):
    # exact to 5e-5: a logarithm near 1 is exact to 2e-7 of 1, which is 4e-5 of it at 1 - 1 / 256; but for the least,
    # one in seven thousand (below -2.18), which may be one step of u off: none is infinite, and there is no comparison
    u = lot(seed, batch, i, j)
    near = u * (1.0 + u * 0.5)
    far = native_normal_log2(1.0 - u * 0.9999999403953552) * -0.6931471805599453
    return native_normal_log2(tl.where(u < 0.00390625, near, far)) * -0.6931471805599453


def uniform(seed, batch, i, j):
    # Philox4x32-10 with counter (j, i, batch, 0); (first word + 1/2) / 2**32, in float32 whatever the arithmetic
    zero = i * 0 + j * 0
    c0 = (zero + j).to(tl.uint32)
    c1 = (zero + i).to(tl.uint32)
    c2 = (zero + batch).to(tl.uint32)
    word, _w1, _w2, _w3 = tl.philox(seed, c0, c1, c2, zero.to(tl.uint32))
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
