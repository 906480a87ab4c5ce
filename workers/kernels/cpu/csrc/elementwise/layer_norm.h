// LayerNorm, computed in float32 and rounded once. A row's order of additions depends only on the ISA level.
#pragma once
#include "runtime/parallel.h"
#include "simd/element_types.h"

// Compute y[d] = (x[d] - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight[d] + bias[d] for d < width. `weight` and
// `bias` may be null.
template <class In, class Out>
inline void layer_norm_row(const In *x, const float *weight, const float *bias, Out *y, long width, float eps) {
  using namespace simd;
  const auto total = [&](auto &&term) {
    Vec sums[4] = {zero(), zero(), zero(), zero()};
    long d = 0;
    for (; d + 4 * kLanes <= width; d += 4 * kLanes)
      for (int i = 0; i < 4; i++) sums[i] = sums[i] + term(load(x + d + i * kLanes), kLanes);
    for (; d < width; d += kLanes) sums[0] = sums[0] + term(load(x + d, width - d), width - d);
    return static_cast<double>(sum((sums[0] + sums[1]) + (sums[2] + sums[3])));
  };
  const Vec mean = broadcast(static_cast<float>(total([](Vec value, long) { return value; }) / width));
  const double variance = total([&](Vec value, long count) {
    const Vec gap = select(first(count), value - mean, zero());
    return gap * gap;
  }) / width;
  const Vec inverse = broadcast(static_cast<float>(1.0 / __builtin_sqrt(variance + eps)));
  for (long d = 0; d < width; d += kLanes) {
    const long count = width - d;
    const Vec scale = weight ? load(weight + d, count) : broadcast(1.0f), shift = bias ? load(bias + d, count) : zero();
    store(y + d, fma((load(x + d, count) - mean) * inverse, scale, shift), count);
  }
}

// Apply LayerNorm to each row: x [rows, width] contiguous, weight and bias [width] -> y [rows, width].
template <class In, class Out>
inline void layer_norm(const In *x, const float *weight, const float *bias, Out *y, long rows, long width, float eps) {
#pragma omp parallel for if (rows * width > kSerial)
  for (long i = 0; i < rows; i++) layer_norm_row(x + i * width, weight, bias, y + i * width, width, eps);
}
