// Pages of the KV cache: the size of a group of 16 positions, and the rounding of a row to 8 bits.
#pragma once
#include <algorithm>
#include <cmath>

#include "attention/attention.h"
#include "simd/element_types.h"

namespace {

using simd::kLanes;
using simd::Vec;

constexpr int kGroup = 16;     // positions per group
constexpr int kMaxHead = 576;  // elements per head

// Return the number of elements of a key that its first scale is for: those of the value if the value is in the key.
// The other elements have the second scale.
inline long first_part(const AttentionLayer &layer) { return layer.value_in_key ? layer.value_dim : layer.head_dim; }

// Return whether keys have a second scale, in an int8 page.
inline bool has_second_part(const AttentionLayer &layer) { return first_part(layer) < layer.head_dim; }

// Sizes in bytes of the keys, or values, of one KV head at the positions of a group: elements, `width` for each
// position, and the scales after them.
template <class T>
long numbers_bytes(const AttentionLayer &layer, long width) {
  return kGroup * width * (layer.pages == kUnrounded ? sizeof(T) : 1);
}
inline long scales_bytes(const AttentionLayer &layer) { return layer.pages == kInt8Pages ? kGroup * sizeof(BFloat16) : 0; }
template <class T>
long key_group_bytes(const AttentionLayer &layer) {
  return numbers_bytes<T>(layer, layer.head_dim) + scales_bytes(layer) * (has_second_part(layer) ? 2 : 1);
}
template <class T>
long value_group_bytes(const AttentionLayer &layer) {
  return layer.value_in_key ? 0 : numbers_bytes<T>(layer, layer.value_dim) + scales_bytes(layer);
}

// Convert the scales of an int8 group of keys or values of `width` elements to float32 in `to` [kGroup]. `part`: 1 for
// the second scales of keys.
inline void widen_scales(const uint8_t *group, long width, float *to, long part = 0) {
  const BFloat16 *scales = reinterpret_cast<const BFloat16 *>(group + kGroup * width) + part * kGroup;
  for (int i = 0; i < kGroup; i += kLanes) simd::store(to + i, simd::load(scales + i));
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Round x [count] to integers from -127 to 127 and return their scale: the largest magnitude / 127, rounded up so that
// no integer exceeds 127. If any element is not finite, the scale is NaN.
inline BFloat16 round_int8(const float *x, long count, uint8_t *to) {
  uint32_t largest = 0;  // float magnitudes are ordered like their bits; NaN comes last
  for (long i = 0; i < count; i++) largest = std::max(largest, bits_of(x[i]) & 0x7fffffffu);
  if (largest >= 0x7f800000u) {
    memset(to, 0, count);
    return {0x7fc0};
  }
  const uint16_t scale = static_cast<uint16_t>((bits_of(float_of(largest) / 127.0f) + 0xffffu) >> 16);
  const float divisor = scale ? simd::to_float(BFloat16{scale}) : 1.0f;
  for (long i = 0; i < count; i++)
    to[i] = static_cast<uint8_t>(static_cast<int32_t>(__builtin_rintf(x[i] / divisor)));
  return {scale};
}

// Round x [count] to the nearest e4m3 values, ties to even. Magnitudes above 448, the largest, become 448. Elements
// that are not finite become NaN.
inline void round_e4m3(const float *x, long count, uint8_t *to) {
  for (long i = 0; i < count; i++) {
    const uint32_t bits = bits_of(x[i]), size = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
    const uint32_t normal = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3);
    const uint32_t small = static_cast<uint32_t>(static_cast<int32_t>(__builtin_rintf(float_of(size) * 512.0f)));
    const uint32_t finite = size < 0x3c800000u ? small : std::min(normal, 0x7eu);  // below 2^-6: steps of 2^-9
    to[i] = static_cast<uint8_t>(size >= 0x7f800000u ? 0x7fu : sign | finite);
  }
}

}  // namespace
