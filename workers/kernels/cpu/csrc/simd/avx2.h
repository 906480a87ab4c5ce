// Implementation of simd.h for AVX2 with FMA and F16C: 8 lanes.
#pragma once
#include <immintrin.h>

namespace simd {

using Vec = __m256;
using Pairs = __m256i;
using Mask = __m256;  // all bits of a lane set, or none
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
constexpr int kTileRows = 6;  // rows x 2 registers of sums

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }    // a b + c
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a b
// Return the second operand if either is NaN.
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec abs(Vec x) { return _mm256_andnot_ps(broadcast(-0.0f), x); }
inline Vec with_sign_of(Vec size, Vec sign) { return _mm256_or_ps(size, _mm256_and_ps(sign, broadcast(-0.0f))); }
inline Vec round(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// Return x 2^n for integers n from -252 to 254. It takes two steps, because one exponent only covers -126 to 127.
inline Vec scale_by_power_of_2(Vec x, Vec n) {
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
  const __m256i rest = _mm256_sub_epi32(whole, half), bias = _mm256_set1_epi32(127);
  const Vec one = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const Vec other = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  return x * one * other;
}

inline float first_lane(Vec x) { return _mm256_cvtss_f32(x); }

inline float sum(Vec x) {
  const __m128 four = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return _mm_cvtss_f32(two) + _mm_cvtss_f32(_mm_movehdup_ps(two));
}

inline float largest(Vec x) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline __m256i first_words(long count) {
  const int most = count >= kLanes ? kLanes : count <= 0 ? 0 : static_cast<int>(count);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(most), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline Mask first(long count) { return _mm256_castsi256_ps(first_words(count)); }
inline Mask from_bits(uint32_t bits) {  // bit i is lane i
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits), bit), bit));
}
inline uint32_t to_bits(Mask mask) { return _mm256_movemask_ps(mask); }
inline Mask less(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline Mask both(Mask a, Mask b) { return _mm256_and_ps(a, b); }
inline Vec select(Mask mask, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, mask); }

inline Vec widened(__m128i half) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)); }

inline __m128i rounded(Vec x) {
  const __m256i word = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(word, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(word, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  // Rounding must not carry NaN into infinity.
  const __m256i quiet = _mm256_or_si256(word, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

inline __m128i halves(Vec x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Vec load(const float *from) { return _mm256_loadu_ps(from); }
inline Vec load(const BFloat16 *from) { return widened(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))); }
inline Vec load(const Float16 *from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}

// Load the first `count` elements. Memory beyond them is not accessed, and their lanes are zero.
inline Vec load(const float *from, long count) {
  return count >= kLanes ? load(from) : _mm256_maskload_ps(from, first_words(count));
}

template <class Half>
inline Vec load(const Half *from, long count) {
  if (count >= kLanes) return load(from);
  Half copy[kLanes] = {};
  if (count > 0) memcpy(copy, from, count * sizeof *from);
  return load(copy);
}

inline void store(float *to, Vec x) { _mm256_storeu_ps(to, x); }
inline void store(BFloat16 *to, Vec x) { _mm_storeu_si128(reinterpret_cast<__m128i *>(to), rounded(x)); }
inline void store(Float16 *to, Vec x) { _mm_storeu_si128(reinterpret_cast<__m128i *>(to), halves(x)); }
inline void store(float *to, Vec x, long count) {  // masked stores are slow on some processors
  if (count >= kLanes) store(to, x);
  else _mm256_maskstore_ps(to, first_words(count), x);
}

template <class Half>
inline void store(Half *to, Vec x, long count) {
  if (count >= kLanes) return store(to, x);
  Half copy[kLanes];
  store(copy, x);
  if (count > 0) memcpy(to, copy, count * sizeof *to);
}

inline float to_float(Float16 value) { return _cvtsh_ss(value.bits); }

inline Pairs load_pairs(const BFloat16 *from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)); }
inline Pairs broadcast_pair(const BFloat16 *from) {
  int32_t pair;
  memcpy(&pair, from, sizeof pair);
  return _mm256_set1_epi32(pair);
}
inline Vec lower(Pairs x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
inline Vec upper(Pairs x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xffff0000))); }

inline void stream(float *to, Vec x) { _mm256_stream_ps(to, x); }
inline bool can_stream(const float *to) { return reinterpret_cast<uintptr_t>(to) % sizeof(Vec) == 0; }
inline void end_streams() { _mm_sfence(); }

inline void prefetch(const void *address) { _mm_prefetch(static_cast<const char *>(address), _MM_HINT_T0); }
// Prefetch into the second-level cache, which may wait for more lines at a time than the first-level cache.
inline void prefetch_second(const void *address) { _mm_prefetch(static_cast<const char *>(address), _MM_HINT_T1); }
inline void prefetch_once(const void *address) { _mm_prefetch(static_cast<const char *>(address), _MM_HINT_NTA); }

}  // namespace simd
