// RMSNorm and rotary embedding of rows, each in one pass. Each row is computed by itself in a fixed order, so its bits do
// not depend on the rest of the batch.
#include <type_traits>

#include "elementwise/norm.h"
#include "elementwise/rotary.h"

// x [rows, heads, width] of type `in` (rows `x_stride` apart), weight float [heads, width] -> y [rows, heads, width]
// contiguous, of type `in`, or float32 with `float32_output`.
extern "C" void oarlock_rms_norm(const void *x, const float *weight, void *y, long rows, long heads, long width,
                                 long x_stride, float eps, int in, int float32_output) {
  with_type(in, [&](auto *of) {
    using In = std::remove_pointer_t<decltype(of)>;
    const In *from = static_cast<const In *>(x);
    if (float32_output) rms_norm(from, weight, static_cast<float *>(y), rows, heads, width, x_stride, eps);
    else rms_norm(from, weight, static_cast<In *>(y), rows, heads, width, x_stride, eps);
  });
}

// x [rows, heads, width] of type `out`, or float32 with `float32_input` (rows `x_stride` apart); cos, sin float
// [rows, 2 half], whose second halves hold the cosine and sine of each pair -> y [rows, heads, width] of type `out`.
extern "C" void oarlock_rotate(const void *x, const float *cos, const float *sin, void *y, long rows, long heads,
                               long width, long half, long x_stride, int float32_input, int out) {
  with_type(out, [&](auto *of) {
    using Out = std::remove_pointer_t<decltype(of)>;
    const auto run = [&](auto *from) {
      rotate(from, cos + half, sin + half, static_cast<Out *>(y), rows, heads, width, half, x_stride, 2 * half);
    };
    if (float32_input) run(static_cast<const float *>(x));
    else run(static_cast<const Out *>(x));
  });
}
