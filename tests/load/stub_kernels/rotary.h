// A rotation that returns at once.
#pragma once
#include "element_types.h"
#include "parallel.h"

template <class In, class Out>
inline void rotate_head(const In *, const float *, const float *, Out *, long, long) {}

template <class In, class Out>
inline void rotate(const In *, const float *, const float *, Out *, long, long, long, long, long, long) {}
