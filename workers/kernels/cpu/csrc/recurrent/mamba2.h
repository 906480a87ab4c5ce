// Mamba 2's recurrence (Dao and Gu, "Transformers are SSMs", 2024, equation 1), token after token.
#pragma once
#include "recurrent/state_step.h"
#include "simd/element_types.h"

namespace recurrent {

struct MambaHeads {
  const float *a, *d;  // [heads]   a: negative; d: or null
  long heads, groups;  // each group of inputs and outputs serves heads / groups consecutive heads
  long head_width, state_width;
};

// Rows of a step's tokens. Heads and groups of a row are contiguous; rows are `stride` elements apart.
template <class T>
struct MambaRows {
  const T *x, *b, *c;  // [T, heads, head_width], [T, groups, state_width] twice
  long x_stride, b_stride, c_stride;
  const float *dt;  // [T, heads]   after softplus and limits
};

// Compute y [T, heads, head_width], contiguous. `states` [slots, heads, head_width, state_width].
//
// For each token and row p of a head's state: S[p] = exp(dt a) S[p] + (dt x[p]) b;   y[p] = S[p] c + d x[p].
template <class T>
void mamba2(const MambaHeads &layer, const MambaRows<T> &rows, float *states, T *y, const StateStep &step);

}  // namespace recurrent
