// Dot products of 8-bit integers: registers of kLanes 32-bit sums. The products of four neighbouring bytes are added to
// each sum.
//
// PlainDot uses only the instructions of its ISA level. Dot uses one more instruction, which the processor may lack. It
// is written in assembly, so that an ISA level need not be compiled twice. `add` is exact for values from -127 to 127.
// `add_unsigned` takes weights from 0 to 127 as they are, and rows without an offset. If `kAddsPairs` is set, products
// with small weights may be added up in 16 bits, two sums in each 32-bit lane, before they become 32-bit sums. This
// halves the multiplications. These additions are in assembly too, because compilers reorder intrinsics and then run
// out of registers.
#pragma once
#include "simd/simd.h"

namespace simd {

#if defined(__AVX512F__)

using Ints = __m512i;
inline Ints load_ints(const void *from) { return _mm512_loadu_si512(from); }
inline void store_ints(int32_t *to, Ints x) { _mm512_storeu_si512(to, x); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints broadcast_four(const uint8_t *from) {
  int32_t word;
  memcpy(&word, from, sizeof word);
  return _mm512_set1_epi32(word);
}
inline Ints broadcast_int(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints low_nibbles(Ints x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Ints high_nibbles(Ints x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
// Load 16 table bytes into every 128-bit lane. `look_up` returns the table byte at each index in `indices`, 0 to 15.
inline Ints load_table(const uint8_t *from) {
  return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i *>(from)));
}
inline Ints look_up(Ints table, Ints indices) { return _mm512_shuffle_epi8(table, indices); }
inline Vec to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
// Store the nearest integers plus `offset`, as bytes.
inline void store_bytes(uint8_t *to, Vec x, int offset) {
  const Ints whole = add(_mm512_cvtps_epi32(x), _mm512_set1_epi32(offset));
  _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_cvtepi32_epi8(whole));
}

// vpmaddubsw takes one unsigned factor and adds two products in 16 bits, which 255 * 127 * 2 would overflow. So the
// sign of the weight moves to the other factor: 127 * 127 * 2 fits.
struct PlainDot {
  static constexpr int kRows = kTileRows, kOffset = 0;
  static constexpr bool kAddsPairs = true;
  struct Weight {
    Ints size;
    __mmask64 negative;
  };
  static Weight prepare(Ints w) { return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)}; }
  static Ints add(Ints acc, Weight w, Ints x) {
    const Ints turned = _mm512_mask_sub_epi8(x, w.negative, _mm512_setzero_si512(), x);
    return add_unsigned(acc, w.size, turned);
  }
  static Ints add_unsigned(Ints acc, Ints w, Ints x) {
    return simd::add(acc, sum_pairs(_mm512_maddubs_epi16(w, x)));
  }
  static Ints first_of_pairs(Ints x) { return _mm512_and_si512(x, _mm512_set1_epi32(0xffff)); }
  static Ints to_pairs(Ints pairs, Ints w, Ints x) {
    asm("vpaddw %1, %0, %0" : "+v"(pairs) : "v"(_mm512_maddubs_epi16(w, x)));
    return pairs;
  }
  static Ints sum_pairs(Ints pairs) { return _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)); }
};

// AVX512-VNNI. The instruction takes the activations as unsigned bytes, so they are stored 128 higher.
struct Dot {
  static constexpr int kRows = kTileRows, kOffset = 128;
  static constexpr bool kAddsPairs = false;
  using Weight = Ints;
  static Weight prepare(Ints w) { return w; }
  static Ints add(Ints acc, Weight w, Ints x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(x), "v"(w));
    return acc;
  }
  static Ints add_unsigned(Ints acc, Ints w, Ints x) { return add(acc, x, w); }
};

#elif defined(__AVX2__)

using Ints = __m256i;
inline Ints load_ints(const void *from) { return _mm256_loadu_si256(static_cast<const __m256i *>(from)); }
inline void store_ints(int32_t *to, Ints x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), x); }
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints broadcast_four(const uint8_t *from) {
  int32_t word;
  memcpy(&word, from, sizeof word);
  return _mm256_set1_epi32(word);
}
inline Ints broadcast_int(int32_t x) { return _mm256_set1_epi32(x); }
inline Ints low_nibbles(Ints x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Ints high_nibbles(Ints x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
inline Ints load_table(const uint8_t *from) {
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i *>(from)));
}
inline Ints look_up(Ints table, Ints indices) { return _mm256_shuffle_epi8(table, indices); }
inline Vec to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
inline void store_bytes(uint8_t *to, Vec x, int offset) {
  const Ints whole = add(_mm256_cvtps_epi32(x), _mm256_set1_epi32(offset));
  const Ints lowest = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                       0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const Ints bytes = _mm256_shuffle_epi8(whole, lowest);
  const int32_t words[2] = {_mm256_extract_epi32(bytes, 0), _mm256_extract_epi32(bytes, 4)};
  memcpy(to, words, sizeof words);
}

