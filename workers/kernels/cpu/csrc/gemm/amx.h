// bfloat16 matmul with the tile registers of AMX, in place of the tiles of tile.h: up to 32 rows times one panel of 32
// outputs. Two tiles of rows times two tiles of weights, each of at most 16 x 64 bytes, give four tiles of sums.
//
// The packed weight has the layout of AVX512-BF16: [inputs / 2][32][2]. So sixteen outputs of a panel are a tile with
// rows 128 bytes apart. The instruction adds the even and the odd inputs of a tile separately. This order depends only
// on the number of inputs, so a row has the same bits for any number of rows. Vector instructions compute batches of a
// few rows, in the same order and with the same bits: a tile takes as long for one row as for sixteen, which is longer
// than reading its weights.
#pragma once
#include "gemm/tile.h"

#ifdef OARLOCK_EMULATE_AMX
#include "gemm/amx_emulated.h"
#else
#include <immintrin.h>
#endif

namespace gemm {

struct AmxPairs {
  using X = BFloat16;
  using W = BFloat16;
  static constexpr int kStep = 2, kRows = 32;
  static constexpr long kBlock = BrainPairs::kBlock;
};

// Rows are loaded tile by tile and do not delay the loads of weights, so a shorter prefetch distance is faster for MoE
// layers.
template <>
constexpr long kMostAhead<AmxPairs> = kAhead;
template <>
constexpr bool kFetchesOnce<AmxPairs> = false;
template <>
constexpr bool kSumsInRegisters<AmxPairs> = false;

// The shapes of the eight tiles, in the layout that LDTILECFG reads.
struct alignas(64) AmxShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // bytes of one row
  uint8_t rows[16] = {};
};

// Set the tile shapes. Tiles 0 to 3: sums of rows 0 to 15 and of rows 16 and up, for both halves of the panel. Tiles 4
// and 5: rows. Tiles 6 and 7: weights.
inline void amx_shape(int rows, int inputs) {
  AmxShapes shapes;
  const int upper = rows < 16 ? rows : 16, lower = rows > 16 ? rows - 16 : 1;
  for (int tile = 0; tile < 8; tile++) {
    shapes.bytes[tile] = tile == 4 || tile == 5 ? inputs * 2 : 64;
    shapes.rows[tile] = tile >= 6 ? inputs / 2 : tile == 2 || tile == 3 || tile == 5 ? lower : upper;
  }
  _tile_loadconfig(&shapes);
}

