// Work on query and key heads after their projection, and on attention's result, in float32 and rounded once.
#pragma once
#include "elementwise/norm.h"
#include "elementwise/rotary.h"
#include "simd/vector_math.h"

constexpr long kWidestHead = 576;

// Rotation of a head, a norm after it, and a factor of the result.
struct HeadFinish {
  const float *cos, *sin;  // [half]   of each pair; null: no rotation
  long half;
  int interleaved;    // pairs are neighbours: see rotate_neighbours
  const float *norm;  // [width]   scale of an RMSNorm after the rotation; or null
  float eps;
  float factor;
};

// Compute y [width] of the head x [width], at most kWidestHead. y may be x if In and Out are the same type.
template <class In, class Out>
inline void finish_head(const HeadFinish &how, const In *x, Out *y, long width) {
  using namespace simd;
  alignas(64) float head[kWidestHead];
  if (!how.cos) {
    for (long d = 0; d < width; d += kLanes) store(head + d, load(x + d, width - d), width - d);
  } else if (how.interleaved) {
    rotate_neighbours<kWidestHead>(x, how.cos, how.sin, head, width, how.half);
  } else {
    rotate_head(x, how.cos, how.sin, head, width, how.half);
  }
  if (how.norm) rms_norm_row(head, how.norm, head, width, how.eps);
  const Vec factor = broadcast(how.factor);
  for (long d = 0; d < width; d += kLanes) store(y + d, load(head + d, width - d) * factor, width - d);
}

// Multiply x [rows, width] by the sigmoid of gate [rows, width], both contiguous.
template <class T>
inline void gate_rows(T *x, const T *gate, long rows, long width) {
  using namespace simd;
#pragma omp parallel for if (rows * width > kSerial)
  for (long row = 0; row < rows; row++)
    for (long d = 0; d < width; d += kLanes) {
      T *to = x + row * width + d;
      store(to, load(to, width - d) * sigmoid(load(gate + row * width + d, width - d)), width - d);
    }
}
