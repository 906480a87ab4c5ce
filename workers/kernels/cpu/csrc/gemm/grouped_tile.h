// The products of a few rows and one panel along one block of groups: all sums stay in registers.
#pragma once
#include <array>
#include <utility>

#include "gemm/grouped_form.h"
#include "gemm/rounded_rows.h"

namespace gemm {
namespace grouped {

constexpr int kStrip = kTileRows / 2;  // sums in float32 take as many registers as those of a group

// What a tile computes: sums [R][kPanel] += x w over `groups` groups, or = where the block is the first of its slice.
struct Tile {
  const uint8_t *x;       // rows of whole numbers, kRowBytes apart
  const char *weight;     // the first group
  long groups, group_bytes;
  const int32_t *starts;  // where the whole sum of a group begins: [R][stride]
  const float *totals;    // [R][stride]  the sum of a row's numbers in a group; null if the weight has no zeros
  long stride;
  bool is_first;
  float *sums;
  Fetch fetch;            // `step` bytes for each group
};

// `kFloats`, raised so that none is negative.
alignas(16) constexpr uint8_t kRaisedFloats[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

template <class Dot, int kBits, bool kFloat, int kGroup, int R>
void multiply_tile(const Tile &t) {
  constexpr long kStepBytes = kBits == 4 ? 4 * kLanes : 4 * kPanel;
  const long values_at = t.group_bytes - kGroup / 4 * kStepBytes;
  const uint8_t *x = t.x;
  const char *w = t.weight, *fetch = t.fetch.from;
  [[maybe_unused]] const Ints numbers = kFloat ? load_table(kRaisedFloats) : broadcast_int(0);
  Vec low[R], high[R];
  for (int r = 0; r < R; r++) {
    low[r] = t.is_first ? zero() : load(t.sums + r * kPanel);
    high[r] = t.is_first ? zero() : load(t.sums + r * kPanel + kLanes);
  }
  for (long group = 0; group < t.groups; group++, w += t.group_bytes, fetch += t.fetch.step) {
    for (long at = 0; at < t.fetch.step; at += 64) prefetch(fetch + at);
    Ints whole_low[R], whole_high[R];
    for (int r = 0; r < R; r++) whole_low[r] = whole_high[r] = broadcast_int(t.starts[r * t.stride + group]);
    for (long step = 0; step < kGroup / 4; step++, x += 4) {
      const char *values = w + values_at + step * kStepBytes;
      if constexpr (kBits == 8 && Dot::kOffset == 0) {
        const typename Dot::Weight left = Dot::prepare(load_ints(values)), right = Dot::prepare(load_ints(values + 4 * kLanes));
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
          const Ints four = broadcast_four(x + r * kRowBytes);
          whole_low[r] = Dot::add(whole_low[r], left, four);
          whole_high[r] = Dot::add(whole_high[r], right, four);
        }
      } else {
        const Ints both = load_ints(values);
        Ints left = kBits == 4 ? low_nibbles(both) : both;
        Ints right = kBits == 4 ? high_nibbles(both) : load_ints(values + 4 * kLanes);
        if constexpr (kFloat) left = look_up(numbers, left), right = look_up(numbers, right);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
          const Ints four = broadcast_four(x + r * kRowBytes);
          whole_low[r] = Dot::add_unsigned(whole_low[r], left, four);
          whole_high[r] = Dot::add_unsigned(whole_high[r], right, four);
        }
      }
    }
    const Float16 *scales = reinterpret_cast<const Float16 *>(w);
    const Vec left = load(scales), right = load(scales + kLanes);
    if (t.totals) {
      const Vec left_zero = load(scales + kPanel), right_zero = load(scales + kPanel + kLanes);
      for (int r = 0; r < R; r++) {
        const Vec total = broadcast(t.totals[r * t.stride + group]);
        low[r] = low[r] + rounded_product(fma(left_zero, total, to_floats(whole_low[r])), left);
        high[r] = high[r] + rounded_product(fma(right_zero, total, to_floats(whole_high[r])), right);
      }
    } else {
      for (int r = 0; r < R; r++) {
        low[r] = low[r] + rounded_product(to_floats(whole_low[r]), left);
        high[r] = high[r] + rounded_product(to_floats(whole_high[r]), right);
      }
    }
  }
  for (int r = 0; r < R; r++) {
    store(t.sums + r * kPanel, low[r]);
    store(t.sums + r * kPanel + kLanes, high[r]);
  }
}

using MultiplyTile = void (*)(const Tile &);

template <class Dot, int kBits, bool kFloat, int kGroup, int... R>
constexpr auto table(std::integer_sequence<int, R...>) {
  return std::array<MultiplyTile, sizeof...(R) + 1>{nullptr, multiply_tile<Dot, kBits, kFloat, kGroup, R + 1>...};
}
// Of R rows: kTable<Dot, kBits, kFloat, kGroup>[R], R from 1 to kStrip.
template <class Dot, int kBits, bool kFloat, int kGroup>
constexpr auto kTable = table<Dot, kBits, kFloat, kGroup>(std::make_integer_sequence<int, kStrip>());

template <class Dot>
inline const MultiplyTile *tiles_for(const PackedForm &form) {
  if (form.is_float) return form.group == 32 ? kTable<Dot, 4, true, 32>.data() : kTable<Dot, 4, true, 16>.data();
  if (form.bits == 4) return form.group == 32 ? kTable<Dot, 4, false, 32>.data() : kTable<Dot, 4, false, 16>.data();
  return form.group == 32 ? kTable<Dot, 8, false, 32>.data() : kTable<Dot, 8, false, 16>.data();
}

}  // namespace grouped
}  // namespace gemm
