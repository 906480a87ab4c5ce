// Values that are part of the keys, read from a group of keys: their elements are brought into the order of values
// (attention.h), once for all rows of a tile. Elements move within squares of 128-bit registers, which every ISA level
// has; AVX-512 moves bfloat16 in whole registers.
#pragma once
#include "attention/pages.h"

namespace {

#if defined(__AVX2__)

using Square = __m128i;
inline Square load_square(const void *from) { return _mm_loadu_si128(static_cast<const __m128i *>(from)); }
inline void store_square(void *to, Square x) { _mm_storeu_si128(static_cast<__m128i *>(to), x); }
// Interleave the lower, or the upper, halves of two registers: elements of 16, 32 or 64 bits.
inline Square lower16(Square a, Square b) { return _mm_unpacklo_epi16(a, b); }
inline Square upper16(Square a, Square b) { return _mm_unpackhi_epi16(a, b); }
inline Square lower32(Square a, Square b) { return _mm_unpacklo_epi32(a, b); }
inline Square upper32(Square a, Square b) { return _mm_unpackhi_epi32(a, b); }
inline Square lower64(Square a, Square b) { return _mm_unpacklo_epi64(a, b); }
inline Square upper64(Square a, Square b) { return _mm_unpackhi_epi64(a, b); }
// Exchange the second and third of each four elements of 16 bits.
inline Square exchange_middle(Square x) {
  return _mm_shuffle_epi8(x, _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
}

#else  // NEON

using Square = uint8x16_t;
inline Square load_square(const void *from) { return vld1q_u8(static_cast<const uint8_t *>(from)); }
inline void store_square(void *to, Square x) { vst1q_u8(static_cast<uint8_t *>(to), x); }
#define OARLOCK_INTERLEAVE(name, bits, zip)                                                                   \
  inline Square name##bits(Square a, Square b) {                                                                 \
    return vreinterpretq_u8_u##bits(zip##_u##bits(vreinterpretq_u##bits##_u8(a), vreinterpretq_u##bits##_u8(b))); \
  }
OARLOCK_INTERLEAVE(lower, 16, vzip1q)
OARLOCK_INTERLEAVE(upper, 16, vzip2q)
OARLOCK_INTERLEAVE(lower, 32, vzip1q)
OARLOCK_INTERLEAVE(upper, 32, vzip2q)
OARLOCK_INTERLEAVE(lower, 64, vzip1q)
OARLOCK_INTERLEAVE(upper, 64, vzip2q)
#undef OARLOCK_INTERLEAVE
inline Square exchange_middle(Square x) {
  static const uint8_t kOrder[16] = {0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15};
  return vqtbl1q_u8(x, vld1q_u8(kOrder));
}

#endif

// Keys [width / 2][16][2] to values [8][width][2]. The unit is the pairs of two neighbouring positions.
#if defined(__AVX512F__)

// Units 0, 2, 4 and 6 of two rows by turns, or the odd units. In each the second and third elements are exchanged.
struct UnitsByTurns {
  uint16_t even[32] = {}, odd[32] = {};

