// A register of floats, the same operations at every level of instruction set: the kernels are written once against this.
//
//   Vec        kLanes floats                  Mask   one truth value per lane
//   Pairs      kLanes 32-bit words, each two neighbouring bfloat16 values: the lower half comes first
//
// + - * / work on Vec by themselves (vector types of GCC and Clang). Exactly one of the files below is included; each
// defines the same names. Files that were compiled for different levels are never linked together.
#pragma once
#include <cstdint>
#include <cstring>

namespace simd {

// 16-bit numbers as they lie in memory; distinct types, so that `load` and `store` know how to widen and round.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

}  // namespace simd

#if defined(__AVX512F__)
#include "simd/avx512.h"
#elif defined(__AVX2__)
#include "simd/avx2.h"
#elif defined(__ARM_NEON)
#include "simd/neon.h"
#else
#error "compile for AVX2, AVX-512 or NEON"
#endif

namespace simd {

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) {
  const uint32_t word = static_cast<uint32_t>(value.bits) << 16;
  float number;
  memcpy(&number, &word, sizeof number);
  return number;
}

// acc + a * b for each of the two bfloat16 values in a word, b's words all equal. Without an instruction for it, two
// fused multiply-adds: the lower value first.
inline Vec add_products(Vec acc, Pairs a, Pairs b) {
#ifdef OARLOCK_BF16_DOT
  return dot(acc, a, b);
#else
  return fma(upper(a), upper(b), fma(lower(a), lower(b), acc));
#endif
}

}  // namespace simd
