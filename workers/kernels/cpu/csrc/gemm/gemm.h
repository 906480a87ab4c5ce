// Products with a weight that was packed once: y = epilogue(x w^T + bias), for any number of rows.
#pragma once
#include "simd/element_types.h"

namespace gemm {

enum Epilogue { kPlain = 0, kAdd = 1, kFloat = 2, kSiluGate = 3, kGeluTanhGate = 4 };

// T is the type of x, weight, bias and residual, and of y unless the epilogue is kFloat.
struct Product {
  const void *x;         // [rows, inputs], rows `x_stride` elements apart
  const void *weight;    // packed by `pack`
  const void *bias;      // [columns] in the packed order, or null
  const void *residual;  // [rows, columns], rows `y_stride` apart; only kAdd
  void *y;               // [rows, columns] (gated: [rows, columns / 2]), rows `y_stride` apart
  long rows, columns, inputs, x_stride, y_stride;
  int epilogue;
};

constexpr int kPanel = 2 * simd::kLanes;  // outputs side by side in a packed weight: two registers

template <class T>
void multiply(const Product &product);

}  // namespace gemm
