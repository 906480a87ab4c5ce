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
  PackedFormat form{from.columns,          from.is_gated, from.is_float, from.bits, from.group,
                  from.zeros != nullptr, from.slices,   from.length,   0};
  form.order_at = from.input_order ? form.bytes() : 0;
  return form;
}

int base_for(int kind, const PackedFormat &form) {
  return kind == kGroupedDot ? base_of<Dot>(form) : base_of<PlainDot>(form);
}

// Return the e2m1 code for twice its value: index value + kFloatBase, from -kFloatBase to kFloatBase.
constexpr std::array<uint8_t, 2 * kFloatBase + 1> bits_of_floats() {
  std::array<uint8_t, 2 * kFloatBase + 1> found{};
  for (int bits = 15; bits >= 0; bits--) found[kFloats[bits] + kFloatBase] = bits;
  return found;
}

// Return the stored bits of a value.
int stored_bits(const PackedFormat &form, int value, int base) {
  if (!form.is_float) return (value + base) & (form.bits == 4 ? 15 : 255);
  constexpr std::array<uint8_t, 2 * kFloatBase + 1> kBits = bits_of_floats();
  return kBits[value + kFloatBase];
}

// Location of value `i` of a group: the byte, and the number of bits by which the value is shifted there.
struct ValueLocation {
  long byte;
  int shift;
  ValueLocation(const PackedFormat &form, int output, long i) {
    const int lane = form.bits == 4 ? output % kLanes : output;
    byte = form.values_at() + i / 4 * form.step_bytes() + lane * 4 + i % 4;
    shift = form.bits == 4 && output >= kLanes ? 4 : 0;
  }
};

void pack_panel(const PackedFormat &form, const GroupedSource &from, long panel, int base, char *to) {
  float *factors = reinterpret_cast<float *>(to);
  to += kPanel * sizeof(float);
  for (long slice = 0; slice < form.slices; slice++)
    for (long group = 0; group < form.groups(); group++, to += form.group_bytes()) {
      const long first = group * form.group, count = std::min<long>(form.group, form.length - first);
      const int32_t *indices = from.value_indices + slice * form.length + first;
      Float16 *scales = reinterpret_cast<Float16 *>(to);
      for (int output = 0; output < kPanel; output++) {
        const long row = row_of(panel, output, form.columns, form.is_gated);
        factors[output] = row < 0 ? 0.0f : from.factors[row];
        const long stored = row * from.scales_per_row + indices[0] / from.stored_group;
        scales[output] = row < 0 ? Float16{} : from.scales[stored];
        if (form.has_zeros) scales[kPanel + output] = row < 0 ? Float16{} : from.zeros[stored];
        for (long i = 0; i < form.group; i++) {
          const int value = row >= 0 && i < count && indices[i] >= 0 ? from.values[row * from.stride + indices[i]] : 0;
          const ValueLocation location(form, output, i);
          to[location.byte] |= stored_bits(form, value, base) << location.shift;
        }
      }
    }
}

// Read output `id` to row [inputs], each input at its index in x.
template <class T>
void read_row(const PackedFormat &form, long id, int base, T *row) {
  const char *at = form.panel(id / kPanel);
  const int output = id % kPanel;
  const float factor = reinterpret_cast<const float *>(at)[output];
  at += kPanel * sizeof(float);
  for (long slice = 0; slice < form.slices; slice++)
    for (long group = 0; group < form.groups(); group++, at += form.group_bytes()) {
      const Float16 *scales = reinterpret_cast<const Float16 *>(at);
      const float scale = to_float(scales[output]), zero = form.has_zeros ? to_float(scales[kPanel + output]) : 0.0f;
      for (long i = 0; i < form.group; i++) {
        const long k = group * form.group + i, input = slice * form.length + k;
        if (k >= form.length || (form.order_at && form.order()[input] < 0)) continue;
        const ValueLocation location(form, output, i);
        const uint8_t byte = at[location.byte];
        const int four = byte >> location.shift & 15;
        const int value = form.is_float ? kFloats[four] : form.bits == 4 ? four - base : static_cast<int8_t>(byte - base);
        const float number = (value + zero) * scale * factor;
        alignas(64) float lanes[kLanes] = {number};
        store(row + (form.order_at ? form.order()[input] : input), load(lanes), 1);
      }
    }
}

}  // namespace
}  // namespace grouped
}  // namespace gemm

// Return the size in bytes of `packed`.
extern "C" long oarlock_grouped_size(const GroupedSource *from) {
  const gemm::grouped::PackedFormat form = gemm::grouped::format_of(*from);
  return form.bytes() + (from->input_order ? form.slices * form.length * sizeof(int32_t) : 0);
}

// Pack a weight. `packed` begins at a cache line.
extern "C" void oarlock_grouped_pack(const GroupedSource *from, char *packed) {
  using namespace gemm::grouped;
  const PackedFormat form = format_of(*from);
  memset(packed, 0, oarlock_grouped_size(from));
  memcpy(packed, &form, sizeof form);
  if (from->input_order)
    memcpy(packed + form.order_at, from->input_order, form.slices * form.length * sizeof(int32_t));
  const int base = base_for(from->kind, form);
#pragma omp parallel for schedule(static)
  for (long panel = 0; panel < form.panels(); panel++)
    pack_panel(form, *from, panel, base, packed + sizeof form + panel * form.panel_bytes());
}

// Read rows `ids` of a packed weight (not gated), times their scales: [count, inputs].
extern "C" void oarlock_grouped_rows(const void *packed, const int64_t *ids, void *rows, long count, long inputs, int type,
                                     int kind) {
  using namespace gemm::grouped;
  const PackedFormat &form = *static_cast<const PackedFormat *>(packed);
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
#pragma omp parallel for if (count >= 16)
    for (long i = 0; i < count; i++)
      read_row(form, ids[i], base_for(kind, form), static_cast<T *>(rows) + i * inputs);
  });
}
