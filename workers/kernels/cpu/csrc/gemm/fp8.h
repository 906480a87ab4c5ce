// Products with weights of 8 bits in floating point and a scale for each group of inputs, in place of those of gemm.h.
#pragma once
#include "gemm/gemm.h"

namespace gemm {

// `product.weight` is packed by `oarlock_fp8_pack` for as many slices; T is the type of all the rest.
template <class T>
void multiply_fp8(const Product &product);

}  // namespace gemm
