// RMSNorm, computed in float32 and rounded once. A row's order of additions depends only on the ISA level.
#pragma once
#include "simd/element_types.h"
#include "runtime/parallel.h"

// Return the sum of x[d]^2 for d < width.
template <class In>
inline float sum_of_squares(const In *x, long width) {
  using namespace simd;
  Vec sums[4] = {zero(), zero(), zero(), zero()};  // independent sums, so that additions do not wait for each other
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
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Return the factor that normalises values with this mean square.
inline float inverse_root(double mean, float eps) { return static_cast<float>(1.0 / __builtin_sqrt(mean + eps)); }

// Compute y[d] = x[d] * factor * weight[d] for d < width. y may be x if In and Out are the same type.
template <class In, class Out>
inline void scale_row(const In *x, float factor, const float *weight, Out *y, long width) {
  using namespace simd;
  const Vec inverse = broadcast(factor);
  long d = 0;
  for (; d + kLanes <= width; d += kLanes) store(y + d, load(x + d) * inverse * load(weight + d));
  if (d < width) store(y + d, load(x + d, width - d) * inverse * load(weight + d, width - d), width - d);
}

// Compute y[d] = x[d] / sqrt(mean(x^2) + eps) * weight[d] for d < width. y may be x if In and Out are the same type.
template <class In, class Out>
inline void rms_norm_row(const In *x, const float *weight, Out *y, long width, float eps) {
  const double mean = static_cast<double>(sum_of_squares(x, width)) / width;
  scale_row(x, inverse_root(mean, eps), weight, y, width);
}

// Apply RMSNorm to each head separately: x [rows, heads, width] (rows `x_stride` elements apart), weight [heads, width]
// -> y [rows, heads, width] contiguous.
template <class In, class Out>
inline void rms_norm(const In *x, const float *weight, Out *y, long rows, long heads, long width, long x_stride,
                     float eps) {
#pragma omp parallel for if (rows * heads * width > kSerial)
  for (long i = 0; i < rows * heads; i++)
    rms_norm_row(x + i / heads * x_stride + i % heads * width, weight + i % heads * width, y + i * width, width, eps);
}

// Norm of q and k over all heads of a row, which are split over the ranks. Each rank sums the squares of its own heads,
// and the sums of all heads are added in the order of heads. So the bits do not depend on the number of ranks.
struct HeadsOfRank {
  long heads, kv_heads, all_heads, all_kv_heads;  // numbers of heads on this rank, and on all ranks
  long first_head, first_kv_head;
  int sums_keys;  // whether this rank sums the squares of its keys; only one rank does if several share KV heads

  long all() const { return all_heads + all_kv_heads; }
};

// Sum squares: qk [rows, heads + kv_heads, width] (rows `stride` elements apart) -> squares [rows, all heads], which
// are 0 for the heads of other ranks.
template <class In>
inline void squares_of_heads(const HeadsOfRank &of, const In *qk, float *squares, long rows, long width, long stride) {
#pragma omp parallel for if (rows * (of.heads + of.kv_heads) * width > kSerial)
  for (long row = 0; row < rows; row++) {
    float *to = squares + row * of.all();
    for (long head = 0; head < of.all(); head++) to[head] = 0;
    for (long head = 0; head < of.heads + of.kv_heads; head++) {
      const bool is_key = head >= of.heads;
      if (is_key && !of.sums_keys) break;
      const long index = is_key ? of.all_heads + of.first_kv_head + head - of.heads : of.first_head + head;
      to[index] = sum_of_squares(qk + row * stride + head * width, width);
    }
  }
}

// Compute the factors of the queries and of the keys of a row, from the squares of all its heads.
inline void row_factors(const HeadsOfRank &of, const float *squares, long width, float eps, float *factors) {
  double total[2] = {0, 0};
  for (long head = 0; head < of.all(); head++) total[head >= of.all_heads] += squares[head];
  factors[0] = inverse_root(total[0] / (of.all_heads * width), eps);
  factors[1] = inverse_root(total[1] / (of.all_kv_heads * width), eps);
}
