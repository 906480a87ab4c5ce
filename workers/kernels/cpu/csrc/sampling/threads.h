// How many threads share the rows of a call, and which one this is.
#pragma once
#ifdef _OPENMP
#include <omp.h>
#endif

namespace sampling {

inline int threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

inline int this_thread() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

}  // namespace sampling
