// Operations of recurrent layers on the rows of a step (see layer.h).
#pragma once
#include "layer/row_chunk.h"
#include "runtime/arena.h"
#include "runtime/parallel.h"

template <class T>
inline void convolve_rows(const RowChunk<T> &chunk, const Operation &op) {
  const ConvolutionLayer &layer = *static_cast<const ConvolutionLayer *>(op.parameters);
  recurrent::convolve(layer.convolution, static_cast<const T *>(chunk.at(layer.inputs)), layer.inputs.stride,
                      static_cast<T *>(layer.states), chunk.at(op.target), *chunk.step.states);
}

template <class T>
inline void run_gated_delta(const RowChunk<T> &chunk, const Operation &op) {
  const DeltaLayer &layer = *static_cast<const DeltaLayer *>(op.parameters);
  const recurrent::DeltaHeads &of = layer.heads;
  const long keys = of.key_heads * of.key_width, stride = 2 * keys + of.value_heads * of.value_width;
  const long heads = of.value_heads;
  const float *b = reinterpret_cast<const float *>(chunk.at(layer.gates)), *a = b + heads;
  const Arena::Mark mark = arena().mark();
  float *log_decay = arena().take<float>(chunk.rows * heads), *beta = arena().take<float>(chunk.rows * heads);
  recurrent::delta_gates(a, b, 2 * heads, layer.a_log, layer.dt_bias, layer.beta_scale, log_decay, beta, chunk.rows,
                         heads);
  const T *q = chunk.at(op.source);
  const recurrent::DeltaRows<T> rows{q, q + keys, q + 2 * keys, stride, stride, stride, log_decay, beta};
  recurrent::gated_delta_rule(of, rows, layer.states, chunk.at(op.target), *chunk.step.states);
  arena().release(mark);
}

template <class T>
inline void run_kimi_delta(const RowChunk<T> &chunk, const Operation &op) {
  const KimiDeltaLayer &layer = *static_cast<const KimiDeltaLayer *>(op.parameters);
  const recurrent::DeltaHeads &of = layer.heads;
  const long heads = of.value_heads, keys = of.key_heads * of.key_width, stride = 2 * keys + heads * of.value_width;
  const Arena::Mark mark = arena().mark();
  float *beta = arena().take<float>(chunk.rows * heads), *decays = reinterpret_cast<float *>(chunk.at(layer.decays));
  const float *rates = reinterpret_cast<const float *>(chunk.at(layer.rates));
  recurrent::kimi_gates(layer.gates, decays, rates, heads, decays, beta, chunk.rows);
  const T *q = chunk.at(op.source);
  const recurrent::DeltaRows<T> rows{q, q + keys, q + 2 * keys, stride, stride, stride, decays, beta};
  recurrent::gated_delta_rule(of, rows, layer.states, chunk.at(op.target), *chunk.step.states);
  arena().release(mark);
}

template <class T>
inline void run_mamba2(const RowChunk<T> &chunk, const Operation &op) {
  const MambaLayer &layer = *static_cast<const MambaLayer *>(op.parameters);
  const recurrent::MambaHeads &of = layer.heads;
  const long width = of.heads * of.head_width, inputs = of.groups * of.state_width, stride = width + 2 * inputs;
  const Arena::Mark mark = arena().mark();
  float *dt = arena().take<float>(chunk.rows * of.heads);
  recurrent::mamba_steps(static_cast<const T *>(chunk.at(layer.steps)), layer.steps.stride, layer.scale,
                         layer.step_bias, layer.least, layer.most, dt, chunk.rows, of.heads);
  const T *x = chunk.at(op.source);
  const recurrent::MambaRows<T> rows{x, x + width, x + width + inputs, stride, stride, stride, dt};
  recurrent::mamba2(of, rows, layer.states, chunk.at(op.target), *chunk.step.states);
  arena().release(mark);
}

// Return kAllArrived, or the rank that did not reach the all-reduce in time.
template <class T>
inline int norm_gated_rows(const RowChunk<T> &chunk, const Operation &op) {
  const GatedNormLayer &layer = *static_cast<const GatedNormLayer *>(op.parameters);
  const recurrent::GatedNorm &norm = layer.norm;
  const T *x = chunk.at(op.source), *gate = chunk.at(layer.gate);
  T *y = chunk.at(op.target);
  if (norm.group_heads == 1) {
    recurrent::gated_norm(norm, x, gate, layer.gate.stride, y, chunk.rows);
    return kAllArrived;
  }
  const Arena::Mark mark = arena().mark();
  float *squares = arena().take<float>(chunk.rows * norm.all_heads);
  recurrent::gated_squares(norm, x, gate, layer.gate.stride, squares, chunk.rows);
  const bool is_shared = norm.all_heads != norm.heads && chunk.step.group;
  const int missing = is_shared ? all_reduce(*chunk.step.group, squares, chunk.rows * norm.all_heads) : kAllArrived;
  if (missing != kAllArrived) return missing;
  const long first_group = norm.first_head / norm.group_heads;
  recurrent::gated_norm_of_heads(norm, x, gate, layer.gate.stride, squares + first_group * norm.group_heads,
                                 norm.all_heads, y, chunk.rows);
  arena().release(mark);
  return kAllArrived;
}

// Store combined(left, right) for the columns of each row.
template <class T, class Combine>
inline void combine_columns(const RowChunk<T> &chunk, const Operation &op, const Combine &combined) {
  using namespace simd;
  const ColumnProduct &product = *static_cast<const ColumnProduct *>(op.parameters);
  const long width = product.width;
  const T *left = chunk.at(product.left), *right = chunk.at(product.right);
  T *y = chunk.at(op.target);
#pragma omp parallel for if (chunk.rows * width > kSerial)
  for (long row = 0; row < chunk.rows; row++)
    for (long d = 0; d < width; d += kLanes) {
      const Vec a = load(left + row * product.left.stride + d, width - d);
      store(y + row * width + d, combined(a, load(right + row * product.right.stride + d, width - d)), width - d);
    }
}

template <class T>
inline void multiply_columns(const RowChunk<T> &chunk, const Operation &op) {
  combine_columns(chunk, op, [](simd::Vec a, simd::Vec b) { return a * b; });
}

template <class T>
inline void add_columns(const RowChunk<T> &chunk, const Operation &op) {
  combine_columns(chunk, op, [](simd::Vec a, simd::Vec b) { return a + b; });
}

template <class T>
inline void scale_columns(const RowChunk<T> &chunk, const Operation &op) {
  using namespace simd;
  const ColumnScale &scale = *static_cast<const ColumnScale *>(op.parameters);
  T *x = chunk.at(scale.columns);
#pragma omp parallel for if (chunk.rows * scale.width > kSerial)
  for (long row = 0; row < chunk.rows; row++)
    for (long d = 0; d < scale.width; d += kLanes) {
      T *to = x + row * scale.columns.stride + d;
      store(to, load(to, scale.width - d) * broadcast(scale.scale), scale.width - d);
    }
}
