// A register of floats with the same operations at every ISA level. Kernels are written once, against this interface.
//
//   Vec        kLanes floats                  Mask   one truth value per lane
//   Pairs      kLanes 32-bit words, each two neighbouring bfloat16 values, the first in the lower half
//
// Vec supports + - * / directly (vector types of GCC and Clang). Exactly one of the headers below is included, and each
// defines the same names. Files compiled for different ISA levels are never linked together.
#pragma once
#include <cstdint>
#include <cstring>

namespace simd {

// 16-bit elements as stored in memory. They are distinct types, so that `load` and `store` can convert them.
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

// Return acc + a * b for both bfloat16 values of each word; all words of b are equal. Without a dot product
// instruction, two fused multiply-adds do this, the lower value first.
inline Vec add_products(Vec acc, Pairs a, Pairs b) {
#ifdef OARLOCK_BF16_DOT
  return dot(acc, a, b);
#else
  return fma(upper(a), upper(b), fma(lower(a), lower(b), acc));
#endif
}

}  // namespace simd
