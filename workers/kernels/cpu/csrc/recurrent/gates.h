// Gates and norms of rows around the recurrent operations, in float32 and rounded once. An element's bits do not depend
// on the batch.
#pragma once
#include "elementwise/norm.h"
#include "runtime/arena.h"
#include "runtime/parallel.h"
#include "simd/int8.h"
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
// `stride` apart), a_log and dt_bias [heads] -> [T, heads] twice.
inline void delta_gates(const float *a, const float *b, long stride, const float *a_log, const float *dt_bias,
                        float beta_scale, float *log_decay, float *beta, long rows, long heads) {
  using namespace simd;
#pragma omp parallel for if (rows * heads > kSerial)
  for (long row = 0; row < rows; row++)
    for (long h = 0; h < heads; h += kLanes) {
      const long count = heads - h, at = row * heads + h;
      const Vec step = softplus(load(a + row * stride + h, count) + load(dt_bias + h, count));
      store(log_decay + at, zero() - exp(load(a_log + h, count)) * step, count);
      store(beta + at, sigmoid(load(b + row * stride + h, count)) * broadcast(beta_scale), count);
    }
}

// Projections of Kimi delta attention from which its gates are computed.
struct KimiGates {
  const float *a_log;    // [heads]
  const float *dt_bias;  // [heads, width]
  long heads, width;
  float lower_bound;     // of the logarithms of decays; 0: they have none
};

// Compute log_decay = -exp(a_log) softplus(f + dt_bias), or lower_bound sigmoid(exp(a_log) (f + dt_bias)) if there is a
// bound, and beta = sigmoid(b): f [T, heads, width] (rows contiguous), b [T, heads] (rows `stride` apart) -> [T, heads,
// width], [T, heads]. log_decay may be f.
inline void kimi_gates(const KimiGates &gates, const float *f, const float *b, long stride, float *log_decay,
                       float *beta, long rows) {
  using namespace simd;
  const long heads = gates.heads, width = gates.width;
#pragma omp parallel for if (rows * heads * width > kSerial)
  for (long i = 0; i < rows * heads; i++) {
    const long row = i / heads, head = i % heads;
    const Vec rate = broadcast(simd::exp(gates.a_log[head])), bound = broadcast(gates.lower_bound);
    beta[i] = first_lane(simd::sigmoid(broadcast(b[row * stride + head])));
    for (long d = 0; d < width; d += kLanes) {
      const long count = width - d;
      const Vec x = load(f + i * width + d, count) + load(gates.dt_bias + head * width + d, count);
      const Vec decay = gates.lower_bound ? bound * simd::sigmoid(rate * x) : zero() - rate * softplus(x);
      store(log_decay + i * width + d, decay, count);
    }
  }
}

// Compute softplus(scale dt + bias), limited to the range from `least` to `most`: dt [T, heads] (rows `stride` apart),
// bias [heads] or null -> y [T, heads].
template <class In>
inline void mamba_steps(const In *dt, long stride, float scale, const float *bias, float least, float most, float *y,
                        long rows, long heads) {
  using namespace simd;
#pragma omp parallel for if (rows * heads > kSerial)
  for (long row = 0; row < rows; row++)
    for (long h = 0; h < heads; h += kLanes) {
      const long count = heads - h;
      Vec x = rounded_product(load(dt + row * stride + h, count), broadcast(scale));
      if (bias) x = x + load(bias + h, count);
      store(y + row * heads + h, max(broadcast(least), min(broadcast(most), softplus(x))), count);  // NaN stays NaN
    }
}

// A norm of the heads of a row, times silu(gate) or sigmoid(gate).
struct GatedNorm {
  const float *weight;  // [heads, width]   or null: rows are only gated
  long heads, width;    // of this rank
  float eps;
  int gates_first;      // the gate is applied before the norm, as in Mamba 2; otherwise after it
  long group_heads;     // heads that are normed together, of which other ranks may have some
  long all_heads, first_head;  // heads of all groups, and the first that is on this rank
  int sigmoid;          // rows are multiplied by sigmoid(gate), not by silu(gate), after the norm

  // Number of consecutive heads on this rank that are in one group.
  long own_heads() const { return heads < group_heads ? heads : group_heads; }
};

