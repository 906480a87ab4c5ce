// The gated MLPs of a mixture's experts: of each row of x those that it was sent to, weighted and added up.
#pragma once
#include "gemm/grouped.h"

namespace gemm {

// One expert. T is the type of biases.
struct Expert {
  const void *gate_up, *down;            // packed: gated [2 width, hidden], and [hidden, width] in `slices`
  const void *gate_up_bias, *down_bias;  // in the order of gated panels; [hidden]; or null
  int gate_up_kind, down_kind;           // a WeightKind
};

// The experts `first` to `first + count` of a mixture.
struct Experts {
  const Expert *of;
  long first, count;
  long hidden, width, slices;  // slices: as in Product, of the width; at most one of slices and groups is more than 1
  long groups, group;          // so many experts of a group, which is added up by itself; groups are added in a tree
  long only_slice;             // the one that is added up, all others count as 0; -1: all are
  int activation;              // the Epilogue of a gated product
  float alpha, limit;          // of kClampedGate
};

// y [rows, hidden] = for each row the sum over its experts, in ascending order, of weight * down(activation(gate) * up).
// `ids`, `weights` [rows, per_row]; ids of experts that are not here are skipped. T is the type of x and of what lies
// between the two products.
template <class T>
void multiply_experts(const Experts &experts, const T *x, long x_stride, const int32_t *ids, const float *weights,
                      long rows, long per_row, float *y);

}  // namespace gemm
