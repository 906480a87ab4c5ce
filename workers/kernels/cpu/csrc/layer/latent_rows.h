// Operations of latent attention on the rows of a step, between its projections (see layer.h).
#pragma once
#include "elementwise/norm.h"
#include "elementwise/rotary.h"
#include "gemm/heads.h"
#include "layer/row_chunk.h"
#include "runtime/parallel.h"

// Rotate x [width] by `half` angles, or copy it if there are none. y may be x.
template <class T>
inline void rotate_part(const float *cos, long half, bool pairs_neighbours, const T *x, T *y, long width) {
  if (pairs_neighbours) rotate_neighbours<kWidestHead>(x, cos, cos + half, y, width, half);
  else rotate_head(x, cos, cos + half, y, width, half);
}

// Norm and rotate the rows of pages, in place; store the rotated part of each query after the part that the matmul of
// its head computes.
template <class T>
inline void prepare_latent(const RowChunk<T> &chunk, const Operation &op) {
  const LatentHeads &of = *static_cast<const LatentHeads *>(op.parameters);
  const RotaryRows none{nullptr, 0};
  const RotaryRows &rotary = of.rotary < 0 ? none : chunk.step.rotary[of.rotary];
  const long half = rotary.width / 2, rope = of.rope_width;
  const long key_width = of.kv_rank + rope, query_width = of.nope_width + rope;
  const T *queries = chunk.at(op.source);
  T *absorbed = chunk.at(op.target), *rows = chunk.at(of.rows);
  const bool pairs_neighbours = of.interleaved && half;
#pragma omp parallel for if (chunk.rows * (of.heads + 1) * key_width > kSerial)
  for (long row = 0; row < chunk.rows; row++) {
    const float *cos = half ? rotary.rows + chunk.step.positions[chunk.first + row] * rotary.width : nullptr;
    T *own = rows + row * key_width;
    rms_norm_row(own, of.norm, own, of.kv_rank, of.eps);
    rotate_part(cos, half, pairs_neighbours, own + of.kv_rank, own + of.kv_rank, rope);
    for (long head = row * of.heads; head < (row + 1) * of.heads; head++) {
      const T *from = queries + head * query_width + of.nope_width;
      rotate_part(cos, half, pairs_neighbours, from, absorbed + head * key_width + of.kv_rank, rope);
    }
  }
}

template <class T>
inline void multiply_heads(const RowChunk<T> &chunk, const Operation &op) {
  const HeadMatmulLayer &layer = *static_cast<const HeadMatmulLayer *>(op.parameters);
  const long heads = layer.matmul.heads;
  const gemm::HeadStrides from{heads * layer.x_width, layer.x_width}, to{heads * layer.y_width, layer.y_width};
  gemm::multiply_heads<T>(layer.matmul, chunk.at(op.source), from, chunk.at(op.target), to, chunk.rows);
}

template <class T>
inline void attend_latent(const RowChunk<T> &chunk, const Operation &op) {
  const LatentPages &layer = *static_cast<const LatentPages *>(op.parameters);
  const AttentionLayer &a = *layer.attention;
  const NewRows<T> rows{chunk.at(layer.rows), a.head_dim, nullptr, 0, chunk.step.slots[layer.pages], chunk.rows};
  attend<T>(*chunk.step.attention[layer.pages], a, chunk.at(op.source), a.heads * a.head_dim, chunk.at(op.target),
            a.heads * a.value_dim, layer.k_pages, nullptr, nullptr, &rows);
}
