// KV writes that return at once.
#include "attention/attention.h"

#include "simd/element_types.h"

template <class T>
void write_kv(const AttentionLayer &, const T *, long, const T *, long, void *, void *, const int64_t *, long) {}

#define OARLOCK_WRITE_KV(T) \
  template void write_kv<T>(const AttentionLayer &, const T *, long, const T *, long, void *, void *, const int64_t *, long);
OARLOCK_FOR_EACH_TYPE(OARLOCK_WRITE_KV)

extern "C" void oarlock_write_kv(const AttentionLayer *, const void *, long, const void *, long, void *, void *,
                                 const int64_t *, long, int) {}
