// exp, tanh, sigmoid, silu and gelu of sixteen floats at a time; a value gives the same bits in every element.
//
// exp follows Cody and Waite's reduction (Software Manual for the Elementary Functions, 1980): x = n ln 2 + r with ln 2
// in two parts, then a polynomial of degree 7 in r.
#pragma once
#include <immintrin.h>

inline __m512 exp_ps(__m512 x) {
  // Below -87.3 the result would be subnormal: 0. Above 88.7 it overflows to infinity in scalef, as it should.
  const __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_LT_OQ);
  // min and max return their second operand when one is NaN: the constant comes first, so that NaN stays NaN.
  x = _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(_mm512_set1_ps(-88.0f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 y = _mm512_set1_ps(1.9875692e-4f);
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.3981999e-3f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(8.3334519e-3f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(4.1665796e-2f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.6666665e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.5f));
  y = _mm512_fmadd_ps(y, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_maskz_mov_ps(static_cast<__mmask16>(~tiny), _mm512_scalef_ps(y, n));
}

inline __m512 sigmoid(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(one, _mm512_add_ps(one, exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

// The same bits as one element of `exp_ps`.
inline float exp_one(float x) { return _mm512_cvtss_f32(exp_ps(_mm512_set1_ps(x))); }

inline __m512 silu(__m512 x) { return _mm512_mul_ps(x, sigmoid(x)); }

// tanh(x) = sign(x) (1 - e) / (1 + e) with e = exp(-2 |x|); below 1/16 the difference would cancel, and three terms of
// the series are exact to float32.
inline __m512 tanh_ps(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), size = _mm512_abs_ps(x);
  const __m512 e = exp_ps(_mm512_mul_ps(size, _mm512_set1_ps(-2.0f)));
  const __m512 far = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
  const __m512 square = _mm512_mul_ps(x, x);
  __m512 series = _mm512_fmadd_ps(square, _mm512_set1_ps(0.13333333f), _mm512_set1_ps(-0.33333333f));
  series = _mm512_fmadd_ps(_mm512_mul_ps(series, square), size, size);
  const __mmask16 near = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0.0625f), _CMP_LT_OQ);
  const __m512 positive = _mm512_mask_mov_ps(far, near, series);
  const __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0f));
  return _mm512_or_ps(positive, sign);
}

// The tanh form of gelu, with (1 + tanh(u)) / 2 = sigmoid(2 u).
inline __m512 gelu_tanh(__m512 x) {
  const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
  const __m512 inner = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
  return _mm512_mul_ps(x, sigmoid(_mm512_mul_ps(inner, _mm512_set1_ps(1.5957691216f))));
}
