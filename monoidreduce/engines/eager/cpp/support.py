"""The fixed part of every generated C++ file: functions of one number, reading of leaves, and threads.

Functions of one number are branch-free, so that compilers vectorise the loops that call them. They follow torch on
infinities and NaN, and are as exact as torch's (``tests/unit/engines/test_cpp.py`` compares both with float64).
Functions of float other than ``exp`` compute in double where that saves a case.
"""

from __future__ import annotations

TYPES = """
#include <cstdint>
#include <cstring>
#ifdef _OPENMP
#include <omp.h>
#else
#include <thread>
#include <vector>
#endif
#define INLINE static inline __attribute__((always_inline))
typedef int64_t I;
typedef uint32_t U;
static const F INF = (F)__builtin_inf(), NaN = (F)__builtin_nan("");
template <class A, class B> INLINE A bits(B x) {
  static_assert(sizeof(A) == sizeof(B), "");
  A y;
  memcpy(&y, &x, sizeof y);
  return y;
}
// a polynomial of x, from its highest coefficient p on
template <class T> INLINE T polynomial(T, T p) { return p; }
template <class T, class... Rest> INLINE T polynomial(T x, T p, T next, Rest... rest) {
  return polynomial(x, p * x + next, rest...);
}
"""

# of exp_ and exp_weight: exp(c) is p times 2 to the power n, for c of at most 89
_EXP_SERIES = """\
  c = c > 89.0f ? 89.0f : c;
  const float n = (c * 1.44269504f + 12582912.0f) - 12582912.0f;
  float r = c - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = polynomial(r, 0.00139269266f, 0.00836377387f, 0.0416665501f, 0.166665734f, 0.5f);
  p = p * (r * r) + r + 1.0f;
"""

