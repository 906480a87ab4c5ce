// Matmul of each head's columns with the head's own matrix: y_h = x_h w_h^T, for any number of rows.
#pragma once
#include "simd/element_types.h"

namespace gemm {

struct HeadMatmul {
  const void *weight;  // [heads]   matrices [columns, inputs], each packed as for `multiply`, one after the other
  long heads, columns, inputs;
};

// Columns of heads: `head` elements from one head to the next, `row` elements from one row to the next.
struct HeadStrides {
  long row, head;
};

// Compute y [rows, heads, columns] of x [rows, heads, inputs]. T is the type of both and of the weight.
template <class T>
void multiply_heads(const HeadMatmul &matmul, const T *x, HeadStrides from, T *y, HeadStrides to, long rows);

}  // namespace gemm
