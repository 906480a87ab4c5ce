// Matmuls with 8-bit floating-point weights and a scale for each group of inputs, in place of the matmul of gemm.h.
#pragma once
#include "gemm/gemm.h"

namespace gemm {

// Compute `args`. Its weight is packed by `oarlock_fp8_pack` for the same number of slices; T is the type of all
// other operands.
template <class T>
void multiply_fp8(const MatmulArgs &args);

}  // namespace gemm
