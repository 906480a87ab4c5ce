// gelu of rows, as plain activation or as a gate. An element's bits do not depend on its index in the row.
#pragma once
#include "runtime/parallel.h"
#include "simd/element_types.h"
#include "simd/vector_math.h"

// Apply gelu: x [rows, width], or with `gated` [rows, 2 width], contiguous -> y [rows, width]: gelu(x), or gelu of the
// first half of a row times the second half. `is_tanh`: use the tanh approximation.
template <class In, class Out>
inline void gelu_rows(const In *x, Out *y, long rows, long width, bool gated, bool is_tanh) {
  using namespace simd;
  const long stride = gated ? 2 * width : width;
#pragma omp parallel for if (rows * width > kSerial)
  for (long row = 0; row < rows; row++)
    for (long d = 0; d < width; d += kLanes) {
      const In *from = x + row * stride + d;
      const long count = width - d;
      const Vec value = load(from, count);
      Vec result = is_tanh ? gelu_tanh(value) : gelu(value);
      if (gated) result = result * load(from + width, count);
      store(y + row * width + d, result, count);
    }
}
