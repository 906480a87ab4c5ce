// Matmuls with a packed weight of any kind, on the rows of a chunk.
#pragma once
#include "layer/row_chunk.h"
#include "runtime/arena.h"
#include "simd/int8.h"

// Return the arguments of the matmul of `source` with `w`: added to a residual; to `partial` without its bias.
template <class T>
inline gemm::MatmulArgs matmul_of(const RowChunk<T> &chunk, int source, int target, const PackedWeight &w) {
  const long y_stride = gemm::is_gate(w.epilogue) ? w.columns / 2 : w.columns;
  gemm::MatmulArgs p{chunk.at(source), w.weight, w.bias, nullptr, nullptr, chunk.rows, w.columns, w.inputs, w.inputs,
                     y_stride, w.epilogue, w.slices};
  if (target == kPartial) {
    p.y = chunk.step.partial + chunk.first * w.columns;
    p.bias = nullptr;
  } else {
    p.y = chunk.at(target);
  }
  if (target == kResidual) {
    p.residual = p.y;  // each element is read once, just before it is written
    p.epilogue = gemm::kAdd;
  }
  return p;
}

template <class T>
inline void run_matmul(const gemm::MatmulArgs &p, int kind) {
  if (kind == gemm::kDense) gemm::multiply<T>(p);
  else if (kind == gemm::kInt8 || kind == gemm::kInt8Dot) gemm::multiply_int8<T>(p, kind);
  else if (kind == gemm::kFloat8) gemm::multiply_fp8<T>(p);
  else gemm::multiply_grouped<T>(p, kind);
}
