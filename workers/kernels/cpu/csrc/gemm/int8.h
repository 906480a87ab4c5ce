// Matmuls with 8-bit weights and a scale for each output, in place of the matmul of gemm.h.
#pragma once
#include "gemm/gemm.h"

namespace gemm {

// Kinds of packed weights. Names that end in Dot are packed for `simd::Dot`, which uses an instruction that some
// processors of the ISA level lack.
enum WeightKind { kDense = 0, kInt8 = 1, kInt8Dot = 2, kGrouped = 3, kGroupedDot = 4, kFloat8 = 5 };

// Compute `args`. Its weight is packed by `oarlock_int8_pack` for `kind`; T is the type of all other operands.
template <class T>
void multiply_int8(const MatmulArgs &args, int kind);

}  // namespace gemm
