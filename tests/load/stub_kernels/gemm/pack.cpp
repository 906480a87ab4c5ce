// Packed weights that nothing is read from, and rows of them that are not unpacked.
#include "gemm/gemm.h"

extern "C" long oarlock_panel() { return gemm::kPanel; }

extern "C" long oarlock_packed_size(long columns, long inputs, int, int, long) { return columns * inputs; }

extern "C" void oarlock_pack(const void *, void *, long, long, long, int, int, long) {}

extern "C" void oarlock_unpack_rows(const void *, const int64_t *, void *, long, long, int) {}
