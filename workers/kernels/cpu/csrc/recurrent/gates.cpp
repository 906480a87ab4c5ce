// Gates and norms around the recurrent operations (see gates.h), for Python.
#include "recurrent/gates.h"

#include <type_traits>

using recurrent::GatedNorm;

// See `delta_gates`.
extern "C" void oarlock_delta_gates(const float *a, const float *b, long stride, const float *a_log,
                                    const float *dt_bias, float beta_scale, float *log_decay, float *beta, long rows,
                                    long heads) {
  recurrent::delta_gates(a, b, stride, a_log, dt_bias, beta_scale, log_decay, beta, rows, heads);
}

// See `kimi_gates`.
extern "C" void oarlock_kimi_gates(const recurrent::KimiGates *gates, const float *f, const float *b, long stride,
                                   float *log_decay, float *beta, long rows) {
  recurrent::kimi_gates(*gates, f, b, stride, log_decay, beta, rows);
}

// See `mamba_steps`, without a scale.
extern "C" void oarlock_mamba_steps(const float *dt, long stride, const float *bias, float least, float most, float *y,
                                    long rows, long heads) {
  recurrent::mamba_steps(dt, stride, 1.0f, bias, least, most, y, rows, heads);
}

// Compute the gated norm y [rows, heads, width] of type `type`: see `gated_norm`. `squares` is null, or as for
// `gated_norm_of_heads`.
extern "C" void oarlock_gated_norm(const GatedNorm *norm, const void *x, const void *gate, long stride,
                                   const float *squares, long squares_stride, void *y, long rows, int type) {
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
    const T *from = static_cast<const T *>(x), *gates = static_cast<const T *>(gate);
    T *to = static_cast<T *>(y);
    if (squares) recurrent::gated_norm_of_heads(*norm, from, gates, stride, squares, squares_stride, to, rows);
    else recurrent::gated_norm(*norm, from, gates, stride, to, rows);
  });
}

// Sum the squares of heads of type `type`: see `gated_squares`.
extern "C" void oarlock_gated_squares(const GatedNorm *norm, const void *x, const void *gate, long stride,
                                      float *squares, long rows, int type) {
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
    recurrent::gated_squares(*norm, static_cast<const T *>(x), static_cast<const T *>(gate), stride, squares, rows);
  });
}
