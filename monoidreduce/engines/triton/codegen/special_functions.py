"""Approximate forms of functions in kernels; inverse, gamma and error functions and bits in both; random numbers.

More of ``device_functions.py``: nobody calls them here, their text is copied into kernels. ``quick_NAME`` stands in
kernels of 16-bit programs for a ``NAME`` of Triton's, of that file or of a primitive's own; ``native_NAME`` has an
instruction of NVIDIA's, which the interpreter does not have. Where there is a quick form and no native one, kernels
take the quick one with native forms inside (``compiler.py``). Each is exact to 2⁻¹⁴ of itself, a quarter of
float16's rounding, or of what ``tests/support/fast_functions.py`` says. Exact forms of the gamma functions compute in
float64. Random numbers are those of ``program/philox.py``. A function may call those that stand above it, and exact
ones.
"""

from __future__ import annotations

from typing import Any

from .device_functions import arctan, erfc, log, log1p, power

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


def negative(x):
    # the sign, that of -0.0 too
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True) < 0
    else:
        return x.to(tl.int64, bitcast=True) < 0


def copysign(x, y):
    return tl.where(negative(y), -tl.abs(x), tl.abs(x))


def hypot(a, b):
    # an infinity beside NaN is infinite
    high = tl.maximum(tl.abs(a), tl.abs(b))
    ratio = tl.where(high == 0.0, 0.0, tl.minimum(tl.abs(a), tl.abs(b)) / high)
    infinite = (tl.abs(a) == float("inf")) | (tl.abs(b) == float("inf"))
    broken = (a != a) | (b != b)
    length = tl.where(broken, a + b, high * tl.sqrt(1.0 + ratio * ratio))
    return tl.where(infinite, float("inf"), length)


def fmod(a, b):
    # of the dividend's sign, as in C
    if a.dtype.is_floating():
        a, b = tl.broadcast(a, b)
        q = a / b
        r = tl.fma(-tl.where(q < 0.0, tl.ceil(q), tl.floor(q)), b, a)
        r = tl.where(tl.abs(r) >= tl.abs(b), r - tl.where((r < 0.0) == (b < 0.0), b, -b), r)  # q was rounded
        r = tl.where((r != 0.0) & ((r < 0.0) != (a < 0.0)), r + tl.where((r < 0.0) == (b < 0.0), -b, b), r)
        whole = tl.where(tl.abs(b) == float("inf"), a, r)
        return tl.where((tl.abs(a) < float("inf")) & (b == b), whole, float("nan"))
    else:
        # Triton's remainder of whole numbers is that of C
        return a % b


def log10(x):
    return log(x) * 0.4342944819032518


def quick_log10(x):
    f = x - 1.0
    near = series_log1p(f) * 0.4342944819032518
    return tl.where(tl.abs(f) < 0.0625, near, quick_lg2(x) * 0.30102999566398120)


def sine_of_pi(x):
    # sin(πx), exact near every whole number: what is left of x is known exactly
    n = tl.floor(x + 0.5)
    y = tl.sin((x - n) * 3.141592653589793)
    return tl.where(tl.floor(n * 0.5) * 2.0 != n, -y, y)


def quick_half_sine(r):
    # sin(πr) for r within 1/2 of 0
    q = r * r
    s = 2.543604956585757 + q * -0.5583960475527273
    return r * (3.1415897033157796 + q * (-5.167367812243469 + q * s))


def quick_sine_of_pi(x):
    n = tl.floor(x + 0.5)
    y = quick_half_sine(x - n)
    return tl.where(tl.floor(n * 0.5) * 2.0 != n, -y, y)


def sinc(x):
    return tl.where(x == 0.0, 1.0, sine_of_pi(x) / (x * 3.141592653589793))


def quick_sinc(x):
    y = quick_sine_of_pi(x) * (quick_reciprocal(x) * 0.3183098861837907)
    return tl.where(tl.abs(x) < 1e-30, 1.0, y)


def arcsin(x):
    return arctan(x / tl.sqrt((1.0 - x) * (1.0 + x)))


def quick_arcsin(x):
    return quick_arctan(x * tl.rsqrt((1.0 - x) * (1.0 + x)))


def arccos(x):
    return 2.0 * arctan(tl.sqrt((1.0 - x) / (1.0 + x)))