FUNCTIONS = (
    """
INLINE float exp_(float x) {
  float c = x < -104.0f ? -104.0f : x;  // NaN stays
"""
    + _EXP_SERIES
    + """\
  const int32_t k = (int32_t)n, half = k >> 1;  // in two steps: results may be subnormal
  return p * bits<float>((half + 127) << 23) * bits<float>((k - half + 127) << 23);
}
INLINE float exp_weight(float x) {  // 0 where the result would be subnormal
  float c = x < -87.33f ? -88.1f : x;
"""
    + _EXP_SERIES
    + """\
  return p * bits<float>(((int32_t)n + 127) << 23);
}
INLINE double exp_(double x) {
  double c = x < -746.0 ? -746.0 : x;
  c = c > 710.0 ? 710.0 : c;
  const double shifted = c * 1.4426950408889634 + 6755399441055744.0, n = shifted - 6755399441055744.0;
  double r = c - n * 0.693147180369123816490;
  r = r - n * 1.90821492927058770002e-10;
  double p = polynomial(r, 2.51013469283503402e-8, 2.76213386691429238e-7, 2.75572664186123037e-6,
    2.48015186413959936e-5, 1.98412698643805133e-4, 1.38888889189391678e-3, 8.3333333333297935e-3,
    4.16666666666206386e-2, 0.166666666666666675, 0.5);
  p = p * (r * r) + r + 1.0;
  const int64_t k = (int64_t)(bits<uint64_t>(shifted) << 13) >> 13, half = k >> 1;  // the integer in the low bits
  return p * bits<double>((half + 1023) << 52) * bits<double>((k - half + 1023) << 52);
}
INLINE double exp_weight(double x) { return exp_(x); }
// The same of what is at most 0, as a power of 2. Compilers make a dozen instructions of a comparison of floats whose
// NaN must stay; compared as integers, which wrap, NaN of either sign pass.
INLINE float exp_falling(float x) {
  const U past = 0x7fffffu, u = bits<U>(x * 1.44269504f) + past, least = 0xc2fe0000u + past;  // -127
  const float c = bits<float>((u < least ? u : least) - past);
  const float n = c + 12582912.0f, r = c - (n - 12582912.0f);
  float p = polynomial(r, 0.000153533089f, 0.00133989266f, 0.00961843791f, 0.0555033235f, 0.240226479f,
    0.693147203f, 1.0f);
  return p * bits<float>((bits<U>(n) << 23) + 0x3f800000u);
}
INLINE double exp_falling(double x) { return exp_(x); }
#ifdef __aarch64__  // GCC keeps the result of an omp simd maximum in memory
typedef F Lanes __attribute__((vector_size(16), aligned(sizeof(F)), may_alias));
INLINE F greatest_(const F* x, int n) {
  const int each = 16 / sizeof(F);
  Lanes lanes[4];
  for (int l = 0; l < 4; l++) lanes[l] = Lanes{} - INF;
  F top = -INF;
  int j = 0;
  for (; j + 4 * each <= n; j += 4 * each)
    for (int l = 0; l < 4; l++) {
      const Lanes y = *(const Lanes*)(x + j + l * each);
      lanes[l] = y > lanes[l] ? y : lanes[l];
    }
  for (int l = 0; l < 4 * each; l++) top = lanes[l / each][l % each] > top ? lanes[l / each][l % each] : top;
  for (; j < n; j++) top = x[j] > top ? x[j] : top;
  return top;
}
#else
INLINE F greatest_(const F* x, int n) {
  F top = -INF;
  _Pragma("omp simd reduction(max:top)")
  for (int j = 0; j < n; j++) top = x[j] > top ? x[j] : top;
  return top;
}
#endif
INLINE double log_(double x) {  // of positive normal numbers
  const int64_t b = bits<int64_t>(x), e = ((b >> 52) & 2047) - 1023;
  double m = bits<double>((b & 0xfffffffffffffLL) | 0x3ff0000000000000LL), k = (double)(int32_t)e;
  const bool high = m > 1.4142135623730951;
  m = high ? 0.5 * m : m;
  k = high ? k + 1.0 : k;
  const double s = (m - 1.0) / (m + 1.0), q = s * s;
  double p = polynomial(q, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3);
  return 2.0 * (s + s * q * p) + k * 0.6931471805599453;
}
// log(1 + f) for f from sqrt(1/2) - 1 to sqrt(2) - 1, and of 2^k times that
INLINE float log_series(float f, float k) {
  const float q = f * f;
  float p = polynomial(f, -0.0763451606f, 0.127615958f, -0.131601825f, 0.142017543f, -0.166233569f, 0.200012267f,
    -0.250008196f, 0.333333313f);
  const float rest = f * q * p - k * 2.12194440e-4f;
  return f + (rest - 0.5f * q) + k * 0.693359375f;
}
INLINE float log_(float x) {
  const bool tiny = x < 1.17549435e-38f;  // subnormal, or not positive
  const int32_t i = bits<int32_t>(tiny ? x * 8388608.0f : x) - 0x3f3504f3;
  const float y = log_series(bits<float>((i & 0x7fffff) + 0x3f3504f3) - 1.0f, (float)((i >> 23) - (tiny ? 23 : 0)));
  const float z = x == 0.0f ? -(float)INF : x < 0.0f ? (float)NaN : y;
  return (x == (float)INF) | (x != x) ? x : z;
}
INLINE float log1p_(float x) {  // of 1 + x as a rounded number and what was rounded away
  const float u = 1.0f + x, d = u - 1.0f, lost = (1.0f - (u - d)) + (x - d);
  const int32_t i = bits<int32_t>(u) - 0x3f3504f3, k = i >> 23;
  const float scaled = k > 60 ? 0.0f : lost * bits<float>((127 - k) << 23);
  const float y = log_series((bits<float>((i & 0x7fffff) + 0x3f3504f3) - 1.0f) + scaled, (float)k);
  const float z = x == -1.0f ? -(float)INF : x < -1.0f ? (float)NaN : y;
  return (x == 0.0f) | (x == (float)INF) | (x != x) ? x : z;
}
INLINE float expm1_(float x) {  // 2^n (exp(r) - 1) + (2^n - 1), halved so that 2^n does not overflow
  float c = x < -30.0f ? -30.0f : x;
  c = c > 89.0f ? 89.0f : c;
  const float n = (c * 1.44269504f + 12582912.0f) - 12582912.0f;
  float r = c - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = polynomial(r, 0.00139269266f, 0.00836377387f, 0.0416665501f, 0.166665734f, 0.5f);
  p = p * (r * r) + r;
  const float half = bits<float>(((int32_t)n + 126) << 23), y = 2.0f * (half * p + (half - 0.5f));
  return (x == 0.0f) | (x == (float)INF) ? x : y;
}
INLINE float sigmoid_(float x) { return 1.0f / (1.0f + exp_(-x)); }
INLINE float tanh_(float x) {
  const float a = x < 0.0f ? -x : x, q = x * x, c = a > 10.0f ? 10.0f : a, y = 1.0f - 2.0f / (exp_(2.0f * c) + 1.0f);
  float p = polynomial(q, -0.000455462403f, 0.00258267438f, -0.00826455094f, 0.0216635466f, -0.0539293028f,
    0.133329779f, -0.333333224f);
  return a < 0.9f ? x + x * q * p : x < 0.0f ? -y : y;
}
INLINE double erfc_(double a) {  // of a >= 1: a polynomial of 1 / (1 + a / 2), times exp(-a^2)
  const double t = 1.0 / (1.0 + 0.5 * a);
  double p = polynomial(t, 0.0755846725097827114, -0.389768147233131778, 0.818704560715947102,
    -0.847079020806625899, 0.433305751118138927, -0.213177307128779746, 0.146809246578008024,
    0.162786896717898247, 0.248848185537314304, 0.281896320402425372, 0.282106396895504391,
    -3.04729289852378646e-7);
  return p * exp_(-a * a);
}
INLINE double erf_near(double x) {  // of |x| <= 1
  const double s = x * x;
  double p = polynomial(s, -1.04691103321512084e-7, 1.53063731636410843e-6, -1.47950314006620446e-5,
    1.20462612697797974e-4, -8.54793373651963316e-4, 5.22396719354389972e-3, -2.68661690505993239e-2,
    0.112837916585487128, -0.376126389028086136, 1.12837916709549382);
  return p * x;
}
INLINE double erfc_wide(double x) {
  const double a = x < 0.0 ? -x : x, c = a > 10.5 ? 10.5 : a, far = erfc_(c < 1.0 ? 1.0 : c);
  const double y = a <= 1.0 ? 1.0 - erf_near(x) : x < 0.0 ? 2.0 - far : a > 10.5 ? 0.0 : far;
  return x != x ? x : y;
}
INLINE float erfc_(float x) { return (float)erfc_wide(x); }
// exp(-s a^2) for s of 1 or 1/2 and s a^2 of at most 87; the square is held as two numbers
INLINE float exp_minus_square(float a, float s) {
  const float high = bits<float>(bits<U>(a) & 0xfffff000u), low = a - high;
  const float c = -s * (high * high), rest = -s * (low * (a + high));
  const float n = ((c + rest) * 1.44269504f + 12582912.0f) - 12582912.0f;
  const float r = (c - n * 0.693359375f) + (n * 2.12194440e-4f + rest);
  float p = polynomial(r, 0.00139269266f, 0.00836377387f, 0.0416665501f, 0.166665734f, 0.5f);
  p = p * (r * r) + r + 1.0f;
  return p * bits<float>(((int32_t)n + 127) << 23);
}
INLINE float erfc_ratio(float a) {  // erfc(a) exp(a^2) for a of 0 to 10.3
  const float t = 1.0f / (1.0f + 0.36f * a);
  float p = polynomial(t, 0.0688793883f, -0.37262556f, 0.697297871f, -0.542514563f, 0.507855117f, 0.0106462538f,
    0.230398998f, 0.196329996f, 0.203759775f);
  return p * t - 2.73213154e-5f;
}
INLINE float erf_(float x) {
  const float a = x < 0.0f ? -x : x, c = a > 4.0f ? 4.0f : a, q = c * c;
  const float far = 1.0f - erfc_ratio(c) * exp_minus_square(c, 1.0f), y = x < 0.0f ? -far : far;
  float p = polynomial(q, 7.85387965e-05f, -0.000801019953f, 0.00518832868f, -0.0268538129f, 0.112835854f,
    -0.37612626f, 0.128379166f);
  return a < 1.0f ? x + x * p : y;
}
INLINE float normal_gate_(float x) {  // 0 where the result would be subnormal
  const float a = x < 0.0f ? -x : x, c = a > 12.94f ? 12.94f : a;
  const float y = a > 12.94f ? 0.0f : 0.5f * erfc_ratio(0.70710678f * c) * exp_minus_square(c, 0.5f);
  return x < 0.0f ? y : 1.0f - y;
}
INLINE float gelu_none(float x) { return x * normal_gate_(x); }
INLINE float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + tanh_(0.79788456f * (x + 0.044715f * x * x * x)));
}
INLINE float softplus_(float x, float beta, float threshold) {
  const float b = x * beta;
  return b > threshold ? x : log1p_(exp_(b)) / beta;
}
INLINE float logsigmoid_(float x) {
  const float a = x < 0.0f ? x : -x;
  return (x < 0.0f ? x : 0.0f) - log1p_(exp_(a));
}
INLINE float logaddexp_(float a, float b) {
  const float m = a > b ? a : b, d = a > b ? b - a : a - b;
  const float y = m + log1p_(exp_(d));
  return (a == b) & ((m == (float)INF) | (m == -(float)INF)) ? m : y;
}
INLINE float mish_gate_(float x) {  // tanh(log(1 + e^x)), of which e^x and its square are all that counts
  const float e = exp_(x > 30.0f ? 30.0f : x), n = e * (e + 2.0f);
  return n / (n + 2.0f);
}
INLINE float exp2_(float x) {
  float c = x < -151.0f ? -151.0f : x;  // NaN stays
  c = c > 129.0f ? 129.0f : c;
  const float n = (c + 12582912.0f) - 12582912.0f, r = c - n;
  float p = polynomial(r, 0.00015345827f, 0.00133999321f, 0.00961848907f, 0.0555032864f, 0.240226462f,
    0.693147182f, 1.0f);
  const int32_t k = (int32_t)n, half = k >> 1;
  return p * bits<float>((half + 127) << 23) * bits<float>((k - half + 127) << 23);
}
// Sine and cosine of |x| up to QUICK_TURNS, which loops ask first; the others are the C library's.
static const float QUICK_TURNS = 1e5f;
INLINE float sin_(float x) { return __builtin_sinf(x); }
INLINE float cos_(float x) { return __builtin_cosf(x); }
INLINE float quick_turn(float x, int32_t quarter) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  const float n = (x * 0.636619772f + 12582912.0f) - 12582912.0f;
  const float a = __builtin_fmaf(-n, 1.57079637f, x), b = n * 4.37113883e-8f;  // a is exact
  const float r = a + b, other = r - a, lost = (a - (r - other)) + (b - other);
  const float rest = lost + __builtin_fmaf(n, 4.37113883e-8f, -b) + n * 1.71512451e-15f;
#else
  const double d = x, n = (double)(int32_t)(d * 0.6366197723675814 + (x < 0 ? -0.5 : 0.5));
  const double near = (d - n * 1.57079631090164184570) - n * 1.58932547735281966916e-8;
  const float r = (float)near, rest = (float)(near - (double)r);
#endif
  const int32_t k = (int32_t)n + quarter;
  const float q = r * r;
  float s = -0.000195043176f, c = 2.4423889e-05f;
  s = s * q + 0.008332083f;
  s = s * q - 0.166666538f;
  s = r + (r * q * s + rest);
  c = c * q - 0.00138872431f;
  c = c * q + 0.0416666456f;
  c = (1.0f - 0.5f * q) + (q * q * c - r * rest);
  const float y = k & 1 ? c : s;
  return k & 2 ? -y : y;
}
INLINE float quick_sin_(float x) { return quick_turn(x, 0); }
INLINE float quick_cos_(float x) { return quick_turn(x, 1); }
template <class T> INLINE T decay_(T x) { return x == -(T)INF ? (T)0 : exp_(-x); }
template <class T> INLINE T minimum_(T a, T b) { return (a < b) | (a != a) ? a : b; }
template <class T> INLINE T maximum_(T a, T b) { return (a > b) | (a != a) ? a : b; }
template <class T> INLINE T sign_(T x) { return (T)((x > 0) - (x < 0)); }
INLINE float floor_(float x) { return __builtin_floorf(x); }
INLINE double floor_(double x) { return __builtin_floor(x); }
INLINE I floor_(I x) { return x; }
INLINE float ceil_(float x) { return __builtin_ceilf(x); }
INLINE double ceil_(double x) { return __builtin_ceil(x); }
INLINE I ceil_(I x) { return x; }
INLINE float round_(float x) { return __builtin_rintf(x); }
INLINE double round_(double x) { return __builtin_rint(x); }
INLINE I round_(I x) { return x; }
INLINE float trunc_(float x) { return __builtin_truncf(x); }
INLINE double trunc_(double x) { return __builtin_trunc(x); }
INLINE I trunc_(I x) { return x; }
INLINE float sqrt_(float x) { return __builtin_sqrtf(x); }
INLINE double sqrt_(double x) { return __builtin_sqrt(x); }
// Whole numbers divided by 0 are counted, which is an error once a fold is done; processors trap, at -2^63 / -1 too.
static int zero_divisors;
INLINE I by_zero() { __atomic_fetch_add(&zero_divisors, 1, __ATOMIC_RELAXED); return 0; }
INLINE I fmod_(I a, I b) { return b == 0 ? by_zero() : b == -1 ? 0 : a % b; }
INLINE I floor_divide_(I a, I b) {
  if (b == 0) return by_zero();
  const I q = b == -1 ? (I)(0 - (uint64_t)a) : a / b;
  return q - (fmod_(a, b) != 0 && ((a < 0) != (b < 0)));
}
INLINE I remainder_(I a, I b) { const I r = fmod_(a, b); return r + (r != 0 && ((r < 0) != (b < 0)) ? b : 0); }
INLINE I power_(I a, I n) {  // by squaring; a negative exponent leaves nothing but 1 and -1
  if (n < 0 && a != 1 && a != -1) return 0;
  uint64_t base = (uint64_t)a, found = 1;
  for (uint64_t left = (uint64_t)n; left; left >>= 1, base *= base) if (left & 1) found *= base;
  return (I)found;
}
template <class T> INLINE T nan_to_num_(T x, T nan, T most, T least) {
  return x != x ? nan : x == (T)INF ? most : x == -(T)INF ? least : x;
}
"""
)

