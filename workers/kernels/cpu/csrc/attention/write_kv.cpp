// Stores keys and values in their pages (see attention.h).
#include <cstring>

#include "attention/attention.h"
#include "attention/pages.h"
#include "attention/products.h"

namespace {

// A key, or a value, at its place in a group, whose numbers are of type E where the model's are of type T.
template <class T, class E>
void place_key(const E *key, long width, long position, E *group) {
  constexpr int kStep = Format<T>::kStep;
  E *to = group + position * kStep;
  for (long d = 0; d < width; d += kStep, to += kGroup * kStep) memcpy(to, key + d, kStep * sizeof(E));
}

template <class T, class E>
void place_value(const E *value, long width, long position, E *group) {
  constexpr int kStep = Format<T>::kStep;
  E *to = group + position / kStep * width * kStep + position % kStep;
  for (long d = 0; d < width; d++) to[d * kStep] = value[d];
}

// x [head_dim] in 8 bits, and its scale in the group, if it has one.
template <class T>
void round_row(const AttentionLayer &layer, const T *x, long position, uint8_t *rounded, uint8_t *group) {
  alignas(64) float wide[kMaxHead];
  for (long d = 0; d < layer.head_dim; d += kLanes) simd::store(wide + d, simd::load(x + d));
  if (layer.pages == kFp8Pages) {
    round_e4m3(wide, layer.head_dim, rounded);
  } else {
    const BFloat16 scale = round_int8(wide, layer.head_dim, rounded);
    memcpy(group + kGroup * layer.head_dim + position * sizeof scale, &scale, sizeof scale);
  }
}

// Clears what weight zero is multiplied by: of int8 the scales, which may be NaN, as the numbers cannot.
template <class T>
void clear_values(const AttentionLayer &layer, uint8_t *pages, long block) {
  const long size = group_bytes<T>(layer), groups = layer.kv_heads * layer.block_size / kGroup;
  uint8_t *first = pages + block * groups * size;
  if (layer.pages != kInt8Pages) {
    memset(first, 0, groups * size);
    return;
  }
  for (long g = 0; g < groups; g++) memset(first + g * size + numbers_bytes<T>(layer), 0, scales_bytes(layer));
}

}  // namespace

template <class T>
void write_kv(const AttentionLayer &layer, const T *k, long k_stride, const T *v, long v_stride, void *k_pages,
              void *v_pages, const int64_t *slots, long tokens) {
  const long kv_heads = layer.kv_heads, width = layer.head_dim, size = group_bytes<T>(layer);
  const long groups_per_page = layer.block_size / kGroup;
  uint8_t *keys = static_cast<uint8_t *>(k_pages), *values = static_cast<uint8_t *>(v_pages);
#pragma omp parallel if (tokens >= 64)
  {
#pragma omp for schedule(static)
    for (long t = 0; t < tokens; t++)
      if (slots[t] % layer.block_size == 0) clear_values<T>(layer, values, slots[t] / layer.block_size);
#pragma omp for schedule(static)
    for (long t = 0; t < tokens; t++) {
      const long block = slots[t] / layer.block_size, offset = slots[t] % layer.block_size, position = offset % kGroup;
      for (long head = 0; head < kv_heads; head++) {
        const long group = ((block * kv_heads + head) * groups_per_page + offset / kGroup) * size;
        const T *key = k + t * k_stride + head * width, *value = v + t * v_stride + head * width;
        if (layer.pages == kUnrounded) {
          place_key<T>(key, width, position, reinterpret_cast<T *>(keys + group));
          place_value<T>(value, width, position, reinterpret_cast<T *>(values + group));
          continue;
        }
        uint8_t rounded[kMaxHead];
        round_row(layer, key, position, rounded, keys + group);
        place_key<T>(rounded, width, position, keys + group);
        round_row(layer, value, position, rounded, values + group);
        place_value<T>(rounded, width, position, values + group);
      }
    }
  }
}

#define OARLOCK_WRITE_KV(T)                                                                                        \
  template void write_kv<T>(const AttentionLayer &, const T *, long, const T *, long, void *, void *, const int64_t *, \
                            long);
OARLOCK_FOR_EACH_TYPE(OARLOCK_WRITE_KV)

extern "C" void oarlock_write_kv(const AttentionLayer *layer, const void *k, long k_stride, const void *v,
                                 long v_stride, void *k_pages, void *v_pages, const int64_t *slots, long tokens,
                                 int type) {
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
    write_kv<T>(*layer, static_cast<const T *>(k), k_stride, static_cast<const T *>(v), v_stride, k_pages, v_pages,
                slots, tokens);
  });
}
