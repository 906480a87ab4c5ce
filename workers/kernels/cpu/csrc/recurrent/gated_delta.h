// The gated delta rule (Yang et al., "Gated Delta Networks", 2024, equation 10), token after token; also with a decay for
// each channel of a key (Kimi Team, "Kimi Linear", 2025, equation 1).
#pragma once
#include "recurrent/state_step.h"
#include "simd/element_types.h"

namespace recurrent {

struct DeltaHeads {
  long key_heads, value_heads;  // each key head serves value_heads / key_heads consecutive value heads
  long key_width, value_width;
  int decays_channels;  // each channel of a key has a decay of its own, as in Kimi delta attention
};

// Rows of a step's tokens. Heads of a row are contiguous; rows are `stride` elements apart.
template <class T>
struct DeltaRows {
  const T *q, *k, *v;  // [T, key_heads, key_width] twice, [T, value_heads, value_width]
  long q_stride, k_stride, v_stride;
  const float *log_decay, *beta;  // [T, value_heads]; log_decay [T, value_heads, key_width] with `decays_channels`
};

// Compute y [T, value_heads, value_width], contiguous. `states` [slots, value_heads, key_width, value_width]. Queries
// and keys are divided by their length, and queries by the square root of the width.
//
// For each token: S = decay S, then S = S + k (v - S^T k) beta, then y = S^T q. One pass over the state does this for
// one token and computes S^T k and S^T q of the next one, from which y follows:
//   found = S^T k;   seen = S^T q
//   delta = (v - decay found) beta;   y = decay seen + (k q) delta;   S = decay S + k delta
// If channels have decays, k and q are multiplied by them before the products with S, and `found` and `seen` are not.
// Every element of S has the same operations in any case, so bits do not depend on how tokens are divided into steps.
template <class T>
void gated_delta_rule(const DeltaHeads &layer, const DeltaRows<T> &rows, float *states, T *y, const StateStep &step);

}  // namespace recurrent