DRAWS = """
INLINE U turn(U w, int shift, U factor) { return (w ^ (w >> shift)) * factor; }
INLINE U mix(U w) { w = turn(turn(w, 16, 0x21F0AAADu), 15, 0xD35A2D97u); return w ^ (w >> 15); }
INLINE U hash_words(U a, U b, U c) { return mix(mix(mix(a) ^ b) ^ c); }
INLINE U draw_begin(I seed, I batch, I i) {
  return mix(hash_words((U)seed, (U)(seed >> 32), (U)batch) + (U)i * 0x9E3779B9u);
}
INLINE U draw_step(I seed, I batch, I i) {
  return mix(hash_words((U)batch, (U)seed, (U)(seed >> 32)) + (U)i * 0x85EBCA6Bu) | 1u;
}
INLINE float as_uniform(U word) {
  const float u = ((float)word + 0.5f) * 2.3283064365386963e-10f, most = 0.99999994039535522f;
  return u > most ? most : u;
}
INLINE float gumbel_(U begin, U step, U j) {
  const U w = turn(turn(j * step + begin, 16, 0x21F0AAADu), 15, 0xD35A2D97u);
  return -log_(-log1p_(-as_uniform(w)));
}
INLINE I coin_(U word, U mark, U col) {
  const U step = word << 16 | word >> 16;
  return (I)(((step * (col / 128 * 2) + word) * mark) >> 17);
}
"""

