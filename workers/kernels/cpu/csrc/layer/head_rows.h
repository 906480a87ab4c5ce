// Operations of the fused layer on values and results of heads: norm of values, and gates of results other than
// `gate_rows`.
#pragma once
#include <cstdint>
#include <cstring>

#include "elementwise/norm.h"
#include "layer/row_chunk.h"

// Norm each head among the columns, in place.
template <class T>
inline void norm_heads(const RowChunk<T> &chunk, const Operation &op) {
  const HeadColumns &heads = *static_cast<const HeadColumns *>(op.parameters);
  T *x = chunk.at(heads.columns);
#pragma omp parallel for if (chunk.rows * heads.heads * heads.width > kSerial)
  for (long row = 0; row < chunk.rows; row++)
    for (long head = 0; head < heads.heads; head++) {
      T *to = x + row * heads.columns.stride + head * heads.width;
      rms_norm_row(to, heads.norm + head * heads.width, to, heads.width, heads.eps);
    }
}

constexpr long kGates = 16;  // gates whose factors are computed together

// Return e^x, within a few units of the last place, for x from -700 to 700. The loops below are compiled for several
// elements at a time, unlike calls of the C library.
inline double exponential(double x) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  constexpr double kFactors[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                                 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0};
  const double shifted = x * 1.4426950408889634 + kMagic, power = shifted - kMagic;
  const double rest = (x - power * 0.693147180369123816490) - power * 1.90821492927058770002e-10;
  double sum = kFactors[0];
#pragma GCC unroll 16
  for (int i = 1; i < 14; i++) sum = sum * rest + kFactors[i];
  uint64_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1023) << 52;
  double scale;
  memcpy(&scale, &bits, sizeof scale);
  return sum * scale;
}

// Return log(1 + x) for x from 0 to 1, likewise: twice the area hyperbolic tangent of x / (2 + x).
inline double log_of_1_and(double x) {
  const double part = x / (2.0 + x), square = part * part;
  constexpr double kFactors[] = {1.0 / 33, 1.0 / 31, 1.0 / 29, 1.0 / 27, 1.0 / 25, 1.0 / 23, 1.0 / 21, 1.0 / 19,
                                 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3, 1.0};
  double sum = kFactors[0];
#pragma GCC unroll 16
  for (int i = 1; i < 17; i++) sum = sum * square + kFactors[i];
  return 2.0 * part * sum;
}

// Replace gates by their sigmoid or softplus, computed in double precision.
inline void gate_factors(float (&gates)[kGates], bool is_softplus) {
  if (is_softplus) {
#pragma omp simd
    for (long i = 0; i < kGates; i++) {
      const double x = gates[i], size = x < 0 ? -x : x, least = size > 700.0 ? 700.0 : size;
      const double smooth = (x > 0 ? x : 0.0) + log_of_1_and(exponential(-least));
      gates[i] = static_cast<float>(x > 20.0 ? x : smooth);
    }
    return;
  }
#pragma omp simd
  for (long i = 0; i < kGates; i++) {
    const double x = gates[i], least = x < -700.0 ? -700.0 : x, limited = least > 700.0 ? 700.0 : least;
    gates[i] = static_cast<float>(1.0 / (1.0 + exponential(-limited)));
  }
}

// Multiply the columns of the result by a function of their gates.
template <class T>
inline void gate_heads(const RowChunk<T> &chunk, const Operation &op) {
  using namespace simd;
  const HeadGate &gate = *static_cast<const HeadGate *>(op.parameters);
  const T *gates = chunk.at(op.source);
  T *x = chunk.at(op.target);
  const long count = chunk.rows * gate.gates, width = gate.width;
#pragma omp parallel for if (count * width > kSerial)
  for (long first = 0; first < count; first += kGates) {
    const long some = count - first < kGates ? count - first : kGates;
    alignas(64) float factors[kGates] = {};
    for (long i = 0; i < some; i += kLanes) store(factors + i, load(gates + first + i, some - i));
    gate_factors(factors, gate.is_softplus);
    T *to = x + first * width;
    if (width == 1) {
      for (long i = 0; i < some; i += kLanes) store(to + i, load(to + i, some - i) * load(factors + i), some - i);
      continue;
    }
    for (long i = 0; i < some; i++, to += width)
      for (long d = 0; d < width; d += kLanes)
        store(to + d, load(to + d, width - d) * broadcast(factors[i]), width - d);
  }
}
