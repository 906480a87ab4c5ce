// Products with weights of 4 bits and a scale for each group of inputs, in place of those of gemm.h.
#pragma once
#include "gemm/int8.h"

namespace gemm {

// `product.weight` is packed by `oarlock_int4_pack`, for every kind; T is the type of all the rest.
template <class T>
void multiply_int4(const Product &product, int kind);

}  // namespace gemm
