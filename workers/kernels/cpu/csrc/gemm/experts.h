// The MLPs of an MoE layer's experts: for each row of x, the weighted sum over the experts it is routed to.
#pragma once
#include "gemm/adapter_pairs.h"
#include "gemm/grouped.h"

namespace gemm {

// One expert. T is the type of biases.
struct Expert {
  const void *gate_up, *down;            // packed: gated [2 width, hidden], or [width, hidden] without a gate, and
                                         // [hidden, width] in `slices`
  const void *gate_up_bias, *down_bias;  // [2 width] in the order of gated panels, and [hidden]; or null
  int gate_up_kind, down_kind;           // a WeightKind
};

// The experts `first` to `first + count` of an MoE layer.
struct Experts {
  const Expert *experts;
  long first, count;
  long hidden, width, slices;  // slices along the width, as in MatmulArgs; at most one of slices and groups exceeds 1
  long groups, group;  // number of groups, and experts per group; groups are summed separately, and added up in a tree
  long only_slice;             // the only slice to add up, all others count as 0; -1: all slices
  int activation;              // the Epilogue of the first matmul; one without a gate if the experts have none
  float alpha, limit;          // parameters of kClampedGate
  int weighs_inputs;           // an expert's weight multiplies its input instead of its result; then without biases

  long inner_columns() const { return is_gate(activation) ? 2 * width : width; }  // outputs of the first matmul
};

// The updates of one expert by adapters. Those of down are added to the sums of each slice of the width.
struct ExpertPairs {
  const AdapterPairs *gate_up, *down;
};

// The updates of all experts, for the rows of x that have adapters.
struct ExpertAdapters {
  const ExpertPairs *pairs;  // [count]
  const AdapterRows *rows;   // numbers of rows of x
};

// Compute y [rows, hidden]: for each row, the sum over its experts, in ascending order, of weight *
// down(activation(gate) * up), or of down(activation(weight * gate) * (weight * up)) with `weighs_inputs`. `ids`,
// `weights` [rows, per_row]. If an id belongs to an expert of another rank, it is
// skipped. T is the type of x and of the values between the two matmuls. `adapters`: null if no row has an adapter.
// Rows without an adapter of an expert have the same bits in both cases.
template <class T>
void multiply_experts(const Experts &experts, const T *x, long x_stride, const int32_t *ids, const float *weights,
                      long rows, long per_row, float *y, const ExpertAdapters *adapters = nullptr);

}  // namespace gemm
