// Attention and KV writes that return at once.
#include "attention.h"

#include "element_types.h"

template <class T>
void attend(const AttentionStep &, const AttentionLayer &, const T *, long, T *, long, const T *, const T *) {}

template <class T>
void write_kv(const AttentionLayer &, const T *, long, const T *, long, T *, T *, const int64_t *, long) {}

#define OARLOCK_STUBS(T)                                                                                               \
  template void attend<T>(const AttentionStep &, const AttentionLayer &, const T *, long, T *, long, const T *,        \
                          const T *);                                                                                  \
  template void write_kv<T>(const AttentionLayer &, const T *, long, const T *, long, T *, T *, const int64_t *, long);
OARLOCK_STUBS(BFloat16)
OARLOCK_STUBS(Float16)
OARLOCK_STUBS(float)

extern "C" void oarlock_attend(const AttentionStep *, const AttentionLayer *, const void *, long, void *, long,
                               const void *, const void *, int) {}

extern "C" void oarlock_write_kv(const AttentionLayer *, const void *, long, const void *, long, void *, void *,
                                 const int64_t *, long, int) {}
