// exp, tanh, sigmoid, silu and both variants of gelu for a register of floats. A value gives the same bits in every
// lane.
//
// exp uses Cody and Waite's reduction (Software Manual for the Elementary Functions, 1980): x = n ln 2 + r with ln 2 in
// two parts, then a polynomial of degree 6 in r.
#pragma once
#include "simd/simd.h"

namespace simd {

inline Vec exp(Vec x) {
  // Below -87.3 the result would be subnormal, so it becomes 0. Above 88.7 the last scaling overflows to infinity, as
  // it should.
  const Mask tiny = less(x, broadcast(-87.3f));
  // min and max return their second operand if one is NaN. The constant comes first, so that NaN stays NaN.
  x = min(broadcast(89.0f), max(broadcast(-88.0f), x));
  const Vec n = round(x * broadcast(1.44269504f));
  Vec r = fnma(n, broadcast(0.693359375f), x);
  r = fnma(n, broadcast(-2.12194440e-4f), r);
  Vec y = broadcast(1.9875692e-4f);
  y = fma(y, r, broadcast(1.3981999e-3f));
  y = fma(y, r, broadcast(8.3334519e-3f));
  y = fma(y, r, broadcast(4.1665796e-2f));
  y = fma(y, r, broadcast(1.6666665e-1f));
  y = fma(y, r, broadcast(0.5f));
  y = fma(y, r * r, r + broadcast(1.0f));
  return select(tiny, zero(), scale_by_power_of_2(y, n));
}

// Return the same bits as one lane of the vector version.
inline float exp(float x) { return first_lane(exp(broadcast(x))); }

constexpr float kLog2E = 1.44269504f;

// Return 2^y for y <= 0, with a relative error of a few parts in 10^8; at least 2^-126. It is cheaper than `exp`, which
// takes any value. 2^y is 2^n 2^f with integer n and f from -1/2 to 1/2. 2^f is a minimax polynomial.
inline Vec power_of_2(Vec y) {
  typedef uint32_t Words __attribute__((vector_size(sizeof(Vec))));
  const Vec magic = broadcast(12582912.0f);  // 1.5 2^23: adding it to a value rounds the value to an integer
  y = max(broadcast(-126.0f), y);
  const Vec shifted = y + magic;
  const Vec f = y - (shifted - magic);
  Vec p = broadcast(0.00015353362f);
  p = fma(p, f, broadcast(0.0013398875f));
  p = fma(p, f, broadcast(0.00961843692f));
  p = fma(p, f, broadcast(0.0555033237f));
  p = fma(p, f, broadcast(0.240226477f));
  p = fma(p, f, broadcast(0.693147182f));
  p = fma(p, f, broadcast(1.0f));
  return (Vec)((Words)p + ((Words)shifted << 23));
}

inline Vec sigmoid(Vec x) { return broadcast(1.0f) / (broadcast(1.0f) + exp(zero() - x)); }

inline Vec silu(Vec x) { return x * sigmoid(x); }

// Return tanh(x) = sign(x) (1 - e) / (1 + e) with e = exp(-2 |x|). Below 1/16 the difference would lose digits, so the
// first three terms of the series are used. They are exact to float32.
inline Vec tanh(Vec x) {
  const Vec one = broadcast(1.0f), size = abs(x);
  const Vec e = exp(size * broadcast(-2.0f));
  const Vec far = (one - e) / (one + e);
  const Vec square = x * x;
  Vec series = fma(square, broadcast(0.13333333f), broadcast(-0.33333333f));
  series = fma(series * square, size, size);
  return with_sign_of(select(less(size, broadcast(0.0625f)), series, far), x);
}

// Return the tanh approximation of gelu, computed with (1 + tanh(u)) / 2 = sigmoid(2 u).
inline Vec gelu_tanh(Vec x) {
  const Vec inner = fma(x * x * x, broadcast(0.044715f), x);
  return x * sigmoid(inner * broadcast(1.5957691216f));
}

// Return x times the normal distribution function at x. Near zero, half of erf(x / sqrt 2) is x times a polynomial in
// x^2. Beyond 1.25, the probability above |x| is exp(-x^2 / 2) times a polynomial in 1 / (1 + |x| / 2), so that small
// probabilities keep their digits. Both were fitted at Chebyshev nodes. The error is at most 4e-7, and at most 4e-6 of
// the result.
inline Vec gelu(Vec x) {
  const Vec one = broadcast(1.0f), half = broadcast(0.5f), size = abs(x), square = x * x;
  Vec p = broadcast(4.75829839e-7f);
  p = fma(p, square, broadcast(-9.05728155e-6f));
  p = fma(p, square, broadcast(0.000115030095f));
  p = fma(p, square, broadcast(-0.00118710791f));
  p = fma(p, square, broadcast(0.0099734993f));
  p = fma(p, square, broadcast(-0.0664903743f));
  p = fma(p, square, broadcast(0.39894228f));
  const Vec near = fma(x, p, half);
  const Vec u = one / fma(size, half, one);
  Vec q = broadcast(0.0100733741f);
  q = fma(q, u, broadcast(0.0970104994f));
  q = fma(q, u, broadcast(-0.284233248f));
  q = fma(q, u, broadcast(0.153693375f));
  q = fma(q, u, broadcast(0.122598823f));
  q = fma(q, u, broadcast(0.203491039f));
  q = fma(q, u, broadcast(0.199151815f));
  q = fma(q, u, broadcast(1.0461316e-5f));
  const Vec above = exp(square * broadcast(-0.5f)) * q;
  const Vec far = select(less(x, zero()), above, one - above);
  return x * select(less(size, broadcast(1.25f)), near, far);
}

}  // namespace simd