// Like AVX-512: the sign of the weight moves to the other factor, so that the sum of two products fits 16 bits.
struct PlainDot {
  static constexpr int kRows = 4, kOffset = 0;  // the weights take four of the 16 registers
  static constexpr bool kAddsPairs = true;
  struct Weight {
    Ints size, sign;
  };
  static Weight prepare(Ints w) { return {_mm256_abs_epi8(w), w}; }
  static Ints add(Ints acc, Weight w, Ints x) {
    return add_unsigned(acc, w.size, _mm256_sign_epi8(x, w.sign));
  }
  static Ints add_unsigned(Ints acc, Ints w, Ints x) {
    return simd::add(acc, sum_pairs(_mm256_maddubs_epi16(w, x)));
  }
  static Ints first_of_pairs(Ints x) { return _mm256_blend_epi16(_mm256_setzero_si256(), x, 0x55); }
  static Ints to_pairs(Ints pairs, Ints w, Ints x) {
    asm("vpaddw %1, %0, %0" : "+x"(pairs) : "x"(_mm256_maddubs_epi16(w, x)));
    return pairs;
  }
  static Ints sum_pairs(Ints pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
};

// AVX-VNNI. The instruction takes the activations as unsigned bytes, so they are stored 128 higher.
struct Dot {
  static constexpr int kRows = kTileRows, kOffset = 128;
  static constexpr bool kAddsPairs = false;
  using Weight = Ints;
  static Weight prepare(Ints w) { return w; }
  static Ints add(Ints acc, Weight w, Ints x) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(x), "x"(w));
    return acc;
  }
  static Ints add_unsigned(Ints acc, Ints w, Ints x) { return add(acc, x, w); }
};

#else  // NEON

using Ints = int32x4_t;
inline Ints load_ints(const void *from) { return vld1q_s32(static_cast<const int32_t *>(from)); }
inline void store_ints(int32_t *to, Ints x) { vst1q_s32(to, x); }
inline Ints add(Ints a, Ints b) { return vaddq_s32(a, b); }
inline Ints broadcast_four(const uint8_t *from) {
  int32_t word;
  memcpy(&word, from, sizeof word);
  return vdupq_n_s32(word);
}
inline Ints broadcast_int(int32_t x) { return vdupq_n_s32(x); }
inline Ints low_nibbles(Ints x) { return vandq_s32(x, vdupq_n_s32(0x0f0f0f0f)); }
inline Ints high_nibbles(Ints x) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(x), 4)); }
inline Ints load_table(const uint8_t *from) { return vreinterpretq_s32_u8(vld1q_u8(from)); }
inline Ints look_up(Ints table, Ints indices) {
  return vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(table), vreinterpretq_u8_s32(indices)));
}
inline Vec to_floats(Ints x) { return vcvtq_f32_s32(x); }
inline void store_bytes(uint8_t *to, Vec x, int offset) {
  const int32x4_t whole = vaddq_s32(vcvtnq_s32_f32(x), vdupq_n_s32(offset));
  const int16x4_t halves = vmovn_s32(whole);
  const int32_t word = vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(halves, halves))), 0);
  memcpy(to, &word, sizeof word);
}

struct PlainDot {
  static constexpr int kRows = kTileRows, kOffset = 0;
  static constexpr bool kAddsPairs = false;
  using Weight = Ints;
  static Weight prepare(Ints w) { return w; }
  static Ints add(Ints acc, Weight w, Ints x) {
    const int8x16_t a = vreinterpretq_s8_s32(w), b = vreinterpretq_s8_s32(x);
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
    const int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(a), vget_high_s8(b)));
    return vaddq_s32(acc, vpaddq_s32(low, high));
  }
  static Ints add_unsigned(Ints acc, Ints w, Ints x) { return add(acc, w, x); }
};

// The dot product extension of ARMv8.2; both factors are signed. The .arch directive enables the extensions of all ISA
// levels.
struct Dot {
  static constexpr int kRows = kTileRows, kOffset = 0;
  static constexpr bool kAddsPairs = false;
  using Weight = Ints;
  static Weight prepare(Ints w) { return w; }
  static Ints add(Ints acc, Weight w, Ints x) {
    asm(".arch armv8.2-a+bf16+dotprod\n\tsdot %0.4s, %1.16b, %2.16b" : "+w"(acc) : "w"(w), "w"(x));
    return acc;
  }
  static Ints add_unsigned(Ints acc, Ints w, Ints x) { return add(acc, w, x); }
};

#endif

// Return a * b, rounded. Without the barrier, the compiler may fuse the multiplication with a following addition, and
// round only once.
inline Vec rounded_product(Vec a, Vec b) {
  Vec product = a * b;
#if defined(__ARM_NEON)
  asm("" : "+w"(product));
#else
  asm("" : "+v"(product));
#endif
  return product;
}

}  // namespace simd
