// Rotary embedding of heads, computed in float32 and rounded once.
#pragma once
#include "simd/element_types.h"
#include "runtime/parallel.h"

// Rotate the pairs (x[i], x[half + i]), i < half, by the angles with cosine cos[i] and sine sin[i]. Elements from 2
// half to width are copied. y may be x if In and Out are the same type.
template <class In, class Out>
inline void rotate_head(const In *x, const float *cos, const float *sin, Out *y, long width, long half) {
  using namespace simd;
  for (long d = 0; d < half; d += kLanes) {
    const Vec a = load(x + d, half - d), b = load(x + half + d, half - d);
    const Vec c = load(cos + d, half - d), s = load(sin + d, half - d);
    store(y + d, fnma(b, s, a * c), half - d);
    store(y + half + d, fma(a, s, b * c), half - d);
  }
  for (long d = 2 * half; d < width; d += kLanes) store(y + d, load(x + d, width - d), width - d);
}

// Rotate like rotate_head, but the pairs are neighbours: x[2 i] and x[2 i + 1]. `width` is at most `kMost`.
template <long kMost, class In, class Out>
inline void rotate_neighbours(const In *x, const float *cos, const float *sin, Out *y, long width, long half) {
  using namespace simd;
  alignas(64) float in[kMost], apart[kMost];
  for (long d = 0; d < width; d += kLanes) store(in + d, load(x + d, width - d), width - d);
  for (long i = 0; i < half; i++) apart[i] = in[2 * i], apart[half + i] = in[2 * i + 1];
  rotate_head(apart, cos, sin, apart, 2 * half, half);
  for (long i = 0; i < half; i++) in[2 * i] = apart[i], in[2 * i + 1] = apart[half + i];
  for (long d = 0; d < width; d += kLanes) store(y + d, load(in + d, width - d), width - d);
}

// Rotate x [rows, heads, width] (rows `x_stride` elements apart) -> y [rows, heads, width] contiguous. Row i of `cos`
// and `sin` begins at `i * angle_stride` and has `half` values.
template <class In, class Out>
inline void rotate(const In *x, const float *cos, const float *sin, Out *y, long rows, long heads, long width,
                   long half, long x_stride, long angle_stride) {
#pragma omp parallel for if (rows * heads * width > kSerial)
  for (long row = 0; row < rows; row++)
    for (long head = 0; head < heads; head++)
      rotate_head(x + row * x_stride + head * width, cos + row * angle_stride, sin + row * angle_stride,
                  y + (row * heads + head) * width, width, half);
}
