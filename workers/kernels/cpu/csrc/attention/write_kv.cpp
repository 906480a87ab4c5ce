// Stores keys and values in their pages (see attention.h).
#include <cstring>

#include "attention/attention.h"
#include "attention/products.h"

template <class T>
void write_kv(const AttentionLayer &layer, const T *k, long k_stride, const T *v, long v_stride, T *k_pages, T *v_pages,
              const int64_t *slots, long tokens) {
  constexpr int kStep = Format<T>::kStep;
  const long kv_heads = layer.kv_heads, width = layer.head_dim, page_size = layer.block_size * width;
#pragma omp parallel if (tokens >= 64)
  {
#pragma omp for schedule(static)
    for (long t = 0; t < tokens; t++)
      if (slots[t] % layer.block_size == 0)
        memset(v_pages + slots[t] / layer.block_size * kv_heads * page_size, 0, kv_heads * page_size * sizeof(T));
#pragma omp for schedule(static)
    for (long t = 0; t < tokens; t++) {
      const long block = slots[t] / layer.block_size, offset = slots[t] % layer.block_size, position = offset % kGroup;
      for (long head = 0; head < kv_heads; head++) {
        const long group = (block * kv_heads + head) * page_size + offset / kGroup * kGroup * width;
        const T *key = k + t * k_stride + head * width, *value = v + t * v_stride + head * width;
        T *key_to = k_pages + group + position * kStep;
        T *value_to = v_pages + group + position / kStep * width * kStep + position % kStep;
        for (long d = 0; d < width; d += kStep, key_to += kGroup * kStep) memcpy(key_to, key + d, kStep * sizeof(T));
        for (long d = 0; d < width; d++) value_to[d * kStep] = value[d];
      }
    }
  }
}

#define OARLOCK_WRITE_KV(T) \
  template void write_kv<T>(const AttentionLayer &, const T *, long, const T *, long, T *, T *, const int64_t *, long);
OARLOCK_FOR_EACH_TYPE(OARLOCK_WRITE_KV)

extern "C" void oarlock_write_kv(const AttentionLayer *layer, const void *k, long k_stride, const void *v,
                                 long v_stride, void *k_pages, void *v_pages, const int64_t *slots, long tokens,
                                 int type) {
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
    write_kv<T>(*layer, static_cast<const T *>(k), k_stride, static_cast<const T *>(v), v_stride,
                static_cast<T *>(k_pages), static_cast<T *>(v_pages), slots, tokens);
  });
}
