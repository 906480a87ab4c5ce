// Products with a weight that was packed once: y = epilogue(x w^T + bias), for any number of rows.
#pragma once
#include "simd/element_types.h"

namespace gemm {

enum Epilogue { kPlain = 0, kAdd = 1, kFloat = 2, kSiluGate = 3, kGeluTanhGate = 4, kClampedGate = 5 };

// T is the type of x, weight, bias and residual, and of y unless the epilogue is kFloat.
struct Product {
  const void *x;         // [rows, inputs], rows `x_stride` elements apart
  const void *weight;    // packed by `pack`
  const void *bias;      // [columns] in the packed order, or null
  const void *residual;  // [rows, columns], rows `y_stride` apart; only kAdd
  void *y;               // [rows, columns] (gated: [rows, columns / 2]), rows `y_stride` apart
  long rows, columns, inputs, x_stride, y_stride;
  int epilogue;
  long slices = 1;  // of equal length along the inputs, which are added up as slices.h says: a power of two
  float alpha = 0.0f, limit = 0.0f;  // of kClampedGate: g sigmoid(alpha g) (u + 1) with gate and up kept within the limit
};

constexpr int kPanel = 2 * simd::kLanes;  // outputs side by side in a packed weight: two registers

// Where output `output` of a panel is read from: a row of the weight, or -1 where there is none. Gated: rows up to
// columns / 2 are gate, the others up; each panel has a register of both.
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
void multiply(const Product &product);

}  // namespace gemm
