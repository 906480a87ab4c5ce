// Matmuls with 4-bit or 8-bit weights and a scale for each group of inputs, in place of the matmul of gemm.h.
#pragma once
#include "gemm/int8.h"

namespace gemm {

// Compute `args`. Its weight is packed by `oarlock_grouped_pack` for `kind` and the same number of slices; T is the
// type of all other operands.
template <class T>
void multiply_grouped(const MatmulArgs &args, int kind);

}  // namespace gemm
