// Widening of 8-bit elements to the model dtype, which holds each of them exactly. 8-bit elements have the same order
// in pages as elements of the model dtype. So a few groups at a time are widened into a buffer that fits the
// first-level cache, once for all rows of a tile, and the matmuls see only the model dtype.
#pragma once
#include <type_traits>

#include "attention/pages.h"

namespace {

// Loads of kLanes elements as floats. e4m3 has a sign, 4 exponent bits and 3 mantissa bits. Moved to the bit positions
// of float16, they give 2^-8 of their value, also for subnormal values. Magnitude bits that are all ones are NaN.
struct Int8Numbers {
  static Vec load(const uint8_t *from);
};
struct E4m3Numbers {
  static Vec load(const uint8_t *from);
};

#if defined(__AVX512F__)

inline Vec Int8Numbers::load(const uint8_t *from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))));
}
inline Vec E4m3Numbers::load(const uint8_t *from) {
  const __m256i byte = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
  const __m256i size = _mm256_and_si256(byte, _mm256_set1_epi16(0x7f)), sign = _mm256_sub_epi16(byte, size);
  const __m256i nan = _mm256_srli_epi16(_mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x7f)), 1);
  const __m256i half = _mm256_or_si256(_mm256_slli_epi16(sign, 8), _mm256_slli_epi16(size, 7));
  return _mm512_cvtph_ps(_mm256_or_si256(half, nan)) * simd::broadcast(256.0f);
}
// Store values that bfloat16 holds exactly, as the upper halves of their float32 bits.
inline void store_exact(BFloat16 *to, Vec x, Vec next) {
  const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23,
                                       21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16((__m512i)x, odd, (__m512i)next));
}

#elif defined(__AVX2__)

inline Vec Int8Numbers::load(const uint8_t *from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from))));
}
inline Vec E4m3Numbers::load(const uint8_t *from) {
  const __m128i byte = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
  const __m128i size = _mm_and_si128(byte, _mm_set1_epi16(0x7f)), sign = _mm_sub_epi16(byte, size);
  const __m128i nan = _mm_srli_epi16(_mm_cmpeq_epi16(size, _mm_set1_epi16(0x7f)), 1);
  const __m128i half = _mm_or_si128(_mm_slli_epi16(sign, 8), _mm_slli_epi16(size, 7));
  return _mm256_cvtph_ps(_mm_or_si128(half, nan)) * simd::broadcast(256.0f);
}
inline void store_exact(BFloat16 *to, Vec x, Vec next) {
  const __m256i low = _mm256_srli_epi32((__m256i)x, 16), high = _mm256_srli_epi32((__m256i)next, 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), packed);
}

#else  // NEON

inline uint16x4_t four_bytes(const uint8_t *from) {
  uint32_t word;
  memcpy(&word, from, sizeof word);
  return vget_low_u16(vmovl_u8(vcreate_u8(word)));
}
inline Vec Int8Numbers::load(const uint8_t *from) {
  const int16x4_t whole = vshr_n_s16(vreinterpret_s16_u16(vshl_n_u16(four_bytes(from), 8)), 8);
  return vcvtq_f32_s32(vmovl_s16(whole));
}
inline Vec E4m3Numbers::load(const uint8_t *from) {
  const uint16x4_t byte = four_bytes(from), size = vand_u16(byte, vdup_n_u16(0x7f)), sign = vsub_u16(byte, size);
  const uint16x4_t nan = vshr_n_u16(vceq_u16(size, vdup_n_u16(0x7f)), 1);
  const uint16x4_t half = vorr_u16(vshl_n_u16(sign, 8), vshl_n_u16(size, 7));
  return vcvt_f32_f16(vreinterpret_f16_u16(vorr_u16(half, nan))) * simd::broadcast(256.0f);
}
inline void store_exact(BFloat16 *to, Vec x, Vec next) {
  const uint16x4_t low = vshrn_n_u32(vreinterpretq_u32_f32(x), 16);
  vst1q_u16(reinterpret_cast<uint16_t *>(to), vshrn_high_n_u32(low, vreinterpretq_u32_f32(next), 16));
}

#endif

template <class T>
inline void store_exact(T *to, Vec x, Vec next) {
  simd::store(to, x);
  simd::store(to + kLanes, next);
}

// AVX-512 with VBMI converts 64 elements at a time, with a lookup table from each magnitude to its bfloat16 bits.
#if defined(__AVX512F__)
#define OARLOCK_WIDENS_BY_TABLE 1

