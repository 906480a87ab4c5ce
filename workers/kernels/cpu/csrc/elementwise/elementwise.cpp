// Norms, rotary embedding, gelu and gates of rows. Each row is computed separately in a fixed order, so its bits do not depend
// on the rest of the batch.
#include <type_traits>

#include "elementwise/gelu.h"
#include "elementwise/heads.h"
#include "elementwise/layer_norm.h"
#include "elementwise/norm.h"
#include "elementwise/rotary.h"

// Apply RMSNorm: x [rows, heads, width] of type `in` (rows `x_stride` apart), weight float [heads, width] -> y [rows,
// heads, width] contiguous, of type `in`, or float32 with `float32_output`.
extern "C" void oarlock_rms_norm(const void *x, const float *weight, void *y, long rows, long heads, long width,
                                 long x_stride, float eps, int in, int float32_output) {
  with_type(in, [&](auto *of) {
    using In = std::remove_pointer_t<decltype(of)>;
    const In *from = static_cast<const In *>(x);
    if (float32_output) rms_norm(from, weight, static_cast<float *>(y), rows, heads, width, x_stride, eps);
    else rms_norm(from, weight, static_cast<In *>(y), rows, heads, width, x_stride, eps);
  });
}

// Sum squares: qk [rows, heads + kv_heads, width] of type `in` (rows `stride` apart) -> squares float [rows, all
// heads].
extern "C" void oarlock_squares_of_heads(const HeadsOfRank *of, const void *qk, float *squares, long rows, long width,
                                         long stride, int in) {
  with_type(in, [&](auto *type) {
    using In = std::remove_pointer_t<decltype(type)>;
    squares_of_heads(*of, static_cast<const In *>(qk), squares, rows, width, stride);
  });
}

// Apply RMSNorm to whole rows, given the squares of all heads, and weight float [heads + kv_heads, width] -> y float32,
// contiguous.
extern "C" void oarlock_norm_of_rows(const HeadsOfRank *of, const void *qk, const float *squares, const float *weight,
                                     float *y, long rows, long width, long stride, float eps, int in) {
  with_type(in, [&](auto *type) {
    using In = std::remove_pointer_t<decltype(type)>;
    const long heads = of->heads + of->kv_heads;
#pragma omp parallel for if (rows * heads * width > kSerial)
    for (long row = 0; row < rows; row++) {
      float factors[2];
      row_factors(*of, squares + row * of->all(), width, eps, factors);
      for (long head = 0; head < heads; head++)
        scale_row(static_cast<const In *>(qk) + row * stride + head * width, factors[head >= of->heads],
                  weight + head * width, y + (row * heads + head) * width, width);
    }
  });
}

// Rotate heads: x [rows, heads, width] of type `out`, or float32 with `float32_input` (rows `x_stride` apart); cos, sin
// float [rows, 2 half], whose second halves hold the cosine and sine of each pair -> y [rows, heads, width] of type
// `out`.
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

// Rotate, norm and scale heads: x [rows, heads, width] of type `out`, or float32 with `float32_input` (rows `x_stride`
// apart) -> y [rows, heads, width] of type `out`. cos, sin as for oarlock_rotate, or null. norm float [heads, width], or
// null. scales float [rows], factors of the first `scaled` heads; or null.
extern "C" void oarlock_finish_heads(const void *x, const float *cos, const float *sin, const float *norm,
                                     const float *scales, void *y, long rows, long heads, long width, long half,
                                     long x_stride, long scaled, float eps, int interleaved, int float32_input,
                                     int out) {
  with_type(out, [&](auto *of) {
    using Out = std::remove_pointer_t<decltype(of)>;
    const auto run = [&](auto *from) {
#pragma omp parallel for if (rows * heads * width > kSerial)
      for (long row = 0; row < rows; row++)
        for (long head = 0; head < heads; head++) {
          const long angle = row * 2 * half + half;
          const HeadFinish how{cos ? cos + angle : nullptr, cos ? sin + angle : nullptr, half, interleaved,
                               norm ? norm + head * width : nullptr, eps,
                               scales && head < scaled ? scales[row] : 1.0f};
          finish_head(how, from + row * x_stride + head * width, static_cast<Out *>(y) + (row * heads + head) * width,
                      width);
        }
    };
    if (float32_input) run(static_cast<const float *>(x));
    else run(static_cast<const Out *>(x));
  });
}

// Multiply x by the sigmoid of gate: both [rows, width] of type `in`, contiguous.
extern "C" void oarlock_gate_rows(void *x, const void *gate, long rows, long width, int in) {
  with_type(in, [&](auto *of) {
    using In = std::remove_pointer_t<decltype(of)>;
    gate_rows(static_cast<In *>(x), static_cast<const In *>(gate), rows, width);
  });
}

// Apply LayerNorm: x [rows, width] of type `out`, or float32 with `float32_input`; weight and bias float [width], or
// null -> y [rows, width] of type `out`.
extern "C" void oarlock_layer_norm(const void *x, const float *weight, const float *bias, void *y, long rows, long width,
                                   float eps, int float32_input, int out) {
  with_type(out, [&](auto *of) {
    using Out = std::remove_pointer_t<decltype(of)>;
    const auto run = [&](auto *from) { layer_norm(from, weight, bias, static_cast<Out *>(y), rows, width, eps); };
    if (float32_input) run(static_cast<const float *>(x));
    else run(static_cast<const Out *>(x));
  });
}

// Apply gelu: x [rows, width], or [rows, 2 width] with `gated`, of type `out`, or float32 with `float32_input` -> y
// [rows, width] of type `out`. See `gelu_rows`.
extern "C" void oarlock_gelu(const void *x, void *y, long rows, long width, int gated, int is_tanh, int float32_input,
                             int out) {
  with_type(out, [&](auto *of) {
    using Out = std::remove_pointer_t<decltype(of)>;
    const auto run = [&](auto *from) { gelu_rows(from, static_cast<Out *>(y), rows, width, gated, is_tanh); };
    if (float32_input) run(static_cast<const float *>(x));
    else run(static_cast<const Out *>(x));
  });
}
