// The low-rank updates of linear layers by LoRA adapters, and the rows of a step that have adapters.
#pragma once
#include <cstdint>

// The updates of one linear layer by the adapters in all slots: scale B (A x), see workers/lora/low_rank.py.
struct AdapterPairs {
  const void *a;         // [slots, parts]   matrices [max_rank, inputs], stored in blocks
  const void *b;         // [slots]   matrices [max_rank, outputs], stored in panels
  const float *scales;   // [slots, parts]
  const int32_t *ranks;  // [slots]   highest rank of the parts; 0: the adapter does not update the layer
  const int64_t *ends;   // [parts]   number of outputs up to the end of each part of a fused layer
  long parts, max_rank, inputs, outputs, slices;
  // A is stored as [groups of 4 ranks][inputs / block][ranks of the group][block], and B as [panels][max_rank][outputs
  // of the panel]: in the order in which kernels read them. `block` divides a slice of the inputs, `panel` is a multiple
  // of every register; the last group and the last panel may be smaller.
  long block, panel;
};

// The rows of a step that have adapters, sorted by slot, then by row.
struct AdapterRows {
  const int64_t *rows;    // [entries]
  const int64_t *starts;  // [spans + 1]   first entry of each span
  const int32_t *slots;   // [spans]   slot of each span, from 1 on
  long spans;
};
