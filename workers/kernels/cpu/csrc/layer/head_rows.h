// Operations of the fused layer on values and results of heads: norm of values, and gates of results other than
// `gate_rows`.
#pragma once
#include <cmath>

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

// Return the sigmoid or softplus of x, computed in double precision.
inline float gate_factor(double x, bool is_softplus) {
  if (!is_softplus) return static_cast<float>(1.0 / (1.0 + std::exp(-x)));
  return static_cast<float>(x > 20.0 ? x : std::log1p(std::exp(x)));
}

// Multiply the columns of the result by a function of their gates.
template <class T>
inline void gate_heads(const RowChunk<T> &chunk, const Operation &op) {
  using namespace simd;
  const HeadGate &gate = *static_cast<const HeadGate *>(op.parameters);
  const T *gates = chunk.at(op.source);
  T *x = chunk.at(op.target);
#pragma omp parallel for if (chunk.rows * gate.gates * gate.width > kSerial)
  for (long i = 0; i < chunk.rows * gate.gates; i++) {
    const float factor = gate_factor(to_float(gates[i]), gate.is_softplus);
    T *to = x + i * gate.width;
    for (long d = 0; d < gate.width; d += kLanes)
      store(to + d, load(to + d, gate.width - d) * broadcast(factor), gate.width - d);
  }
}
