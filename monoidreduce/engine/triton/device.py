"""Small functions that kernels use beyond Triton's own. Nobody calls them here: their text is copied into kernels.

So this file needs no Triton, a kernel's text is complete in itself, and its hash covers the helpers too. No libdevice
functions: the text must also run in Triton's interpreter. Helpers may call helpers that stand above them.
"""

from typing import Any

tl: Any = None  # triton.language, where the text is copied to


def sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


def expm1(x):
    # Kahan: the rounding of exp(x) cancels against its own logarithm
    u = tl.exp(x)
    near = (u - 1.0) * x / tl.log(u)
    far = tl.where((u == 0.0) | (u == float("inf")), u - 1.0, near)
    return tl.where(u == 1.0, x, far)


def log1p(x):
    # Kahan: the rounding of 1 + x cancels against its own difference from 1
    u = 1.0 + x
    near = tl.log(u) * (x / (u - 1.0))
    return tl.where(u == 1.0, x, tl.where(tl.abs(u) == float("inf"), tl.log(u), near))


def tanh(x):
    # from exp(-2|x|) - 1, which neither overflows nor cancels near 0
    gap = expm1(-2.0 * tl.abs(x))
    y = -gap / (2.0 + gap)
    return tl.where(x < 0.0, -y, y)


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
    # in float64, since an error in n log2|x| is multiplied by the result's logarithm
    wide = tl.exp2(n.to(tl.float64) * tl.log2(tl.abs(x).to(tl.float64))).to(x.dtype)
    whole = tl.floor(n) == n
    odd = whole & (tl.floor(n * 0.5) * 2.0 != n)
    signed = tl.where(x < 0.0, tl.where(whole, tl.where(odd, -wide, wide), float("nan")), wide)
    return tl.where(n == 0.0, 1.0, signed)


def gelu_none(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


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


def remainder(a, b):
    # of the divisor's sign, as in Python
    if a.dtype.is_floating():
        return a - tl.floor(a / b) * b
    else:
        r = a % b
        return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


def floor_divide(a, b):
    if a.dtype.is_floating():
        return tl.floor(a / b)
    else:
        q = a // b
        return tl.where((a - q * b != 0) & ((a < 0) != (b < 0)), q - 1, q)


def uniform(seed, batch, i, j):
    # Philox4x32-10 with counter (j, i, batch, 0); (first word + 1/2) / 2**32, in float32 whatever the arithmetic
    zero = i * 0 + j * 0
    c0 = (zero + j).to(tl.uint32)
    c1 = (zero + i).to(tl.uint32)
    c2 = (zero + batch).to(tl.uint32)
    word, w1, w2, w3 = tl.philox(seed, c0, c1, c2, zero.to(tl.uint32))
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)


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
