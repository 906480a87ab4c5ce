// RMSNorm, computed in float32 and rounded once. A row's order of additions depends on the level alone.
#pragma once
#include "simd/element_types.h"
#include "runtime/parallel.h"

// y[d] = x[d] / sqrt(mean(x^2) + eps) * weight[d] for d < width. y may be x if In and Out are the same type.
template <class In, class Out>
inline void rms_norm_row(const In *x, const float *weight, Out *y, long width, float eps) {
  using namespace simd;
  Vec sums[4] = {zero(), zero(), zero(), zero()};  // independent, so that additions need not wait for each other
  long d = 0;
  for (; d + 4 * kLanes <= width; d += 4 * kLanes)
    for (int i = 0; i < 4; i++) {
      const Vec value = load(x + d + i * kLanes);
      sums[i] = fma(value, value, sums[i]);
    }
  for (; d < width; d += kLanes) {
    const Vec value = load(x + d, width - d);
    sums[0] = fma(value, value, sums[0]);
  }
  const double mean = static_cast<double>(sum((sums[0] + sums[1]) + (sums[2] + sums[3]))) / width;
  const Vec inverse = broadcast(static_cast<float>(1.0 / __builtin_sqrt(mean + eps)));
  for (d = 0; d + kLanes <= width; d += kLanes) store(y + d, load(x + d) * inverse * load(weight + d));
  if (d < width) store(y + d, load(x + d, width - d) * inverse * load(weight + d, width - d), width - d);
}

// x [rows, heads, width] (rows `x_stride` elements apart), weight [heads, width] -> y [rows, heads, width] contiguous:
// each head is normed by itself.
template <class In, class Out>
inline void rms_norm(const In *x, const float *weight, Out *y, long rows, long heads, long width, long x_stride,
                     float eps) {
#pragma omp parallel for if (rows * heads * width > kSerial)
  for (long i = 0; i < rows * heads; i++)
    rms_norm_row(x + i / heads * x_stride + i % heads * width, weight + i % heads * width, y + i * width, width, eps);
}