_TYPES = ("float", "double", "Bf16", "Half")  # of numbers of leaves, by their kinds


def reading(kinds: tuple[int, ...]) -> str:
    """How numbers of leaves of these kinds are read."""
    cases = [f"if (kind == {k}) return visit({_TYPES[k]}());" for k in kinds]
    cases[-1] = f"return visit({_TYPES[kinds[-1]]}());"
    return f"""
template <class Visit> INLINE void as_kind(int kind, Visit visit) {{ {" ".join(cases)} }}
INLINE F read_number(const char* p, I at, int kind) {{
  F y;
  as_kind(kind, [&](auto zero) {{ y = to_number(((const decltype(zero)*)p)[at]); }});
  return y;
}}
"""


NUMBERS = """
INLINE float from_bf16(uint16_t x) { return bits<float>((U)x << 16); }
INLINE float from_half(uint16_t h) {
  const U sign = (U)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023;
  const float sub = (float)m * 5.9604644775390625e-8f;
  const U body = e == 31 ? 0x7f800000u | m << 13 : (e + 112) << 23 | m << 13;
  return bits<float>(sign | (e ? body : bits<U>(sub)));
}
struct Bf16 { uint16_t x; };
struct Half { uint16_t x; };
INLINE F to_number(float x) { return (F)x; }
INLINE F to_number(double x) { return (F)x; }
INLINE F to_number(Bf16 x) { return (F)from_bf16(x.x); }
INLINE F to_number(Half x) { return (F)from_half(x.x); }
"""

