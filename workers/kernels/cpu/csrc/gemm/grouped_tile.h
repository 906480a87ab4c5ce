// Matmul of a few rows and one panel along some groups. All sums stay in registers.
#pragma once
#include <array>
#include <utility>

#include "gemm/grouped_format.h"
#include "gemm/panel_rows.h"
#include "gemm/rounded_rows.h"

namespace gemm {
namespace grouped {

// Maximum number of rows of a tile. Sums in float32 take the same number of registers as the integer sums of a group.
// If pairs are added up first, the integer sums exist only at the end of a group, and the float32 sums are loaded then.
template <class Dot>
constexpr int kStrip = Dot::kAddsPairs ? 6 : kTileRows / 2;

// Storage of the values of a weight (grouped_format.h). 4-bit values may be unpacked to bytes, in the layout of 8-bit
// values.
template <int kBits_, bool kFloat_, int kGroup_, bool kUnpacked_ = false>
struct Values {
  static constexpr int kBits = kBits_, kGroup = kGroup_;
  static constexpr bool kFloat = kFloat_, kUnpacked = kUnpacked_;
  static constexpr long kStepBytes = kBits == 4 && !kUnpacked ? 4 * kLanes : 4 * kPanel;  // values of four inputs
};

// Arguments of a tile, which computes the sums of R rows of x and one panel, for several slices in turn, or for a block
// of a slice.
struct Tile {
  const uint8_t *x;       // integer rows, kRowBytes apart
  const char *scales;     // scales and zero points of the first group
  const char *values;     // values of the first group
  long scales_step, values_step;  // bytes between groups
  const int32_t *starts;  // initial integer sums of each group: [R][stride]
  const float *totals;    // [R][stride]  the sum of a row's integers in a group; null if the weight has no zero points
  long stride;
  Fetch fetch;            // `step` bytes for each group
  long slices, groups;    // number of slices, and groups of a slice
  long slice_bytes;       // bytes between slices of x
  bool is_first;          // the first block of the slice, so sums begin at 0
  float *sums;            // [R][kPanel]  sums passed from one block to the next; after the last block, the result
  const float *factors;   // [kPanel]  factors of the outputs; null unless the block is the slice's last
  const float *row_scales;  // [R][scales_stride]  scales of x for each slice
  long scales_stride;
  const WeightedTotals *to;  // totals to which results are added, from slice `slice` and row `row` on; or null
  long slice, row;
};

// `kFloats`, raised so that no value is negative.
alignas(16) constexpr uint8_t kRaisedFloats[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Load the values of four inputs as unsigned integers.
template <class V>
inline void load_values(const char *w, Ints numbers, Ints &left, Ints &right) {
  const Ints both = load_ints(w);
  constexpr bool kPacked = V::kBits == 4 && !V::kUnpacked;
  left = kPacked ? low_nibbles(both) : both;
  right = kPacked ? high_nibbles(both) : load_ints(w + 4 * kLanes);
  if constexpr (kPacked && V::kFloat) left = look_up(numbers, left), right = look_up(numbers, right);
}

// Add x times the weights of one group to `whole` [R]. `w`: the values of the group.
template <class Dot, class V, int R>
inline void add_group(const uint8_t *x, const char *w, Ints numbers, Ints (&whole_low)[R], Ints (&whole_high)[R]) {
  for (long step = 0; step < V::kGroup / 4; step++, x += 4, w += V::kStepBytes) {
    if constexpr (V::kBits == 8 && Dot::kOffset == 0) {
      const typename Dot::Weight left = Dot::prepare(load_ints(w)), right = Dot::prepare(load_ints(w + 4 * kLanes));
      add_four_inputs<Dot::add>(x, left, right, whole_low, whole_high);
    } else {
      Ints left, right;
      load_values<V>(w, numbers, left, right);
      add_four_inputs<Dot::add_unsigned>(x, left, right, whole_low, whole_high);
    }
  }
}

// Number of steps whose products can be added up in 16 bits. A pair of products is at most 2 * 127 * 15 for integers
// and 2 * 127 * 24 for floats.
constexpr long kPairSteps[] = {32767 / (2 * 127 * 15), 4};
static_assert(kPairSteps[0] == 8 && kPairSteps[1] * 2 * 127 * 24 <= 32767);

// Compute `whole` [R] = `start` [R] + x times the weights of one 4-bit group, with fewer multiplications. If all steps
// fit in 16 bits, the sums begin with `start` in the lower half of each 32 bits. This is safe: `start` subtracts the
// offset of all inputs, and together with the products of one half it is at most 127 * 32 * 8. The loop over steps is
// not unrolled, because that makes the tile slower.
template <class Dot, class V, int R>
inline void sum_group_by_pairs(const Ints (&start)[R], const uint8_t *x, const char *w, Ints numbers,
                               Ints (&whole_low)[R], Ints (&whole_high)[R]) {
  constexpr long kAll = V::kGroup / 4, kSteps = std::min(kAll, kPairSteps[V::kFloat]);
  for (long first = 0; first < kAll; first += kSteps) {
    Ints pairs_low[R], pairs_high[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
      pairs_low[r] = pairs_high[r] = kSteps == kAll ? Dot::first_of_pairs(start[r]) : broadcast_int(0);
#pragma GCC unroll 1
    for (long step = first; step < first + kSteps; step++) {
      Ints left, right;
      load_values<V>(w + step * V::kStepBytes, numbers, left, right);
      add_four_inputs<Dot::to_pairs>(x + step * 4, left, right, pairs_low, pairs_high);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Ints low = Dot::sum_pairs(pairs_low[r]), high = Dot::sum_pairs(pairs_high[r]);
      whole_low[r] = kSteps == kAll ? low : add(first == 0 ? start[r] : whole_low[r], low);
      whole_high[r] = kSteps == kAll ? high : add(first == 0 ? start[r] : whole_high[r], high);
    }
  }
}

// Position of the next group of a tile. It is a copy of the tile's fields. Otherwise the compiler reloads them from
// memory after each prefetch and each store, which costs measurable time with a single row.
struct Cursor {
  const char *scales, *values, *fetch;
  const int32_t *starts;
  const float *totals;
  const long scales_step, values_step, fetch_step, stride;

  explicit Cursor(const Tile &t)
      : scales(t.scales), values(t.values), fetch(t.fetch.from), starts(t.starts), totals(t.totals),
        scales_step(t.scales_step), values_step(t.values_step), fetch_step(t.fetch.step), stride(t.stride) {}
  void advance() {
    scales += scales_step, values += values_step, fetch += fetch_step, starts++;
    if (totals) totals++;
  }
};

// Add the contribution of the group at `at` to low, high [R]. `x`: the group's integers of x.
template <class Dot, class V, int R>
inline void add_scaled_group(const Cursor &at, const uint8_t *x, Ints numbers, Vec (&low)[R], Vec (&high)[R]) {
  Ints start[R], whole_low[R], whole_high[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) start[r] = broadcast_int(at.starts[r * at.stride]);
  if constexpr (V::kBits == 4 && Dot::kAddsPairs) {
    sum_group_by_pairs<Dot, V, R>(start, x, at.values, numbers, whole_low, whole_high);
  } else {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) whole_low[r] = whole_high[r] = start[r];
    add_group<Dot, V, R>(x, at.values, numbers, whole_low, whole_high);
  }
  const Float16 *scales = reinterpret_cast<const Float16 *>(at.scales);
  const Vec left = load(scales), right = load(scales + kLanes);
  if (at.totals) {
    const Vec left_zero = load(scales + kPanel), right_zero = load(scales + kPanel + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Vec total = broadcast(at.totals[r * at.stride]);
      low[r] = low[r] + rounded_product(fma(left_zero, total, to_floats(whole_low[r])), left);
      high[r] = high[r] + rounded_product(fma(right_zero, total, to_floats(whole_high[r])), right);
    }
  } else {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      low[r] = low[r] + rounded_product(to_floats(whole_low[r]), left);
      high[r] = high[r] + rounded_product(to_floats(whole_high[r]), right);
    }
  }
}

// Finish slice `slice` of the tile: multiply the sums by their scales, and add them to the totals or store them.
template <int R>
inline void finish_slice(const Tile &t, long slice, const Vec (&low)[R], const Vec (&high)[R]) {
  const Vec left = load(t.factors), right = load(t.factors + kLanes);
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    const Vec scale = broadcast(t.row_scales[r * t.scales_stride + slice]);
    const Vec scaled_low = rounded_product(rounded_product(low[r], left), scale);
    const Vec scaled_high = rounded_product(rounded_product(high[r], right), scale);
    if (t.to) {
      t.to->add(t.slice + slice, t.row + r, scaled_low, scaled_high);
    } else {
      store(t.sums + r * kPanel, scaled_low);
      store(t.sums + r * kPanel + kLanes, scaled_high);
    }
  }
}

template <class Dot, class V, int R>
void multiply_tile(const Tile &t) {
  [[maybe_unused]] const Ints numbers = V::kFloat ? load_table(kRaisedFloats) : broadcast_int(0);
  Cursor at(t);
  for (long slice = 0; slice < t.slices; slice++) {
    Vec low[R], high[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      low[r] = t.is_first ? zero() : load(t.sums + r * kPanel);
      high[r] = t.is_first ? zero() : load(t.sums + r * kPanel + kLanes);
    }
    const uint8_t *x = t.x + slice * t.slice_bytes;
    for (const uint8_t *end = x + t.groups * V::kGroup; x < end; x += V::kGroup, at.advance()) {
      fetch_weights<are_read_once(R, kStrip<Dot>)>(at.fetch, at.fetch_step);
      add_scaled_group<Dot, V, R>(at, x, numbers, low, high);
    }
    if (t.factors) {
      finish_slice<R>(t, slice, low, high);
    } else {
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        store(t.sums + r * kPanel, low[r]);
        store(t.sums + r * kPanel + kLanes, high[r]);
      }
    }
  }
}

