"""Inverse, gamma and error functions of float, and bits of whole numbers, in C++: more of ``support.py``.

They are part of a generated file where it calls one of them. As there they are branch-free; they compute in double,
where polynomials of a relative error below 1e-8 leave all digits of a float."""

from __future__ import annotations

import re

FUNCTIONS = """
INLINE double log_any(double x) {  // of any number, as torch has it
  const double y = log_(x), z = x == 0.0 ? -(double)__builtin_inf() : x < 0.0 ? __builtin_nan("") : y;
  return (x == (double)__builtin_inf()) | (x != x) ? x : z;
}
INLINE double root(double x) { return __builtin_sqrt(x); }
INLINE float log10_(float x) { return (float)(0.4342944819032518 * log_any(x < 1e-37f ? (double)x * 1e10 : (double)x)
                                              - (x < 1e-37f ? 10.0 : 0.0)); }
INLINE float logit_(float x) { const double d = x; return (float)log_any((x < 0) | (x > 1) ? -1.0 : d / (1.0 - d)); }
INLINE double atan_unit(double y) {  // of |y| <= 1
  const double q = y * y;
  double p = 0.001091114046245701;
  p = p * q - 0.007199398203125328;
  p = p * q + 0.02227437998948465;
  p = p * q - 0.04435751698234764;
  p = p * q + 0.06716108379682273;
  p = p * q - 0.08798772083089684;
  p = p * q + 0.11054501136804236;
  p = p * q - 0.14279159611491257;
  p = p * q + 0.1999960463438745;
  p = p * q - 0.3333332393519831;
  p = p * q + 0.9999999996282283;
  return p * y;
}
INLINE double atan_wide(double x) {
  const double a = x < 0.0 ? -x : x;
  const bool big = a > 1.0;
  const double y = atan_unit(big ? 1.0 / x : x), half = x < 0.0 ? -1.5707963267948966 : 1.5707963267948966;
  return big ? half - y : y;
}
INLINE float atan_(float x) { return (float)atan_wide(x); }
INLINE float asin_(float x) { const double d = x; return (float)atan_wide(d / root((1.0 - d) * (1.0 + d))); }
INLINE float acos_(float x) { const double d = x; return (float)(2.0 * atan_wide(root((1.0 - d) / (1.0 + d)))); }
INLINE float atan2_(float y, float x) {
  const double a = x < 0 ? -(double)x : (double)x, b = y < 0 ? -(double)y : (double)y;
  const double high = a > b ? a : b, low = a > b ? b : a;
  const double ratio = high == 0.0 ? 0.0 : low == (double)__builtin_inf() ? 1.0 : low / high;
  double t = atan_unit(ratio);
  t = b > a ? 1.5707963267948966 - t : t;
  t = bits<int32_t>(x) < 0 ? 3.141592653589793 - t : t;
  t = bits<int32_t>(y) < 0 ? -t : t;
  return (x != x) | (y != y) ? x + y : (float)t;
}
INLINE float hypot_(float a, float b) {
  const float y = (float)root((double)a * a + (double)b * b), inf = (float)INF;
  return (a == inf) | (a == -inf) | (b == inf) | (b == -inf) ? inf : y;
}
INLINE float copysign_(float a, float b) {
  return bits<float>((bits<U>(a) & 0x7fffffffu) | (bits<U>(b) & 0x80000000u));
}
INLINE float asinh_(float x) {
  const double a = x < 0 ? -(double)x : (double)x, y = a < 1e-4 ? a - a * a * a / 6.0 : log_any(a + root(a * a + 1.0));
  return (float)(x < 0 ? -y : y);
}
INLINE float acosh_(float x) {
  const double d = x;
  return (float)log_any(x < 1 ? -1.0 : d + root((d - 1.0) * (d + 1.0)));
}
INLINE float atanh_(float x) {
  const double a = x < 0 ? -(double)x : (double)x, y = 0.5 * log_any(a > 1.0 ? -1.0 : (1.0 + a) / (1.0 - a));
  const double z = a < 1e-3 ? a + a * a * a * (1.0 / 3 + a * a / 5.0) : y;
  return (float)(x < 0 ? -z : z);
}
INLINE float erfinv_(float x) {  // polynomials of -log(1 - x^2)
  const double d = x, w = -log_any((1.0 - d) * (1.0 + d)), u = w - 2.5, v = root(w) - 3.0;
  double p = -8.791017955699019e-09;
  p = p * u + 2.323262378098054e-08;
  p = p * u + 4.661701325271363e-07;
  p = p * u - 3.462704506937595e-06;
  p = p * u - 4.963345425858762e-06;
  p = p * u + 0.0002183444384696857;
  p = p * u - 0.0012527418825182273;
  p = p * u - 0.0041773867799402755;
  p = p * u + 0.24664028615527028;
  p = p * u + 1.5014093592822946;
  double q = 0.00010098725450490267;
  q = q * v - 0.0002941746953460838;
  q = q * v - 3.620811473143733e-05;
  q = q * v + 0.0014656826719516812;
  q = q * v - 0.0036079340035103445;
  q = q * v + 0.00569451649670237;
  q = q * v - 0.007635036980693811;
  q = q * v + 0.009444386239345879;
  q = q * v + 1.0016748227725842;
  q = q * v + 2.8329768164819673;
  const float y = (float)(d * (w < 5.0 ? p : q));
  return (x == 1.0f) | (x == -1.0f) ? x * (float)INF : y;
}
INLINE double half_sine(double r) {  // sin(pi r) for |r| <= 1/2
  const double q = r * r;
  double p = -0.0070221634076570024;
  p = p * q + 0.08204647875654367;
  p = p * q - 0.599251330090059;
  p = p * q + 2.5501632403160635;
  p = p * q - 5.167712762115735;
  p = p * q + 3.141592653523345;
  return p * r;
}
INLINE double sine_of_pi(double x) {
  const double n = __builtin_floor(x + 0.5), y = half_sine(x - n), half = 0.5 * n;
  return __builtin_floor(half) != half ? -y : y;
}
INLINE float sinc_(float x) {
  const double d = x, y = sine_of_pi(d) / (d * 3.141592653589793);
  return x == 0.0f ? 1.0f : (float)y;
}
// The gamma function as in the Triton engine's special_functions.py: reflection, ten above, Stirling's series.
INLINE float lgamma_(float x) {
  const double d = x, y = d < 0.5 ? 1.0 - d : d;
  const bool low = y < 10.0;
  const double u = low ? y * (y + 9.0) : 1.0, below = u * (u + 8.0) * (u + 14.0) * (u + 18.0) * (u + 20.0);
  const double z = low ? y + 10.0 : y, r = 1.0 / z, q = r * r;
  const double s = 1.0 / 12 - q * (1.0 / 360 - q * (1.0 / 1260 - q * (1.0 / 1680 - q / 1188)));
  const double t = (z - 0.5) * (log_(z) - 1.0) + 0.4189385332046727 + r * s - (low ? log_(below) : 0.0);
  const double sine = sine_of_pi(d), size = sine < 0.0 ? -sine : sine, inf = __builtin_inf();
  const double w = d < 0.5 ? (size == 0.0 ? inf : 1.1447298858494002 - log_(size) - t) : t;
  const float v = (x == 1.0f) | (x == 2.0f) ? 0.0f : (float)w;
  return (d == inf) | (d == -inf) ? (float)INF : x != x ? x : v;
}
INLINE float digamma_(float x) {
  const double d = x, y = d < 0.5 ? 1.0 - d : d;
  const bool low = y < 10.0;
  const double b = low ? y : 1.0, u = b * (b + 9.0), below = u * (u + 8.0) * (u + 14.0) * (u + 18.0) * (u + 20.0);
  const double slope = 40320.0 + u * (24352.0 + u * (3924.0 + u * (240.0 + u * 5.0)));
  const double z = low ? y + 10.0 : y, r = 1.0 / z, q = r * r;
  const double s = q * (1.0 / 12 - q * (1.0 / 120 - q * (1.0 / 252 - q * (1.0 / 240 - q / 132))));
  const double t = log_any(z) - 0.5 * r - s - (low ? (2.0 * b + 9.0) * slope / below : 0.0);
  const double rest = d - __builtin_floor(d + 0.5), size = rest < 0.0 ? -rest : rest;
  const double w = d < 0.5 ? t - 3.141592653589793 * half_sine(0.5 - size) / half_sine(rest) : t;
  return (x < 0.0f) & (rest == 0.0) ? (float)NaN : (float)w;
}
INLINE float polygamma_1(float x) {
  const double d = x, y = d < 0.5 ? 1.0 - d : d;
  const bool low = y < 10.0;
  const double b = low ? y : 1.0, u = b * (b + 9.0), square = (2.0 * b + 9.0) * (2.0 * b + 9.0);
  double below = (square - 2.0 * u) / (u * u);
  below += (square - 2.0 * (u + 8.0)) / ((u + 8.0) * (u + 8.0));
  below += (square - 2.0 * (u + 14.0)) / ((u + 14.0) * (u + 14.0));
  below += (square - 2.0 * (u + 18.0)) / ((u + 18.0) * (u + 18.0));
  below += (square - 2.0 * (u + 20.0)) / ((u + 20.0) * (u + 20.0));
  const double z = low ? y + 10.0 : y, r = 1.0 / z, q = r * r;
  const double s = 1.0 / 6 - q * (1.0 / 30 - q * (1.0 / 42 - q * (1.0 / 30 - q * 5.0 / 66)));
  const double t = r + 0.5 * q + r * q * s + (low ? below : 0.0), sine = sine_of_pi(d);
  return (float)(d < 0.5 ? 9.869604401089358 / (sine * sine) - t : t);
}
INLINE I fmod_(I a, I b) { return a % b; }
INLINE I shift_left_(I x, I count) { return (count < 0) | (count > 63) ? 0 : (I)((uint64_t)x << (count & 63)); }
INLINE I shift_right_(I x, I count) { return x >> ((count < 0) | (count > 63) ? 63 : count); }
INLINE I popcount_(I x, int width) { return __builtin_popcountll((uint64_t)x << (64 - width)); }
"""
_NAMES = re.findall(r"INLINE \w+ (\w+_\d?)\(", FUNCTIONS)


def used_by(text: str) -> bool:
    """Whether a generated text calls one of the functions."""
    return any(f"{name}(" in text for name in _NAMES)
