// Writing of keys and values to their pages (see attention.h).
#include <cstring>

#include "attention/attention.h"
#include "attention/pages.h"
#include "attention/matmuls.h"

namespace {

// Copy a key, or a value, to its position in a group. E is the type of the elements in the page, T the model dtype.
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

// Round x [width] to 8 bits, and store the scale at `scales` [16] if the format has scales.
template <class T>
void round_row(const AttentionLayer &layer, const T *x, long width, long position, uint8_t *rounded, uint8_t *scales) {
  alignas(64) float wide[kMaxHead];
  for (long d = 0; d < width; d += kLanes) simd::store(wide + d, simd::load(x + d));
  if (layer.pages == kFp8Pages) {
    round_e4m3(wide, width, rounded);
  } else {
    const BFloat16 scale = round_int8(wide, width, rounded);
    memcpy(scales + position * sizeof scale, &scale, sizeof scale);
  }
}

// Round a key in its parts, each with its own scale.
template <class T>
void round_key(const AttentionLayer &layer, const T *key, long position, uint8_t *rounded, uint8_t *group) {
  const long width = layer.head_dim, first = first_part(layer);
  uint8_t *scales = group + kGroup * width;
  round_row(layer, key, first, position, rounded, scales);
  if (first == width) return;
  round_row(layer, key + first, width - first, position, rounded + first, scales + scales_bytes(layer));
}

// Clear the data that is multiplied by weight zero, for `heads` heads from `head` on: values, or keys that they are in.
// For int8 these are the scales, which may be NaN; the integers cannot be.
template <class T>
void clear_values(const AttentionLayer &layer, uint8_t *k_pages, uint8_t *v_pages, long block, long head, long heads) {
  const bool in_keys = layer.value_in_key;
  const long size = in_keys ? key_group_bytes<T>(layer) : value_group_bytes<T>(layer);
  const long numbers = numbers_bytes<T>(layer, in_keys ? layer.head_dim : layer.value_dim);
  const long groups_per_page = layer.block_size / kGroup, groups = heads * groups_per_page;
  uint8_t *first = (in_keys ? k_pages : v_pages) + (block * layer.kv_heads + head) * groups_per_page * size;
  if (layer.pages != kInt8Pages) {
    memset(first, 0, groups * size);
    return;
  }
  for (long g = 0; g < groups; g++) memset(first + g * size + numbers, 0, size - numbers);
}

template <class T>
void place_head(const AttentionLayer &layer, const NewRows<T> &rows, long token, long head, uint8_t *keys,
                uint8_t *values) {
  const long key_width = layer.head_dim, value_width = layer.value_dim, slot = rows.slots[token];
  const long block = slot / layer.block_size, offset = slot % layer.block_size, position = offset % kGroup;
  const long groups_per_page = layer.block_size / kGroup;
  const long group = (block * layer.kv_heads + head) * groups_per_page + offset / kGroup;
  const T *key = rows.k + token * rows.k_stride + head * key_width;
  uint8_t rounded[kMaxHead];
  keys += group * key_group_bytes<T>(layer);
  if (layer.pages == kUnrounded) {
    place_key<T>(key, key_width, position, reinterpret_cast<T *>(keys));
  } else {
    round_key(layer, key, position, rounded, keys);
    place_key<T>(rounded, key_width, position, keys);
  }
  if (layer.value_in_key) return;
  const T *value = rows.v + token * rows.v_stride + head * value_width;
  values += group * value_group_bytes<T>(layer);
  if (layer.pages == kUnrounded) {
    place_value<T>(value, value_width, position, reinterpret_cast<T *>(values));
  } else {
    round_row(layer, value, value_width, position, rounded, values + kGroup * value_width);
    place_value<T>(rounded, value_width, position, values);
  }
}

}  // namespace

template <class T>
void write_kv(const AttentionLayer &layer, const NewRows<T> &rows, void *k_pages, void *v_pages) {
  uint8_t *keys = static_cast<uint8_t *>(k_pages), *values = static_cast<uint8_t *>(v_pages);
#pragma omp parallel if (rows.tokens >= 64)
  {
#pragma omp for schedule(static)
    for (long t = 0; t < rows.tokens; t++)
      if (rows.slots[t] % layer.block_size == 0)
        clear_values<T>(layer, keys, values, rows.slots[t] / layer.block_size, 0, layer.kv_heads);
#pragma omp for schedule(static)
    for (long t = 0; t < rows.tokens; t++)
      for (long head = 0; head < layer.kv_heads; head++) place_head(layer, rows, t, head, keys, values);
  }
}

template <class T>
void write_head(const AttentionLayer &layer, const NewRows<T> &rows, long token, long head, void *k_pages,
                void *v_pages) {
  uint8_t *keys = static_cast<uint8_t *>(k_pages), *values = static_cast<uint8_t *>(v_pages);
  const long slot = rows.slots[token];
  if (slot % layer.block_size == 0) clear_values<T>(layer, keys, values, slot / layer.block_size, head, 1);
  place_head(layer, rows, token, head, keys, values);
}

#define OARLOCK_WRITE_KV(T)                                                                      \
  template void write_kv<T>(const AttentionLayer &, const NewRows<T> &, void *, void *);         \
  template void write_head<T>(const AttentionLayer &, const NewRows<T> &, long, long, void *, void *);
OARLOCK_FOR_EACH_TYPE(OARLOCK_WRITE_KV)

extern "C" void oarlock_write_kv(const AttentionLayer *layer, const void *k, long k_stride, const void *v,
                                 long v_stride, void *k_pages, void *v_pages, const int64_t *slots, long tokens,
                                 int type) {
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
    const NewRows<T> rows{static_cast<const T *>(k), k_stride, static_cast<const T *>(v), v_stride, slots, tokens};
    write_kv(*layer, rows, k_pages, v_pages);
  });
}
