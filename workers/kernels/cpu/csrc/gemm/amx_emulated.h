// Emulation in plain C++ of the AMX tile instructions that amx.h uses, so that tests run its loops on every processor.
//
// TDPBF16PS adds even and odd products separately, each with fused multiply-adds, and adds both sums to the total at
// the end (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2). This emulation does not flush
// subnormal values to zero.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd/simd.h"

// The compiler's header defines these names as macros.
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps

namespace gemm {

struct EmulatedTiles {
  uint8_t memory[8][16][64];
  int bytes[8], rows[8];
};
inline EmulatedTiles &emulated_tiles() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}

inline void _tile_loadconfig(const void *shapes) {
  EmulatedTiles &tiles = emulated_tiles();
  memset(tiles.memory, 0, sizeof tiles.memory);
  const auto *from = static_cast<const uint8_t *>(shapes);
  for (int tile = 0; tile < 8; tile++) {
    uint16_t bytes;
    memcpy(&bytes, from + 16 + 2 * tile, sizeof bytes);
    tiles.bytes[tile] = bytes, tiles.rows[tile] = from[48 + tile];
  }
}
inline void _tile_release() { memset(emulated_tiles().rows, 0, sizeof emulated_tiles().rows); }
inline void _tile_zero(int tile) { memset(emulated_tiles().memory[tile], 0, sizeof emulated_tiles().memory[tile]); }

inline void _tile_loadd(int tile, const void *from, long stride) {
  EmulatedTiles &tiles = emulated_tiles();
  _tile_zero(tile);
  for (int row = 0; row < tiles.rows[tile]; row++)
    memcpy(tiles.memory[tile][row], static_cast<const char *>(from) + row * stride, tiles.bytes[tile]);
}
inline void _tile_stored(int tile, void *to, long stride) {
  const EmulatedTiles &tiles = emulated_tiles();
  for (int row = 0; row < tiles.rows[tile]; row++)
    memcpy(static_cast<char *>(to) + row * stride, tiles.memory[tile][row], tiles.bytes[tile]);
}

inline void _tile_dpbf16ps(int sums, int left, int right) {
  EmulatedTiles &tiles = emulated_tiles();
  for (int m = 0; m < tiles.rows[sums]; m++) {
    float *sum = reinterpret_cast<float *>(tiles.memory[sums][m]);
    const auto *a = reinterpret_cast<const simd::BFloat16 *>(tiles.memory[left][m]);
    for (int n = 0; n < tiles.bytes[sums] / 4; n++) {
      float even = 0, odd = 0;
      for (int k = 0; k < tiles.bytes[left] / 4; k++) {
        const auto *b = reinterpret_cast<const simd::BFloat16 *>(tiles.memory[right][k]) + 2 * n;
        even = std::fma(simd::to_float(a[2 * k]), simd::to_float(b[0]), even);
        odd = std::fma(simd::to_float(a[2 * k + 1]), simd::to_float(b[1]), odd);
      }
      sum[n] += even + odd;
    }
  }
}

}  // namespace gemm
