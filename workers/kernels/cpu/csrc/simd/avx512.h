// Implementation of simd.h for AVX-512 (F, BW, DQ, VL): 16 lanes. With AVX512-BF16, its instructions do the rounding
// and the dot products of pairs.
#pragma once
#include <immintrin.h>

namespace simd {

using Vec = __m512;
using Pairs = __m512i;
using Mask = __mmask16;
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
constexpr int kTileRows = 12;  // rows x 2 registers of sums

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }    // a b + c
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
// Return the second operand if either is NaN.
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec abs(Vec x) { return _mm512_abs_ps(x); }
inline Vec with_sign_of(Vec size, Vec sign) { return _mm512_or_ps(size, _mm512_and_ps(sign, broadcast(-0.0f))); }
inline Vec round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec scale_by_power_of_2(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }  // n: integers
inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }
inline float largest(Vec x) { return _mm512_reduce_max_ps(x); }
inline float first_lane(Vec x) { return _mm512_cvtss_f32(x); }

inline Mask first(long count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<Mask>((1u << count) - 1); }
inline Mask from_bits(uint32_t bits) { return static_cast<Mask>(bits); }  // bit i is lane i
inline uint32_t to_bits(Mask mask) { return mask; }
inline Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Mask both(Mask a, Mask b) { return a & b; }
inline Vec select(Mask mask, Vec yes, Vec no) { return _mm512_mask_blend_ps(mask, no, yes); }

inline Vec widened(__m256i half) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)); }

inline __m256i rounded(Vec x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i word = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(word, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(word, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);  // rounding must not carry NaN into infinity
  return _mm512_cvtepi32_epi16(
      _mm512_srli_epi32(_mm512_mask_or_epi32(up, nan, word, _mm512_set1_epi32(0x400000)), 16));
#endif
}

inline Vec load(const float *from) { return _mm512_loadu_ps(from); }
inline Vec load(const BFloat16 *from) { return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from))); }
inline Vec load(const Float16 *from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}

// Load the first `count` elements. Memory beyond them is not accessed, and their lanes are zero.
inline Vec load(const float *from, long count) { return _mm512_maskz_loadu_ps(first(count), from); }
inline Vec load(const BFloat16 *from, long count) { return widened(_mm256_maskz_loadu_epi16(first(count), from)); }
inline Vec load(const Float16 *from, long count) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), from));
}

inline __m256i halves(Vec x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline void store(float *to, Vec x) { _mm512_storeu_ps(to, x); }
inline void store(BFloat16 *to, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), rounded(x)); }
inline void store(Float16 *to, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), halves(x)); }
inline void store(float *to, Vec x, long count) { _mm512_mask_storeu_ps(to, first(count), x); }
inline void store(BFloat16 *to, Vec x, long count) { _mm256_mask_storeu_epi16(to, first(count), rounded(x)); }
inline void store(Float16 *to, Vec x, long count) { _mm256_mask_storeu_epi16(to, first(count), halves(x)); }

inline float to_float(Float16 value) { return _cvtsh_ss(value.bits); }

inline Pairs load_pairs(const BFloat16 *from) { return _mm512_loadu_si512(from); }
inline Pairs broadcast_pair(const BFloat16 *from) {
  int32_t pair;
  memcpy(&pair, from, sizeof pair);
  return _mm512_set1_epi32(pair);
}
inline Vec lower(Pairs x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline Vec upper(Pairs x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(0xffff0000))); }

#if defined(__AVX512BF16__)
#define OARLOCK_BF16_DOT 1
inline Vec dot(Vec acc, Pairs a, Pairs b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
#elif defined(OARLOCK_EMULATE_BF16_DOT)  // tests run the AVX512-BF16 code on processors without it
#define OARLOCK_BF16_DOT 1
inline Vec dot(Vec acc, Pairs a, Pairs b) { return fma(lower(a), lower(b), fma(upper(a), upper(b), acc)); }
#endif

// Store without reading the cache lines of `to` first, and without keeping them. See `can_stream` for its alignment.
inline void stream(float *to, Vec x) { _mm512_stream_ps(to, x); }
inline bool can_stream(const float *to) { return reinterpret_cast<uintptr_t>(to) % sizeof(Vec) == 0; }
inline void end_streams() { _mm_sfence(); }  // before other threads may read what `stream` stored

inline void prefetch(const void *address) { _mm_prefetch(static_cast<const char *>(address), _MM_HINT_T0); }
// Prefetch into the second-level cache, which may wait for more lines at a time than the first-level cache.
inline void prefetch_second(const void *address) { _mm_prefetch(static_cast<const char *>(address), _MM_HINT_T1); }
inline void prefetch_once(const void *address) { _mm_prefetch(static_cast<const char *>(address), _MM_HINT_NTA); }

}  // namespace simd
