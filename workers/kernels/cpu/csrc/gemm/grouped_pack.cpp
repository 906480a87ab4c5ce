// Packing and unpacking of weights of 4 or 8 bits with scales for groups of inputs (grouped_format.h).
#include <array>
#include <type_traits>

#include "gemm/grouped_format.h"
#include "gemm/grouped_source.h"
#include "gemm/int8.h"
#include "runtime/parallel.h"
#include "simd/element_types.h"

namespace gemm {
namespace grouped {
namespace {

PackedFormat format_of(const GroupedSource &from) {
  PackedFormat format{from.columns,          from.is_gated, from.is_float, from.bits, from.group,
                  from.zeros != nullptr, from.slices,   from.length,   0};
  format.order_at = from.input_order ? format.bytes() : 0;
  return format;
}

int base_for(int kind, const PackedFormat &format) {
  return kind == kGroupedDot ? base_of<Dot>(format) : base_of<PlainDot>(format);
}

// Return the e2m1 code for twice its value: index value + kFloatBase, from -kFloatBase to kFloatBase.
constexpr std::array<uint8_t, 2 * kFloatBase + 1> bits_of_floats() {
  std::array<uint8_t, 2 * kFloatBase + 1> found{};
  for (int bits = 15; bits >= 0; bits--) found[kFloats[bits] + kFloatBase] = bits;
  return found;
}

// Return the stored bits of a value.
int stored_bits(const PackedFormat &format, int value, int base) {
  if (!format.is_float) return (value + base) & (format.bits == 4 ? 15 : 255);
  constexpr std::array<uint8_t, 2 * kFloatBase + 1> kBits = bits_of_floats();
  return kBits[value + kFloatBase];
}

// Location of value `i` of a group: the byte, and the number of bits by which the value is shifted there.
struct ValueLocation {
  long byte;
  int shift;
  ValueLocation(const PackedFormat &format, int output, long i) {
    const int lane = format.bits == 4 ? output % kLanes : output;
    byte = format.values_at() + i / 4 * format.step_bytes() + lane * 4 + i % 4;
    shift = format.bits == 4 && output >= kLanes ? 4 : 0;
  }
};

void pack_panel(const PackedFormat &format, const GroupedSource &from, long panel, int base, char *to) {
  float *factors = reinterpret_cast<float *>(to);
  to += kPanel * sizeof(float);
  for (long slice = 0; slice < format.slices; slice++)
    for (long group = 0; group < format.groups(); group++, to += format.group_bytes()) {
      const long first = group * format.group, count = std::min<long>(format.group, format.length - first);
      const int32_t *indices = from.value_indices + slice * format.length + first;
      Float16 *scales = reinterpret_cast<Float16 *>(to);
      for (int output = 0; output < kPanel; output++) {
        const long row = row_of(panel, output, format.columns, format.is_gated);
        factors[output] = row < 0 ? 0.0f : from.factors[row];
        const long stored = row * from.scales_per_row + indices[0] / from.stored_group;
        scales[output] = row < 0 ? Float16{} : from.scales[stored];
        if (format.has_zeros) scales[kPanel + output] = row < 0 ? Float16{} : from.zeros[stored];
        for (long i = 0; i < format.group; i++) {
          const int value = row >= 0 && i < count && indices[i] >= 0 ? from.values[row * from.stride + indices[i]] : 0;
          const ValueLocation location(format, output, i);
          to[location.byte] |= stored_bits(format, value, base) << location.shift;
        }
      }
    }
}

// Read output `id` to row [inputs], each input at its index in x.
template <class T>
void read_row(const PackedFormat &format, long id, int base, T *row) {
  const char *at = format.panel(id / kPanel);
  const int output = id % kPanel;
  const float factor = reinterpret_cast<const float *>(at)[output];
  at += kPanel * sizeof(float);
  for (long slice = 0; slice < format.slices; slice++)
    for (long group = 0; group < format.groups(); group++, at += format.group_bytes()) {
      const Float16 *scales = reinterpret_cast<const Float16 *>(at);
      const float scale = to_float(scales[output]), zero = format.has_zeros ? to_float(scales[kPanel + output]) : 0.0f;
      for (long i = 0; i < format.group; i++) {
        const long k = group * format.group + i, input = slice * format.length + k;
        if (k >= format.length || (format.order_at && format.order()[input] < 0)) continue;
        const ValueLocation location(format, output, i);
        const uint8_t byte = at[location.byte];
        const int four = byte >> location.shift & 15;
        const int value =
            format.is_float ? kFloats[four] : format.bits == 4 ? four - base : static_cast<int8_t>(byte - base);
        const float number = (value + zero) * scale * factor;
        alignas(64) float lanes[kLanes] = {number};
        store(row + (format.order_at ? format.order()[input] : input), load(lanes), 1);
      }
    }
}

}  // namespace
}  // namespace grouped
}  // namespace gemm

// Return the size in bytes of `packed`.
extern "C" long oarlock_grouped_size(const GroupedSource *from) {
  const gemm::grouped::PackedFormat format = gemm::grouped::format_of(*from);
  return format.bytes() + (from->input_order ? format.slices * format.length * sizeof(int32_t) : 0);
}

// Pack a weight. `packed` begins at a cache line.
extern "C" void oarlock_grouped_pack(const GroupedSource *from, char *packed) {
  using namespace gemm::grouped;
  const PackedFormat format = format_of(*from);
  memset(packed, 0, oarlock_grouped_size(from));
  memcpy(packed, &format, sizeof format);
  if (from->input_order)
    memcpy(packed + format.order_at, from->input_order, format.slices * format.length * sizeof(int32_t));
  const int base = base_for(from->kind, format);
#pragma omp parallel for schedule(static)
  for (long panel = 0; panel < format.panels(); panel++)
    pack_panel(format, *from, panel, base, packed + sizeof format + panel * format.panel_bytes());
}

// Read rows `ids` of a packed weight (not gated), times their scales: [count, inputs].
extern "C" void oarlock_grouped_rows(const void *packed, const int64_t *ids, void *rows, long count, long inputs, int type,
                                     int kind) {
  using namespace gemm::grouped;
  const PackedFormat &format = *static_cast<const PackedFormat *>(packed);
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
#pragma omp parallel for if (count >= 16)
    for (long i = 0; i < count; i++)
      read_row(format, ids[i], base_for(kind, format), static_cast<T *>(rows) + i * inputs);
  });
}