using MultiplyTile = void (*)(const Tile &);

template <class Dot, class V, int... R>
constexpr auto table(std::integer_sequence<int, R...>) {
  return std::array<MultiplyTile, sizeof...(R) + 1>{nullptr, multiply_tile<Dot, V, R + 1>...};
}
// Tiles for R rows: kTable<Dot, V>[R], R from 1 to kStrip<Dot>.
template <class Dot, class V>
constexpr auto kTable = table<Dot, V>(std::make_integer_sequence<int, kStrip<Dot>>());

// Unpack the values of `groups` groups, `step` bytes apart, to bytes in the layout of Values::kUnpacked.
template <class V>
void unpack(const char *values, long step, long groups, char *to) {
  [[maybe_unused]] const Ints numbers = V::kFloat ? load_table(kRaisedFloats) : broadcast_int(0);
  for (long group = 0; group < groups; group++, values += step)
    for (long at = 0; at < V::kGroup / 4 * V::kStepBytes; at += V::kStepBytes, to += 4 * kPanel) {
      Ints left, right;
      load_values<V>(values + at, numbers, left, right);
      store_ints(reinterpret_cast<int32_t *>(to), left);
      store_ints(reinterpret_cast<int32_t *>(to + 4 * kLanes), right);
    }
}

// The tiles for one weight format. If `unpack` is set, it unpacks the values for the `unpacked` tiles.
struct Tiles {
  const MultiplyTile *packed, *unpacked = nullptr;
  void (*unpack)(const char *values, long step, long groups, char *to) = nullptr;
};

template <class Dot, bool kFloat, int kGroup>
Tiles tiles_of_4_bits() {
  using V = Values<4, kFloat, kGroup>;
  if constexpr (Dot::kAddsPairs)
    return {kTable<Dot, V>.data(), kTable<Dot, Values<4, kFloat, kGroup, true>>.data(), unpack<V>};
  else
    return {kTable<Dot, V>.data()};
}

template <class Dot>
Tiles tiles_for(const PackedFormat &format) {
  const bool long_groups = format.group == 32;
  if (format.is_float) return long_groups ? tiles_of_4_bits<Dot, true, 32>() : tiles_of_4_bits<Dot, true, 16>();
  if (format.bits == 4) return long_groups ? tiles_of_4_bits<Dot, false, 32>() : tiles_of_4_bits<Dot, false, 16>();
  return {long_groups ? kTable<Dot, Values<8, false, 32>>.data() : kTable<Dot, Values<8, false, 16>>.data()};
}

}  // namespace grouped
}  // namespace gemm