def quick_arccos(x):
    a = tl.abs(x)
    s = 0.08459656155928731 + a * (-0.03564342391307322 + a * 0.008591801400223299)
    y = tl.sqrt(1.0 - a) * (1.5707874385613387 + a * (-0.21411081311906813 + a * s))
    return tl.where(x < 0.0, 3.141592653589793 - y, y)


def arctan2(y, x):
    a, b = tl.abs(x), tl.abs(y)
    high, low = tl.maximum(a, b), tl.minimum(a, b)
    ratio = tl.where(high == 0.0, 0.0, tl.where(low == float("inf"), 1.0, low / high))
    angle = arctan(ratio)
    angle = tl.where(b > a, 1.5707963267948966 - angle, angle)
    angle = tl.where(negative(x), 3.141592653589793 - angle, angle)
    angle = tl.where(negative(y), -angle, angle)
    return tl.where((x != x) | (y != y), x + y, angle)


def quick_arctan2(y, x):
    a, b = tl.abs(x), tl.abs(y)
    high, low = tl.maximum(a, b), tl.minimum(a, b)
    angle = quick_arctan(tl.where(low == float("inf"), 1.0, low * quick_reciprocal(high)))
    angle = tl.where(high == 0.0, 0.0, angle)
    angle = tl.where(b > a, 1.5707963267948966 - angle, angle)
    angle = tl.where(negative(x), 3.141592653589793 - angle, angle)
    angle = tl.where(negative(y), -angle, angle)
    return tl.where((x != x) | (y != y), x + y, angle)


def arcsinh(x):
    a = tl.abs(x)
    large = a > 1e8
    b = tl.where(large, 1.0, a)
    y = tl.where(large, log(a) + 0.6931471805599453, log1p(b + b * b / (1.0 + tl.sqrt(1.0 + b * b))))
    return tl.where(x < 0.0, -y, y)


def quick_arcsinh(x):
    a = tl.abs(x)
    large = a > 1e8
    b = tl.where(large, 1.0, a)
    near = quick_log1p(b + b * b * quick_rcp(1.0 + tl.sqrt(1.0 + b * b)))
    y = tl.where(large, quick_log(a) + 0.6931471805599453, near)
    return tl.where(x < 0.0, -y, y)


def arccosh(x):
    large = x > 1e8
    t = tl.where(large, 1.0, tl.where(x < 1.0, float("nan"), x - 1.0))
    return tl.where(large, log(x) + 0.6931471805599453, log1p(t + tl.sqrt(t * (t + 2.0))))


def quick_arccosh(x):
    large = x > 1e8
    t = tl.where(large, 1.0, tl.where(x < 1.0, float("nan"), x - 1.0))
    return tl.where(large, quick_log(x) + 0.6931471805599453, quick_log1p(t + tl.sqrt(t * (t + 2.0))))


def arctanh(x):
    a = tl.abs(x)
    y = 0.5 * log1p(2.0 * a / (1.0 - a))
    return tl.where(x < 0.0, -y, y)


def quick_arctanh(x):
    a = tl.abs(x)
    y = 0.5 * quick_log1p(2.0 * a * quick_rcp(1.0 - a))
    y = tl.where(a > 1.0, float("nan"), y)  # the reciprocal of a huge number may count as 0
    return tl.where(x < 0.0, -y, y)


def erfinv_centre(w):
    # erfinv(x) / x with w = -log(1 - x²), up to w = 5
    u = w - 2.5
    s = 2.323262378098054e-08 + u * -8.791017955699019e-09
    s = -3.462704506937595e-06 + u * (4.661701325271363e-07 + u * s)
    s = 0.0002183444384696857 + u * (-4.963345425858762e-06 + u * s)
    s = -0.0041773867799402755 + u * (-0.0012527418825182273 + u * s)
    return 1.5014093592822946 + u * (0.24664028615527028 + u * s)


def erfinv_tail(w):
    # the same, from 5 to 17.5: to float32's last number below 1
    u = tl.sqrt(w) - 3.0
    s = -0.0002941746953460838 + u * 0.00010098725450490267
    s = 0.0014656826719516812 + u * (-3.620811473143733e-05 + u * s)
    s = 0.00569451649670237 + u * (-0.0036079340035103445 + u * s)
    s = 0.009444386239345879 + u * (-0.007635036980693811 + u * s)
    return 2.8329768164819673 + u * (1.0016748227725842 + u * s)