// Compute the same as `tile` in tile.h, for R rows, at most 32.
template <int R>
void amx_tile(const void *rows, const void *weights, long count, float *totals, bool first, Fetch fetch) {
  const auto *x = static_cast<const BFloat16 *>(rows);
  const auto *w = static_cast<const BFloat16 *>(weights);
  constexpr int kRow = kRowStride<AmxPairs> * sizeof *x, kPairs = 2 * kPanel * sizeof *w;  // bytes between rows
  alignas(64) float sums[R * kPanel];
  for (long done = 0; done < count;) {
    const int inputs = count - done < 32 ? count - done : 32;
    if (done == 0 || inputs < 32) {
      // Changing the shapes clears all tiles, so the sums so far are kept in memory.
      if (done > 0) {
        _tile_stored(0, sums, kPanel * sizeof *sums);
        _tile_stored(1, sums + 16, kPanel * sizeof *sums);
        if constexpr (R > 16) {
          _tile_stored(2, sums + 16 * kPanel, kPanel * sizeof *sums);
          _tile_stored(3, sums + 16 * kPanel + 16, kPanel * sizeof *sums);
        }
      }
      amx_shape(R, inputs);
      if (done > 0) {
        _tile_loadd(0, sums, kPanel * sizeof *sums);
        _tile_loadd(1, sums + 16, kPanel * sizeof *sums);
        if constexpr (R > 16) {
          _tile_loadd(2, sums + 16 * kPanel, kPanel * sizeof *sums);
          _tile_loadd(3, sums + 16 * kPanel + 16, kPanel * sizeof *sums);
        }
      } else {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (R > 16) {
          _tile_zero(2);
          _tile_zero(3);
        }
      }
    }
    for (int pair = 0; pair < inputs / 2; pair++, fetch.from += fetch.step) {
      prefetch(fetch.from);
      prefetch(fetch.from + 64);
    }
    _tile_loadd(6, w + done * kPanel, kPairs);
    _tile_loadd(7, w + done * kPanel + 32, kPairs);
    _tile_loadd(4, x + done, kRow);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (R > 16) {
      _tile_loadd(5, x + 16 * kRowStride<AmxPairs> + done, kRow);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    done += inputs;
  }
  _tile_stored(0, sums, kPanel * sizeof *sums);
  _tile_stored(1, sums + 16, kPanel * sizeof *sums);
  if constexpr (R > 16) {
    _tile_stored(2, sums + 16 * kPanel, kPanel * sizeof *sums);
    _tile_stored(3, sums + 16 * kPanel + 16, kPanel * sizeof *sums);
  }
  _tile_release();  // the operating system switches threads that hold tiles more slowly
  for (int at = 0; at < R * kPanel; at += kLanes)
    store(totals + at, first ? load(sums + at) : load(totals + at) + load(sums + at));
}

constexpr int kFewRows = 3;  // tiles are faster over a whole block with four rows

// While this object exists, subnormal values count as zero, as in the AMX tiles.
struct FlushesSubnormals {
#ifndef OARLOCK_EMULATE_AMX
  const unsigned before = _mm_getcsr();
  FlushesSubnormals() { _mm_setcsr(before | _MM_FLUSH_ZERO_ON | 0x40); }  // flush results, and treat inputs as zero
  ~FlushesSubnormals() { _mm_setcsr(before); }
#endif
};

// Compute the same bits as `amx_tile`, for R rows, at most kFewRows.
template <int R>
void few_rows(const void *rows, const void *weights, long count, float *totals, bool first, Fetch fetch) {
  const FlushesSubnormals flushes;
  const auto *x = static_cast<const BFloat16 *>(rows);
  const auto *w = static_cast<const BFloat16 *>(weights);
  Vec sums[R][2];
  for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = zero();
  for (long done = 0; done < count; done += 32) {
    const long pairs = (count - done < 32 ? count - done : 32) / 2;
    Vec even[R][2], odd[R][2];
    for (int r = 0; r < R; r++) even[r][0] = even[r][1] = odd[r][0] = odd[r][1] = zero();
    for (long pair = 0; pair < pairs; pair++, w += 2 * kPanel, x += 2, fetch.from += fetch.step) {
      prefetch(fetch.from);
      prefetch(fetch.from + 64);
      const Pairs weight[2] = {load_pairs(w), load_pairs(w + kPanel)};
      for (int r = 0; r < R; r++) {
        const Pairs both = broadcast_pair(x + r * kRowStride<AmxPairs>);
        for (int half = 0; half < 2; half++) {
          even[r][half] = fma(lower(weight[half]), lower(both), even[r][half]);
          odd[r][half] = fma(upper(weight[half]), upper(both), odd[r][half]);
        }
      }
    }
    for (int r = 0; r < R; r++)
      for (int half = 0; half < 2; half++) sums[r][half] = sums[r][half] + (even[r][half] + odd[r][half]);
  }
  for (int r = 0; r < R; r++)
    for (int half = 0; half < 2; half++) {
      float *to = totals + r * kPanel + half * kLanes;
      store(to, first ? sums[r][half] : load(to) + sums[r][half]);
    }
}

template <int R>
constexpr Tile tile_of() {
  if constexpr (R <= kFewRows) return few_rows<R>;
  else return amx_tile<R>;
}
template <int... R>
constexpr auto amx_table(std::integer_sequence<int, R...>) {
  return std::array<Tile, sizeof...(R) + 1>{nullptr, tile_of<R + 1>()...};
}
template <>
constexpr auto kTiles<AmxPairs> = amx_table(std::make_integer_sequence<int, AmxPairs::kRows>());

}  // namespace gemm
