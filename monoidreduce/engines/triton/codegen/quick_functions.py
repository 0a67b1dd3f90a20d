"""Quick forms of functions, for kernels of 16-bit programs: ``quick_NAME`` in place of a ``NAME`` of Triton's, of
``device_functions.py`` or of a primitive's own. Their text is copied into kernels, as there.

``native_NAME`` has an instruction of NVIDIA's, which the interpreter does not have. Where there is a quick form and no
native one, kernels take the quick one with native forms inside (``kernel_text.py``). Each is exact to 2⁻¹⁴ of itself, a
quarter of float16's rounding, or of what ``tests/support/fast_functions.py`` says. A function may call those that stand
above it, and exact ones."""

from __future__ import annotations

from typing import Any

from .device_functions import power

tl: Any = None  # triton.language, where the text is copied to


def quick_rcp(x):
    return 1.0 / x


def native_rcp(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


def quick_reciprocal(x):
    return 1.0 / x


def native_reciprocal(x):
    # of numbers up to the largest, whose reciprocal the instruction alone would make 0; those below 5e-38 count as 0
    return 0.25 * native_rcp(0.25 * x)


def quick_lg2(x):
    return tl.log2(x)


def native_lg2(x):
    # exact to 2e-7 of 1 near 1; numbers below the normal ones too
    return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


def quick_exp(x):
    return tl.exp2(x * 1.4426950408889634)


def quick_decay(x):
    return tl.where(x == float("-inf"), 0.0, quick_exp(-x))


def quick_expm1(x):
    # the series near 0, where exp(x) - 1 cancels
    near = x + x * x * (0.5 + x * 0.16666667163372040)
    return tl.where(tl.abs(x) < 0.03125, near, quick_exp(x) - 1.0)


def series_log1p(x):
    # within 1/16 of 0
    return x * (1.0 + x * (-0.5 + x * (0.3333333432674408 + x * -0.25)))


def quick_log(x):
    f = x - 1.0
    return tl.where(tl.abs(f) < 0.0625, series_log1p(f), quick_lg2(x) * 0.6931471805599453)


def quick_log2(x):
    f = x - 1.0
    return tl.where(tl.abs(f) < 0.0625, series_log1p(f) * 1.4426950408889634, quick_lg2(x))


def quick_log1p(x):
    return tl.where(tl.abs(x) < 0.0625, series_log1p(x), quick_lg2(1.0 + x) * 0.6931471805599453)


def quick_tanh(x):
    near = x * (1.0 - x * x * 0.3333333432674408)
    return tl.where(tl.abs(x) < 0.0625, near, 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268)))


def native_tanh(x):
    # exact to 1.1e-5 of itself (all float32 up to 12 met on an H200)
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


def quick_sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


def native_sigmoid(x):
    y = 1.0 + tl.exp2(x * -1.4426950408889634)
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1)


def quick_gate(x):
    return quick_sigmoid(x)


def native_gate(x):
    # exact to 4e-6 of 1: one instruction of those that are slow, where a sigmoid takes two
    return 0.5 + 0.5 * native_tanh(0.5 * x)


def normal_argument(x):
    # the inverse tanh of erf(x / sqrt(2)) as a polynomial, up to where tanh is 1: gelu is then exact to 3e-5
    q = tl.minimum(x * x, 50.0)
    return x * (0.7975075229508214 + q * (0.037006049858891325 - 0.0003516011722770188 * q))


def quick_normal_gate(x):
    return 0.5 + 0.5 * quick_tanh(normal_argument(x))


def quick_gelu_none(x):
    return x * quick_normal_gate(x)


def quick_gelu_tanh(x):
    # as the gradient has it, so that a kernel with both computes it once
    return x * quick_gate(x * (1.5957691216057308 + 0.07135481627260025 * (x * x)))


def quick_erf(x):
    # tanh of a polynomial, up to where tanh is 1
    q = tl.minimum(x * x, 32.0)
    s = -0.0004463526162182593 + q * 3.5455135743904654e-05
    return quick_tanh(x * (1.1283749568729675 + q * (0.1028519307319967 + q * (-0.000407925519620035 + q * s))))


def quick_erfc(x):
    # t exp(-x² + P(t)) with t = 2 / (2 + |x|); off by 2⁻¹⁷ up to |x| = 9.2, where erfc leaves float32
    z = tl.abs(x)
    t = quick_rcp(1.0 + 0.5 * z)
    s = 0.6845355730979733 + t * (-1.0231338635041927 + t * 0.3300703776906059)
    s = -1.8272333736150592 + t * (1.4686814695200847 + t * (0.3670907904026398 + t * s))
    tail = t * tl.exp2(z * z * -1.4426950408889634 + s)
    return tl.where(x < 0.0, 2.0 - tail, tail)