def erfinv_far(w):
    # the same, from 5 to 37, to 5e-7
    u = tl.sqrt(w) - 4.0
    s = -4.892915885834948e-07 + u * -1.3727681842556398e-06
    s = -7.397680194163639e-05 + u * (3.237193616701253e-05 + u * s)
    s = -4.518764199954771e-05 + u * (3.780180061645403e-05 + u * s)
    s = -0.0009188415349571921 + u * (0.0003323438411623966 + u * s)
    return 3.8397841671841633 + u * (1.0095026917145076 + u * (0.0012558563068575319 + u * s))


def erfinv(x):
    w = -log((1.0 - x) * (1.0 + x))
    if x.dtype == tl.float64:
        # one step of Halley's, from 1 - |x|, which erfc keeps all digits of
        a = tl.abs(x)
        y = a * tl.where(w < 5.0, erfinv_centre(w), erfinv_far(tl.minimum(w, 40.0)))
        gap = tl.where(a < 0.5, a - tl.erf(y), erfc(y) - (1.0 - a)) * 0.886226925452758 * tl.exp(y * y)
        y = y + gap / (1.0 - y * gap)
        y = tl.where(x < 0.0, -y, y)
    else:
        y = x * tl.where(w < 5.0, erfinv_centre(w), erfinv_tail(w))
    y = tl.where(tl.abs(x) > 1.0, float("nan"), y)
    return tl.where(tl.abs(x) == 1.0, x * float("inf"), y)


def quick_erfinv(x):
    w = quick_lg2((1.0 - x) * (1.0 + x)) * -0.6931471805599453
    u = w - 2.5
    s = 0.000218481243721203 + u * (-6.624779808711417e-07 + u * -3.30799787754073e-06)
    s = -0.004178944284074429 + u * (-0.001265259087350411 + u * s)
    y = 1.5014101127326336 + u * (0.246649597107098 + u * s)
    u = tl.sqrt(w) - 3.0
    s = 0.00912666485116983 + u * (-0.008481182055215898 + u * (0.006892477836159553 + u * -0.0025160228108966924))
    y = x * tl.where(w < 5.0, y, 2.832992891167513 + u * (1.0018004842766888 + u * s))
    y = tl.where(tl.abs(x) > 1.0, float("nan"), y)
    return tl.where(tl.abs(x) == 1.0, x * float("inf"), y)


# The gamma function: below 1/2 by reflection at 1/2, below 10 from ten above, then Stirling's series. The ten factors
# x, x + 1 ... are five of x (x + 9) plus 0, 8, 14, 18, 20.


def reflected(x):
    return tl.where(x < 0.5, 1.0 - x, x)


def lgamma(x):
    v = x.to(tl.float64)
    y = reflected(v)
    u = tl.where(y < 10.0, y * (y + 9.0), 1.0)
    low = tl.where(y < 10.0, u * (u + 8.0) * (u + 14.0) * (u + 18.0) * (u + 20.0), 1.0)
    z = tl.where(y < 10.0, y + 10.0, y)
    r = 1.0 / z
    q = r * r
    s = 1.0 / 1188.0 - q * (691.0 / 360360.0 - q * (1.0 / 156.0 - q * (3617.0 / 122400.0)))
    s = 1.0 / 12.0 - q * (1.0 / 360.0 - q * (1.0 / 1260.0 - q * (1.0 / 1680.0 - q * s)))
    y = (z - 0.5) * (tl.log(z) - 1.0) + 0.4189385332046727 + r * s - tl.log(low)
    sine = tl.abs(sine_of_pi(v))
    y = tl.where(v < 0.5, tl.where(sine == 0.0, float("inf"), 1.1447298858494002 - tl.log(sine) - y), y)
    y = tl.where((v == 1.0) | (v == 2.0), 0.0, y)
    return tl.where(tl.abs(v) == float("inf"), float("inf"), y).to(x.dtype)


