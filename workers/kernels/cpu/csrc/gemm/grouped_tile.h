// The products of a few rows and one panel along some groups: all sums stay in registers.
#pragma once
#include <array>
#include <utility>

#include "gemm/grouped_form.h"
#include "gemm/panel_rows.h"
#include "gemm/rounded_rows.h"

namespace gemm {
namespace grouped {

// Rows of a tile at most. Sums in float32 take as many registers as those of a group; where pairs are added up, these are
// whole numbers only at the end of a group, and those in float32 are read then.
template <class Dot>
constexpr int kStrip = Dot::kAddsPairs ? 6 : kTileRows / 2;

// How the values of a weight lie (grouped_form.h). Those of 4 bits may be unpacked, to bytes as values of 8 bits lie.
template <int kBits_, bool kFloat_, int kGroup_, bool kUnpacked_ = false>
struct Values {
  static constexpr int kBits = kBits_, kGroup = kGroup_;
  static constexpr bool kFloat = kFloat_, kUnpacked = kUnpacked_;
  static constexpr long kStepBytes = kBits == 4 && !kUnpacked ? 4 * kLanes : 4 * kPanel;  // of four inputs
};

// What a tile computes: the sums of R rows of x and one panel, for one slice after the other, or of a block of a slice.
struct Tile {
  const uint8_t *x;       // rows of whole numbers, kRowBytes apart
  const char *scales;     // of the first group, and its zeros
  const char *values;     // of the first group
  long scales_step, values_step;  // bytes from those of a group to those of the next
  const int32_t *starts;  // where the whole sum of a group begins: [R][stride]
  const float *totals;    // [R][stride]  the sum of a row's numbers in a group; null if the weight has no zeros
  long stride;
  Fetch fetch;            // `step` bytes for each group
  long slices, groups;    // of each slice
  long slice_bytes;       // from the numbers of a slice in x to those of the next
  bool is_first;          // no block of the slice came before: sums begin at 0
  float *sums;            // [R][kPanel]  where a block leaves them for the next, and the last block the result
  const float *factors;   // [kPanel]  of the outputs; null unless the block is the slice's last
  const float *row_scales;  // [R][scales_stride]  of x, for each slice
  long scales_stride;
  const WeightedTotals *to;  // where results are added, of slice `slice` and following, rows from `row` on; or null
  long slice, row;
};

// `kFloats`, raised so that none is negative.
alignas(16) constexpr uint8_t kRaisedFloats[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// The values of four inputs, as unsigned numbers.
template <class V>
inline void load_values(const char *w, Ints numbers, Ints &left, Ints &right) {
  const Ints both = load_ints(w);
  constexpr bool kPacked = V::kBits == 4 && !V::kUnpacked;
  left = kPacked ? low_nibbles(both) : both;
  right = kPacked ? high_nibbles(both) : load_ints(w + 4 * kLanes);
  if constexpr (kPacked && V::kFloat) left = look_up(numbers, left), right = look_up(numbers, right);
}

// whole [R] += x times the weights of one group, whose values are at `w`.
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

// Steps whose pairs of products are added up in 16 bits: 2 * 127 * 15 for whole numbers, 2 * 127 * 24 for floats.
constexpr long kPairSteps[] = {32767 / (2 * 127 * 15), 4};
static_assert(kPairSteps[0] == 8 && kPairSteps[1] * 2 * 127 * 24 <= 32767);

// whole [R] = start [R] + x times the weights of one group of 4 bits, with fewer multiplications. The sums may begin with
// `start` in one half of the 32 bits where all steps fit: what is subtracted for the values of all inputs, and the products
// of one half, are at most 127 * 32 * 8 together. The loop over steps is not unrolled: with all of them a tile is slower.
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

// The group that a tile comes to next. The tile is read once: a compiler that sees weights fetched, or sums stored, reads
// again what it has in memory, and a group of one row then takes 1.2 times as long.
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

// low, high [R] += what the group at `at` gives, whose numbers of x are at `x`.
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

// The end of slice number `slice` of the tile: its sums times their scales, to where the tile wants them.
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
// Of R rows: kTable<Dot, V>[R], R from 1 to kStrip<Dot>.
template <class Dot, class V>
constexpr auto kTable = table<Dot, V>(std::make_integer_sequence<int, kStrip<Dot>>());

// Values of `groups` groups, `step` bytes apart, to bytes as Values::kUnpacked has them.
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

// The tiles for one form of weights; and, if there are any, those for its values when they are unpacked.
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
Tiles tiles_for(const PackedForm &form) {
  const bool long_groups = form.group == 32;
  if (form.is_float) return long_groups ? tiles_of_4_bits<Dot, true, 32>() : tiles_of_4_bits<Dot, true, 16>();
  if (form.bits == 4) return long_groups ? tiles_of_4_bits<Dot, false, 32>() : tiles_of_4_bits<Dot, false, 16>();
  return {long_groups ? kTable<Dot, Values<8, false, 32>>.data() : kTable<Dot, Values<8, false, 16>>.data()};
}

}  // namespace grouped
}  // namespace gemm
