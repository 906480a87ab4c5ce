// Products with weights of 8 bits and a scale for each output, in place of those of gemm.h.
#pragma once
#include "gemm/gemm.h"

namespace gemm {

// What a packed weight holds. Those that end in Dot are for `simd::Dot`, which takes an instruction that not every
// processor of a level has.
enum WeightKind { kDense = 0, kInt8 = 1, kInt8Dot = 2, kGrouped = 3, kGroupedDot = 4, kFloat8 = 5 };

// `product.weight` is packed by `oarlock_int8_pack` for `kind`; T is the type of all the rest.
template <class T>
void multiply_int8(const Product &product, int kind);

}  // namespace gemm
