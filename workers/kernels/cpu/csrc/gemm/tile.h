// Matmul of a few rows and one panel along one block of inputs. All sums stay in registers.
//
// A block of packed weights is stored as [inputs][kPanel], bfloat16 as [inputs / 2][kPanel][2]: one load reads one
// input (or two neighbouring inputs) for a register of outputs. A block of rows is stored as [R][kRowStride], of which
// the first S::kBlock are used.
#pragma once
#include <array>
#include <utility>

#include "gemm/gemm.h"
#include "gemm/panel_rows.h"

namespace gemm {

using namespace simd;

// Bytes of weights prefetched ahead, per row. With more rows, activation loads compete with weight loads, so weights
// are prefetched further ahead. `python -m benchmarks.products --threads 1` shows the effect most clearly, because a
// single thread does not saturate the memory bus.
constexpr long kAheadOfRow = 2048;
template <class S>
constexpr long kMostAhead = 16384;
template <class S>
constexpr bool kFetchesOnce = true;  // whether tiles bypass the caches for weights that are read once
template <class S>
constexpr long ahead(long rows) {
  if (kFetchesOnce<S> && are_read_once(rows, S::kRows)) return kAheadOnce;
  const long wanted = rows * kAheadOfRow;
  return wanted < kAhead ? kAhead : wanted < kMostAhead<S> ? wanted : kMostAhead<S>;
}

// Tile parameters: types of rows and weights, inputs per step, maximum number of rows, and inputs of a block. Sums are
// stored once per block. Blocks of 256 inputs cost time for these stores, which only pays off for float32: shorter sums
// have smaller errors, but a 16-bit result does not show the difference.
struct Floats {
  using X = float;
  using W = float;
  static constexpr int kStep = 1, kRows = kTileRows;
  static constexpr long kBlock = 256;
};
struct Widened {  // 16-bit weights, widened before
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

// Elements between two rows of x: one cache line more than a block. Otherwise all rows would map to the same few sets
// of the first-level cache.
template <class S>
constexpr long kRowStride = S::kBlock + 64 / sizeof(typename S::X);

// Bytes of weights that one step of the loop reads.
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
    // The same order as in a widened panel: the lower input, then the upper one.
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

// Compute low, high [R] = x w over `count` inputs. The loops over rows here and in other tiles must be unrolled
// completely. Otherwise the compiler keeps the sums of six or more rows in memory, which costs measurable time.
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

// Compute x w over `count` inputs. Add it to totals [R][kPanel], or store it there if the block is the first.
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

// Add x w over the `count` inputs of a slice, which is one block, to the totals of the rows from `row` on. For short
// slices and many rows, this is faster than storing the sums first.
template <class S, int R>
void add_tile(const void *rows, const void *weights, long count, Fetch fetch, const WeightedTotals &given, long slice,
              long row) {
  const WeightedTotals to = given;  // a local copy, so that its fields are not reloaded after each store
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
// Tiles for R rows: kTiles<S>[R] and kAddTiles<S>[R], R from 1 to kTileRows.
template <class S>
constexpr auto kTiles = tile_table<S>(std::make_integer_sequence<int, kTileRows>());
template <class S>
constexpr auto kAddTiles = add_tile_table<S>(std::make_integer_sequence<int, kTileRows>());

}  // namespace gemm
