"""Functions that kernels call beyond Triton's own. Nobody calls them here: their text is copied into kernels.

So this file needs no Triton, a kernel's text is complete in itself, and its hash covers these functions too. No
libdevice functions: the text must also run in Triton's interpreter. A function may call those that stand above it.
``special_functions.py`` has the approximate forms for 16-bit programs, inverse, gamma and error functions in both, and
random numbers.
"""

from __future__ import annotations

from typing import Any

tl: Any = None  # triton.language, where the text is copied to


def sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


def decay(x):
    return tl.where(x == float("-inf"), 0.0, tl.exp(-x))


def finite(x):
    # what exponents are measured from: infinity less infinity would be NaN
    return tl.where(tl.abs(x) == float("inf"), 0.0, x)


def measured(most, guess, far):
    # what a tile's exponents are measured from: the guess, unless the greatest of them lies far from it
    return tl.where((tl.abs(most - guess) <= far) | (most == float("-inf")), guess, finite(most))


def unseen(x):
    # the logarithm of a total by which weights are divided: infinite where there was nothing, so that they are 0
    return tl.where(x == float("-inf"), float("inf"), x)


def lanes(block):
    # sums over what a thread holds of a row; its four threads are added at the end
    return tl.sum(tl.sum(tl.reshape(block, [block.shape[0], block.shape[1] // 8, 4, 2]), 1), 2)


def lane_moments(block, inside):
    # of what a thread holds of a row: how many are inside, their mean and the sum of squared deviations from it
    x = tl.reshape(tl.where(inside, block, 0.0), [block.shape[0], block.shape[1] // 8, 4, 2])
    here = tl.reshape(inside, [1, block.shape[1] // 8, 4, 2])
    count = tl.sum(tl.sum(here.to(block.dtype), 1), 2)
    mean = tl.sum(tl.sum(x, 1), 2) / tl.maximum(count, 1.0)
    gap = tl.where(here, x - mean[:, None, :, None], 0.0)
    return count, mean, tl.sum(tl.sum(gap * gap, 1), 2)


def lane_largest(weight):
    # the largest weight that a thread holds of a row, as bits: one instruction compares three integers
    bits = tl.reshape(tl.cast(weight, tl.int32, bitcast=True), [weight.shape[0], weight.shape[1] // 8, 4, 2])
    return tl.max(tl.max(bits, 1), 2)


def rounding(weight, NARROW: tl.constexpr):
    # what rounding takes off a weight
    return weight - weight.to(NARROW).to(tl.float32)


def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


def expm1(x):
    # Taylor near 0, where exp(x) - 1 cancels. (Kahan's way needs a log exact near 1; a GPU's fast one is not.)
    s = 1.0 + x / 12.0
    s = 1.0 + s * x * (1.0 / 11.0)
    s = 1.0 + s * x * (1.0 / 10.0)
    s = 1.0 + s * x * (1.0 / 9.0)
    s = 1.0 + s * x * (1.0 / 8.0)
    s = 1.0 + s * x * (1.0 / 7.0)
    s = 1.0 + s * x * (1.0 / 6.0)
    s = 1.0 + s * x * (1.0 / 5.0)
    s = 1.0 + s * x * (1.0 / 4.0)
    s = 1.0 + s * x * (1.0 / 3.0)
    s = 1.0 + s * x * (1.0 / 2.0)
    return tl.where(tl.abs(x) < 0.35, s * x, tl.exp(x) - 1.0)


def atanh_twice(f):
    # 2 atanh(f / (2 + f)), which is log(1 + f), for f near 0
    z = f / (2.0 + f)
    z2 = z * z
    s = 1.0 / 17.0 + z2 * (1.0 / 19.0 + z2 * (1.0 / 21.0))
    s = 1.0 / 15.0 + z2 * s
    s = 1.0 / 13.0 + z2 * s
    s = 1.0 / 11.0 + z2 * s
    s = 1.0 / 9.0 + z2 * s
    s = 1.0 / 7.0 + z2 * s
    s = 1.0 / 5.0 + z2 * s
    s = 1.0 / 3.0 + z2 * s
    return 2.0 * (z + z * z2 * s)


def log(x):
    # a GPU's own float32 form may be off by four units of the last place, torch's by one
    if x.dtype == tl.float32:
        small = x < 1.1754943508222875e-38
        bits = tl.where(small, x * 8388608.0, x).to(tl.int32, bitcast=True) - 1060439283  # of sqrt(1/2)
        power = ((bits >> 23) - tl.where(small, 23, 0)).to(tl.float32)
        mantissa = ((bits & 8388607) + 1060439283).to(tl.float32, bitcast=True)
        y = power * 0.693145751953125 + (power * 1.428606765330187e-06 + atanh_twice(mantissa - 1.0))
        return tl.where((x > 0.0) & (x < float("inf")), y, tl.log(x))
    else:
        return tl.log(x)


def log1p(x):
    # near 0 not by way of 1 + x, whose rounding loses digits
    return tl.where(tl.abs(x) < 0.3, atanh_twice(x), log(1.0 + x))


def tanh(x):
    # from exp(-2|x|) - 1, which neither overflows nor cancels near 0
    gap = expm1(-2.0 * tl.abs(x))
    y = -gap / (2.0 + gap)
    return tl.where(x < 0.0, -y, y)


def gate(x):
    return sigmoid(x)


def normal_gate(x):
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


def mish_gate(x):
    # tanh(softplus(x)) without logarithm: from exp(x), bounded where the quotient is 1
    e = tl.exp(tl.minimum(x, 30.0))
    n = e * (e + 2.0)
    return n / (n + 2.0)


def cosh(x):
    # not from exp(|x|) where that is infinite and half of it is not
    a = tl.abs(x)
    return tl.where(a > 88.0, tl.exp(a - 0.6931471805599453), 0.5 * (tl.exp(a) + tl.exp(-a)))


def sinh(x):
    # small numbers from exp - 1, large ones from exp alone
    a = tl.abs(x)
    t = expm1(tl.where(a > 30.0, 0.0, a))
    y = tl.where(a > 30.0, tl.exp(a - 0.6931471805599453), 0.5 * (t + t / (t + 1.0)))
    return tl.where(x < 0.0, -y, y)


def erfc(x):
    # t exp(-x² + P(t)) with t = 2 / (2 + |x|): Chebyshev's series of P, summed by Clenshaw's rule
    z = tl.abs(x)
    t = 2.0 / (2.0 + z)
    y = 4.0 * t - 2.0
    d = y * 0.0
    e = y * 0.0
    d, e = y * d - e + -2.8e-17, d
    d, e = y * d - e + 1.21e-16, d
    d, e = y * d - e + -9.4e-17, d
    d, e = y * d - e + -1.523e-15, d
    d, e = y * d - e + 7.106e-15, d
    d, e = y * d - e + 3.81e-16, d
    d, e = y * d - e + -1.12708e-13, d
    d, e = y * d - e + 3.13092e-13, d
    d, e = y * d - e + 8.94487e-13, d
    d, e = y * d - e + -6.886027e-12, d
    d, e = y * d - e + 2.394038e-12, d
    d, e = y * d - e + 9.6467911e-11, d
    d, e = y * d - e + -2.27365122e-10, d
    d, e = y * d - e + -9.91364156e-10, d
    d, e = y * d - e + 5.059343495e-9, d
    d, e = y * d - e + 6.529054439e-9, d
    d, e = y * d - e + -8.5238095915e-8, d
    d, e = y * d - e + 1.5626441722e-8, d
    d, e = y * d - e + 1.303655835580e-6, d
    d, e = y * d - e + -1.624290004647e-6, d
    d, e = y * d - e + -2.0278578112534e-5, d
    d, e = y * d - e + 4.2523324806907e-5, d
    d, e = y * d - e + 3.66839497852761e-4, d
    d, e = y * d - e + -9.46595344482036e-4, d
    d, e = y * d - e + -9.561514786808631e-3, d
    d, e = y * d - e + 1.9476473204185836e-2, d
    d, e = y * d - e + 6.4196979235649026e-1, d
    tail = t * tl.exp(-z * z + 0.5 * (-1.3026537197817094 + y * d) - e)
    return tl.where(x < 0.0, 2.0 - tail, tail)


def arctan(x):
    # twice halved by atan(x) = 2 atan(x / (1 + sqrt(1 + x²))), then the series around 0 up to x²⁵
    big = tl.abs(x) > 1.0
    y = tl.where(big, 1.0 / x, x)
    y = y / (1.0 + tl.sqrt(1.0 + y * y))
    y = y / (1.0 + tl.sqrt(1.0 + y * y))
    s = y * y
    total = 1.0 / 25 + 0.0 * s
    total = 1.0 / 23 - s * total
    total = 1.0 / 21 - s * total
    total = 1.0 / 19 - s * total
    total = 1.0 / 17 - s * total
    total = 1.0 / 15 - s * total
    total = 1.0 / 13 - s * total
    total = 1.0 / 11 - s * total
    total = 1.0 / 9 - s * total
    total = 1.0 / 7 - s * total
    total = 1.0 / 5 - s * total
    total = 1.0 / 3 - s * total
    total = 4.0 * (y - y * s * total)
    return tl.where(big, sign(x) * 1.5707963267948966 - total, total)


def power(x, n):
    if x.dtype.is_floating():
        # in float64, since an error in n log2|x| is multiplied by the result's logarithm
        size = tl.abs(x)
        wide = tl.exp2(n.to(tl.float64) * tl.log2(size.to(tl.float64))).to(x.dtype)
        wide = tl.where(size == 1.0, 1.0, wide)
        whole = tl.floor(n) == n
        odd = whole & (tl.floor(n * 0.5) * 2.0 != n)
        negative = (x < 0.0) | ((x == 0.0) & (1.0 / x < 0.0))
        none = tl.where(whole, False, (x < 0.0) & (size < float("inf")))
        signed = tl.where(none, float("nan"), tl.where(negative, tl.where(odd, -wide, wide), wide))
        return tl.where(n == 0.0, 1.0, signed)
    else:
        # of whole numbers, by squaring; a negative exponent leaves nothing but 1 and -1
        base, left = tl.broadcast(x.to(tl.int64), n.to(tl.int64))
        result = tl.where((left < 0) & (tl.abs(base) != 1), 0, left * 0 + 1)
        for _ in range(64):
            result = tl.where((left & 1) != 0, result * base, result)
            base = base * base
            left = (left >> 1) & 9223372036854775807
        return result


def gelu_none(x):
    return x * normal_gate(x)


def gelu_tanh(x):
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def softplus(x, beta, threshold):
    return tl.where(x * beta > threshold, x, log1p(tl.exp(x * beta)) / beta)


def logsigmoid(x):
    return tl.where(x < 0.0, x, 0.0) - log1p(tl.exp(-tl.abs(x)))


def logaddexp(a, b):
    high = tl.maximum(a, b)
    gap = tl.abs(a - b)
    return tl.where(a == b, a + 0.6931471805599453, high + log1p(tl.exp(-gap)))


def nearest(x):
    # halves to even
    y = tl.floor(x + 0.5)
    half = (y - x == 0.5) & (tl.floor(y * 0.5) * 2.0 != y)
    return tl.where(half, y - 1.0, y)


def nan_to_num(x, nan, posinf, neginf):
    finite = tl.where(x == float("inf"), posinf, tl.where(x == float("-inf"), neginf, x))
    return tl.where(x != x, nan, finite)


def remainder(a, b):
    # of the divisor's sign, as in Python
    if a.dtype.is_floating():
        a, b = tl.broadcast(a, b)
        q = a / b
        r = tl.fma(-tl.where(q < 0.0, tl.ceil(q), tl.floor(q)), b, a)
        r = tl.where(tl.abs(r) >= tl.abs(b), r - tl.where((r < 0.0) == (b < 0.0), b, -b), r)  # q was rounded
        r = tl.where((tl.abs(b) == float("inf")) & (tl.abs(a) < float("inf")), a, r)
        return tl.where((r != 0.0) & ((r < 0.0) != (b < 0.0)), r + b, r)
    else:
        r = a % b
        return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


def floor_divide(a, b):
    if a.dtype.is_floating():
        # of what the remainder leaves: a quotient may be rounded up to a whole number that it does not reach
        q = (a - remainder(a, b)) / b
        q = tl.where(q - tl.floor(q) > 0.5, tl.floor(q) + 1.0, tl.floor(q))
        under = tl.where((a != 0.0) & ((a < 0.0) != (b < 0.0)), a * 0.0 - 1.0, a * 0.0)
        q = tl.where((tl.abs(b) == float("inf")) & (tl.abs(a) < float("inf")), under, q)
        return tl.where(b == 0.0, a / b, q)
    else:
        q = a // b
        return tl.where((a - q * b != 0) & ((a < 0) != (b < 0)), q - 1, q)


def halved(x):
    # the columns of a tile in two runs
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


def highest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


def lowest(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


def larger(a, ia, b, ib):
    # the larger value and its place: NaN beats all, the first of equals
    both_nan = (a != a) & (b != b)
    same = (a == b) | both_nan
    take = tl.where(same, ib < ia, ((b > a) | (b != b)) & (a == a))
    return tl.where(take, b, a), tl.where(take, ib, ia)


def smaller(a, ia, b, ib):
    # the smaller value and its place: NaN beats all, the first of equals
    both_nan = (a != a) & (b != b)
    same = (a == b) | both_nan
    take = tl.where(same, ib < ia, ((b < a) | (b != b)) & (a == a))
    return tl.where(take, b, a), tl.where(take, ib, ia)


def ordered32(x):
    # integers in the order of the numbers; NaN is above all
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(x != x, 2143289344, bits)
    return bits ^ ((bits >> 31) & 2147483647)


def unordered32(k):
    return (k ^ ((k >> 31) & 2147483647)).to(tl.float32, bitcast=True)


def ordered64(x):
    bits = (x + 0.0).to(tl.int64, bitcast=True)
    bits = tl.where(x != x, 9221120237041090560, bits)
    return bits ^ ((bits >> 63) & 9223372036854775807)


def unordered64(k):
    return (k ^ ((k >> 63) & 9223372036854775807)).to(tl.float64, bitcast=True)


def sum_features(x):
    return tl.sum(x, len(x.shape) - 1)


def split_numbers(x):
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


def split_vectors(x):
    halves = tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2, x.shape[2]])
    return tl.split(tl.permute(halves, (0, 1, 3, 2)))


def within(at, size, RAGGED: tl.constexpr):
    # which indices of a tile exist; all of them where tiles fill the axis, which the compiler then knows
    if RAGGED:
        return at < size
    else:
        return tl.full(at.shape, 1, tl.int1)


def longest_first(program, tiles, turns, flip):
    # which tile of which batch element: those with long walks of all batch elements, then the short quarter, so that
    # at the end no processor is left alone with a long one; flip: the last tiles have the longest
    short = tiles // 4
    late = program >= (tiles - short) * turns
    many = tl.where(late, short, tiles - short)
    rest = program - tl.where(late, (tiles - short) * turns, 0)
    place = rest % many + tl.where(late, tiles - short, 0)
    return place + flip * (tiles - 1 - 2 * place), rest // many


def grouped(program, tiles, turns, few):
    # which tile and which turn of it: a few tiles take all turns before the next few, so that those which run at the
    # same time share what they read
    many = few * turns
    first = program // many * few
    size = tl.minimum(tiles - first, few)
    rest = program % many
    return first + rest % size, rest // size


# Products of float32 vectors whose elements are split into two or three bfloat16 numbers that add up to them. Of the
# nine products of thirds the three smallest are below float32's rounding; the others are added smallest first.


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


def bfloat16_of_int8(x):
    # 128 + the lower seven bits, minus 128 or, where the sign is set, 256: both are bfloat16 numbers with those bits
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b, c, d, one; mov.b32 one, 0x3F803F80; "
        "prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342; "
        "lop3.b32 c, a, 0x007F007F, 0x43004300, 0xEA; lop3.b32 a, a, 0x00800080, 0xC300C300, 0xEA; "
        "lop3.b32 d, b, 0x007F007F, 0x43004300, 0xEA; lop3.b32 b, b, 0x00800080, 0xC300C300, 0xEA; "
        "fma.rn.bf16x2 $0, c, one, a; fma.rn.bf16x2 $1, d, one, b; }",
        "=r,=r,r",
        [x],
        dtype=tl.bfloat16,
        is_pure=False,
        pack=4,
    )


def bfloat16_of_float8_e4m3fn(x):
    return tl.inline_asm_elementwise(
        "{ .reg .b16 l, h, a, b, c, d; .reg .b32 p, q; .reg .f32 w, x, y, z; mov.b32 {l, h}, $2; "
        "cvt.rn.f16x2.e4m3x2 p, l; cvt.rn.f16x2.e4m3x2 q, h; mov.b32 {a, b}, p; mov.b32 {c, d}, q; "
        "cvt.f32.f16 w, a; cvt.f32.f16 x, b; cvt.f32.f16 y, c; cvt.f32.f16 z, d; "
        "cvt.rn.bf16x2.f32 $0, x, w; cvt.rn.bf16x2.f32 $1, z, y; }",
        "=r,=r,r",
        [x],
        dtype=tl.bfloat16,
        is_pure=False,
        pack=4,
    )


def bfloat16_of_float8_e5m2(x):
    return tl.inline_asm_elementwise(
        "{ .reg .b16 l, h, a, b, c, d; .reg .b32 p, q; .reg .f32 w, x, y, z; mov.b32 {l, h}, $2; "
        "cvt.rn.f16x2.e5m2x2 p, l; cvt.rn.f16x2.e5m2x2 q, h; mov.b32 {a, b}, p; mov.b32 {c, d}, q; "
        "cvt.f32.f16 w, a; cvt.f32.f16 x, b; cvt.f32.f16 y, c; cvt.f32.f16 z, d; "
        "cvt.rn.bf16x2.f32 $0, x, w; cvt.rn.bf16x2.f32 $1, z, y; }",
        "=r,=r,r",
        [x],
        dtype=tl.bfloat16,
        is_pure=False,
        pack=4,
    )


def float16_of_int8(x):
    # 1024 + the number, which is at least -128, + 128: those bits are a float16 number
    return tl.inline_asm_elementwise(
        "{ .reg .b32 x, bias; xor.b32 x, $2, 0x80808080; mov.b32 bias, 0x64806480; "
        "prmt.b32 $0, x, 0x64646464, 0x4140; prmt.b32 $1, x, 0x64646464, 0x4342; "
        "sub.rn.f16x2 $0, $0, bias; sub.rn.f16x2 $1, $1, bias; }",
        "=r,=r,r",
        [x],
        dtype=tl.float16,
        is_pure=False,
        pack=4,
    )


def float16_of_float8_e4m3fn(x):
    return tl.inline_asm_elementwise(
        "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }",
        "=r,=r,r",
        [x],
        dtype=tl.float16,
        is_pure=False,
        pack=4,
    )


def float16_of_float8_e5m2(x):
    # float16 with eight bits less
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;",
        "=r,=r,r",
        [x],
        dtype=tl.float16,
        is_pure=False,
        pack=4,
    )


def float16_unit(x):
    # a power of two for each row, by which its largest number is between 2¹⁴ and 2¹⁵: less than 2⁻³⁸ of it is lost
    bits = tl.max(tl.abs(x.to(tl.float32)), 1).to(tl.int32, bitcast=True) & 0x7F800000
    return tl.minimum(tl.maximum(bits, 0x0D800000), 0x7F000000).to(tl.float32, bitcast=True) * 0.00006103515625


def both_halves(x):
    # 4-bit numbers, two in a byte, each with an offset of 8
    return tl.interleave(x & 15, x >> 4).to(tl.int8) - 8


def of_thirds(x, y, z):
    return x.to(tl.float32) + (y.to(tl.float32) + z.to(tl.float32))


# Of kernels over lists


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