def digamma(x):
    v = x.to(tl.float64)
    y = reflected(v)
    b = tl.where(y < 10.0, y, 1.0)
    u = b * (b + 9.0)
    low = u * (u + 8.0) * (u + 14.0) * (u + 18.0) * (u + 20.0)
    slope = 40320.0 + u * (24352.0 + u * (3924.0 + u * (240.0 + u * 5.0)))
    z = tl.where(y < 10.0, y + 10.0, y)
    r = 1.0 / z
    q = r * r
    s = 1.0 / 132.0 - q * (691.0 / 32760.0 - q * (1.0 / 12.0 - q * (3617.0 / 8160.0)))
    s = q * (1.0 / 12.0 - q * (1.0 / 120.0 - q * (1.0 / 252.0 - q * (1.0 / 240.0 - q * s))))
    y = tl.log(z) - 0.5 * r - s - tl.where(y < 10.0, (2.0 * b + 9.0) * slope / low, 0.0)
    rest = v - tl.floor(v + 0.5)
    turn = rest * 3.141592653589793
    y = tl.where(v < 0.5, y - 3.141592653589793 * tl.cos(turn) / tl.sin(turn), y)
    return tl.where((v < 0.0) & (rest == 0.0), float("nan"), y).to(x.dtype)


def polygamma_1(x):
    v = x.to(tl.float64)
    y = reflected(v)
    b = tl.where(y < 10.0, y, 1.0)
    u = b * (b + 9.0)
    square = (2.0 * b + 9.0) * (2.0 * b + 9.0)
    low = (square - 2.0 * u) / (u * u)
    low += (square - 2.0 * (u + 8.0)) / ((u + 8.0) * (u + 8.0))
    low += (square - 2.0 * (u + 14.0)) / ((u + 14.0) * (u + 14.0))
    low += (square - 2.0 * (u + 18.0)) / ((u + 18.0) * (u + 18.0))
    low += (square - 2.0 * (u + 20.0)) / ((u + 20.0) * (u + 20.0))
    z = tl.where(y < 10.0, y + 10.0, y)
    r = 1.0 / z
    q = r * r
    s = 5.0 / 66.0 - q * (691.0 / 2730.0 - q * (7.0 / 6.0 - q * (3617.0 / 510.0)))
    s = 1.0 / 6.0 - q * (1.0 / 30.0 - q * (1.0 / 42.0 - q * (1.0 / 30.0 - q * s)))
    y = r + 0.5 * q + r * q * s + tl.where(y < 10.0, low, 0.0)
    sine = sine_of_pi(v)
    return tl.where(v < 0.5, 9.869604401089358 / (sine * sine) - y, y).to(x.dtype)


def polygamma_2(x):
    v = x.to(tl.float64)
    y = reflected(v)
    b = tl.where(y < 10.0, y, 1.0)
    u = b * (b + 9.0)
    twice = 2.0 * b + 9.0
    square = twice * twice
    low = (square - 3.0 * u) / (u * u * u)
    low += (square - 3.0 * (u + 8.0)) / ((u + 8.0) * (u + 8.0) * (u + 8.0))
    low += (square - 3.0 * (u + 14.0)) / ((u + 14.0) * (u + 14.0) * (u + 14.0))
    low += (square - 3.0 * (u + 18.0)) / ((u + 18.0) * (u + 18.0) * (u + 18.0))
    low += (square - 3.0 * (u + 20.0)) / ((u + 20.0) * (u + 20.0) * (u + 20.0))
    z = tl.where(y < 10.0, y + 10.0, y)
    r = 1.0 / z
    q = r * r
    s = 5.0 / 6.0 - q * (691.0 / 210.0 - q * (35.0 / 2.0 - q * (3617.0 / 30.0)))
    s = 0.5 - q * (1.0 / 6.0 - q * (1.0 / 6.0 - q * (3.0 / 10.0 - q * s)))
    y = -(q + q * r + q * q * s + tl.where(y < 10.0, 2.0 * twice * low, 0.0))
    rest = (v - tl.floor(v + 0.5)) * 3.141592653589793
    sine = tl.sin(rest)
    return tl.where(v < 0.5, y - 62.01255336059964 * tl.cos(rest) / (sine * sine * sine), y).to(x.dtype)


