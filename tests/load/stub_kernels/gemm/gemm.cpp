// Products that return at once.
#include "gemm/gemm.h"

namespace gemm {

template <class T>
void multiply(const Product &) {}
template void multiply<BFloat16>(const Product &);
template void multiply<Float16>(const Product &);
template void multiply<float>(const Product &);

}  // namespace gemm

extern "C" void oarlock_gemm(const void *, const void *, const void *, const void *, void *, long, long, long, long, long,
                             int, int) {}
