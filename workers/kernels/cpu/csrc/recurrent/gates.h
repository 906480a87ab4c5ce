// Gates and norms of rows around the recurrent operations, in float32 and rounded once. An element's bits do not depend
// on the batch.
#pragma once
#include "elementwise/norm.h"
#include "runtime/arena.h"
#include "runtime/parallel.h"
#include "simd/vector_math.h"

namespace recurrent {

// Return log(1 + exp(x)) = max(x, 0) + log(1 + u) with u = exp(-|x|). With s = u / (2 + u) <= 1/3, log(1 + u) is
// 2 (s + s^3 / 3 + s^5 / 5 + ...); the terms after s^13 are below the last bit.
inline simd::Vec softplus(simd::Vec x) {
  using namespace simd;
  const Vec u = exp(zero() - abs(x)), s = u / (u + broadcast(2.0f)), square = s * s;
  Vec series = broadcast(1.0f / 13.0f);
  for (int divisor = 11; divisor > 0; divisor -= 2) series = fma(series, square, broadcast(1.0f / divisor));
  return fma(s + s, series, max(zero(), x));
}

// Compute log_decay = -exp(a_log) softplus(a + dt_bias) and beta = beta_scale sigmoid(b): a, b [T, heads] (rows
// `a_stride` and `b_stride` apart), a_log and dt_bias [heads] -> [T, heads] twice.
template <class In>
inline void delta_gates(const In *a, long a_stride, const In *b, long b_stride, const float *a_log,
                        const float *dt_bias, float beta_scale, float *log_decay, float *beta, long rows, long heads) {
  using namespace simd;
#pragma omp parallel for if (rows * heads > kSerial)
  for (long row = 0; row < rows; row++)
    for (long h = 0; h < heads; h += kLanes) {
      const long count = heads - h, at = row * heads + h;
      const Vec step = softplus(load(a + row * a_stride + h, count) + load(dt_bias + h, count));
      store(log_decay + at, zero() - exp(load(a_log + h, count)) * step, count);
      store(beta + at, sigmoid(load(b + row * b_stride + h, count)) * broadcast(beta_scale), count);
    }
}

// Compute softplus(dt + bias), limited to the range from `least` to `most`: dt [T, heads] (rows `stride` apart), bias
// [heads] or null -> y [T, heads].
template <class In>
inline void mamba_steps(const In *dt, long stride, const float *bias, float least, float most, float *y, long rows,
                        long heads) {
  using namespace simd;
#pragma omp parallel for if (rows * heads > kSerial)
  for (long row = 0; row < rows; row++)
    for (long h = 0; h < heads; h += kLanes) {
      const long count = heads - h;
      const Vec x = load(dt + row * stride + h, count), step = softplus(bias ? x + load(bias + h, count) : x);
      store(y + row * heads + h, max(broadcast(least), min(broadcast(most), step)), count);  // NaN stays NaN
    }
}

struct GatedNorm {
  const float *weight;  // [groups, width]
  long groups, width;
  float eps;
  int gates_first;  // the gate is applied before the norm, as in Mamba 2; otherwise after it
};

// Compute to[d] = x[d] silu(gate[d]) for d < width. `to` may be x if X and Out are the same type.
template <class X, class T, class Out>
inline void gate_row(const X *x, const T *gate, Out *to, long width) {
  using namespace simd;
  for (long d = 0; d < width; d += kLanes)
    store(to + d, load(x + d, width - d) * silu(load(gate + d, width - d)), width - d);
}

// Compute the RMSNorm of x [T, groups, width] over each group, times silu(gate): rows of x are contiguous, rows of the
// gate `stride` elements apart -> y as x. y may be x.
template <class T>
inline void gated_norm(const GatedNorm &norm, const T *x, const T *gate, long stride, T *y, long rows) {
  const long width = norm.width;
#pragma omp parallel for if (rows * norm.groups * width > kSerial)
  for (long i = 0; i < rows * norm.groups; i++) {
    const long group = i % norm.groups;
    const float *weight = norm.weight + group * width;
    const T *from = x + i * width, *gates = gate + i / norm.groups * stride + group * width;
    const Arena::Mark mark = arena().mark();
    float *row = arena().take<float>(width);
    if (norm.gates_first) {
      gate_row(from, gates, row, width);
      rms_norm_row(row, weight, y + i * width, width, norm.eps);
    } else {
      rms_norm_row(from, weight, row, width, norm.eps);
      gate_row(row, gates, y + i * width, width);
    }
    arena().release(mark);
  }
}

}  // namespace recurrent