  constexpr UnitsByTurns() {
    constexpr int kOrder[4] = {0, 2, 1, 3};
    for (int i = 0; i < 32; i++) {
      const int unit = i / 8 * 2, row = i / 4 % 2;
      even[i] = static_cast<uint16_t>(32 * row + 4 * unit + kOrder[i % 4]);
      odd[i] = static_cast<uint16_t>(even[i] + 4);
    }
  }
};

// Transpose 16-byte lanes: lane i of x[j] to lane j of to[i].
inline void store_lanes(const __m512i (&x)[4], BFloat16 *to, long stride) {
  const __m512i a = _mm512_shuffle_i64x2(x[0], x[1], 0x44), b = _mm512_shuffle_i64x2(x[2], x[3], 0x44);
  const __m512i c = _mm512_shuffle_i64x2(x[0], x[1], 0xee), d = _mm512_shuffle_i64x2(x[2], x[3], 0xee);
  _mm512_storeu_si512(to, _mm512_shuffle_i64x2(a, b, 0x88));
  _mm512_storeu_si512(to + stride, _mm512_shuffle_i64x2(a, b, 0xdd));
  _mm512_storeu_si512(to + 2 * stride, _mm512_shuffle_i64x2(c, d, 0x88));
  _mm512_storeu_si512(to + 3 * stride, _mm512_shuffle_i64x2(c, d, 0xdd));
}

inline void transpose_group(const BFloat16 *keys, long width, BFloat16 *values) {
  alignas(64) static constexpr UnitsByTurns kUnits{};
  const __m512i even = _mm512_load_si512(kUnits.even), odd = _mm512_load_si512(kUnits.odd);
  for (long d = 0; d < width; d += 16, keys += 16 * kGroup) {
    __m512i x[4], y[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const __m512i one = _mm512_loadu_si512(keys + 64 * i), two = _mm512_loadu_si512(keys + 64 * i + 32);
      x[i] = _mm512_permutex2var_epi16(one, even, two);
      y[i] = _mm512_permutex2var_epi16(one, odd, two);
    }
    store_lanes(x, values + 2 * d, 4 * width);
    store_lanes(y, values + 2 * d + 2 * width, 4 * width);
  }
}

#else

inline void transpose_group(const BFloat16 *keys, long width, BFloat16 *values) {
  constexpr long kRow = 2 * kGroup;  // elements of a pair of elements of all positions
  for (long d = 0; d < width; d += 4, keys += 2 * kRow)
#pragma GCC unroll 4
    for (long position = 0; position < kGroup; position += 4) {
      const Square one = exchange_middle(load_square(keys + 2 * position));
      const Square two = exchange_middle(load_square(keys + kRow + 2 * position));
      BFloat16 *to = values + position * width + 2 * d;
      store_square(to, lower64(one, two));
      store_square(to + 2 * width, upper64(one, two));
    }
}

#endif

// Keys [width][16] to values [16][width].
inline void transpose_group(const float *keys, long width, float *values) {
  for (long d = 0; d < width; d += 4, keys += 4 * kGroup)
#pragma GCC unroll 4
    for (long position = 0; position < kGroup; position += 4) {
      Square x[4], y[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) x[i] = load_square(keys + i * kGroup + position);
      y[0] = lower32(x[0], x[1]), y[1] = upper32(x[0], x[1]);
      y[2] = lower32(x[2], x[3]), y[3] = upper32(x[2], x[3]);
      float *to = values + position * width + d;
      store_square(to, lower64(y[0], y[2]));
      store_square(to + width, upper64(y[0], y[2]));
      store_square(to + 2 * width, lower64(y[1], y[3]));
      store_square(to + 3 * width, upper64(y[1], y[3]));
    }
}

inline void transpose_group(const Float16 *keys, long width, Float16 *values) {
  for (long d = 0; d < width; d += 8, keys += 8 * kGroup)
#pragma GCC unroll 2
    for (long position = 0; position < kGroup; position += 8) {
      Square x[8], y[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; i++) x[i] = load_square(keys + i * kGroup + position);
      Float16 *to = values + position * width + d;
      // y[2 i], y[2 i + 1]: positions 0 to 3, and 4 to 7, of elements 2 i and 2 i + 1
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
        y[2 * i] = lower16(x[2 * i], x[2 * i + 1]), y[2 * i + 1] = upper16(x[2 * i], x[2 * i + 1]);
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++, to += 4 * width) {
        const Square a = lower32(y[half], y[2 + half]), b = lower32(y[4 + half], y[6 + half]);
        const Square c = upper32(y[half], y[2 + half]), e = upper32(y[4 + half], y[6 + half]);
        store_square(to, lower64(a, b));
        store_square(to + width, upper64(a, b));
        store_square(to + 2 * width, lower64(c, e));
        store_square(to + 3 * width, upper64(c, e));
      }
    }
}

}  // namespace