TILES = """
typedef void (*Gemm)(const char*, const char*, const int*, const int*, const int*, const F*, const F*, const int*,
                     const F*, const int*, const F*, F*, const int*);
typedef void (*Limit)(int);
static Gemm gemm_;
// c[m, n] (+)= alpha a[m, k] b[n, k]^T
static void multiply(F* c, int ldc, const F* a, int lda, const F* b, int ldb, int m, int n, int k, F alpha) {
  const F zero = 0;
  gemm_("T", "N", &n, &m, &k, &alpha, b, &ldb, a, &lda, &zero, c, &ldc);
}
// the same with b[k, n], as load_features writes it
static void multiply_packed(F* c, int ldc, const F* a, int lda, const F* b, int m, int n, int k, F alpha) {
  const F zero = 0;
  gemm_("N", "N", &n, &m, &k, &alpha, b, &BN, a, &lda, &zero, c, &ldc);
}
// out[m, d] += alpha w[m, n] v[n, d]
static void contract(F* out, int ldo, const F* w, int ldw, const F* v, int ldv, int m, int n, int d, F alpha = 1) {
  const F one = 1;
  gemm_("N", "N", &d, &m, &n, &alpha, v, &ldv, w, &ldw, &one, out, &ldo);
}
// out[n, d] += alpha w[m, n]^T v[m, d]
static void contract_rows(F* out, int ldo, const F* w, int ldw, const F* v, int ldv, int m, int n, int d, F alpha = 1) {
  const F one = 1;
  gemm_("N", "T", &d, &n, &m, &alpha, v, &ldv, w, &ldw, &one, out, &ldo);
}
// A leaf in the list of arguments: address, stride of the batch, of the axis and of features, kind of number.
struct Vectors { const F* at; int ld; };
INLINE bool lies_in_rows(const I* leaf, int width) {  // as products read them
  return leaf[4] == (sizeof(F) == 4 ? 0 : 1) && leaf[3] == 1 && leaf[2] >= width && leaf[2] < 2147483647;
}
static Vectors load_vectors(const I* leaf, I b, I start, int count, int width, F* room) {
  const I first = b * leaf[1] + start * leaf[2], step = leaf[2], feature = leaf[3];
  if (lies_in_rows(leaf, width)) return {(const F*)leaf[0] + first, (int)step};
  as_kind((int)leaf[4], [&](auto zero) {
    const auto* const from = (const decltype(zero)*)leaf[0] + first;
    for (int l = 0; l < count; l++) {
      F* const to = room + (I)l * width;
      if (feature == 1) for (int f = 0; f < width; f++) to[f] = to_number(from[l * step + f]);
      else for (int f = 0; f < width; f++) to[f] = to_number(from[l * step + f * feature]);
    }
  });
  return {room, width};
}
// The same block again, after load_vectors.
INLINE Vectors find_vectors(const I* leaf, I b, I start, int width, const F* room) {
  if (lies_in_rows(leaf, width)) return {(const F*)leaf[0] + b * leaf[1] + start * leaf[2], (int)leaf[2]};
  return {room, width};
}
// The same with features first: room[f][l], `stride` numbers from one feature to the next.
static void load_features(const I* leaf, I b, I start, int count, int width, F* room, int stride) {
  const I first = b * leaf[1] + start * leaf[2], step = leaf[2], feature = leaf[3];
  as_kind((int)leaf[4], [&](auto zero) {
    const auto* const from = (const decltype(zero)*)leaf[0] + first;
    for (int start = 0; start < count; start += 16) {  // 16 vectors at a time: whole lines of the cache are written
      const int stop = start + 16 < count ? start + 16 : count;
      for (int f = 0; f < width; f++)
        for (int l = start; l < stop; l++) room[(I)f * stride + l] = to_number(from[l * step + f * feature]);
    }
  });
}
"""

