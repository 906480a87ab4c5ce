// Implementation of simd.h for 64-bit ARM: 4 lanes. With the BF16 extension, its instruction does the dot products of
// pairs.
#pragma once
#include <arm_neon.h>

namespace simd {

using Vec = float32x4_t;
using Pairs = uint32x4_t;
using Mask = uint32x4_t;  // all bits of a lane set, or none
constexpr int kLanes = 4;
constexpr int kRegisters = 32;
constexpr int kTileRows = 12;  // rows x 2 registers of sums

inline Vec zero() { return vdupq_n_f32(0.0f); }
inline Vec broadcast(float x) { return vdupq_n_f32(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }   // a b + c
inline Vec fnma(Vec a, Vec b, Vec c) { return vfmsq_f32(c, a, b); }  // c - a b
// Return the second operand if either is NaN.
inline Vec min(Vec a, Vec b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline Vec max(Vec a, Vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline Vec abs(Vec x) { return vabsq_f32(x); }
inline Vec with_sign_of(Vec size, Vec sign) { return vbslq_f32(vdupq_n_u32(0x80000000u), sign, size); }
inline Vec round(Vec x) { return vrndnq_f32(x); }

// Return x 2^n for integers n from -252 to 254. It takes two steps, because one exponent only covers -126 to 127.
inline Vec scale_by_power_of_2(Vec x, Vec n) {
  const int32x4_t whole = vcvtq_s32_f32(n), half = vshrq_n_s32(whole, 1), bias = vdupq_n_s32(127);
  const Vec one = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23));
  const Vec other = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vsubq_s32(whole, half), bias), 23));
  return x * one * other;
}

inline float sum(Vec x) { return vaddvq_f32(x); }
inline float largest(Vec x) { return vmaxvq_f32(x); }
inline float first_lane(Vec x) { return vgetq_lane_f32(x, 0); }

inline Mask first(long count) {
  const uint32_t order[4] = {0, 1, 2, 3};
  return vcltq_u32(vld1q_u32(order), vdupq_n_u32(count >= kLanes ? kLanes : count <= 0 ? 0 : count));
}
inline Mask from_bits(uint32_t bits) {  // bit i is lane i
  const uint32_t bit[4] = {1, 2, 4, 8};
  return vtstq_u32(vdupq_n_u32(bits), vld1q_u32(bit));
}
inline uint32_t to_bits(Mask mask) {
  const uint32_t bit[4] = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(mask, vld1q_u32(bit)));
}
inline Mask less(Vec a, Vec b) { return vcltq_f32(a, b); }
inline Mask both(Mask a, Mask b) { return vandq_u32(a, b); }
inline Vec select(Mask mask, Vec yes, Vec no) { return vbslq_f32(mask, yes, no); }

inline Vec widened(uint16x4_t half) { return vreinterpretq_f32_u32(vshll_n_u16(half, 16)); }

inline uint16x4_t rounded(Vec x) {
  const uint32x4_t word = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(word, 16), vdupq_n_u32(1));
  const uint32x4_t up = vaddq_u32(word, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  // Rounding must not carry NaN into infinity.
  const uint32x4_t quiet = vorrq_u32(word, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), up, quiet), 16);
}

inline Vec load(const float *from) { return vld1q_f32(from); }
inline Vec load(const BFloat16 *from) { return widened(vld1_u16(reinterpret_cast<const uint16_t *>(from))); }
inline Vec load(const Float16 *from) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t *>(from))));
}

inline void store(float *to, Vec x) { vst1q_f32(to, x); }
inline void store(BFloat16 *to, Vec x) { vst1_u16(reinterpret_cast<uint16_t *>(to), rounded(x)); }
inline void store(Float16 *to, Vec x) {
  vst1_u16(reinterpret_cast<uint16_t *>(to), vreinterpret_u16_f16(vcvt_f16_f32(x)));
}

// Load the first `count` elements. Memory beyond them is not accessed, and their lanes are zero.
template <class T>
inline Vec load(const T *from, long count) {
  if (count >= kLanes) return load(from);
  T copy[kLanes] = {};
  if (count > 0) memcpy(copy, from, count * sizeof *from);
  return load(copy);
}

template <class T>
inline void store(T *to, Vec x, long count) {
  if (count >= kLanes) return store(to, x);
  T copy[kLanes];
  store(copy, x);
  if (count > 0) memcpy(to, copy, count * sizeof *to);
}

inline float to_float(Float16 value) {
  return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(value.bits))), 0);
}

inline Pairs load_pairs(const BFloat16 *from) { return vreinterpretq_u32_u16(vld1q_u16(reinterpret_cast<const uint16_t *>(from))); }
inline Pairs broadcast_pair(const BFloat16 *from) {
  uint32_t pair;
  memcpy(&pair, from, sizeof pair);
  return vdupq_n_u32(pair);
}
inline Vec lower(Pairs x) { return vreinterpretq_f32_u32(vshlq_n_u32(x, 16)); }
inline Vec upper(Pairs x) { return vreinterpretq_f32_u32(vandq_u32(x, vdupq_n_u32(0xffff0000u))); }

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define OARLOCK_BF16_DOT 1
inline Vec dot(Vec acc, Pairs a, Pairs b) {
  return vbfdotq_f32(acc, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
}
#endif

inline void stream(float *to, Vec x) { store(to, x); }
inline bool can_stream(const float *) { return true; }
inline void end_streams() {}

inline void prefetch(const void *address) { __builtin_prefetch(address); }
// Prefetch into the second-level cache, which may wait for more lines at a time than the first-level cache.
inline void prefetch_second(const void *address) { __builtin_prefetch(address, 0, 2); }
inline void prefetch_once(const void *address) { __builtin_prefetch(address, 0, 0); }

}  // namespace simd
