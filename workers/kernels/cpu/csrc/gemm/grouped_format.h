// Format of a packed weight of 4 or 8 bits with a scale, and optionally a zero point, for each group of inputs.
//
// An element is (value + zero) * scale * factor. `value` is an integer, `zero` and `scale` are the float16 parameters
// of a group, and `factor` is a power of two for the output. A packed weight begins with its header (PackedFormat),
// followed by the panels. A panel is [kPanel] factors, then for each group of each slice [kPanel] scales, [kPanel] zero
// points if the weight has any, and the values.
//
// 4-bit values are stored as [group / 4][kLanes][4] bytes with the weights of two outputs, each 8 higher and so from 0
// to 15. The lower half of a byte belongs to an output of the first register, the upper half to the output kLanes
// further on. 8-bit values are stored as [group / 4][kPanel][4], raised by the offset that `simd::Dot` or
// `simd::PlainDot` needs for its unsigned factor.
//
// 4-bit floats (e2m1, of MXFP4) are stored like 4-bit integers, by their bits. The matmul uses integers of twice their
// value, from -12 to 12: a lookup table returns these, 12 higher.
#pragma once
#include <algorithm>

#include "gemm/gemm.h"
#include "simd/int8.h"

namespace gemm {
namespace grouped {

using namespace simd;

constexpr long kScaleBytes = kPanel * sizeof(Float16);

// Header of 64 bytes, so that panels begin at a cache line.
struct PackedFormat {
  int64_t columns;
  int32_t is_gated, is_float;      // is_float: the values are e2m1, 4 bits
  int64_t bits, group, has_zeros;  // 4 or 8 bits; groups of 16 or 32 inputs; zero points
  int64_t slices, length;          // number of slices, and inputs of a slice
  // Offset in bytes of the input order, or 0 if there is none. The order is int32 [slices * length]: the index in x of
  // each packed input, -1 for padding.
  int64_t order_at;

  // Number of groups of `inputs` inputs, and of a slice. The last group is padded with zeros.
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
  long bytes() const { return sizeof(PackedFormat) + panels() * panel_bytes(); }  // size without the order

  const char *panel(long index) const {
    return reinterpret_cast<const char *>(this) + sizeof(PackedFormat) + index * panel_bytes();
  }
  const int32_t *order() const {
    return order_at ? reinterpret_cast<const int32_t *>(reinterpret_cast<const char *>(this) + order_at) : nullptr;
  }
};
static_assert(sizeof(PackedFormat) == 64);

// Offset of e2m1 values in the matmul, and twice the value of each 4-bit code.
constexpr int kFloatBase = 12;
constexpr int8_t kFloats[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Return the offset that is added to the values in the matmul.
template <class Dot>
constexpr int base_of(const PackedFormat &format) {
  return format.is_float ? kFloatBase : format.bits == 4 ? 8 : Dot::kOffset;
}

}  // namespace grouped
}  // namespace gemm
