// Depthwise convolution over a token and the tokens before it.
#pragma once
#include "recurrent/state_step.h"
#include "simd/element_types.h"

namespace recurrent {

struct Convolution {
  const float *weight;  // [channels, taps]   the last tap is the token's own
  const float *bias;    // [channels]   or null
  long channels, taps;  // 2 to 8 taps
  int silu;             // results pass through SiLU
};

// Convolve x [T, channels] (rows `stride` elements apart) -> y [T, channels], contiguous, in float32 and rounded once.
// `states` [slots, channels, taps - 1]: inputs of the latest tokens, oldest first.
template <class T>
void convolve(const Convolution &layer, const T *x, long stride, T *states, T *y, const StateStep &step);

}  // namespace recurrent
