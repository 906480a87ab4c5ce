// The form of a packed weight of 4 or 8 bits with a scale, and perhaps a zero point, for each group of inputs.
//
// An element is (value + zero) * scale * factor: `value` a whole number, `zero` and `scale` float16, of a group, and
// `factor` a power of two, of an output. A packed weight begins with what its form is (PackedForm), and is a row of
// panels, each: [kPanel] factors, then for each group of each slice [kPanel] scales, [kPanel] zeros if it has any, and the
// values.
//
// Values of 4 bits lie as [group / 4][kLanes][4] bytes with the weights of two outputs, each 8 higher and so from 0 to 15:
// in a byte's lower half that of a register's output, in its upper half that of the output kLanes further on. Values of 8
// bits lie as [group / 4][kPanel][4], as much higher as `simd::Dot` or `simd::PlainDot` wants the unsigned factor.
//
// Floats of 4 bits (e2m1, of MXFP4) lie as whole numbers of 4 bits do, by the bits they have there. They are multiplied
// as the whole numbers that are twice as large, from -12 to 12: a table gives these, 12 higher.
#pragma once
#include <algorithm>

#include "gemm/gemm.h"
#include "simd/int8.h"

namespace gemm {
namespace grouped {

using namespace simd;

constexpr long kScaleBytes = kPanel * sizeof(Float16);

// 64 bytes, so that panels begin at a cache line.
struct PackedForm {
  int64_t columns;
  int32_t is_gated, is_float;      // e2m1, of 4 bits
  int64_t bits, group, has_zeros;  // 4 or 8 bits; groups of 16 or 32 inputs
  int64_t slices, length;          // inputs of a slice
  int64_t order_at;                // from the beginning to int32 [slices * length], the input of x at each place: -1 for none; or 0

  // Of a number of inputs, and of a slice; the last one is filled up with zeros.
  long groups_of(long inputs) const { return group == 32 ? (inputs + 31) / 32 : (inputs + 15) / 16; }
  long groups() const { return groups_of(length); }
  long step_bytes() const { return bits == 4 ? 4 * kLanes : 4 * kPanel; }  // values of four inputs
  long values_at() const { return (has_zeros ? 2 : 1) * kScaleBytes; }
  long group_bytes() const { return values_at() + group / 4 * step_bytes(); }
  long slice_bytes() const { return groups() * group_bytes(); }
  long panel_bytes() const { return kPanel * sizeof(float) + slices * slice_bytes(); }
  long panels() const {
    const long width = is_gated ? kLanes : kPanel, outputs = is_gated ? columns / 2 : columns;
    return (outputs + width - 1) / width;
  }
  long bytes() const { return sizeof(PackedForm) + panels() * panel_bytes(); }  // without the order

  const char *panel(long index) const {
    return reinterpret_cast<const char *>(this) + sizeof(PackedForm) + index * panel_bytes();
  }
  const int32_t *order() const {
    return order_at ? reinterpret_cast<const int32_t *>(reinterpret_cast<const char *>(this) + order_at) : nullptr;
  }
};
static_assert(sizeof(PackedForm) == 64);

// Twice the number of each four bits of e2m1, and how much higher it is in a product.
constexpr int kFloatBase = 12;
constexpr int8_t kFloats[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// How much higher than they are values are multiplied.
template <class Dot>
constexpr int base_of(const PackedForm &form) {
  return form.is_float ? kFloatBase : form.bits == 4 ? 8 : Dot::kOffset;
}

}  // namespace grouped
}  // namespace gemm