def quick_arctan(x):
    big = tl.abs(x) > 1.0
    y = tl.where(big, quick_rcp(x), x)
    q = y * y
    s = -0.12123917165092293 + q * (0.057477385499850035 + q * -0.013480485146897215)
    y = y * (0.9999956303386272 + q * (-0.33299460926682767 + q * (0.19563598167743695 + q * s)))
    return tl.where(big, tl.where(x < 0.0, -1.5707963267948966, 1.5707963267948966) - y, y)


def quick_sinh(x):
    a = tl.abs(x)
    half = tl.exp2(a * 1.4426950408889634 - 1.0)
    q = x * x
    near = x * (1.0 + q * (0.16666667163372040 + q * 0.00833333376795053))
    far = half - 0.25 * quick_rcp(half)
    return tl.where(a < 0.25, near, tl.where(x < 0.0, -far, far))


def quick_cosh(x):
    half = tl.exp2(tl.abs(x) * 1.4426950408889634 - 1.0)
    return half + 0.25 * quick_rcp(half)


def half_turns(x):
    # x / π, rounded. 1.5 × 2²³: what is added to it is rounded to a whole number, which stands in the lowest bits
    return tl.fma(x, 0.3183098861837907, 12582912.0)


def rest_of_turns(x, turns):
    # x less so many half turns, exact to 1e-5 up to 2²¹, beyond which neighbours in float32 lie a quarter apart: 0
    # there, NaN at infinity. Of a sine and a cosine of one number the compiler computes it once
    r = tl.fma(turns, 8.742277657347586e-08, tl.fma(turns, -3.1415927410125732, x))
    return tl.where(tl.abs(x) < 2097152.0, tl.fma(turns, 3.430244902329324e-15, r), x * 0.0)


def signed_by_turns(y, count):
    return (y.to(tl.int32, bitcast=True) ^ (count.to(tl.int32, bitcast=True) << 31)).to(tl.float32, bitcast=True)


def quick_sin(x):
    count = half_turns(x)
    r = rest_of_turns(x, count - 12582912.0)
    q = r * r
    s = -0.16665483740020112 + q * (0.00831101770000767 + q * -0.0001846102793451776)
    return signed_by_turns(r * (0.9999989795274309 + q * s), count)


def quick_cos(x):
    count = half_turns(x)
    r = rest_of_turns(x, count - 12582912.0)
    q = r * r
    s = -0.49991231101921824 + q * (0.04148757386753756 + q * -0.00127115294782419)
    return signed_by_turns(0.999993282094165 + q * s, count)  # exact to 7e-6


def log1p_unit(z):
    # log(1 + z) of z from 0 to 1, as a polynomial: exact to 9e-6 of itself
    s = 0.32520678521417556 + z * (-0.21004887503157313 + z * (0.10122241631755972 + z * -0.023869180366084014))
    return z * (0.9999915995611955 + z * (-0.4993613878938919 + z * s))


def quick_softplus(x, beta, threshold):
    y = x * beta
    low = log1p_unit(tl.exp2(tl.abs(y) * -1.4426950408889634))
    return tl.where(y > threshold, x, (tl.maximum(y, 0.0) + low) / beta)


def quick_logsigmoid(x):
    return tl.minimum(x, 0.0) - log1p_unit(tl.exp2(tl.abs(x) * -1.4426950408889634))


def quick_logaddexp(a, b):
    low = log1p_unit(tl.exp2(tl.abs(a - b) * -1.4426950408889634))
    return tl.where(a == b, a + 0.6931471805599453, tl.maximum(a, b) + low)


def quick_mish_gate(x):
    e = quick_exp(tl.minimum(x, 30.0))
    n = e * (e + 2.0)
    return n * quick_rcp(n + 2.0)


def quick_power(x, n):
    # exact to 2⁻¹⁴ of itself for exponents up to 32
    if x.dtype.is_floating():
        size = tl.abs(x)
        y = tl.where(size == 1.0, 1.0, tl.exp2(n * quick_lg2(size)))
        whole = tl.floor(n) == n
        odd = whole & (tl.floor(n * 0.5) * 2.0 != n)
        negative = (x < 0.0) | ((x == 0.0) & (1.0 / x < 0.0))
        none = tl.where(whole, False, (x < 0.0) & (size < float("inf")))
        signed = tl.where(none, float("nan"), tl.where(negative, tl.where(odd, -y, y), y))
        return tl.where(n == 0.0, 1.0, signed)
    else:
        return power(x, n)