def quick_lgamma(x):
    # below 2.5 a polynomial times the zeros at 1 and 2, then Stirling's series
    y = reflected(x)
    u = y - 1.5
    s = 0.0006384863422548825 + u * (0.005980861021564194 + u * -0.004163997934221598)
    s = 0.01858665070491273 + u * (-0.011345666689398444 + u * (0.000986575595427564 + u * s))
    s = -0.14597982381102417 + u * (0.06267071233974036 + u * (-0.030934901726776636 + u * s))
    near = (y - 1.0) * (y - 2.0) * (0.48313402085205975 + u * s)
    r = quick_rcp(y)
    q = r * r
    tail = r * (0.08333333333333333 - q * (0.002777777777777778 - q * 0.0007936507936507937))
    y = tl.where(y < 2.5, near, (y - 0.5) * (quick_log(y) - 1.0) + 0.4189385332046727 + tail)
    sine = tl.abs(quick_sine_of_pi(x))
    y = tl.where(x < 0.5, tl.where(sine == 0.0, float("inf"), 1.1447298858494002 - quick_log(sine) - y), y)
    return tl.where(tl.abs(x) == float("inf"), float("inf"), y)


def quick_digamma(x):
    # below 4 from three above
    y = reflected(x)
    b = tl.where(y < 4.0, y, 1.0)
    low = (b * (3.0 * b + 6.0) + 2.0) * quick_rcp(b * (b + 1.0) * (b + 2.0))
    z = tl.where(y < 4.0, y + 3.0, y)
    r = quick_rcp(z)
    q = r * r
    s = q * (0.08333333333333333 - q * (0.008333333333333333 - q * 0.003968253968253968))
    y = quick_log(z) - 0.5 * r - s - tl.where(y < 4.0, low, 0.0)
    rest = x - tl.floor(x + 0.5)
    cotangent = quick_half_sine(0.5 - tl.abs(rest)) / quick_half_sine(rest)
    y = tl.where(x < 0.5, y - 3.141592653589793 * cotangent, y)
    return tl.where((x < 0.0) & (rest == 0.0), float("nan"), y)


def quick_polygamma_1(x):
    y = reflected(x)
    b = tl.where(y < 4.0, y, 1.0)
    first, second, third = quick_rcp(b), quick_rcp(b + 1.0), quick_rcp(b + 2.0)
    low = first * first + second * second + third * third
    z = tl.where(y < 4.0, y + 3.0, y)
    r = quick_rcp(z)
    q = r * r
    s = 0.16666666666666666 - q * (0.03333333333333333 - q * 0.023809523809523808)
    y = r + 0.5 * q + r * q * s + tl.where(y < 4.0, low, 0.0)
    sine = quick_rcp(quick_sine_of_pi(x))
    return tl.where(x < 0.5, 9.869604401089358 * sine * sine - y, y)


# Bits of whole numbers. Those of 64 bits wrap around; the result of a shift to the left is always of 64.


def shift_left(x, count):
    inside = (count >= 0) & (count < 64)
    return tl.where(inside, x.to(tl.int64) << tl.where(inside, count, 0).to(tl.int64), 0)


def shift_right(x, count):
    # what is shifted by all its bits, or by a negative count, is 0 or -1
    most = 63 if x.dtype == tl.int64 else 31
    inside = (count >= 0) & (count <= most)
    return x >> tl.where(inside, count, most).to(x.dtype)


def ones_of_32(x):
    # the compiler knows these lines, and writes one instruction
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x * 0x01010101) >> 24


def popcount(x, bits: tl.constexpr):
    if bits > 32:
        wide = x.to(tl.int64).to(tl.uint64, bitcast=True)
        high = (wide >> 32).to(tl.uint32)
        if bits < 64:
            high = high << (64 - bits)
        return (ones_of_32(wide.to(tl.uint32)) + ones_of_32(high)).to(tl.int32)
    else:
        low = x.to(tl.int32).to(tl.uint32, bitcast=True)
        if bits < 32:
            low = low << (32 - bits)
        return ones_of_32(low).to(tl.int32)


def quick_cos_apart(x):
    # a cosine that shares no lines with the sine of x, and so holds nothing for it: sin(x + π/2), in half turns
    count = tl.fma(x, 0.3183098861837907, 0.5) + 12582912.0
    r = rest_of_turns(x, (count - 12582912.0) - 0.5)
    q = r * r
    s = -0.16665483740020112 + q * (0.00831101770000767 + q * -0.0001846102793451776)
    return signed_by_turns(r * (0.9999989795274309 + q * s), count)


# Random numbers


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
