// A rotation that returns at once.
#pragma once
#include "simd/element_types.h"
#include "runtime/parallel.h"

template <class In, class Out>
inline void rotate_head(const In *, const float *, const float *, Out *, long, long) {}

template <class In, class Out>
inline void rotate(const In *, const float *, const float *, Out *, long, long, long, long, long, long) {}