struct BFloat16Table {
  uint8_t low[128] = {}, high[128] = {};  // low and high byte of the bfloat16 value of each magnitude

  constexpr void set(int size, int bits) {
    low[size] = static_cast<uint8_t>(bits & 0xff);
    high[size] = static_cast<uint8_t>(bits >> 8);
  }
};

// Return the bfloat16 bits of size * 2^power, for a size below 256.
constexpr int bfloat16_bits(int size, int power) {
  if (!size) return 0;
  int top = 7;
  while (!(size >> top & 1)) top--;
  return (127 + top + power) << 7 | (size << (7 - top) & 0x7f);
}

constexpr BFloat16Table table_of(Int8Numbers) {
  BFloat16Table table;
  for (int size = 0; size < 128; size++) table.set(size, bfloat16_bits(size, 0));
  return table;
}

constexpr BFloat16Table table_of(E4m3Numbers) {
  BFloat16Table table;
  for (int size = 0; size < 127; size++) {
    const int exponent = size >> 3, part = size & 7;
    table.set(size, exponent ? bfloat16_bits(8 + part, exponent - 10) : bfloat16_bits(part, -9));
  }
  table.set(127, 0x7fc0);
  return table;
}

// Shuffle indices that interleave the bytes of two registers: alternately one byte of each.
struct Interleaved {
  uint8_t bytes[128] = {};

  constexpr Interleaved() {
    for (int i = 0; i < 64; i++) bytes[2 * i] = static_cast<uint8_t>(i), bytes[2 * i + 1] = static_cast<uint8_t>(64 + i);
  }
};

template <class Numbers>
__attribute__((target("avx512vbmi"))) void widen_by_table(const uint8_t *from, BFloat16 *to, long count) {
  alignas(64) static constexpr BFloat16Table kTable = table_of(Numbers{});
  alignas(64) static constexpr Interleaved kOrder{};
  const __m512i low0 = _mm512_load_si512(kTable.low), low1 = _mm512_load_si512(kTable.low + 64);
  const __m512i high0 = _mm512_load_si512(kTable.high), high1 = _mm512_load_si512(kTable.high + 64);
  const __m512i first = _mm512_load_si512(kOrder.bytes), second = _mm512_load_si512(kOrder.bytes + 64);
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  for (long i = 0; i < count; i += 64) {
    const __m512i x = _mm512_loadu_si512(from + i);
    // The lookup uses the lower 7 bits.
    const __m512i size = std::is_same_v<Numbers, Int8Numbers> ? _mm512_abs_epi8(x) : x;
    const __m512i low = _mm512_permutex2var_epi8(low0, size, low1);
    const __m512i high = _mm512_permutex2var_epi8(high0, size, high1);
    const __m512i whole = _mm512_ternarylogic_epi32(high, x, sign, 0xf8);  // high | (x & sign)
    _mm512_storeu_si512(to + i, _mm512_permutex2var_epi8(low, first, whole));
    _mm512_storeu_si512(to + i + 32, _mm512_permutex2var_epi8(low, second, whole));
  }
}

inline bool has_byte_tables() {
  static const bool found = __builtin_cpu_supports("avx512vbmi");
  return found;
}

#endif

// Widen `count` elements, a multiple of 256.
template <class Numbers, class T>
inline void widen(const uint8_t *from, T *to, long count) {
#ifdef OARLOCK_WIDENS_BY_TABLE
  if constexpr (std::is_same_v<T, BFloat16>)
    if (has_byte_tables()) return widen_by_table<Numbers>(from, to, count);
#endif
  for (long i = 0; i < count; i += 64) {
#pragma GCC unroll 8
    for (int j = 0; j < 64; j += 2 * kLanes)
      store_exact(to + i + j, Numbers::load(from + i + j), Numbers::load(from + i + j + kLanes));
  }
}

// Widen `count` elements of an 8-bit page, a multiple of 256.
template <class T>
void widen_part(const AttentionLayer &layer, const uint8_t *from, long count, T *to) {
  if (layer.pages == kInt8Pages) widen<Int8Numbers>(from, to, count);
  else widen<E4m3Numbers>(from, to, count);
}

// Widen the elements of a group of an 8-bit page, `width` for each position.
template <class T>
void widen_group(const AttentionLayer &layer, const uint8_t *group, long width, T *to) {
  widen_part(layer, group, kGroup * width, to);
}

}  // namespace
