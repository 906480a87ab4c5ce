// Gates and norms around the recurrent operations (see gates.h), for Python.
#include "recurrent/gates.h"

#include <type_traits>

using recurrent::GatedNorm;

// Compute log_decay and beta, float [rows, heads], of a and b of type `in`: see `delta_gates`.
extern "C" void oarlock_delta_gates(const void *a, long a_stride, const void *b, long b_stride, const float *a_log,
                                    const float *dt_bias, float beta_scale, float *log_decay, float *beta, long rows,
                                    long heads, int in) {
  with_type(in, [&](auto *of) {
    using In = std::remove_pointer_t<decltype(of)>;
    recurrent::delta_gates(static_cast<const In *>(a), a_stride, static_cast<const In *>(b), b_stride, a_log, dt_bias,
                           beta_scale, log_decay, beta, rows, heads);
  });
}

// Compute the limited softplus y, float [rows, heads], of dt of type `in`: see `mamba_steps`.
extern "C" void oarlock_mamba_steps(const void *dt, long stride, const float *bias, float least, float most, float *y,
                                    long rows, long heads, int in) {
  with_type(in, [&](auto *of) {
    using In = std::remove_pointer_t<decltype(of)>;
    recurrent::mamba_steps(static_cast<const In *>(dt), stride, bias, least, most, y, rows, heads);
  });
}

// Compute the gated norm y [rows, groups, width] of type `type`: see `gated_norm`.
extern "C" void oarlock_gated_norm(const GatedNorm *norm, const void *x, const void *gate, long stride, void *y,
                                   long rows, int type) {
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
    recurrent::gated_norm(*norm, static_cast<const T *>(x), static_cast<const T *>(gate), stride, static_cast<T *>(y),
                          rows);
  });
}
