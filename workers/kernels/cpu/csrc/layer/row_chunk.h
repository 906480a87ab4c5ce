// A chunk of rows of a step, on which the operations of a branch run.
#pragma once
#include "layer/layer.h"

// A chunk of rows of a step, and the scratch memory of the branch that runs on them.
template <class T>
struct RowChunk {
  const LayerStep &step;
  T *scratch[kScratchBuffers];
  long first, rows;

  T *at(int rows_kind) const {  // Rows except kPartial
    if (rows_kind >= kScratch0 && rows_kind <= kScratch3) return scratch[rows_kind - kScratch0];
    if (rows_kind == kLayerInputs)
      return static_cast<T *>(const_cast<void *>(step.layer_inputs)) + first * step.inputs_width;
    void *all = rows_kind == kResidual ? step.hidden : step.normed[rows_kind - kNormed0];
    return static_cast<T *>(all) + first * step.width;
  }
  T *at(const Columns &columns) const { return at(columns.rows) + columns.first; }
};
