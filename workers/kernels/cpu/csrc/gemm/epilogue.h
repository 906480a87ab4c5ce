// Epilogue of a matmul: add the bias, apply the activation or add the residual, round once, and store.
#pragma once
#include <algorithm>

#include "gemm/gemm.h"
#include "simd/vector_math.h"

namespace gemm {

using namespace simd;

// Return the activation of an MLP without a gate. A function of its own, to keep `finish` short.
[[gnu::noinline]] inline Vec activated(int epilogue, Vec x) {
  if (epilogue == kGelu) return gelu(x);
  if (epilogue == kGeluTanh) return gelu_tanh(x);
  const Vec positive = max(zero(), x);  // NaN stays NaN, as the second operand
  return epilogue == kRelu ? positive : positive * positive;
}

// Apply the epilogue to one row's sums of a panel: add the bias, apply `epilogue`, round and store.
template <class T>
inline void finish(const MatmulArgs &p, long row, long panel, Vec low, Vec high) {
  const long column = panel * kPanel;
  const bool gated = is_gate(p.epilogue);
  const long count = gated ? kPanel : p.columns - column;  // gated biases, like weights, are padded to whole panels
  const long left = std::min<long>(count, kLanes), right = std::max<long>(std::min<long>(count - kLanes, kLanes), 0);
  if (p.bias) {
    const T *bias = static_cast<const T *>(p.bias) + column;
    low = low + load(bias, left);
    if (right) high = high + load(bias + kLanes, right);
  }
  const long at = row * p.y_stride + column;
  if (gated) {
    const long half = panel * kLanes;
    Vec gate = low;
    if (p.epilogue == kClampedGate) {
      const Vec most = broadcast(p.limit), one = broadcast(1.0f);
      gate = min(most, low);  // NaN stays NaN, as the second operand
      high = one + max(broadcast(-p.limit), min(most, high));
      gate = gate * sigmoid(gate * broadcast(p.alpha));
    } else {
      gate = p.epilogue == kSiluGate ? silu(low) : gelu_tanh(low);
    }
    store(static_cast<T *>(p.y) + row * p.y_stride + half, gate * high, std::min<long>(kLanes, p.columns / 2 - half));
    return;
  }
  if (p.epilogue == kFloat) {
    store(static_cast<float *>(p.y) + at, low, left);
    if (right) store(static_cast<float *>(p.y) + at + kLanes, high, right);
    return;
  }
  if (p.epilogue == kAdd) {
    const T *residual = static_cast<const T *>(p.residual) + at;
    low = low + load(residual, left);
    if (right) high = high + load(residual + kLanes, right);
  } else if (p.epilogue >= kGelu) {
    low = activated(p.epilogue, low);
    if (right) high = activated(p.epilogue, high);
  }
  store(static_cast<T *>(p.y) + at, low, left);
  if (right) store(static_cast<T *>(p.y) + at + kLanes, high, right);
}

}  // namespace gemm
