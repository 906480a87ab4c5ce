// The element types that kernels are compiled for, by the numbers that Python passes.
#pragma once
#include "simd/simd.h"

using simd::BFloat16;
using simd::Float16;

enum ElementType { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

// Calls `function` with a null pointer to the type that `type` names: with_type(t, [&](auto *of) { ... *of ... }).
template <class Function>
inline void with_type(int type, const Function &function) {
  if (type == kBFloat16) function(static_cast<BFloat16 *>(nullptr));
  else if (type == kFloat16) function(static_cast<Float16 *>(nullptr));
  else function(static_cast<float *>(nullptr));
}
