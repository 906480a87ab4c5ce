// A weight of 4 or 8 bits with scales for groups of inputs, before packing.
#pragma once
#include <cstdint>

#include "simd/element_types.h"

// A weight before packing, and the parameters of its packed format.
struct GroupedSource {
  const int8_t *values;          // [columns, inputs], rows `stride` apart
  const Float16 *scales;         // [columns, scales_per_row]
  const Float16 *zeros;          // [columns, scales_per_row], or null
  const float *factors;          // [columns]
  const int32_t *value_indices;  // [slices * length]  index in a row of `values` of each packed input, -1 for none
  const int32_t *input_order;    // [slices * length]  index in x of each packed input; null if x is read in its order
  long columns, stride, scales_per_row, stored_group;
  long slices, length;           // number of slices, and inputs of a slice
  int bits, group, is_gated, is_float, kind;
};
