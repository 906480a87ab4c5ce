// Element types for which kernels are compiled, and the integers that Python passes for them. A library has all three
// types, or only the type that OARLOCK_ONLY names.
#pragma once
#include "simd/simd.h"

using simd::BFloat16;
using simd::Float16;

enum ElementType { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

// OARLOCK_FOR_EACH_TYPE(M) expands to M(T) for each element type, to instantiate templates that other files use.
#ifdef OARLOCK_ONLY
#define OARLOCK_FOR_EACH_TYPE(M) M(OARLOCK_ONLY)
#else
#define OARLOCK_FOR_EACH_TYPE(M) M(BFloat16) M(Float16) M(float)
#endif

inline ElementType number_of(BFloat16 *) { return kBFloat16; }
inline ElementType number_of(Float16 *) { return kFloat16; }
inline ElementType number_of(float *) { return kFloat32; }

// Call `function` with a null pointer to the type that `type` names: with_type(t, [&](auto *of) { ... *of ... }).
template <class Function>
inline void with_type(int type, const Function &function) {
#ifdef OARLOCK_ONLY
  if (type != number_of(static_cast<OARLOCK_ONLY *>(nullptr))) __builtin_trap();  // the caller loaded the wrong library
  function(static_cast<OARLOCK_ONLY *>(nullptr));
#else
  if (type == kBFloat16) function(static_cast<BFloat16 *>(nullptr));
  else if (type == kFloat16) function(static_cast<Float16 *>(nullptr));
  else function(static_cast<float *>(nullptr));
#endif
}
