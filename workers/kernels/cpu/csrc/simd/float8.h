// 8-bit floating point: e4m3, without infinity. Widening is exact, also for subnormal values.
#pragma once
#include "simd/simd.h"

namespace simd {

struct Float8 {
  uint8_t bits;
};

// Ratio between a value and its result from `load_scaled`: the exponent bias of float16 is 15, the bias of e4m3 is 7.
constexpr float kFloat8Scale = 256.0f;

// Load kLanes elements, divided by kFloat8Scale. Except for the position of the sign, the bits of e4m3 are float16
// bits, and the conversion from float16 also reads subnormal values. NaN is not supported: it becomes 480.
#if defined(__AVX512F__)
inline Vec load_scaled(const Float8 *from) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbfff))));
}
#elif defined(__AVX2__)
inline Vec load_scaled(const Float8 *from) {
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
  return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<int16_t>(0xbfff))));
}
#else  // NEON
inline Vec load_scaled(const Float8 *from) {
  int32_t word;
  memcpy(&word, from, sizeof word);
  const int16x4_t wide = vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(word))));
  const uint16x4_t half = vand_u16(vreinterpret_u16_s16(vshl_n_s16(wide, 7)), vdup_n_u16(0xbfff));
  return vcvt_f32_f16(vreinterpret_f16_u16(half));
}
#endif

inline float to_float(Float8 value) {
  Float8 lanes[kLanes] = {value};
  alignas(64) float numbers[kLanes];
  store(numbers, load_scaled(lanes));
  return numbers[0] * kFloat8Scale;
}

}  // namespace simd
