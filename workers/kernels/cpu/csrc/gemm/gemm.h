// Matmul with a weight that was packed once: y = epilogue(x w^T + bias), for any number of rows.
#pragma once
#include "simd/element_types.h"

namespace gemm {

enum Epilogue {
  kPlain = 0, kAdd = 1, kFloat = 2,                          // the sums, plus a residual, or unrounded
  kSiluGate = 3, kGeluTanhGate = 4, kClampedGate = 5,        // an activation of the gate times the other half
  kGelu = 6, kGeluTanh = 7, kRelu = 8, kReluSquared = 9,     // an activation of the sums
};

inline bool is_gate(int epilogue) { return epilogue >= kSiluGate && epilogue <= kClampedGate; }

// Arguments of a matmul. T is the type of x, weight, bias and residual, and of y unless the epilogue is kFloat.
struct MatmulArgs {
  const void *x;         // [rows, inputs], rows `x_stride` elements apart
  const void *weight;    // packed by `pack`
  const void *bias;      // [columns] in the packed order, or null
  const void *residual;  // [rows, columns], rows `y_stride` apart; only kAdd
  void *y;               // [rows, columns] (gated: [rows, columns / 2]), rows `y_stride` apart
  long rows, columns, inputs, x_stride, y_stride;
  int epilogue;
  long slices = 1;  // slices of equal length along the inputs, added up in a tree (slices.h): a power of two
  // Parameters of kClampedGate: g sigmoid(alpha g) (u + 1), with gate g and up u clamped to the limit.
  float alpha = 0.0f, limit = 0.0f;
};

constexpr int kPanel = 2 * simd::kLanes;  // neighbouring outputs in a packed weight: two registers

// Return the row of the weight that becomes output `output` of a panel, or -1 if there is none. Gated weights: rows
// below columns / 2 are gate, the others up; each panel has one register of each.
inline long row_of(long panel, int output, long columns, bool gated) {
  if (!gated) {
    const long row = panel * kPanel + output;
    return row < columns ? row : -1;
  }
  const long index = panel * simd::kLanes + output % simd::kLanes, half = columns / 2;
  if (index >= half) return -1;
  return output < simd::kLanes ? index : half + index;
}

template <class T>
void multiply(const MatmulArgs &args);

}  // namespace gemm