// Compute to[d] = x[d] silu(gate[d]) for d < width. `to` may be x if X and Out are the same type.
template <class X, class T, class Out>
inline void gate_row(const X *x, const T *gate, Out *to, long width) {
  using namespace simd;
  for (long d = 0; d < width; d += kLanes)
    store(to + d, load(x + d, width - d) * silu(load(gate + d, width - d)), width - d);
}

// Compute to[d] = x[d] sigmoid(gate[d]) for d < width.
template <class T, class Out>
inline void gate_row_by_sigmoid(const float *x, const T *gate, Out *to, long width) {
  using namespace simd;
  for (long d = 0; d < width; d += kLanes)
    store(to + d, load(x + d, width - d) * simd::sigmoid(load(gate + d, width - d)), width - d);
}

// Call `work(row, head, head's rows of x, gate and y, float [width])` for the heads of all rows. x and y [T, heads,
// width] are contiguous, rows of the gate `stride` elements apart.
template <class T, class Out, class Work>
inline void for_each_gated_head(const GatedNorm &norm, const T *x, const T *gate, long stride, Out *y, long rows,
                                const Work &work) {
  const long width = norm.width;
#pragma omp parallel for if (rows * norm.heads * width > kSerial)
  for (long i = 0; i < rows * norm.heads; i++) {
    const long row = i / norm.heads, head = i % norm.heads;
    const Arena::Mark mark = arena().mark();
    work(row, head, x + i * width, gate + row * stride + head * width, y + i * width, arena().take<float>(width));
    arena().release(mark);
  }
}

// Compute the RMSNorm of each head of x, and gate it -> y. y may be x.
template <class T>
inline void gated_norm(const GatedNorm &norm, const T *x, const T *gate, long stride, T *y, long rows) {
  const auto norm_head = [&](long, long head, const T *from, const T *gates, T *to, float *row) {
    const float *weight = norm.weight + head * norm.width;
    if (!norm.weight) {
      gate_row(from, gates, to, norm.width);
    } else if (norm.gates_first) {
      gate_row(from, gates, row, norm.width);
      rms_norm_row(row, weight, to, norm.width, norm.eps);
    } else {
      rms_norm_row(from, weight, row, norm.width, norm.eps);
      if (norm.sigmoid) gate_row_by_sigmoid(row, gates, to, norm.width);
      else gate_row(row, gates, to, norm.width);
    }
  };
  for_each_gated_head(norm, x, gate, stride, y, rows, norm_head);
}

// Sum the squares that the norm of a group of heads needs -> squares [T, all heads], 0 for heads of other ranks.
template <class T>
inline void gated_squares(const GatedNorm &norm, const T *x, const T *gate, long stride, float *squares, long rows) {
  for (long i = 0; i < rows * norm.all_heads; i++) squares[i] = 0;
  const auto sum_head = [&](long row, long head, const T *from, const T *gates, const T *, float *gated) {
    float *to = squares + row * norm.all_heads + norm.first_head + head;
    if (norm.gates_first) {
      gate_row(from, gates, gated, norm.width);
      *to = sum_of_squares(gated, norm.width);
    } else {
      *to = sum_of_squares(from, norm.width);
    }
  };
  for_each_gated_head(norm, x, gate, stride, x, rows, sum_head);
}

// Compute the gated norm of groups of heads -> y. y may be x. `squares` [T, heads of this rank's groups]: the squares
// of all heads of these groups, rows `squares_stride` apart.
template <class T>
inline void gated_norm_of_heads(const GatedNorm &norm, const T *x, const T *gate, long stride, const float *squares,
                                long squares_stride, T *y, long rows) {
  const auto norm_head = [&](long row, long head, const T *from, const T *gates, T *to, float *normed) {
    const float *of_group = squares + row * squares_stride + head / norm.own_heads() * norm.group_heads;
    double total = 0;
    for (long i = 0; i < norm.group_heads; i++) total += of_group[i];
    const float factor = inverse_root(total / (norm.group_heads * norm.width), norm.eps);
    const float *weight = norm.weight + head * norm.width;
    if (norm.gates_first) {
      gate_row(from, gates, normed, norm.width);
      scale_row(normed, factor, weight, to, norm.width);
    } else {
      scale_row(from, factor, weight, normed, norm.width);
      gate_row(normed, gates, to, norm.width);
    }
  };
  for_each_gated_head(norm, x, gate, stride, y, rows, norm_head);
}

}  // namespace recurrent