REDUCTIONS = {  # what some folds use, by the name that they call
    "centred": """
// Vectors of both sides less the mean of the folded ones, and their squared norms, in the form in which one product
// gives all squared distances: left = (-2 (x - c), norm, 1, 1), right = (y - c, 1, 1, norm). Norms are held as two
// numbers each: their rounding would be the largest error. Returns the largest norm of the folded ones.
static F centred(Vectors x, Vectors y, int m, int n, int d, F* left, F* right) {
  const int ld = d + 4;
  F* const centre = right + (I)n * ld;
  memset(centre, 0, sizeof(F) * d);
  for (int j = 0; j < n; j++)
    for (int f = 0; f < d; f++) centre[f] += y.at[(I)j * y.ld + f];
  for (int f = 0; f < d; f++) centre[f] /= n;
  auto write = [&](const F* from, F* to, F factor) {
    double s = 0;
    _Pragma("omp simd reduction(+:s)")
    for (int f = 0; f < d; f++) {
      const F v = from[f] - centre[f];
      to[f] = factor * v;
      s += (double)v * v;
    }
    return s;
  };
  F most = 0;
  for (int j = 0; j < n; j++) {
    F* const r = right + (I)j * ld;
    const double s = write(y.at + (I)j * y.ld, r, 1);
    const F high = (F)s;
    r[d] = 1; r[d + 1] = 1; r[d + 2] = high; r[d + 3] = (F)(s - (double)high);
    most = high > most ? high : most;
  }
  for (int i = 0; i < m; i++) {
    F* const l = left + (I)i * ld;
    const double s = write(x.at + (I)i * x.ld, l, -2);
    const F high = (F)s;
    l[d] = high; l[d + 1] = (F)(s - (double)high); l[d + 2] = 1; l[d + 3] = 1;
  }
  return most;
}
""",
    "distances": """
// Squared distances of many features from what centred() made; close pairs are computed directly.
static void distances(F* out, int ldo, Vectors x, Vectors y, int m, int n, int d, F most, F* left, F* right) {
  const int ld = d + 4;
  multiply(out, ldo, left, ld, right, ld, m, n, ld, 1);
  for (int i = 0; i < m; i++) {
    F* const o = out + (I)i * ldo;
    const F bound = (F)1e-2 * (left[(I)i * ld + d] + most);
    int32_t any = 0;
    _Pragma("omp simd reduction(|:any)")
    for (int j = 0; j < n; j++) any |= (int32_t)!(o[j] >= bound);  // a point at infinity gives NaN
    if (!any) continue;
    const F* const p = x.at + (I)i * x.ld;
    for (int j = 0; j < n; j++) {
      if (o[j] >= bound) continue;
      const F* const q = y.at + (I)j * y.ld;
      F s = 0;
      _Pragma("omp simd reduction(+:s)")
      for (int f = 0; f < d; f++) s += (p[f] - q[f]) * (p[f] - q[f]);
      o[j] = s;
    }
  }
}
""",
    "contract_gap": """
// out += sign times the sum of weight (x - y), from what centred() made; `sums`: of the weights over the axis that is
// summed.
static void contract_gap(F* out, int ldo, const F* weight, const F* left, const F* right, const F* sums, int m, int n,
                         int d, bool folds, F sign) {
  const int ld = d + 4;
  const F* const own = folds ? left : right;
  for (int i = 0; i < (folds ? m : n); i++) {
    const F s = (folds ? -(F)0.5 : (F)-1) * sign * sums[i];
    for (int f = 0; f < d; f++) out[(I)i * ldo + f] += s * own[(I)i * ld + f];
  }
  if (folds) contract(out, ldo, weight, LD, right, ld, m, n, d, -sign);
  else contract_rows(out, ldo, weight, LD, left, ld, m, n, d, -(F)0.5 * sign);
}
""",
    "select_best": """
// The best number so far and its place; the first of equals, NaN before all.
template <bool LARGEST> static void select_best(const F* x, int n, I j0, F best, int32_t odd, F* value, I* place) {
  if (*value != *value) return;
  if (odd) {
    int j = 0;
    while (x[j] == x[j]) j++;
    *value = x[j]; *place = j0 + j;
  } else if (LARGEST ? best > *value : best < *value) {
    int j = 0;
    while (x[j] != best) j++;
    *value = best; *place = j0 + j;
  }
}
""",
    "select_top": """
// The k best so far, best first and the first of equals first; NaN is the largest of all.
template <int TOP, bool LARGEST>
static void select_top(const F* x, int n, I j0, F best, int32_t odd, F* value, I* place) {
  auto better = [](F a, F b) { return LARGEST ? a > b || (a != a && b == b) : a < b || (b != b && a == a); };
  int j = 0;
  auto insert = [&](F v, I at) {
    int s = TOP - 1;
    while (s > 0 && (place[s - 1] < 0 || better(v, value[s - 1]))) {
      value[s] = value[s - 1]; place[s] = place[s - 1]; s--;
    }
    value[s] = v; place[s] = at;
  };
  for (; j < n && place[TOP - 1] < 0; j++) insert(x[j], j0 + j);
  if (j == n || !(odd || better(best, value[TOP - 1]))) return;
  for (; j < n;) {
    const F edge = value[TOP - 1];
    const int stop = j + 16 <= n ? j + 16 : n;
    if (stop - j == 16 && !odd && edge == edge) {
      int32_t any = 0;
      for (int l = 0; l < 16; l++) any |= (int32_t)(LARGEST ? x[j + l] > edge : x[j + l] < edge);
      if (!any) { j = stop; continue; }
    }
    for (; j < stop; j++) if (better(x[j], value[TOP - 1])) insert(x[j], j0 + j);
  }
}
""",
    "select_heap": """
// Many best so far, as a heap with the worst at its root: the last of equals, before all a slot with nothing in it.
template <bool LARGEST> static bool is_worse(F a, I i, F b, I j) {
  if (i < 0 || j < 0) return i < 0 && j >= 0;
  if (a == b || (a != a && b != b)) return i > j;
  return LARGEST ? a < b || b != b : a > b || a != a;
}
template <bool LARGEST> static void sift_down(F v, I at, int size, F* value, I* place) {
  int s = 0;
  for (int c; (c = 2 * s + 1) < size; s = c) {
    if (c + 1 < size && is_worse<LARGEST>(value[c + 1], place[c + 1], value[c], place[c])) c++;
    if (!is_worse<LARGEST>(value[c], place[c], v, at)) break;
    value[s] = value[c]; place[s] = place[c];
  }
  value[s] = v; place[s] = at;
}
template <int TOP, bool LARGEST>
static void select_heap(const F* x, int n, I j0, F best, int32_t odd, F* value, I* place) {
  for (int j = 0; j < n;) {
    const F edge = value[0];
    const int stop = j + 16 <= n ? j + 16 : n;
    if (stop - j == 16 && !odd && edge == edge && place[0] >= 0) {
      if (j == 0 && !(LARGEST ? best > edge : best < edge)) return;
      int32_t any = 0;
      for (int l = 0; l < 16; l++) any |= (int32_t)(LARGEST ? x[j + l] > edge : x[j + l] < edge);
      if (!any) { j = stop; continue; }
    }
    for (; j < stop; j++)
      if (is_worse<LARGEST>(value[0], place[0], x[j], j0 + j)) sift_down<LARGEST>(x[j], j0 + j, TOP, value, place);
  }
}
// A heap as a list, best first.
template <int TOP, bool LARGEST> static void sort_heap(F* value, I* place) {
  for (int size = TOP - 1; size > 0; size--) {
    const F v = value[size]; const I at = place[size];
    value[size] = value[0]; place[size] = place[0];
    sift_down<LARGEST>(v, at, size, value, place);
  }
}
""",
}
