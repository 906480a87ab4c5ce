// Products with weights of 4 or 8 bits and a scale for each group of inputs, in place of those of gemm.h.
#pragma once
#include "gemm/int8.h"

namespace gemm {

// `product.weight` is packed by `oarlock_grouped_pack` for `kind` and as many slices; T is the type of all the rest.
template <class T>
void multiply_grouped(const Product &product, int kind);

}  // namespace gemm
