// Loads and stores of sixteen values in a register of floats: bfloat16 is widened and rounded, float32 is copied.
#pragma once
#include <immintrin.h>

#include <cstdint>

// The mask of the first `count` of sixteen elements.
inline __mmask16 first(long count) { return count >= 16 ? 0xffff : static_cast<__mmask16>((1u << count) - 1); }

inline __m512 load(const uint16_t *from, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
}

inline __m512 load(const float *from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }

inline void store(uint16_t *to, __mmask16 mask, __m512 value) {
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(value));
}

inline void store(float *to, __mmask16 mask, __m512 value) { _mm512_mask_storeu_ps(to, mask, value); }
