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

// Bytes of the values of four inputs.
template <int kBits>
constexpr long kStepBytes = kBits == 4 ? 4 * kLanes : 4 * kPanel;

// whole [R] += x times the weights of one group, whose values are at `w`.
template <class Dot, int kBits, bool kFloat, int kGroup, int R>
inline void add_group(const uint8_t *x, const char *w, Ints numbers, Ints (&whole_low)[R], Ints (&whole_high)[R]) {
  for (long step = 0; step < kGroup / 4; step++, x += 4, w += kStepBytes<kBits>) {
    if constexpr (kBits == 8 && Dot::kOffset == 0) {
      const typename Dot::Weight left = Dot::prepare(load_ints(w)), right = Dot::prepare(load_ints(w + 4 * kLanes));
      add_four_inputs<Dot::add>(x, left, right, whole_low, whole_high);
    } else {
      const Ints both = load_ints(w);
      Ints left = kBits == 4 ? low_nibbles(both) : both;
      Ints right = kBits == 4 ? high_nibbles(both) : load_ints(w + 4 * kLanes);
      if constexpr (kFloat) left = look_up(numbers, left), right = look_up(numbers, right);
      add_four_inputs<Dot::add_unsigned>(x, left, right, whole_low, whole_high);
    }
  }
}

// Steps whose pairs of products are added up in 16 bits: 2 * 127 * 15 for whole numbers, 2 * 127 * 24 for floats.
constexpr long kPairSteps[] = {32767 / (2 * 127 * 15), 4};
static_assert(kPairSteps[0] == 8 && kPairSteps[1] * 2 * 127 * 24 <= 32767);

// The same with weights of 4 bits and fewer multiplications. The loop over steps is hardly unrolled: of all steps, a
// compiler adds up the products in another order, and needs more registers than there are.
template <class Dot, bool kFloat, int kGroup, int R>
inline void add_group_by_pairs(const uint8_t *x, const char *w, Ints numbers, Ints (&whole_low)[R],
                               Ints (&whole_high)[R]) {
  constexpr long kSteps = std::min<long>(kGroup / 4, kPairSteps[kFloat]);
  for (long first = 0; first < kGroup / 4; first += kSteps) {
    Ints pairs_low[R], pairs_high[R];
    for (int r = 0; r < R; r++) pairs_low[r] = pairs_high[r] = broadcast_int(0);
#pragma GCC unroll 2
    for (long step = first; step < first + kSteps; step++) {
      const Ints both = load_ints(w + step * 4 * kLanes);
      Ints left = low_nibbles(both), right = high_nibbles(both);
      if constexpr (kFloat) left = look_up(numbers, left), right = look_up(numbers, right);
      add_four_inputs<Dot::to_pairs>(x + step * 4, left, right, pairs_low, pairs_high);
    }
    for (int r = 0; r < R; r++) {
      whole_low[r] = Dot::add_pairs(whole_low[r], pairs_low[r]);
      whole_high[r] = Dot::add_pairs(whole_high[r], pairs_high[r]);
    }
  }
}

template <class Dot, int kBits, bool kFloat, int kGroup, int R>
void multiply_tile(const Tile &t) {
  const long values_at = t.group_bytes - kGroup / 4 * kStepBytes<kBits>;
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
    const char *values = w + values_at;
    if constexpr (kBits == 4 && Dot::kAddsPairs)
      add_group_by_pairs<Dot, kFloat, kGroup, R>(x, values, numbers, whole_low, whole_high);
    else
      add_group<Dot, kBits, kFloat, kGroup, R>(x, values, numbers, whole_low, whole_high);
    x += kGroup;
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
