// Attention that returns at once.
#include "attention/attention.h"

#include "simd/element_types.h"

template <class T>
void attend(const AttentionStep &, const AttentionLayer &, const T *, long, T *, long, const void *, const void *) {}

#define OARLOCK_ATTEND(T)                                                                                                \
  template void attend<T>(const AttentionStep &, const AttentionLayer &, const T *, long, T *, long, const void *,     \
                          const void *);
OARLOCK_FOR_EACH_TYPE(OARLOCK_ATTEND)

extern "C" void oarlock_attend(const AttentionStep *, const AttentionLayer *, const void *, long, void *, long,
                               const void *, const void *, int) {}
