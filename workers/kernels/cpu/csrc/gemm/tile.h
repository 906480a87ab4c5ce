// The products of a few rows and one panel along one block of inputs: all sums stay in registers.
//
// A block of packed weights lies as [inputs][kPanel], bfloat16 as [inputs / 2][kPanel][2]: one load holds one input (or two
// neighbouring ones) of a register of outputs. A block of rows lies as [R][kRowStride], of which S::kBlock are used.
#pragma once
#include <array>
#include <utility>

#include "gemm/gemm.h"
#include "gemm/panel_rows.h"

namespace gemm {

using namespace simd;

// Bytes of weights fetched ahead while `rows` rows use them. The loads of more rows stand in line with those of weights, which
// must then be asked for earlier. `python -m benchmarks.products --threads 1` shows the effect most clearly: a single thread
// does not fill the bus. A whole step of one row, of a mixture in bfloat16, took 0.93 of the time that it takes with 2048.
constexpr long kAheadOfRow = 2048;
template <class S>
constexpr long kMostAhead = 16384;
template <class S>
constexpr bool kFetchesOnce = true;  // whether its tiles fetch weights that are read once past the caches
template <class S>
constexpr long ahead(long rows) {
  if (kFetchesOnce<S> && are_read_once(rows, S::kRows)) return kAheadOnce;
  const long wanted = rows * kAheadOfRow;
  return wanted < kAhead ? kAhead : wanted < kMostAhead<S> ? wanted : kMostAhead<S>;
}

// What a tile multiplies: types of rows and weights, how many inputs one step takes, the most rows, and the inputs of a block.
// Sums leave the registers once per block. With 256 inputs that takes a tenth of the time, and is worth it for float32 alone:
// shorter sums have smaller errors, which a result of 16 bits cannot show.
struct Floats {
  using X = float;
  using W = float;
  static constexpr int kStep = 1, kRows = kTileRows;
  static constexpr long kBlock = 256;
};
struct Widened {  // 16-bit weights that were widened before
  using X = float;
  using W = float;
  static constexpr int kStep = 1, kRows = kTileRows;
  static constexpr long kBlock = 1024;
};
struct Halves {
  using X = float;
  using W = Float16;
  static constexpr int kStep = 1, kRows = kTileRows;
  static constexpr long kBlock = Widened::kBlock;
};
struct BrainPairs {
#ifdef OARLOCK_BF16_DOT
  using X = BFloat16;
#else
  using X = float;
#endif
  using W = BFloat16;
  static constexpr int kStep = 2, kRows = kTileRows;
  static constexpr long kBlock = Widened::kBlock;
};

// Elements from a row of x to the next: a cache line more than a block, or all rows would lie in the same few sets of the
// first-level cache.
template <class S>
constexpr long kRowStride = S::kBlock + 64 / sizeof(typename S::X);

// Bytes of weights that one step of the loop takes.
template <class S>
constexpr long kStepBytes = S::kStep * kPanel * sizeof(typename S::W);

template <class S, int R>
inline void step(Vec (&low)[R], Vec (&high)[R], const typename S::X *x, const typename S::W *w) {
  if constexpr (S::kStep == 1) {
    const Vec left = load(w), right = load(w + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Vec value = broadcast(x[r * kRowStride<S>]);
      low[r] = fma(left, value, low[r]);
      high[r] = fma(right, value, high[r]);
    }
  } else {
    const Pairs left = load_pairs(w), right = load_pairs(w + 2 * kLanes);
#ifdef OARLOCK_BF16_DOT
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Pairs value = broadcast_pair(x + r * kRowStride<S>);
      low[r] = dot(low[r], left, value);
      high[r] = dot(high[r], right, value);
    }
#else
    // The same order as a widened panel has: the lower input, then the upper one.
    const Vec left0 = lower(left), right0 = lower(right);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Vec value = broadcast(x[r * kRowStride<S>]);
      low[r] = fma(left0, value, low[r]);
      high[r] = fma(right0, value, high[r]);
    }
    const Vec left1 = upper(left), right1 = upper(right);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const Vec value = broadcast(x[r * kRowStride<S> + 1]);
      low[r] = fma(left1, value, low[r]);
      high[r] = fma(right1, value, high[r]);
    }
#endif
  }
}

// low, high [R] = x w over `count` inputs. Here and in other tiles, loops over rows that are not unrolled at once would clear
// and leave the sums of six rows and more in memory: the second product of 32 rows of a mixture took 1.2 times as long.
template <class S, int R>
inline void sum_inputs(const void *rows, const void *weights, long count, Fetch fetch, Vec (&low)[R], Vec (&high)[R]) {
  const auto *x = static_cast<const typename S::X *>(rows);
  const auto *w = static_cast<const typename S::W *>(weights);
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) low[r] = high[r] = zero();
  for (long k = 0; k < count; k += S::kStep, w += S::kStep * kPanel) {
    fetch_weights<are_read_once(R, S::kRows)>(fetch.from, kStepBytes<S>);
    fetch.from += fetch.step;
    step<S, R>(low, high, x + k, w);
  }
}

// totals [R][kPanel] += x w over `count` inputs, or = where the block is the first.
template <class S, int R>
void tile(const void *rows, const void *weights, long count, float *totals, bool first, Fetch fetch) {
  Vec low[R], high[R];
  sum_inputs<S, R>(rows, weights, count, fetch, low, high);
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    float *to = totals + r * kPanel;
    store(to, first ? low[r] : load(to) + low[r]);
    store(to + kLanes, first ? high[r] : load(to + kLanes) + high[r]);
  }
}

// Whether tiles have their sums in vector registers.
template <class S>
constexpr bool kSumsInRegisters = true;

// Adds x w over the `count` inputs of a slice, which is one block, to the totals of the rows from `row` on. A panel of short
// slices and many rows takes 0.9 of the time that it takes where their sums are stored first.
template <class S, int R>
void add_tile(const void *rows, const void *weights, long count, Fetch fetch, const WeightedTotals &given, long slice,
              long row) {
  const WeightedTotals to = given;  // whose fields are not read again after each store
  Vec low[R], high[R];
  sum_inputs<S, R>(rows, weights, count, fetch, low, high);
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) to.add(slice, row + r, low[r], high[r]);
}

using Tile = void (*)(const void *rows, const void *weights, long count, float *totals, bool first, Fetch fetch);
using AddTile = void (*)(const void *rows, const void *weights, long count, Fetch fetch, const WeightedTotals &to,
                         long slice, long row);

template <class S, int... R>
constexpr auto tile_table(std::integer_sequence<int, R...>) {
  return std::array<Tile, sizeof...(R) + 1>{nullptr, tile<S, R + 1>...};
}
template <class S, int... R>
constexpr auto add_tile_table(std::integer_sequence<int, R...>) {
  return std::array<AddTile, sizeof...(R) + 1>{nullptr, add_tile<S, R + 1>...};
}
// Of R rows: kTiles<S>[R] and kAddTiles<S>[R], R from 1 to kTileRows.
template <class S>
constexpr auto kTiles = tile_table<S>(std::make_integer_sequence<int, kTileRows>());
template <class S>
constexpr auto kAddTiles = add_tile_table<S>(std::make_integer_sequence<int, kTileRows>());

}  // namespace gemm
